#include "penstock/graph/ir/size_expression.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::graph {
namespace {

constexpr std::size_t kMaxTerms = 4;
constexpr std::int64_t kMaxDivisor = 64;

std::optional<std::int64_t> times(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

std::int64_t floor_quotient(std::int64_t a, std::int64_t b) {
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0) ? 1 : 0);
}

// ---- arithmetic modulo the prime 2^61 - 1: systems of equations are solved exactly and without coefficient
// growth ----

constexpr std::uint64_t kPrime = (std::uint64_t{1} << 61) - 1;

std::uint64_t residue_of(std::int64_t value) {
  const auto remainder = value % static_cast<std::int64_t>(kPrime);
  return static_cast<std::uint64_t>(remainder < 0 ? remainder + static_cast<std::int64_t>(kPrime)
                                                  : remainder);
}
std::uint64_t multiply(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>(static_cast<Wide>(a) * b % kPrime);
}
std::uint64_t subtract(std::uint64_t a, std::uint64_t b) { return a >= b ? a - b : a + kPrime - b; }
std::uint64_t inverse(std::uint64_t a) {  // a^(p - 2)
  std::uint64_t result = 1;
  for (std::uint64_t exponent = kPrime - 2; exponent > 0; exponent >>= 1, a = multiply(a, a))
    if (exponent & 1) result = multiply(result, a);
  return result;
}
// The number of least magnitude with this residue, if it is small.
std::optional<std::int64_t> small_number(std::uint64_t residue) {
  constexpr std::uint64_t kLimit = std::uint64_t{1} << 50;
  if (residue < kLimit) return static_cast<std::int64_t>(residue);
  if (kPrime - residue < kLimit) return -static_cast<std::int64_t>(kPrime - residue);
  return std::nullopt;
}

// Solves an overdetermined system: rows of coefficients with the right side last. Returns std::nullopt unless
// there is exactly one solution.
std::optional<std::vector<std::uint64_t>> solve_residues(std::vector<std::vector<std::uint64_t>> rows,
                                                         std::size_t unknowns) {
  for (std::size_t column = 0; column < unknowns; ++column) {
    std::size_t pivot = column;
    while (pivot < rows.size() && rows[pivot][column] == 0) ++pivot;
    if (pivot >= rows.size()) return std::nullopt;
    std::swap(rows[pivot], rows[column]);
    const std::uint64_t scale = inverse(rows[column][column]);
    for (std::uint64_t& entry : rows[column]) entry = multiply(entry, scale);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::uint64_t factor = rows[i][column];
      if (i == column || factor == 0) continue;
      for (std::size_t j = column; j <= unknowns; ++j)
        rows[i][j] = subtract(rows[i][j], multiply(factor, rows[column][j]));
    }
  }
  for (std::size_t i = unknowns; i < rows.size(); ++i)
    if (rows[i][unknowns] != 0) return std::nullopt;
  std::vector<std::uint64_t> solution;
  for (std::size_t i = 0; i < unknowns; ++i) solution.push_back(rows[i][unknowns]);
  return solution;
}

bool equal_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

// A factor in source code has few digits; one recovered by a division has rounding errors.
double rounded_to_digits(double value) { return std::strtod(fmt::format("{:.12g}", value).c_str(), nullptr); }

}  // namespace

// ---- SizeExpression ----

SizeExpression SizeExpression::constant(std::int64_t value) {
  return value == 0 ? SizeExpression() : SizeExpression(std::vector<Term>{Term{value, {}}});
}

SizeExpression SizeExpression::variable(std::size_t index) {
  Term term{1, std::vector<std::uint8_t>(index + 1, 0)};
  term.exponents[index] = 1;
  return SizeExpression(std::vector<Term>{std::move(term)});
}

bool SizeExpression::is_constant() const {
  return std::all_of(terms_.begin(), terms_.end(), [](const Term& term) {
    return std::all_of(term.exponents.begin(), term.exponents.end(),
                       [](std::uint8_t exponent) { return exponent == 0; });
  });
}

bool SizeExpression::uses(std::size_t variable) const {
  return std::any_of(terms_.begin(), terms_.end(), [&](const Term& term) {
    return variable < term.exponents.size() && term.exponents[variable] > 0;
  });
}

std::optional<std::int64_t> SizeExpression::at(std::span<const std::int64_t> variables) const {
  std::int64_t sum = 0;
  for (const Term& term : terms_) {
    std::optional<std::int64_t> product = term.coefficient;
    for (std::size_t i = 0; i < term.exponents.size(); ++i)
      for (std::uint8_t e = 0; e < term.exponents[i]; ++e) {
        product = i < variables.size() ? times(*product, variables[i]) : std::nullopt;
        if (!product) return std::nullopt;
      }
    if (__builtin_add_overflow(sum, *product, &sum)) return std::nullopt;
  }
  if (sum % divisor_ != 0) return std::nullopt;
  return sum / divisor_;
}

std::string SizeExpression::text(std::span<const std::string> names, bool in_product) const {
  if (terms_.empty()) return "0";
  std::string sum;
  for (const Term& term : terms_) {
    std::string product;
    for (std::size_t i = 0; i < term.exponents.size(); ++i) {
      if (term.exponents[i] == 0) continue;
      if (!product.empty()) product += "*";
      product += i < names.size() ? names[i] : fmt::format("?{}", i);
      if (term.exponents[i] > 1) product += fmt::format("^{}", term.exponents[i]);
    }
    const std::int64_t magnitude = std::abs(term.coefficient);
    if (product.empty())
      product = std::to_string(magnitude);
    else if (magnitude != 1)
      product += fmt::format("*{}", magnitude);
    if (sum.empty())
      sum = (term.coefficient < 0 ? "-" : "") + product;
    else
      sum += (term.coefficient < 0 ? " - " : " + ") + product;
  }
  if (divisor_ != 1) return fmt::format("{}/{}", terms_.size() > 1 ? "(" + sum + ")" : sum, divisor_);
  return in_product && terms_.size() > 1 ? "(" + sum + ")" : sum;
}

// ---- NumberExpression ----

double NumberExpression::combine(Form form, double factor, double size) {
  switch (form) {
    case Form::Multiple:
      return factor * size;
    case Form::Quotient:
      return factor / size;
    case Form::MultipleOfRoot:
      return factor * std::sqrt(size);
    case Form::QuotientOfRoot:
      return factor / std::sqrt(size);
  }
  return 0;
}

std::optional<double> NumberExpression::at(std::span<const std::int64_t> variables) const {
  const std::optional<std::int64_t> value = size.at(variables);
  if (!value) return std::nullopt;
  return combine(form, factor, static_cast<double>(*value));
}

std::string NumberExpression::text(std::span<const std::string> names) const {
  const std::string inner = size.text(names, /*in_product=*/true);
  switch (form) {
    case Form::Multiple:
      return factor == 1 ? size.text(names) : fmt::format("{}*{}", factor, inner);
    case Form::Quotient:
      return fmt::format("{}/({})", factor, size.text(names));
    case Form::MultipleOfRoot:
      return factor == 1 ? fmt::format("sqrt({})", size.text(names))
                         : fmt::format("{}*sqrt({})", factor, size.text(names));
    case Form::QuotientOfRoot:
      return fmt::format("{}/sqrt({})", factor, size.text(names));
  }
  return "?";
}

// ---- SymbolSet ----

void SymbolSet::add_quotient(SizeExpression numerator, std::int64_t divisor) {
  names_.push_back(fmt::format("({}//{})", numerator.text(names_, /*in_product=*/true), divisor));
  quotients_.push_back({std::move(numerator), divisor});
}

std::optional<SymbolValues> SymbolSet::variables_at(const SymbolValues& symbols) const {
  SymbolValues all = symbols;
  for (const Quotient& quotient : quotients_) {
    const std::optional<std::int64_t> numerator = quotient.numerator.at(all);
    if (!numerator) return std::nullopt;
    all.push_back(floor_quotient(*numerator, quotient.divisor));
  }
  return all;
}

bool SymbolSet::depends(std::size_t variable, std::size_t symbol) const {
  if (variable < symbols_) return variable == symbol;
  for (std::size_t i = 0; i < variable; ++i)
    if (quotients_[variable - symbols_].numerator.uses(i) && depends(i, symbol)) return true;
  return false;
}

// ---- SizeFitter ----

SizeFitter::SizeFitter(std::vector<std::string> names, std::vector<SymbolValues> points)
    : symbols_(std::move(names)), points_(std::move(points)) {
  if (points_.size() < 2)
    throw ValueError(describe("graph: points to fit sizes to", std::to_string(points_.size()), "two or more",
                              "allow more sizes for the symbols"));
  for (const SymbolValues& point : points_)
    if (point.size() != symbols_.symbols())
      throw ValueError(describe("graph: values of symbols at a point", std::to_string(point.size()),
                                std::to_string(symbols_.symbols()), "give one for each symbol"));
  list_monomials();
}

void SizeFitter::list_monomials() {
  const std::size_t variables = symbols_.variables();
  const unsigned max_degree = variables <= 2 ? 4 : 3;
  monomials_.clear();
  std::vector<std::uint8_t> exponents(variables, 0);
  while (true) {
    if (std::accumulate(exponents.begin(), exponents.end(), 0u) <= max_degree)
      monomials_.push_back(exponents);
    std::size_t i = 0;
    while (i < variables && exponents[i] == 2) exponents[i++] = 0;
    if (i == variables) break;
    ++exponents[i];
  }
  std::stable_sort(monomials_.begin(), monomials_.end(), [](const auto& a, const auto& b) {
    return std::accumulate(a.begin(), a.end(), 0u) < std::accumulate(b.begin(), b.end(), 0u);
  });
  residues_.clear();
  for (const std::vector<std::uint8_t>& monomial : monomials_) {
    std::vector<Residue> at_points;
    for (const SymbolValues& point : points_) {
      Residue product = 1;
      for (std::size_t i = 0; i < variables; ++i)
        for (std::uint8_t e = 0; e < monomial[i]; ++e) product = multiply(product, residue_of(point[i]));
      at_points.push_back(product);
    }
    residues_.push_back(std::move(at_points));
  }
}

bool SizeFitter::holds(const SizeExpression& expression, const std::vector<std::int64_t>& values) const {
  for (std::size_t i = 0; i < points_.size(); ++i)
    if (expression.at(points_[i]) != values[i]) return false;
  return true;
}

std::optional<SizeExpression> SizeFitter::solve(const std::vector<std::size_t>& support,
                                                const std::vector<std::int64_t>& values) const {
  std::vector<std::vector<Residue>> rows(points_.size());
  for (std::size_t i = 0; i < points_.size(); ++i) {
    for (const std::size_t monomial : support) rows[i].push_back(residues_[monomial][i]);
    rows[i].push_back(residue_of(values[i]));
  }
  const auto solution = solve_residues(std::move(rows), support.size());
  if (!solution) return std::nullopt;
  for (std::int64_t divisor = 1; divisor <= kMaxDivisor; ++divisor) {
    std::vector<SizeExpression::Term> terms;
    bool small = true;
    // The highest degree first, as is customary.
    for (std::size_t i = support.size(); small && i-- > 0;) {
      const auto coefficient = small_number(multiply((*solution)[i], static_cast<Residue>(divisor)));
      small = coefficient.has_value();
      if (small && *coefficient != 0) terms.push_back({*coefficient, monomials_[support[i]]});
    }
    if (!small) continue;
    SizeExpression expression(std::move(terms), divisor);
    if (holds(expression, values)) return expression;
  }
  return std::nullopt;
}

std::optional<SizeExpression> SizeFitter::search(const std::vector<std::int64_t>& values,
                                                 std::size_t max_terms) const {
  // Two more points than terms, if there are enough.
  const std::size_t most =
      std::min({max_terms, std::max<std::size_t>(points_.size() - 2, 1), monomials_.size()});
  std::vector<std::size_t> support;
  for (std::size_t terms = 1; terms <= most; ++terms) {
    support.resize(terms);
    std::iota(support.begin(), support.end(), std::size_t{0});
    while (true) {
      if (auto found = solve(support, values)) return found;
      std::size_t i = terms;  // the next combination of this many monomials
      while (i-- > 0 && support[i] == monomials_.size() - terms + i) {
      }
      if (i >= terms) break;
      ++support[i];
      for (std::size_t j = i + 1; j < terms; ++j) support[j] = support[j - 1] + 1;
    }
  }
  return std::nullopt;
}

std::optional<SizeExpression> SizeFitter::fit(const std::vector<std::int64_t>& values) {
  PENSTOCK_INVARIANT(values.size() == points_.size(), "one value for each point");
  const auto [entry, is_new] = known_.try_emplace(values);
  if (is_new) entry->second = search(values, kMaxTerms);
  return entry->second;
}

std::optional<SizeExpression> SizeFitter::fit_size(const std::vector<std::int64_t>& values) {
  // Simple candidates first: a size is more likely a quotient than a sum of three terms that fits by chance.
  if (const auto known = known_.find(values); known != known_.end() && known->second) return known->second;
  if (auto found = search(values, 2)) return known_[values] = found;
  // value = (variable + shift) // divisor: each point allows a few shifts, and all points together one.
  for (std::int64_t divisor = 2; divisor <= kMaxDivisor; ++divisor)
    for (std::size_t variable = 0; variable < symbols_.variables(); ++variable) {
      std::int64_t least = std::numeric_limits<std::int64_t>::min(),
                   most = std::numeric_limits<std::int64_t>::max();
      for (std::size_t i = 0; i < points_.size(); ++i) {
        const auto first = times(values[i], divisor);
        if (!first) return std::nullopt;
        least = std::max(least, *first - points_[i][variable]);
        most = std::min(most, *first + divisor - 1 - points_[i][variable]);
      }
      if (least != most) continue;
      std::vector<SizeExpression::Term> numerator{
          SizeExpression::Term{1, std::vector<std::uint8_t>(variable + 1, 0)}};
      numerator[0].exponents[variable] = 1;
      if (least != 0) numerator.push_back({least, {}});
      symbols_.add_quotient(SizeExpression(std::move(numerator)), divisor);
      for (std::size_t i = 0; i < points_.size(); ++i) points_[i].push_back(values[i]);
      list_monomials();
      // What did not fit before may fit now.
      std::erase_if(known_, [](const auto& entry) { return !entry.second; });
      return fit(values);
    }
  return fit(values);
}

std::optional<NumberExpression> SizeFitter::fit_number(NumberExpression::Form form, double factor,
                                                       const std::vector<double>& values) {
  using Form = NumberExpression::Form;
  std::vector<std::int64_t> sizes;
  for (const double value : values) {
    const double ratio =
        form == Form::Quotient || form == Form::QuotientOfRoot ? factor / value : value / factor;
    const double size = std::round(form == Form::Multiple || form == Form::Quotient ? ratio : ratio * ratio);
    if (!(std::abs(size) < 9e15) || !equal_bits(NumberExpression::combine(form, factor, size), value))
      return std::nullopt;
    sizes.push_back(static_cast<std::int64_t>(size));
  }
  auto expression = fit(sizes);
  if (!expression) return std::nullopt;
  return NumberExpression{form, factor, std::move(*expression)};
}

std::optional<NumberExpression> SizeFitter::fit(const std::vector<double>& values) {
  PENSTOCK_INVARIANT(values.size() == points_.size(), "one value for each point");
  using Form = NumberExpression::Form;
  constexpr Form kForms[] = {Form::Multiple, Form::Quotient, Form::MultipleOfRoot, Form::QuotientOfRoot};
  for (const Form form : kForms)
    for (const double factor : {1.0, -1.0, 2.0, -2.0, 0.5, -0.5})
      if (auto found = fit_number(form, factor, values)) return found;
  // Any other factor of a single monomial, determined by the first point.
  for (const std::vector<std::uint8_t>& monomial : monomials_)
    for (const Form form : kForms) {
      const SizeExpression size(std::vector<SizeExpression::Term>{SizeExpression::Term{1, monomial}});
      const auto first = size.at(points_[0]);
      if (!first || size.is_constant()) continue;
      const double unit = NumberExpression::combine(form, 1, static_cast<double>(*first));
      for (const double factor : {rounded_to_digits(values[0] / unit), values[0] / unit}) {
        NumberExpression candidate{form, factor, size};
        bool right = true;
        for (std::size_t i = 0; right && i < points_.size(); ++i) {
          const auto value = candidate.at(points_[i]);
          right = value && equal_bits(*value, values[i]);
        }
        if (right) return candidate;
      }
    }
  return std::nullopt;
}

}  // namespace penstock::graph
