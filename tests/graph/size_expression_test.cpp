// Expressions of sizes, fitted to their values.
#include "penstock/graph/ir/size_expression.h"

#include <gtest/gtest.h>
#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#endif

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace size_expression_test {

using Numbers = std::vector<std::int64_t>;

const std::vector<SymbolValues> kPoints{{7, 30}, {6, 28}, {5, 26}, {4, 31}, {3, 29}, {9, 27}, {10, 25}};

SizeFitter two_symbols() { return SizeFitter({"B", "T"}, kPoints); }

std::string fitted(const std::function<std::int64_t(std::int64_t, std::int64_t)>& function) {
  SizeFitter fitter = two_symbols();
  Numbers values;
  for (const SymbolValues& point : kPoints) values.push_back(function(point[0], point[1]));
  const auto expression = fitter.fit(values);
  return expression ? expression->text(fitter.symbols().names()) : "none";
}

std::string fitted_number(const std::function<double(double, double)>& function) {
  SizeFitter fitter = two_symbols();
  std::vector<double> values;
  for (const SymbolValues& point : kPoints)
    values.push_back(function(static_cast<double>(point[0]), static_cast<double>(point[1])));
  const auto expression = fitter.fit(values);
  if (!expression) return "none";
  for (const SymbolValues& other : {SymbolValues{2, 3}, SymbolValues{64, 2048}})
    EXPECT_EQ(expression->at(other), function(static_cast<double>(other[0]), static_cast<double>(other[1])));
  return expression->text(fitter.symbols().names());
}

TEST(SizeExpression, Polynomials) {
  EXPECT_EQ(fitted([](auto, auto) { return 5; }), "5");
  EXPECT_EQ(fitted([](auto, auto) { return 0; }), "0");
  EXPECT_EQ(fitted([](auto b, auto) { return b; }), "B");
  EXPECT_EQ(fitted([](auto b, auto t) { return b * t; }), "B*T");
  EXPECT_EQ(fitted([](auto b, auto t) { return b * t * 64 + 3; }), "B*T*64 + 3");
  EXPECT_EQ(fitted([](auto, auto t) { return t - 1; }), "T - 1");
  EXPECT_EQ(fitted([](auto b, auto t) { return 2 * b + t; }), "T + B*2");
  EXPECT_EQ(fitted([](auto b, auto t) { return b * t * t * 12; }), "B*T^2*12");
  EXPECT_EQ(fitted([](auto b, auto t) { return (b + 1) * (t + 2); }), "B*T + T + B*2 + 2");
  EXPECT_EQ(fitted([](auto, auto t) { return t * (t + 1) / 2; }), "(T^2 + T)/2");
  EXPECT_EQ(fitted([](auto, auto t) { return -t; }), "-T");
  EXPECT_EQ(fitted([](auto b, auto t) { return b * t * (std::int64_t{1} << 40); }), "B*T*1099511627776");
}

TEST(SizeExpression, NonPolynomialsAreRejected) {
  EXPECT_EQ(fitted([](auto b, auto t) { return b % 3 + t; }), "none");
  EXPECT_EQ(fitted([](auto b, auto t) { return b > 5 ? t : t + 1; }), "none");
  EXPECT_EQ(fitted([](auto b, auto) { return std::int64_t{1} << b; }), "none");
  EXPECT_EQ(fitted_number([](double b, double t) { return std::sin(b) * t; }), "none");
}

TEST(SizeExpression, ExactQuotients) {
  SizeFitter fitter({"T"}, {{8}, {4}, {6}, {10}, {14}});
  const auto half = fitter.fit(Numbers{4, 2, 3, 5, 7});
  ASSERT_TRUE(half);
  EXPECT_EQ(half->text(fitter.symbols().names()), "T/2");
  EXPECT_EQ(half->at(Numbers{100}), 50);
  EXPECT_EQ(half->at(Numbers{7}), std::nullopt);
}

TEST(SizeExpression, WholePartsOfQuotients) {
  // A convolution with kernel 3 and stride 2, twice, and expressions of its length.
  const auto length = [](std::int64_t t) { return (t - 3) / 2 + 1; };
  SizeFitter fitter({"T"}, {{21}, {20}, {19}, {18}, {17}});
  Numbers once, twice, flat;
  for (const std::int64_t t : {21, 20, 19, 18, 17}) {
    once.push_back(length(t));
    twice.push_back(length(length(t)));
    flat.push_back(length(t) * 8 + 1);
  }
  EXPECT_FALSE(fitter.fit(once));
  const auto first = fitter.fit_size(once), second = fitter.fit_size(twice), third = fitter.fit(flat);
  ASSERT_TRUE(first && second && third);
  EXPECT_EQ(first->text(fitter.symbols().names()), "((T - 1)//2)");
  EXPECT_EQ(fitter.symbols().symbols(), 1u);
  EXPECT_EQ(fitter.symbols().variables(), 3u);
  for (std::int64_t t = 7; t < 60; ++t) {
    const auto variables = fitter.symbols().variables_at({t});
    ASSERT_TRUE(variables);
    EXPECT_EQ(first->at(*variables), length(t)) << t;
    EXPECT_EQ(second->at(*variables), length(length(t))) << t;
    EXPECT_EQ(third->at(*variables), length(t) * 8 + 1) << t;
  }
  EXPECT_TRUE(fitter.symbols().depends(2, 0));
}

TEST(SizeExpression, Numbers) {
  EXPECT_EQ(fitted_number([](double b, double t) { return b * t; }), "B*T");
  EXPECT_EQ(fitted_number([](double b, double t) { return 1 / (b * t); }), "1/(B*T)");
  EXPECT_EQ(fitted_number([](double b, double t) { return 2.0 / (b * t - 1); }), "2/(B*T - 1)");
  EXPECT_EQ(fitted_number([](double, double t) { return std::sqrt(t); }), "sqrt(T)");
  EXPECT_EQ(fitted_number([](double, double t) { return 1 / std::sqrt(t); }), "1/sqrt(T)");
  EXPECT_EQ(fitted_number([](double b, double) { return 0.37 / b; }), "0.37/(B)");
  EXPECT_EQ(fitted_number([](double, double t) { return 0.001 * t; }), "0.001*T");
}

TEST(SizeExpression, OutOfRangeNumbersHaveNoValue) {
  SizeFitter fitter = two_symbols();
  Numbers values;
  for (const SymbolValues& point : kPoints) values.push_back(point[0] * point[1] * point[1]);
  const auto expression = fitter.fit(values);
  ASSERT_TRUE(expression);
  EXPECT_EQ(expression->at(Numbers{std::int64_t{1} << 40, std::int64_t{1} << 40}), std::nullopt);
}

TEST(SizeExpression, TooFewPoints) {
  EXPECT_THROW(SizeFitter({"B"}, {{3}}), ValueError);
  EXPECT_THROW(SizeFitter({"B", "T"}, {{3, 4}, {5}}), ValueError);
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK

// Up to three monomials with coefficients typical of strides and offsets.
SizeExpression random_polynomial(std::size_t symbols) {
  std::vector<SizeExpression::Term> terms;
  const int count = *rc::gen::inRange(1, 4);
  for (int i = 0; i < count; ++i) {
    SizeExpression::Term term{*rc::gen::inRange<std::int64_t>(1, 5000),
                              std::vector<std::uint8_t>(symbols, 0)};
    if (*rc::gen::inRange(0, 4) == 0) term.coefficient = -term.coefficient;
    int degree = 3;
    for (std::size_t s = 0; s < symbols && degree > 0; ++s) {
      term.exponents[s] = static_cast<std::uint8_t>(*rc::gen::inRange(0, std::min(degree, 2) + 1));
      degree -= term.exponents[s];
    }
    bool again = false;
    for (const SizeExpression::Term& other : terms) again |= other.exponents == term.exponents;
    if (!again) terms.push_back(std::move(term));
  }
  return SizeExpression(std::move(terms));
}

RC_GTEST_PROP(SizeExpressionLaws, APolynomialIsFoundFromItsValues, ()) {
  const std::size_t symbols = *rc::gen::inRange<std::size_t>(1, 4);
  const std::size_t count = std::vector<std::size_t>{0, 5, 7, 11}[symbols];
  std::vector<SymbolValues> points;
  const std::int64_t first = *rc::gen::inRange<std::int64_t>(2, 3000);
  for (std::size_t i = 0; i < count; ++i) {
    SymbolValues point;
    for (std::size_t s = 0; s < symbols; ++s)
      point.push_back(first + static_cast<std::int64_t>(100 * s + i * (s + 1) % count));
    points.push_back(point);
  }
  const SizeExpression polynomial = random_polynomial(symbols);
  SizeFitter fitter(std::vector<std::string>(symbols, "x"), points);
  Numbers values;
  for (const SymbolValues& point : points) values.push_back(polynomial.at(point).value());
  const auto found = fitter.fit(values);
  RC_ASSERT(found.has_value());
  for (int i = 0; i < 5; ++i) {
    const auto other = *rc::gen::container<SymbolValues>(symbols, rc::gen::inRange<std::int64_t>(0, 5000));
    RC_ASSERT(found->at(other) == polynomial.at(other));
  }
}

RC_GTEST_PROP(SizeExpressionLaws, ExpressionsForRandomValuesMatchThePoints, ()) {
  SizeFitter fitter = two_symbols();
  const auto values =
      *rc::gen::container<Numbers>(kPoints.size(), rc::gen::inRange<std::int64_t>(0, std::int64_t{1} << 40));
  const auto found = fitter.fit(values);
  // Usually there is none: seven random numbers are rarely the values of a polynomial with four terms.
  if (found)
    for (std::size_t i = 0; i < kPoints.size(); ++i) RC_ASSERT(found->at(kPoints[i]) == values[i]);
}

#endif

}  // namespace size_expression_test
}  // namespace penstock::graph
