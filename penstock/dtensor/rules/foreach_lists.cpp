#include "penstock/dtensor/rules/foreach_lists.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iterator>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/spec.h"
#include "penstock/errors.h"

namespace penstock::detail {
namespace {

Placements without_terms(const Placements& placements) {
  Placements result = placements;
  for (Placement& placement : result)
    if (placement.is_partial()) placement = Replicate{};
  return result;
}

bool sums_only(const Placements& placements) {
  for (const Placement& placement : placements)
    if (placement.is_partial() && !placement.is_partial(PartialOp::Sum) &&
        !placement.is_partial(PartialOp::Avg))
      return false;
  return true;
}

// A single tensor next to the lists: a scalar that every rank has.
at::Tensor whole_of(const at::Tensor& tensor) {
  const DTensorPayload* payload = dtensor_payload(tensor);
  if (!payload) return tensor;
  const SpecPtr whole = payload->spec->with_placements(Placements(payload->spec->placements().size()));
  return whole == payload->spec ? payload->local()
                                : transfer_between(payload->spec, whole, PartialTarget::Refuse)
                                      ->run(payload->mesh, payload->local());
}

}  // namespace

ForeachCall::ForeachCall(const c10::OperatorHandle& op, Stack* stack, bool partial_allowed)
    : traits_(traits_of(op)) {
  const auto base = stack->end() - static_cast<std::ptrdiff_t>(traits_.arguments.size());
  const std::vector<c10::IValue> arguments(std::make_move_iterator(base),
                                           std::make_move_iterator(stack->end()));
  stack->erase(base, stack->end());
  for (std::size_t i = 0; i < arguments.size() && first_.empty(); ++i)
    if (traits_.arguments[i].kind == ArgumentTraits::Kind::TensorList) first_ = arguments[i].toTensorVector();
  for (const at::Tensor& tensor : first_) {
    const DTensorPayload* payload = dtensor_payload(tensor);
    SpecPtr spec = payload ? payload->spec : nullptr;
    if (spec && spec->has_partial() && !(partial_allowed && sums_only(spec->placements())))
      spec = spec->with_placements(without_terms(spec->placements()));
    specs_.push_back(std::move(spec));
  }
  const bool scaled = [&] {
    const auto& schema = op.schema().arguments();
    for (std::size_t i = 0; i < schema.size(); ++i)
      if (schema[i].name() == "grad_scale") return arguments[i].isTensor();
    return false;
  }();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const bool written = traits_.arguments[i].written;
    // A fused optimizer writes gradients only to unscale them.
    const bool may_be_lost = op.schema().arguments()[i].name() == "grads" && !scaled;
    if (traits_.arguments[i].kind == ArgumentTraits::Kind::TensorList) {
      c10::List<at::Tensor> list;
      const auto elements = arguments[i].toListRef();
      for (std::size_t position = 0; position < elements.size(); ++position) {
        // Step counters of optimizers have no dims; unused lists are empty.
        const at::Tensor tensor = elements[position].toTensor();
        list.push_back(position < first_.size() ? localize(tensor, position, written, may_be_lost) : tensor);
      }
      local.push_back(std::move(list));
    } else if (arguments[i].isTensor() && arguments[i].toTensor().defined()) {
      local.push_back(whole_of(arguments[i].toTensor()));
    } else {
      local.push_back(arguments[i]);
    }
  }
}

at::Tensor ForeachCall::localize(const at::Tensor& tensor, std::size_t position, bool written,
                                 bool may_be_lost) {
  const DTensorPayload* payload = dtensor_payload(tensor);
  const SpecPtr& target = specs_[position];
  if (!payload) {
    if (target && tensor.dim() > 0 && !ImplicitReplicationGuard::active())
      throw TypeError(describe(
          fmt::format("{}: tensor {} of a list", traits_.name, position),
          fmt::format("a plain tensor [{}] next to a distributed one", fmt::join(tensor.sizes(), ", ")),
          "distributed tensors at the same position of every list",
          "distribute it (distribute_tensor, from_local), or use ImplicitReplicationGuard if every rank has "
          "equal values"));
    if (!target || tensor.dim() == 0) return tensor;
  } else if (!target || payload->spec->mesh_id() != target->mesh_id()) {
    throw ValueError(describe(fmt::format("{}: tensor {} of a list", traits_.name, position),
                              payload->mesh.mesh().to_string(),
                              target ? "the mesh of the tensor at the same position of the first list"
                                     : "a plain tensor, as at the same position of the first list",
                              "create the tensors at one position on the same mesh"));
  }
  const GlobalGeometry geometry = global_geometry_of(tensor);
  const std::vector<std::int64_t>& shape = target->shape();
  Placements wanted = target->placements();
  if (geometry.shape != shape) {
    // It is expanded along some dims.
    if (at::infer_size(geometry.shape, shape) != shape)
      throw ValueError(
          describe(fmt::format("{}: tensor {} of a list", traits_.name, position),
                   fmt::format("shape [{}]", fmt::join(geometry.shape, ", ")),
                   fmt::format("[{}] or a shape that can be broadcast to it", fmt::join(shape, ", ")),
                   "use the operator on single tensors, which broadcasts both"));
    for (Placement& placement : wanted)
      if (placement.splits()) {
        const auto own = broadcast_dim(geometry.shape, placement.dim(), shape);
        placement = !own                           ? Placement()
                    : placement.is_strided_shard() ? Placement(StridedShard{*own, placement.split_factor()})
                                                   : Placement(Shard{*own});
      }
  }
  const SpecPtr now =
      payload ? payload->spec : DTensorSpec::get(*target, Placements(wanted.size()), geometry);
  const SpecPtr to = now->with_placements(wanted);
  if (written && !may_be_lost && (to != now || !payload))
    throw ValueError(describe(
        fmt::format("{}: tensor {} of a list that is written", traits_.name, position),
        to_string(now->placements()), to_string(wanted),
        "redistribute it first; parameters, gradients and optimizer states must have the same placements"));
  if (written && payload->copied_view)
    throw StateError(
        fmt::format("{}: tensor {} of a list that is written is a view that had to be redistributed, so its "
                    "base would not change; clone() it, or "
                    "redistribute its base first",
                    traits_.name, position));
  const at::Tensor local_part = payload ? payload->local() : tensor;
  return to == now ? local_part
                   : transfer_between(now, to, PartialTarget::Allow)->run(mesh(position), local_part);
}

at::Tensor ForeachCall::wrap(const at::Tensor& result, std::size_t position) const {
  const SpecPtr& spec = specs_[position];
  if (!spec) return result;
  GlobalGeometry geometry = spec->geometry();
  geometry.dtype = result.scalar_type();
  geometry.stride = dense_stride(geometry.shape, geometry.stride);
  return make_dtensor(result, DTensorSpec::get(*spec, spec->placements(), geometry), mesh(position));
}

}  // namespace penstock::detail
