#include "penstock/torch/random/random_constants.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::random {

namespace {

template <class Real>
using WordOf = std::conditional_t<sizeof(Real) == 4, u32, u64>;

template <class Real>
AnyConstants uniform(double low, double high) {
  Constants<Real, WordOf<Real>> constants;
  constants.a = static_cast<Real>(low);
  constants.b = static_cast<Real>(high - low);
  const Real end = static_cast<Real>(high);
  constants.c = end > constants.a ? std::nextafter(end, constants.a) : constants.a;
  if (!std::isfinite(constants.a) || !std::isfinite(constants.b) || !std::isfinite(constants.c))
    throw ValueError(describe("keyed_uniform_: interval", fmt::format("[{}, {})", low, high),
                              "bounds and a width that are finite in the precision of the draw",
                              sizeof(Real) == 4 ? "draw in Precision::Double or choose a smaller interval"
                                                : "choose a smaller interval"));
  return constants;
}

template <class Real>
AnyConstants normal(double mean, double deviation) {
  Constants<Real, WordOf<Real>> constants;
  constants.a = static_cast<Real>(mean);
  constants.b = static_cast<Real>(deviation);
  return constants;
}

// Returns the smallest word whose quantile is at least `bound` (`after`: above it), or all ones if there is
// none. Searches the quantile function itself, so that the result does not depend on the machine's math
// library.
template <class Real>
WordOf<Real> first_word(Real bound, bool after) {
  using Word = WordOf<Real>;
  Word low = 0, high = std::numeric_limits<Word>::max();
  while (low < high) {
    const Word middle = low + (high - low) / 2;
    const Real value = normal_quantile(middle);
    const bool reached = after ? value > bound : value >= bound;
    if (reached) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

template <class Real>
AnyConstants trunc_normal(double mean, double deviation, double low, double high) {
  using Word = WordOf<Real>;
  constexpr Word kAll = std::numeric_limits<Word>::max();
  constexpr Word kFewest = Word{1} << 16;
  Constants<Real, Word> constants;
  constants.a = static_cast<Real>(mean);
  constants.b = static_cast<Real>(deviation);
  constants.c = static_cast<Real>(low);
  constants.d = static_cast<Real>(high);
  const Real from = static_cast<Real>((low - mean) / deviation),
             to = static_cast<Real>((high - mean) / deviation);
  constants.first = first_word(from, false);
  constants.last = normal_quantile(kAll) <= to ? kAll : first_word(to, true) - 1;
  // first_word(to) is 0 if no word is low enough; then `last` wraps around to the largest word.
  const bool none =
      normal_quantile(Word{0}) > to || normal_quantile(kAll) < from || constants.last < constants.first;
  if (none || constants.last - constants.first < kFewest - 1)
    throw ValueError(
        describe("keyed_trunc_normal_: interval",
                 fmt::format("[{}, {}], {:.3g} to {:.3g} deviations from the mean", low, high, from, to),
                 fmt::format("an interval with at least 2^16 of the 2^{} quantiles", 8 * sizeof(Word)),
                 sizeof(Real) == 4 ? "widen it, move it towards the mean or draw in Precision::Double"
                                   : "widen it or move it towards the mean"));
  return constants;
}

void check_normal(const char* operation, double mean, double deviation, bool zero_allowed) {
  if (!std::isfinite(mean))
    throw ValueError(
        describe(fmt::format("{}: mean", operation), fmt::format("{}", mean), "a finite number"));
  if (!std::isfinite(deviation) || deviation < 0 || (deviation == 0 && !zero_allowed))
    throw ValueError(describe(fmt::format("{}: standard deviation", operation), fmt::format("{}", deviation),
                              zero_allowed ? "a finite number, 0 or more" : "a finite number above 0"));
}

// Words below p * 2^32 mean yes.
template <class Real>
Constants<Real, u32> yes_or_no(const char* operation, double p) {
  if (!(p >= 0 && p <= 1))
    throw ValueError(
        describe(fmt::format("{}: probability", operation), fmt::format("{}", p), "a number from 0 to 1"));
  const u64 yes = static_cast<u64>(std::floor(p * 0x1p32 + 0.5));
  Constants<Real, u32> constants;
  constants.any = yes > 0 ? 0xffffffffu : 0u;
  constants.last = yes > 0 ? static_cast<u32>(yes - 1) : 0u;
  return constants;
}

template <class Real>
AnyConstants dropout_as(double p) {
  Constants<Real, u32> constants = yes_or_no<Real>("keyed_dropout", p);
  constants.a = p < 1 ? static_cast<Real>(1 / (1 - p)) : Real{0};
  return constants;
}

}  // namespace

AnyConstants uniform_constants(double low, double high, bool in_double) {
  if (!(low <= high) || !std::isfinite(low) || !std::isfinite(high))
    throw ValueError(describe("keyed_uniform_: interval", fmt::format("[{}, {})", low, high),
                              "two finite numbers, low before high"));
  return in_double ? uniform<double>(low, high) : uniform<float>(low, high);
}

AnyConstants normal_constants(double mean, double deviation, bool in_double) {
  check_normal("keyed_normal_", mean, deviation, true);
  return in_double ? normal<double>(mean, deviation) : normal<float>(mean, deviation);
}

AnyConstants trunc_normal_constants(double mean, double deviation, double low, double high, bool in_double) {
  check_normal("keyed_trunc_normal_", mean, deviation, false);
  if (!(low < high))
    throw ValueError(describe("keyed_trunc_normal_: interval", fmt::format("[{}, {}]", low, high),
                              "the lower bound first, below the upper one"));
  return in_double ? trunc_normal<double>(mean, deviation, low, high)
                   : trunc_normal<float>(mean, deviation, low, high);
}

AnyConstants bernoulli_constants(double p) { return yes_or_no<float>("keyed_bernoulli_", p); }

AnyConstants dropout_constants(double p, bool in_double) {
  return in_double ? dropout_as<double>(p) : dropout_as<float>(p);
}

}  // namespace penstock::random
