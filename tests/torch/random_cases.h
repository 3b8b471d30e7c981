// Shared by the tests of keyed random numbers: every way to fill a tensor, boxes of global tensors, memory
// formats, and bitwise comparison.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "penstock/random.h"

namespace penstock::test {

using Sizes = std::vector<std::int64_t>;

inline const std::vector<at::ScalarType>& floating_dtypes() {
  static const std::vector<at::ScalarType> dtypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  return dtypes;
}

// One function with fixed arguments.
struct FillCase {
  std::string name;
  std::vector<at::ScalarType> dtypes;
  std::function<void(const at::Tensor&, const RandomKey&, const GlobalBox&)> fill;
};

inline const std::vector<FillCase>& fill_cases() {
  static const std::vector<FillCase> cases = [] {
    std::vector<FillCase> all;
    const auto add = [&](std::string name, std::vector<at::ScalarType> dtypes, auto fill) {
      all.push_back({std::move(name), std::move(dtypes), fill});
    };
    using T = const at::Tensor&;
    using K = const RandomKey&;
    using B = const GlobalBox&;
    add("uniform", floating_dtypes(), [](T t, K k, B b) { keyed_uniform_(t, k, -0.3, 1.7, b); });
    add("normal", floating_dtypes(), [](T t, K k, B b) { keyed_normal_(t, k, 0.1, 0.7, b); });
    add("trunc_normal", floating_dtypes(),
        [](T t, K k, B b) { keyed_trunc_normal_(t, k, 0.1, 0.7, -1.3, 0.9, b); });
    add("bernoulli", {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kBool},
        [](T t, K k, B b) { keyed_bernoulli_(t, k, 0.37, b); });
    add("uniform in double", {at::kDouble},
        [](T t, K k, B b) { keyed_uniform_(t, k, -0.3, 1.7, b, Precision::Double); });
    add("normal in double", {at::kDouble},
        [](T t, K k, B b) { keyed_normal_(t, k, 0.1, 0.7, b, Precision::Double); });
    add("trunc_normal in double", {at::kDouble},
        [](T t, K k, B b) { keyed_trunc_normal_(t, k, 0.1, 0.7, -1.3, 0.9, b, Precision::Double); });
    // Dropout of ones, as a fill.
    add("dropout", floating_dtypes(),
        [](T t, K k, B b) { t.copy_(keyed_dropout(at::ones_like(t), 0.37, k, b)); });
    return all;
  }();
  return cases;
}

struct BoxCase {
  Sizes global, offset, sizes;
  GlobalBox box() const { return {global, offset}; }
};

// Whole tensors, rows, columns, blocks, single elements, nothing; aligned to Philox blocks of four and not.
inline const std::vector<BoxCase>& box_cases() {
  static const std::vector<BoxCase> cases = {
      {{}, {}, {}},
      {{1}, {0}, {1}},
      {{1000}, {0}, {1000}},
      {{1000}, {3}, {997}},
      {{1000}, {513}, {6}},
      {{1000}, {5}, {0}},
      {{64, 48}, {16, 0}, {16, 48}},
      {{64, 48}, {0, 12}, {64, 12}},
      {{64, 48}, {3, 5}, {9, 21}},
      {{37, 29}, {0, 0}, {37, 29}},
      {{37, 29}, {7, 3}, {30, 26}},
      {{37, 29}, {0, 28}, {37, 1}},
      {{37, 29}, {11, 13}, {1, 1}},
      {{5, 7, 11}, {1, 0, 2}, {3, 7, 5}},
      {{5, 7, 11}, {1, 2, 0}, {3, 4, 11}},
      {{3, 4, 5, 6}, {1, 1, 1, 1}, {2, 3, 4, 5}},
      {{2, 3, 4, 5, 3}, {0, 1, 1, 0, 1}, {2, 2, 3, 5, 2}},
      {{9000}, {0}, {9000}},                                    // longer than a piece of the loop
      {{3, 70001}, {1, 33333}, {2, 20011}},                     // longer than the work of one thread
      {{1LL << 20, 1LL << 21}, {(1LL << 20) - 3, 7}, {3, 13}},  // indices beyond 2^32
      {{1LL << 31, 1LL << 31}, {(1LL << 31) - 2, (1LL << 31) - 9}, {2, 9}},  // and up to 2^62
  };
  return cases;
}

// Tensors of the same sizes with different memory layouts.
enum class Memory { Contiguous, Reversed, EveryOther, Misaligned };
inline constexpr Memory kMemories[] = {Memory::Contiguous, Memory::Reversed, Memory::EveryOther,
                                       Memory::Misaligned};

inline at::Tensor make_tensor(const Sizes& sizes, const at::TensorOptions& options, Memory memory) {
  const auto dims = static_cast<std::int64_t>(sizes.size());
  switch (memory) {
    case Memory::Contiguous:
      return at::zeros(sizes, options);
    case Memory::Reversed: {  // the first dim is the innermost
      Sizes order;
      for (std::int64_t d = dims - 1; d >= 0; --d) order.push_back(d);
      return at::zeros(Sizes(sizes.rbegin(), sizes.rend()), options).permute(order);
    }
    case Memory::EveryOther: {
      Sizes doubled = sizes;
      doubled.push_back(2);
      return at::zeros(doubled, options).select(dims, 1);
    }
    case Memory::Misaligned: {
      std::int64_t count = 1;
      for (const auto size : sizes) count *= size;
      return at::zeros({count + 1}, options).narrow(0, 1, count).view(sizes);
    }
  }
  return {};
}

// The memory of a tensor as integers, in row-major order.
inline at::Tensor bits_of(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().cpu().contiguous();
  switch (plain.element_size()) {
    case 8:
      return plain.view(at::kLong);
    case 4:
      return plain.view(at::kInt);
    case 2:
      return plain.view(at::kShort);
    default:
      return plain;
  }
}

inline ::testing::AssertionResult same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type())
    return ::testing::AssertionFailure()
           << a.toString() << a.sizes() << " against " << b.toString() << b.sizes();
  const at::Tensor different = bits_of(a) != bits_of(b);
  const auto count = different.sum().item<std::int64_t>();
  if (count == 0) return ::testing::AssertionSuccess();
  const auto at = different.flatten().nonzero()[0][0].item<std::int64_t>();
  return ::testing::AssertionFailure()
         << count << " of " << a.numel() << " elements differ; first at " << at << ": "
         << a.cpu().flatten()[at].item<double>() << " against " << b.cpu().flatten()[at].item<double>();
}

inline at::Tensor part_of(at::Tensor whole, const Sizes& offset, const Sizes& sizes) {
  for (std::size_t d = 0; d < sizes.size(); ++d)
    whole = whole.narrow(static_cast<std::int64_t>(d), offset[d], sizes[d]);
  return whole;
}

inline RandomKey test_key() {
  return {.seed = 42, .step = 7, .microbatch = 3, .layer = 12, .purpose = purpose::kInit};
}

}  // namespace penstock::test
