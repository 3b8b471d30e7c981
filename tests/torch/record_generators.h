// Records for tests: fixed ones that are all different, and arbitrary ones for property tests.
#pragma once

#include <torch/torch.h>

#include <vector>

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#endif

#include "penstock/pipeline/contract/stage_meta.h"
#include "penstock/torch/compat/dtype.h"
#include "penstock/torch/tree/tensor_meta.h"

namespace penstock::test {

// A record and variants that differ from it in one field each; the last differs in requires_grad only.
inline std::vector<DistributedRecord> distributed_variants() {
  const auto local = [](std::vector<std::int64_t> shape, at::ScalarType dtype = at::kFloat,
                        bool grad = false) {
    return TensorRecord::contiguous(std::move(shape), dtype, grad);
  };
  const MeshKey key{{"dp", "tp"}, MeshLayout({2, 2})};
  const Placements split = {Shard{0}, Replicate{}};
  return {
      DistributedRecord(local({2, 3}), {4, 3}, {3, 1}, split, key),
      DistributedRecord(local({2, 4}), {4, 3}, {3, 1}, split, key),
      DistributedRecord(local({2, 3}, at::kHalf), {4, 3}, {3, 1}, split, key),
      DistributedRecord(TensorRecord({2, 3}, {1, 2}, at::kFloat), {4, 3}, {3, 1}, split, key),
      DistributedRecord(local({2, 3}), {5, 3}, {3, 1}, split, key),
      DistributedRecord(local({2, 3}), {4, 3}, {1, 4}, split, key),
      DistributedRecord(local({2, 3}), {4, 3}, {3, 1}, {Shard{1}, Replicate{}}, key),
      DistributedRecord(local({2, 3}), {4, 3}, {3, 1}, {Replicate{}, Shard{0}}, key),
      DistributedRecord(local({2, 3}), {4, 3}, {3, 1}, {StridedShard{0, 2}, Replicate{}}, key),
      DistributedRecord(local({2, 3}), {4, 3}, {3, 1}, {StridedShard{0, 3}, Replicate{}}, key),
      DistributedRecord(local({2, 3}), {4, 3}, {3, 1}, {Shard{0}, Partial{}}, key),
      DistributedRecord(local({2, 3}), {4, 3}, {3, 1}, {Shard{0}, Partial{PartialOp::Max}}, key),
      DistributedRecord(local({2, 3}), {4, 3}, {3, 1}, split, MeshKey{{"tp", "dp"}, MeshLayout({2, 2})}),
      DistributedRecord(local({2, 3}), {4, 3}, {3, 1}, split, MeshKey{{}, MeshLayout({2, 2})}),
      DistributedRecord(local({2, 3}), {4, 3}, {3, 1}, split,
                        MeshKey{{"dp", "tp"}, MeshLayout({2, 2}, {1, 2})}),
      DistributedRecord(local({2, 3}), {4, 3}, {3, 1}, split, MeshKey{{"dp", "tp"}, std::nullopt}),
      DistributedRecord(local({2, 3}, at::kFloat, true), {4, 3}, {3, 1}, split, key),
  };
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK

inline at::ScalarType arbitrary_dtype() {
  std::vector<at::ScalarType> here;
  for (const DtypeEntry& entry : dtype_table())
    if (entry.here) here.push_back(*entry.here);
  return *rc::gen::elementOf(here);
}

inline std::vector<std::int64_t> arbitrary_sizes(std::size_t count) {
  return *rc::gen::container<std::vector<std::int64_t>>(count, rc::gen::inRange<std::int64_t>(0, 6));
}

inline TensorRecord arbitrary_record(std::size_t ndim) {
  const at::ScalarType dtype = arbitrary_dtype();
  const bool differentiable = at::isFloatingType(dtype) || at::isComplexType(dtype);
  return TensorRecord(arbitrary_sizes(ndim), arbitrary_sizes(ndim), dtype,
                      differentiable && *rc::gen::arbitrary<bool>());
}

inline Placement arbitrary_placement(std::size_t ndim) {
  const auto dim = [&] { return *rc::gen::inRange<std::int64_t>(0, static_cast<std::int64_t>(ndim)); };
  switch (*rc::gen::inRange(0, ndim > 0 ? 4 : 2)) {
    case 0:
      return Replicate{};
    case 1:
      return Partial{*rc::gen::element(PartialOp::Sum, PartialOp::Avg, PartialOp::Min, PartialOp::Max,
                                       PartialOp::Product)};
    case 2:
      return Shard{dim()};
    default:
      return StridedShard{dim(), *rc::gen::inRange<std::int64_t>(1, 5)};
  }
}

inline TensorMeta arbitrary_meta() {
  const auto ndim = *rc::gen::inRange<std::size_t>(0, 5);
  TensorRecord local = arbitrary_record(ndim);
  if (*rc::gen::arbitrary<bool>()) return local;
  const auto axes = *rc::gen::inRange<std::size_t>(0, 4);
  MeshKey key;
  if (*rc::gen::arbitrary<bool>())
    for (std::size_t i = 0; i < axes; ++i) key.names.push_back(*rc::gen::arbitrary<std::string>());
  if (*rc::gen::arbitrary<bool>()) {
    key.layout = MeshLayout(
        *rc::gen::container<std::vector<std::int64_t>>(axes, rc::gen::inRange<std::int64_t>(1, 5)));
    if (axes > 1 && *rc::gen::arbitrary<bool>())
      key.layout = key.layout->slice({static_cast<int>(axes) - 1, 0});
  }
  const std::size_t placed = key.layout ? static_cast<std::size_t>(key.layout->ndim()) : axes;
  if (!key.names.empty()) key.names.resize(placed);
  Placements placements;
  for (std::size_t i = 0; i < placed; ++i) placements.push_back(arbitrary_placement(ndim));
  return DistributedRecord(std::move(local), arbitrary_sizes(ndim), arbitrary_sizes(ndim),
                           std::move(placements), std::move(key));
}

template <class Make>
auto arbitrary_list(Make make) {
  std::vector<decltype(make())> list;
  for (int count = *rc::gen::inRange(0, 4); count > 0; --count) list.push_back(make());
  return list;
}

inline std::optional<TensorMeta> arbitrary_optional_meta() {
  if (!*rc::gen::arbitrary<bool>()) return std::nullopt;
  return arbitrary_meta();
}

inline StageMeta arbitrary_stage_meta() {
  StageMeta meta;
  if (*rc::gen::arbitrary<bool>()) meta.inputs = arbitrary_list(arbitrary_meta);
  if (*rc::gen::arbitrary<bool>()) meta.outputs = arbitrary_list(arbitrary_meta);
  if (*rc::gen::arbitrary<bool>()) meta.input_grads = arbitrary_list(arbitrary_optional_meta);
  if (*rc::gen::arbitrary<bool>()) meta.output_grads = arbitrary_list(arbitrary_optional_meta);
  return meta;
}

#endif

}  // namespace penstock::test
