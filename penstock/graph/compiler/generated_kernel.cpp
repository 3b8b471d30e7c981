#include "penstock/graph/compiler/generated_kernel.h"

#include <torch/library.h>

#include <utility>

#include "penstock/graph/compiler/plain_tensor.h"
#include "penstock/graph/compiler/run_plan.h"

namespace penstock::graph {
namespace {

constexpr const char* kGeneratedName = "penstock_fused::kernel";

// Only the executor calls it, by call_generated.
std::vector<at::Tensor> refuse_dispatch(at::TensorList, std::int64_t) {
  TORCH_CHECK(false, kGeneratedName,
              " stands for generated code in a compiled graph and cannot be called by itself");
}

TORCH_LIBRARY(penstock_fused, library) {
  library.def("kernel(Tensor[] inputs, int kernel) -> Tensor[]", &refuse_dispatch);
}

}  // namespace

Node generated_node(const GeneratedKernel& kernel, Operand inputs, Operand outputs) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(kGeneratedName, "");
  Node node{op, {}, {}};
  node.arguments.push_back(std::move(inputs));
  node.arguments.push_back(
      Operand::of(c10::IValue(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(&kernel)))));
  node.results.push_back(std::move(outputs));
  return node;
}

const GeneratedKernel* generated_kernel(const Node& node) {
  if (node.op.operator_name().name != kGeneratedName) return nullptr;
  return reinterpret_cast<const GeneratedKernel*>(
      static_cast<std::intptr_t>(node.arguments.at(1).constant.toInt()));
}

void call_generated(const Step& step, Frame& frame) {
  const GeneratedCall& call = frame.plan->generated[step.special];
  c10::SmallVector<const at::Tensor*, 8> inputs;
  for (const Slot slot : call.inputs) inputs.push_back(&frame.slots[slot]);
  c10::SmallVector<at::Tensor, 4> results(call.results.size());
  if (frame.unobserved)
    for (const GeneratedReuse& reuse : call.reuses) {
      const at::Tensor& dead = frame.slots[reuse.dead];
      if (!results[reuse.result].defined() && dead.defined() && is_plain(dead) && is_owned_alone(dead) &&
          dead.scalar_type() == reuse.geometry->dtype && is_laid_out_as(dead, *reuse.geometry))
        results[reuse.result] = dead;
    }
  call.kernel->run({inputs.data(), inputs.size()}, {results.data(), results.size()});
  for (std::size_t i = 0; i < results.size(); ++i)
    if (call.results[i] != kNoSlot) frame.slots[call.results[i]] = std::move(results[i]);
}

}  // namespace penstock::graph
