#include "penstock/train/data/document_split.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::train {

namespace {

bool is_about(std::uint64_t actual, double wanted) {
  return static_cast<double>(actual) >= wanted / 2 && static_cast<double>(actual) <= wanted * 2;
}

}  // namespace

bool is_validation(std::uint64_t key, double validation_fraction) {
  if (!(validation_fraction >= 0 && validation_fraction <= 1))
    throw ValueError(
        describe("validation fraction", fmt::format("{}", validation_fraction), "a number from 0 to 1"));
  // 32 bits of the key are exact in a double, so that the result is the same on every machine.
  return static_cast<double>(key >> 32) < validation_fraction * 4294967296.0;
}

DocumentSplit::DocumentSplit(double validation_fraction) : fraction_(validation_fraction) {
  (void)is_validation(0, validation_fraction);  // checks the fraction
}

void DocumentSplit::count(std::uint64_t tokens, std::uint64_t key) {
  tokens_ += tokens;
  if (is_validation(key, fraction_)) by_key_ += tokens;
}

void DocumentSplit::decide() {
  const auto all = static_cast<double>(tokens_);
  cuts_ = !is_about(by_key_, all * fraction_) || !is_about(tokens_ - by_key_, all * (1 - fraction_));
}

std::uint64_t DocumentSplit::validation_tokens(std::uint64_t tokens, std::uint64_t key) {
  const std::uint64_t before = passed_;
  passed_ += tokens;
  if (!cuts_) return is_validation(key, fraction_) ? tokens : 0;
  // Differences of rounded sums: later documents compensate for the rounding of earlier ones. Products of
  // numbers below 2^53 with a fraction are monotone and the same on every machine.
  const auto share = [&](std::uint64_t count) {
    return static_cast<std::uint64_t>(static_cast<double>(count) * fraction_);
  };
  return std::min(tokens, share(passed_) - share(before));
}

}  // namespace penstock::train
