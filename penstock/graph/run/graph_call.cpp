#include "penstock/graph/run/graph_call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/run/captured_node.h"
#include "penstock/graph/run/subclass_call.h"

namespace penstock::graph {
namespace {

// Another tensor over the same memory, sharing the version counter.
at::Tensor share_storage(const at::Tensor& tensor) {
  const auto& impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(
      impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

}  // namespace

std::vector<at::Tensor> tensors_among(const Values& values) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(values.size());
  for (const c10::IValue& value : values)
    if (is_defined_tensor(value)) tensors.push_back(value.toTensor());
  return tensors;
}

c10::intrusive_ptr<GraphCall> make_graph_call(const PartitionedCapture& capture, CompiledHalves halves) {
  if (capture.capture.joint.subclasses) return c10::make_intrusive<SubclassCall>(capture, std::move(halves));
  return c10::make_intrusive<PlainGraphCall>(capture, std::move(halves));
}

PlainGraphCall::PlainGraphCall(const PartitionedCapture& capture, CompiledHalves compiled)
    : halves(std::move(compiled)),
      forward_outputs(capture.capture.joint.forward_outputs),
      tangents(capture.capture.joint.tangents) {
  const JointGraph& joint = capture.capture.joint;
  for (const std::size_t primal : joint.written_in_backward)
    written_in_backward.push_back({primal, joint.graph.inputs[primal].name});
  plan_returned(capture.capture);
  plan_saved(capture);
  if (capture.capture.second_derivatives == SecondDerivatives::Refuse) return;
  run_again = capture.capture.run_again;
  if (capture.capture.second_derivatives == SecondDerivatives::RunAgainKeepingInputs)
    kept_inputs.assign(kept_inputs.size(), 1);
}

void PlainGraphCall::plan_returned(const FunctionCapture& capture) {
  const ViewAndMutationMeta& meta = capture.meta;
  const JointGraph& joint = capture.joint;
  const std::size_t mutated = meta.mutated_at_run_time().size();
  for (std::size_t i = 0; i < joint.forward_outputs; ++i) {
    const ValueId value = joint.graph.outputs[i].value();
    if (value == kNoValue) continue;
    if (i >= mutated && i < mutated + meta.outputs.size() && meta.outputs[i - mutated].same_as) continue;
    bool held_twice = false;
    for (std::size_t j = 0; j < joint.primals; ++j) held_twice |= joint.graph.inputs[j].value == value;
    std::optional<std::size_t> shares;
    for (const Returned& earlier : returned_) {
      if (joint.graph.outputs[earlier.output].value() != value) continue;
      held_twice = true;
      if (!shares && i >= mutated && earlier.output >= mutated &&
          capture.memory_of_output[i] == capture.memory_of_output[earlier.output])
        shares = earlier.output;
    }
    returned_.push_back({i, held_twice, shares});
  }
  for (const TangentInfo& tangent : tangents) {
    const std::size_t output = meta.forward_return_of(tangent);
    PENSTOCK_INVARIANT(std::any_of(returned_.begin(), returned_.end(),
                                   [&](const Returned& item) { return item.output == output; }),
                       "a tangent belongs to a result that is not returned");
    differentiated_.push_back(output);
  }
}

void PlainGraphCall::plan_saved(const PartitionedCapture& partitioned) {
  const FunctionCapture& capture = partitioned.capture;
  const Graph& graph = capture.joint.graph;
  kept_inputs.assign(capture.joint.primals, 0);
  for (const ValueId value : partitioned.halves.saved) {
    Saved how;
    for (std::size_t i = 0; i < capture.joint.primals; ++i) {
      const ValueId input = graph.inputs[i].value;
      if (graph[input].storage != graph[value].storage) continue;
      if (capture.primal_written[i])
        how.how = Saved::How::Copied;
      else if (capture.primal_shares_changed[i])
        how.how = Saved::How::Unwatched;
      else if (input != value)
        how.watch_primal = i;
      // Its memory is kept anyway.
      kept_inputs[i] = how.how == Saved::How::AsIs ? 1 : 0;
      break;
    }
    if (how.how == Saved::How::AsIs && !how.watch_primal)
      for (const Returned& item : returned_) {
        const ValueId output = graph.outputs[item.output].value();
        if (item.copied || output == value || graph[output].storage != graph[value].storage) continue;
        how.watch_output = item.output;
        break;
      }
    saved.push_back(how);
  }
}

std::vector<at::Tensor> PlainGraphCall::run(const std::vector<at::Tensor>& primals, const CallSizes& sizes) {
  std::vector<at::Tensor> results(forward_outputs);
  const auto keep = [&](const std::vector<c10::IValue>& values) {
    for (const Returned& item : returned_) {
      at::Tensor result = values[item.output].toTensor();
      if (item.shares)
        result = share_storage(results[*item.shares]);
      else if (item.copied)
        result = copy_keeping_lazy_bits(result);
      else if (std::any_of(primals.begin(), primals.end(),
                           [&](const at::Tensor& primal) { return primal.is_same(result); }))
        // A kernel returned its argument: an input must not become a result of the function.
        result = result.variable_data();
      results[item.output] = std::move(result);
    }
  };
  if (tangents.empty()) {
    keep(halves.forward->run(primals, sizes.get()));
    return results;
  }
  const auto node = make_node<CapturedNode>(c10::intrusive_ptr<PlainGraphCall>::reclaim_copy(this), sizes);
  node->set_next_edges(torch::autograd::collect_next_edges(at::TensorList(primals)));
  const std::vector<c10::IValue> values = halves.forward->run(primals, sizes.get());
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    keep(values);
  }
  for (const std::size_t output : differentiated_)
    torch::autograd::set_history(results[output], NodePtr(node));
  node->save_all(values, primals, results);
  node->hold(primals);
  for (const WrittenInBackward& written : written_in_backward)
    node->write_in_backward(primals[written.primal]);
  return results;
}

}  // namespace penstock::graph
