#include "penstock/torch/tree/tensor_meta.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/hash.h"
#include "penstock/errors.h"
#include "penstock/torch/tree/distributed_type.h"
#include "penstock/torch/tree/tensor_text.h"

namespace penstock {

namespace {

[[noreturn]] void refuse_meta(std::string_view what, const std::string& actual, const std::string& expected) {
  throw ValueError(describe(fmt::format("distributed record: {}", what), actual, expected,
                            "take global shape, placements and mesh from one distributed tensor"));
}

// "[dp, tp]"
std::string names_text(const std::vector<std::string>& names) {
  return fmt::format("[{}]", fmt::join(names, ", "));
}

std::string layout_text(const std::optional<MeshLayout>& layout) {
  return layout ? layout->to_string() : "none";
}

std::string in_count(std::size_t count, std::string_view one, std::string_view many) {
  return fmt::format("{} {}", count, count == 1 ? one : many);
}

}  // namespace

DistributedRecord::DistributedRecord(TensorRecord local, std::vector<std::int64_t> global_shape,
                                     std::vector<std::int64_t> global_stride, Placements placements,
                                     MeshKey mesh_key)
    : local_(std::move(local)),
      global_shape_(std::move(global_shape)),
      global_stride_(std::move(global_stride)),
      placements_(std::move(placements)),
      mesh_key_(std::move(mesh_key)) {
  const std::size_t ndim = local_.shape().size();
  for (const auto& [name, list] :
       {std::pair{"global shape", &global_shape_}, {"global stride", &global_stride_}}) {
    if (list->size() != ndim)
      refuse_meta(name, shape_text(*list),
                  in_count(ndim, "dim, as the local part", "dims, as the local part"));
    if (std::any_of(list->begin(), list->end(), [](std::int64_t n) { return n < 0; }))
      refuse_meta(name, shape_text(*list), "no negative number");
  }
  for (const Placement& placement : placements_) {
    if (placement.splits() && (placement.dim() < 0 || placement.dim() >= static_cast<std::int64_t>(ndim)))
      refuse_meta("placements", to_string(placements_),
                  fmt::format("dims below {}, counted from the front", ndim));
    if (placement.is_strided_shard() && placement.split_factor() < 1)
      refuse_meta("placements", to_string(placements_), "split factors of at least 1");
  }
  if (const auto& layout = mesh_key_.layout) {
    const auto axes = static_cast<std::size_t>(layout->ndim());
    if (placements_.size() != axes)
      refuse_meta("placements", to_string(placements_),
                  in_count(axes, "placement, one for each mesh axis", "placements, one for each mesh axis"));
    if (!mesh_key_.names.empty() && mesh_key_.names.size() != axes)
      refuse_meta("mesh axis names", names_text(mesh_key_.names),
                  in_count(axes, "name, one for each axis", "names, one for each axis"));
  } else if (!mesh_key_.names.empty() && placements_.size() != mesh_key_.names.size()) {
    refuse_meta("placements", to_string(placements_),
                in_count(mesh_key_.names.size(), "placement, one for each mesh axis",
                         "placements, one for each mesh axis"));
  }
}

DistributedRecord DistributedRecord::with_requires_grad(bool requires_grad) const {
  DistributedRecord copy = *this;
  copy.local_ = local_.with_requires_grad(requires_grad);
  return copy;
}

std::size_t DistributedRecord::hash() const {
  HashBuilder builder;
  builder.add(local_);
  for (const std::int64_t size : global_shape_) builder.add(size);
  for (const std::int64_t step : global_stride_) builder.add(step);
  return builder.add(placements_).add(mesh_key_).value();
}

TensorMeta meta_of(const at::Tensor& tensor) {
  if (const auto type = distributed_type_of(tensor)) return type->record(tensor);
  return detail::record_of_attributes(tensor);
}

DistributedRecord distributed_record_of(const at::Tensor& tensor) {
  if (const auto type = distributed_type_of(tensor)) return type->record(tensor);
  throw PipeliningMetadataError(describe(
      "distributed_record_of", tensor.defined() ? "a plain tensor" : "an undefined tensor",
      "a distributed one", "call record_of(tensor), or meta_of(tensor) for the record of either kind"));
}

bool is_distributed(const TensorMeta& meta) { return std::holds_alternative<DistributedRecord>(meta); }

const TensorRecord& local_record(const TensorMeta& meta) {
  if (const auto* distributed = std::get_if<DistributedRecord>(&meta)) return distributed->local();
  return std::get<TensorRecord>(meta);
}

bool requires_grad(const TensorMeta& meta) { return local_record(meta).requires_grad(); }

at::Tensor make_raw_tensor(const TensorMeta& meta, at::Device device) {
  return make_raw_tensor(local_record(meta), device);
}

std::vector<std::string> differences(const DistributedRecord& expected, const DistributedRecord& actual) {
  std::vector<std::string> found = differences(expected.local(), actual.local());
  detail::add_list_difference(found, "global shape", expected.global_shape(), actual.global_shape());
  detail::add_list_difference(found, "global stride", expected.global_stride(), actual.global_stride());
  if (expected.placements() != actual.placements())
    found.push_back(describe("placements", to_string(actual.placements()), to_string(expected.placements())));
  const MeshKey& expected_key = expected.mesh_key();
  const MeshKey& actual_key = actual.mesh_key();
  if (expected_key.names != actual_key.names)
    found.push_back(describe("mesh axes", names_text(actual_key.names), names_text(expected_key.names)));
  if (expected_key.layout != actual_key.layout)
    found.push_back(
        describe("mesh layout", layout_text(actual_key.layout), layout_text(expected_key.layout)));
  return found;
}

std::vector<std::string> differences(const TensorMeta& expected, const TensorMeta& actual) {
  const auto* left = std::get_if<DistributedRecord>(&expected);
  const auto* right = std::get_if<DistributedRecord>(&actual);
  if (left && right) return differences(*left, *right);
  std::vector<std::string> found = differences(local_record(expected), local_record(actual));
  if (left || right) found.push_back(describe("kind", kind_text(actual), kind_text(expected)));
  return found;
}

std::vector<std::string> requires_grad_differences(const TensorMeta& expected, const TensorMeta& actual) {
  return requires_grad_differences(local_record(expected), local_record(actual));
}

std::string kind_text(const TensorMeta& meta) {
  return is_distributed(meta) ? "a distributed tensor" : "a plain tensor";
}

std::string to_string(const DistributedRecord& record) {
  return fmt::format("{} of {}, placements {}, mesh {}", to_string(record.local()),
                     shape_text(record.global_shape()), to_string(record.placements()),
                     record.mesh_key().to_string());
}

std::string to_string(const TensorMeta& meta) {
  return std::visit([](const auto& record) { return to_string(record); }, meta);
}

std::string to_string(const std::optional<TensorMeta>& meta) { return meta ? to_string(*meta) : "nothing"; }

}  // namespace penstock
