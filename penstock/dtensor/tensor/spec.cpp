#include "penstock/dtensor/tensor/spec.h"

#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "penstock/errors.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/torch/compat/dtype.h"

namespace penstock {
namespace {

void mix(std::size_t& seed, std::size_t value) {
  seed ^= value + 0x9e3779b97f4a7c15ull + (seed << 6) + (seed >> 2);
}

}  // namespace

std::int64_t GlobalGeometry::numel() const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

GlobalGeometry global_geometry_of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.device()};
}

std::vector<std::int64_t> contiguous_stride(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> stride(shape.size());
  std::int64_t next = 1;
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    stride[dim] = next;
    next *= std::max<std::int64_t>(shape[dim], 1);
  }
  return stride;
}

std::vector<std::int64_t> dense_stride(const std::vector<std::int64_t>& shape,
                                       const std::vector<std::int64_t>& stride) {
  std::vector<std::size_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return stride[a] > stride[b]; });
  std::vector<std::int64_t> result(shape.size());
  std::int64_t next = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    result[order[i]] = next;
    next *= std::max<std::int64_t>(shape[order[i]], 1);
  }
  return result;
}

SpecPtr DTensorSpec::get(const comm::MeshGroups& mesh, const Placements& placements,
                         const GlobalGeometry& geometry) {
  DTensorSpec spec;
  spec.mesh_id_ = mesh.id();
  spec.mesh_shape_ = mesh.shape();
  spec.coordinate_ = mesh.coordinate();
  spec.placements_ = placements;
  spec.geometry_ = geometry;
  return intern(std::move(spec));
}

SpecPtr DTensorSpec::get(const DTensorSpec& like, const Placements& placements,
                         const GlobalGeometry& geometry) {
  DTensorSpec spec;
  spec.mesh_id_ = like.mesh_id_;
  spec.mesh_shape_ = like.mesh_shape_;
  spec.coordinate_ = like.coordinate_;
  spec.placements_ = placements;
  spec.geometry_ = geometry;
  return intern(std::move(spec));
}

std::size_t DTensorSpec::hash() const {
  std::size_t seed = std::hash<std::uint64_t>()(mesh_id_);
  mix(seed, std::hash<Placements>()(placements_));
  for (const std::int64_t size : geometry_.shape) mix(seed, static_cast<std::size_t>(size));
  for (const std::int64_t stride : geometry_.stride) mix(seed, static_cast<std::size_t>(stride));
  mix(seed, static_cast<std::size_t>(geometry_.dtype));
  mix(seed, std::hash<c10::Device>()(geometry_.device));
  return seed;
}

bool DTensorSpec::same_as(const DTensorSpec& other) const {
  return mesh_id_ == other.mesh_id_ && placements_ == other.placements_ && geometry_ == other.geometry_;
}

SpecPtr DTensorSpec::intern(DTensorSpec&& spec) {
  spec.placements_ =
      normalize_placements(spec.placements_, static_cast<int>(spec.mesh_shape_.size()), spec.ndim());
  // Never freed: tensors may outlive every static object.
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::unordered_multimap<std::size_t, std::weak_ptr<const DTensorSpec>>;
  static std::size_t next_sweep = 1024;
  const std::size_t hash = spec.hash();
  const std::lock_guard lock(mutex);
  const auto [begin, end] = known.equal_range(hash);
  for (auto it = begin; it != end; ++it)
    if (SpecPtr held = it->second.lock(); held && held->same_as(spec)) return held;
  if (known.size() >= next_sweep) {
    std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
    next_sweep = std::max<std::size_t>(1024, 2 * known.size());
  }
  spec.has_partial_ = std::any_of(spec.placements_.begin(), spec.placements_.end(),
                                  [](const Placement& p) { return p.is_partial(); });
  spec.replicated_ = std::all_of(spec.placements_.begin(), spec.placements_.end(),
                                 [](const Placement& p) { return p.is_replicate(); });
  spec.local_shape_ =
      spec.coordinate_.empty() && !spec.mesh_shape_.empty()
          ? std::vector<std::int64_t>{0}
          : local_shape_and_offset(spec.shape(), spec.mesh_shape_, spec.coordinate_, spec.placements_).shape;
  SpecPtr made(new DTensorSpec(std::move(spec)));
  known.emplace(hash, made);
  return made;
}

std::string DTensorSpec::to_string() const {
  return fmt::format("{}[{}] as {} on a mesh of ({})", dtype_name(geometry_.dtype),
                     fmt::join(geometry_.shape, ", "), penstock::to_string(placements_),
                     fmt::join(mesh_shape_, ", "));
}

}  // namespace penstock
