// The small subclasses of tests/torch, registered so that they can be rebuilt, and comparison of tensors of
// any kind.
#pragma once

#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "penstock/graph/ir/subclass_record.h"
#include "tests/torch/sample_wrappers.h"

namespace penstock::test {

inline void register_sample_kinds() {
  static std::once_flag once;
  std::call_once(once, [] {
    register_wrapper_kind(
        "Boxed", [](const FlatWrapper& flat) { return sample::Boxed::make(flat.tensors.at(0).second); });
    register_wrapper_kind("Two", [](const FlatWrapper& flat) {
      return sample::Two::make(flat.tensors.at(0).second, flat.tensors.at(1).second);
    });
  });
}

// Equal in kind, context, geometry and every bit of the inner tensors.
inline ::testing::AssertionResult same_tensor(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return ::testing::AssertionFailure() << "one of them is undefined";
  if (!a.defined()) return ::testing::AssertionSuccess();
  if (graph::is_subclass(a) != graph::is_subclass(b))
    return ::testing::AssertionFailure() << graph::type_text(a) << " and " << graph::type_text(b);
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type())
    return ::testing::AssertionFailure() << a.sizes() << " and " << b.sizes();
  if (!graph::is_subclass(a))
    return at::equal(a, b) ? ::testing::AssertionSuccess()
                           : ::testing::AssertionFailure()
                                 << "they differ by " << (a - b).abs().max().to(at::kDouble).item<double>();
  if (graph::type_text(a) != graph::type_text(b))
    return ::testing::AssertionFailure() << graph::type_text(a) << " and " << graph::type_text(b);
  const auto inner_a = payload_of(a)->inner_tensors(), inner_b = payload_of(b)->inner_tensors();
  for (std::size_t i = 0; i < inner_a.size(); ++i)
    if (auto same = same_tensor(inner_a[i].second.detach(), inner_b[i].second.detach()); !same)
      return same << " in " << inner_a[i].first;
  return ::testing::AssertionSuccess();
}

}  // namespace penstock::test
