// masked_select: the number of elements depends on the values, so every rank gets all of them.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/errors.h"

namespace penstock::detail {
namespace {

at::Tensor whole_of(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  if (const DTensorPayload* payload = dtensor_payload(tensor)) {
    const SpecPtr whole = payload->spec->with_placements(Placements(payload->spec->placements().size()));
    return whole == payload->spec ? payload->local()
                                  : transfer_between(payload->spec, whole, PartialTarget::Refuse)
                                        ->run(payload->mesh, payload->local());
  }
  if (tensor.dim() > 0 && !ImplicitReplicationGuard::active())
    throw TypeError(
        describe(fmt::format("{}: an argument", op.operator_name().name),
                 fmt::format("a plain tensor [{}] among distributed ones", fmt::join(tensor.sizes(), ", ")),
                 "only distributed tensors",
                 "distribute it, or use ImplicitReplicationGuard if every rank has equal values"));
  return tensor;
}

void masked_select(const c10::OperatorHandle& op, Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  if (count != 2)
    throw NotImplemented(
        "masked_select of distributed tensors into an out= tensor; use the form that returns its result");
  const at::Tensor self = (*stack)[stack->size() - 2].toTensor(), mask = stack->back().toTensor();
  const DTensorPayload* like = dtensor_payload(self);
  if (!like) like = dtensor_payload(mask);
  const at::Tensor selected = at::masked_select(whole_of(op, self), whole_of(op, mask));
  const SpecPtr spec = DTensorSpec::get(*like->spec, Placements(like->spec->placements().size()),
                                        global_geometry_of(selected));
  const comm::MeshGroups mesh = like->mesh;
  stack->resize(stack->size() - count);
  stack->emplace_back(make_dtensor(selected, spec, mesh));
}

}  // namespace

void add_selection_rules(RuleTable& table) { table.handle({"masked_select"}, masked_select); }

}  // namespace penstock::detail
