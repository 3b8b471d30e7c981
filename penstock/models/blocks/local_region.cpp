#include "penstock/models/blocks/local_region.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

#include "penstock/base/describe.h"
#include "penstock/comm/group/operators.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/mesh/local_shard.h"

namespace penstock::models {

LocalRegion::LocalRegion(const at::Tensor& x, const at::Tensor& weight, Rows rows) {
  plain_input_ = !is_dtensor(x);
  if (!is_dtensor(weight)) {
    if (!plain_input_)
      throw TypeError(describe(
          "a distributed activation", describe_dtensor(x), "a plain one, because the parameters are plain",
          "distribute the parameters with parallelize_transformer() or distribute_module()"));
    return;
  }
  mesh_ = mesh_of(weight);
  const Placements& own = placements_of(weight);
  for (const Placement& placement : own) split_.push_back(placement.splits());
  shape_ = x.sizes().vec();
  if (plain_input_) {
    if (own.size() != 1)
      throw TypeError(describe(
          "an activation of a tensor parallel model", "a plain tensor",
          fmt::format("a distributed tensor of {}", mesh_->mesh().to_string()),
          "make it one with from_local(), or parallelize on the slice of the mesh that is tensor parallel"));
    inside_ = outside_ = Placements(1);
    return;
  }
  place(x, rows == Rows::Batch ? 1 : x.dim() - 1);
}

LocalRegion::LocalRegion(const at::Tensor& x, const comm::MeshGroups& mesh)
    : mesh_(mesh),
      split_(mesh.shape().size(), true),
      inside_(mesh.shape().size()),
      outside_(mesh.shape().size()),
      plain_input_(!is_dtensor(x)),
      shape_(x.sizes().vec()) {
  if (split_.size() != 1)
    throw TypeError(describe("a part of a model that is split over ranks", mesh.mesh().to_string(),
                             "a mesh with one axis", "use the slice of the mesh along that axis"));
  if (!plain_input_) place(x, x.dim() - 1);
}

// `kept_dims`: so many dims of x, from the first, may stay divided within the region.
void LocalRegion::place(const at::Tensor& x, std::int64_t kept_dims) {
  if (!(mesh_of(x) == *mesh_))
    throw TypeError(describe("a distributed activation", describe_dtensor(x),
                             fmt::format("one of the parameters' mesh {}", mesh_->mesh().to_string())));
  const auto divides_first = [&](const Placement& placement, std::int64_t dims) {
    bool divides = placement.splits();
    for (std::int64_t dim = dims; dim < x.dim(); ++dim) divides = divides && !placement.splits(dim);
    return divides;
  };
  inside_ = outside_ = placements_of(x);
  for (std::size_t axis = 0; axis < inside_.size(); ++axis) {
    if (split_[axis] || !divides_first(inside_[axis], kept_dims)) inside_[axis] = Replicate{};
    if (!divides_first(outside_[axis], x.dim() - 1)) outside_[axis] = inside_[axis];
  }
}

at::Tensor LocalRegion::enter(const at::Tensor& x) const {
  if (!mesh_) return x;
  const bool whole = std::none_of(split_.begin(), split_.end(), [](bool split) { return split; });
  if (plain_input_ && whole) return x;
  // Every rank of a splitting axis uses the whole activation for its own columns: the gradients are terms of
  // a sum.
  Placements gradients = inside_;
  for (std::size_t axis = 0; axis < split_.size(); ++axis)
    if (split_[axis]) gradients[axis] = Partial{};
  return to_local(plain_input_ ? from_local(x, *mesh_, inside_, {.check = false}) : redistribute(x, inside_),
                  {.grad_placements = gradients});
}

at::Tensor LocalRegion::weight(const at::Tensor& parameter) const {
  if (!mesh_) {
    if (is_dtensor(parameter))
      throw ValueError(describe("a parameter of a model", describe_dtensor(parameter),
                                "a plain one, like the others", "use parallelize_transformer()"));
    return parameter;
  }
  if (!is_dtensor(parameter))
    throw ValueError(
        describe("a parameter of a tensor parallel model", "a plain tensor",
                 fmt::format("distributed over {}", mesh_->mesh().to_string()),
                 "use parallelize_transformer(), or distribute_module() after parallelize_module()"));
  Placements gradients = placements_of(parameter);
  for (std::size_t axis = 0; axis < gradients.size(); ++axis) {
    if (gradients[axis].splits() != split_[axis])
      throw ValueError(describe("a parameter of a tensor parallel model", describe_dtensor(parameter),
                                "a parameter split along the same axes as its neighbours",
                                "use tensor_parallel_plan(): column parallel for query, key, value, gate and "
                                "up needs row parallel for output and down"));
    if (inside_[axis].splits()) gradients[axis] = Partial{};  // every rank has other rows
  }
  return to_local(parameter, {.grad_placements = gradients});
}

at::Tensor LocalRegion::shared_weight(const at::Tensor& parameter) const {
  if (!mesh_) return weight(parameter);
  if (!is_dtensor(parameter) || !(mesh_of(parameter) == *mesh_))
    throw ValueError(
        describe("a parameter of a tensor parallel model",
                 is_dtensor(parameter) ? describe_dtensor(parameter) : "a plain tensor",
                 fmt::format("distributed over {}, like its neighbours", mesh_->mesh().to_string())));
  Placements gradients = placements_of(parameter);
  for (std::size_t axis = 0; axis < gradients.size(); ++axis) {
    if (gradients[axis].splits())
      throw ValueError(describe("a parameter that all ranks of a region use", describe_dtensor(parameter),
                                "a replicated one"));
    if (split_[axis] || inside_[axis].splits()) gradients[axis] = Partial{};
  }
  return to_local(parameter, {.grad_placements = gradients});
}

at::Tensor LocalRegion::leave_sum(const at::Tensor& local) const {
  if (!mesh_) return local;
  const bool whole = std::none_of(split_.begin(), split_.end(), [](bool split) { return split; });
  if (plain_input_ && whole) return local;
  Placements terms = inside_;
  for (std::size_t axis = 0; axis < split_.size(); ++axis)
    if (split_[axis]) terms[axis] = Partial{};
  FromLocalOptions options{.check = false};
  if (!shape_.empty()) options.shape = shape_;
  const at::Tensor sum = redistribute(from_local(local, *mesh_, terms, options), outside_);
  return plain_input_ ? to_local(sum) : sum;
}

at::Tensor LocalRegion::own_tokens(const at::Tensor& per_token, std::int64_t dim) const {
  if (!mesh_ || plain_input_) return per_token;
  const LocalShard part = local_shape_and_offset(shape_, mesh_->shape(), mesh_->coordinate(), inside_);
  return per_token.narrow(dim, part.offset.at(1), part.shape.at(1));
}

bool LocalRegion::is_split() const {
  for (std::size_t axis = 0; axis < split_.size(); ++axis)
    if (split_[axis] && mesh_->shape()[axis] > 1) return true;
  return false;
}

at::Tensor LocalRegion::sum_over_ranks(const at::Tensor& local) const {
  namespace functional = comm::functional;
  at::Tensor sum = local;
  for (std::size_t axis = 0; axis < split_.size(); ++axis)
    if (split_[axis])
      sum = functional::wait_tensor(
          functional::all_reduce(sum, comm::ReduceOp::Sum, mesh_->group(static_cast<int>(axis))));
  return sum;
}

at::Tensor LocalRegion::leave_split(const at::Tensor& local, std::int64_t columns) const {
  if (!mesh_) return local;
  const bool whole = std::none_of(split_.begin(), split_.end(), [](bool split) { return split; });
  if (plain_input_ && whole) return local;
  Placements placements = inside_;
  std::vector<std::int64_t> shape = shape_;
  shape.back() = columns;
  for (std::size_t axis = 0; axis < split_.size(); ++axis)
    if (split_[axis]) placements[axis] = Shard{static_cast<std::int64_t>(shape.size()) - 1};
  return from_local(local, *mesh_, placements, {.shape = shape, .check = false});
}

}  // namespace penstock::models
