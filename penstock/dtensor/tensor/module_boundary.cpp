// Redistributes inputs and outputs of a parallelized module, at the operator that takes its weight.
#include <fmt/format.h>

#include <mutex>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/errors.h"
#include "penstock/operator_traits.h"
#include "penstock/tensor_parallel.h"
#include "penstock/torch/dispatch/operator_hook.h"

namespace penstock {
namespace {

using detail::DTensorPayload;

Placement counted_from_front(const Placement& placement, std::int64_t ndim) {
  return normalize_placements({placement}, 1, ndim)[0];
}

at::Tensor along_axis(const at::Tensor& tensor, int axis, const Placement& wanted) {
  Placements placements = placements_of(tensor);
  placements[static_cast<std::size_t>(axis)] = counted_from_front(wanted, tensor.dim());
  return redistribute(tensor, placements);
}

// The same input is often used by several modules (query, key and value): while the first result lives, all
// of them use it, and their gradients are added before they are reduced.
at::Tensor prepared(const at::Tensor& input, int axis, const Placement& wanted) {
  DTensorPayload& payload = *detail::dtensor_payload(input);
  Placements placements = payload.spec->placements();
  placements[static_cast<std::size_t>(axis)] = counted_from_front(wanted, input.dim());
  if (placements == payload.spec->placements()) return input;
  const bool tracked = at::GradMode::is_enabled() && input.requires_grad();
  if (payload.prepared && payload.prepared->placements == placements &&
      payload.prepared->version == input._version())
    if (auto impl = payload.prepared->tensor.lock()) {
      at::Tensor known(impl);
      if (known.requires_grad() == tracked) return known;
    }
  at::Tensor result = redistribute(input, placements);
  payload.prepared = std::make_unique<DTensorPayload::Prepared>(
      DTensorPayload::Prepared{placements, c10::weak_intrusive_ptr<c10::TensorImpl>(result.getIntrusivePtr()),
                               static_cast<std::uint32_t>(input._version())});
  return result;
}

void redistribute_at_boundary(const c10::OperatorHandle& op, Stack* stack, int input_argument,
                              int weight_argument) {
  const NoHooksGuard off;
  const std::size_t base = stack->size() - traits_of(op).arguments.size();
  const at::Tensor weight = (*stack)[base + static_cast<std::size_t>(weight_argument)].isTensor()
                                ? (*stack)[base + static_cast<std::size_t>(weight_argument)].toTensor()
                                : at::Tensor();
  const DTensorPayload* payload = weight.defined() ? detail::dtensor_payload(weight) : nullptr;
  const std::shared_ptr<const ModuleBoundary> boundary = payload ? payload->boundary : nullptr;
  if (!boundary) return op.callBoxed(stack);
  c10::IValue& slot = (*stack)[base + static_cast<std::size_t>(input_argument)];
  at::Tensor input = slot.toTensor();
  const bool plain = !is_dtensor(input);
  if (plain) {
    if (!boundary->plain_input || boundary->mesh.shape().size() != 1)
      throw TypeError(describe(
          fmt::format("the input of a parallelized module ({})", op.operator_name().name), "a plain tensor",
          fmt::format("a distributed tensor of {}", boundary->mesh.mesh().to_string()),
          "convert it with from_local() or distribute_tensor(), or parallelize on the tensor-parallel slice "
          "of the mesh"));
    input = from_local(input, boundary->mesh, {counted_from_front(*boundary->plain_input, input.dim())});
  }
  // The boundary's axis is a position in its own mesh.
  if (!(mesh_of(input) == boundary->mesh))
    throw ValueError(describe(fmt::format("the input of a parallelized module ({})", op.operator_name().name),
                              describe_dtensor(input),
                              fmt::format("a distributed tensor of {}", boundary->mesh.mesh().to_string()),
                              "distribute it on the mesh that the module was parallelized on"));
  if (boundary->desired_input) input = prepared(input, boundary->axis, *boundary->desired_input);
  slot = input;
  op.callBoxed(stack);
  at::Tensor output = stack->back().toTensor();
  if (boundary->output) output = along_axis(output, boundary->axis, *boundary->output);
  const bool local =
      boundary->kind == BoundaryOutput::Local || (boundary->kind == BoundaryOutput::AsInput && plain);
  stack->back() = local ? detail::take_local(output) : output;
}

// A bias that is added to a module's plain output must be its local part. If the output has different rows on
// every rank, so has the gradient of the bias.
void add_bias(const c10::OperatorHandle& op, Stack* stack) {
  const NoHooksGuard off;
  const std::size_t base = stack->size() - traits_of(op).arguments.size();
  const at::Tensor sum = (*stack)[base].toTensor(), bias = (*stack)[base + 1].toTensor();
  const DTensorPayload* payload = bias.defined() ? detail::dtensor_payload(bias) : nullptr;
  if (payload && payload->boundary && !is_dtensor(sum)) {
    const ModuleBoundary& boundary = *payload->boundary;
    const auto axis = static_cast<std::size_t>(boundary.axis);
    Placements placements = payload->spec->placements();
    Placements gradients = placements;
    if (boundary.output) {
      const Placement output = counted_from_front(*boundary.output, sum.dim());
      placements[axis] = output.splits(sum.dim() - 1) ? Placement(Shard{0}) : Placement();
      gradients[axis] =
          output.splits() && !output.splits(sum.dim() - 1) ? Placement(Partial{}) : placements[axis];
    }
    (*stack)[base + 1] = to_local(redistribute(bias, placements), {.grad_placements = gradients});
  }
  op.callBoxed(stack);
}

// torch::nn::Linear multiplies by the transposed weight, with one operator or several.
void install_hooks() {
  static std::once_flag once;
  std::call_once(once, [] {
    const auto at = [](const char* name, int input, int weight) {
      register_operator_hook(name, [input, weight](const c10::OperatorHandle& op, Stack* stack) {
        redistribute_at_boundary(op, stack, input, weight);
      });
    };
    at("aten::linear", 0, 1);
    at("aten::addmm", 1, 2);
    at("aten::matmul", 0, 1);
    at("aten::embedding", 1, 0);
    at("aten::layer_norm", 0, 2);
    register_operator_hook("aten::add_.Tensor", add_bias);
    register_operator_hook("aten::add.Tensor", add_bias);
  });
}

}  // namespace

void set_boundary(const at::Tensor& parameter, ModuleBoundary boundary) {
  DTensorPayload& payload = detail::require_dtensor(parameter, "set_boundary");
  const int axes = static_cast<int>(boundary.mesh.shape().size());
  if (!(boundary.mesh == payload.mesh) || boundary.axis < 0 || boundary.axis >= axes)
    throw ValueError(describe(
        "set_boundary", fmt::format("axis {} of {}", boundary.axis, boundary.mesh.mesh().to_string()),
        fmt::format("an axis of the parameter's mesh {}", payload.mesh.mesh().to_string())));
  install_hooks();
  payload.boundary = std::make_shared<const ModuleBoundary>(std::move(boundary));
  mark_hooked(parameter);
}

at::Tensor prepare_layout(const at::Tensor& activation, const comm::MeshGroups& mesh, const Placement& from,
                          const Placement& to, const std::string& axis) {
  int position = 0;
  if (!axis.empty())
    position = mesh.mesh().axis(axis);
  else if (mesh.shape().size() != 1)
    throw ValueError(describe("prepare_layout: axis", "none",
                              fmt::format("the name of an axis of {}", mesh.mesh().to_string())));
  at::Tensor input = activation;
  if (!is_dtensor(input)) {
    if (mesh.shape().size() != 1)
      throw TypeError(describe("prepare_layout", "a plain tensor on a mesh of several axes",
                               "a distributed tensor", "use from_local() with a placement for every axis"));
    input = from_local(input, mesh, {counted_from_front(from, input.dim())});
  }
  if (!(mesh_of(input) == mesh))
    throw ValueError(describe("prepare_layout: the activation", describe_dtensor(input),
                              fmt::format("a distributed tensor of {}", mesh.mesh().to_string()),
                              "distribute it on that mesh"));
  return along_axis(input, position, to);
}

}  // namespace penstock
