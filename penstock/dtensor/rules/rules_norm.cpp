// Norms: each rank's term, one small all-reduce, the root. The result is replicated.
#include <ATen/ATen.h>

#include "penstock/dtensor/rules/norm_terms.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"

namespace penstock::detail {
namespace {

struct NormDims {
  explicit NormDims(const ShardingCall& call) : ndim(call.inputs[0].ndim()) {
    gone = dims_of(call.has_argument("dim") ? call.argument("dim") : c10::IValue(), ndim);
    keep = call.has_argument("keepdim") && call.argument("keepdim").toBool();
  }
  std::int64_t ndim;
  std::set<std::int64_t> gone;
  bool keep;
};

void norm_of_parts(const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
  const NormDims dims(context.call);
  // Read from this call: the decision may have been made for another order.
  const c10::IValue& order = (*stack)[static_cast<std::size_t>(
      context.call.argument_index(context.call.has_argument("ord") ? "ord" : "p"))];
  const NormTerms terms(order.isNone() ? 2 : order.toScalar().toDouble());
  at::Tensor values = terms.of((*stack)[0].toTensor(), {dims.gone.begin(), dims.gone.end()});
  terms.reduce(context.mesh, axes_splitting(context.inputs[0], dims.gone), values);
  at::Tensor result =
      terms.norm(values)
          .reshape(local_shape(context.call, context.call.outputs[0].shape, context.outputs[0]))
          .to(context.call.outputs[0].dtype);
  stack->clear();
  stack->push_back(std::move(result));
}

Sharding norm(const ShardingCall& call) {
  const NormDims dims(call);
  std::vector<AxisStrategy> strategies;
  std::int64_t place = 0;
  for (std::int64_t dim = 0; dim < dims.ndim; ++dim) {
    const bool gone = dims.gone.count(dim) > 0;
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Shard{dim};
    if (!gone) strategy.outputs[0] = Shard{place};
    strategies.push_back(std::move(strategy));
    if (!gone || dims.keep) ++place;
  }
  Sharding sharding = choose(call, std::move(strategies));
  if (!axes_splitting(sharding.inputs[0], dims.gone).empty()) sharding.local = norm_of_parts;
  return sharding;
}

}  // namespace

void add_norm_rules(RuleTable& table) {
  table.add({"linalg_vector_norm", "norm"}, norm);
  table.add({"frobenius_norm", "nuclear_norm"}, replicate_all);
}

}  // namespace penstock::detail
