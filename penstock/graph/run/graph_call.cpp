#include "penstock/graph/run/graph_call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/run/captured_node.h"
#include "penstock/graph/run/carried_values.h"

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

namespace {

// The values of the graph that a primal or a forward return consists of.
template <class Visit>
void for_each_part(const std::vector<FlattenRecord>* records, std::size_t which, const Visit& visit) {
  if (!records) return visit(which);
  (*records)[which].for_each_plain([&](const PlainTensorMeta& plain) { visit(plain.flat_index); });
}

// The primals and forward returns of a capture as values of its graph.
class Parts {
 public:
  explicit Parts(const JointGraph& joint)
      : graph_(joint.graph),
        primals_(joint.subclasses ? &joint.subclasses->inputs : nullptr),
        outputs_(joint.subclasses ? &joint.subclasses->forward_outputs : nullptr),
        primal_count_(primals_ ? primals_->size() : joint.primals),
        output_count_(outputs_ ? outputs_->size() : joint.forward_returns()) {}

  std::size_t primals() const { return primal_count_; }
  std::size_t outputs() const { return output_count_; }
  bool is_subclass_primal(std::size_t i) const { return primals_ && (*primals_)[i].is_subclass(); }
  bool is_subclass_output(std::size_t i) const { return outputs_ && (*outputs_)[i].is_subclass(); }

  bool primal_has(std::size_t i, ValueId value) const {
    bool has = false;
    for_each_part(primals_, i, [&](std::size_t flat) { has |= graph_.inputs[flat].value == value; });
    return has;
  }
  bool output_has(std::size_t i, ValueId value) const {
    bool has = false;
    for_each_part(outputs_, i, [&](std::size_t flat) { has |= graph_.outputs[flat].value() == value; });
    return has;
  }
  // The first primal in each storage; primals() if there is none.
  std::vector<std::size_t> first_primals() const {
    std::vector<std::size_t> first(static_cast<std::size_t>(graph_.storages), primal_count_);
    for (std::size_t i = primal_count_; i-- > 0;)
      for_each_part(primals_, i, [&](std::size_t flat) {
        first[index_of(graph_[graph_.inputs[flat].value].storage)] = i;
      });
    return first;
  }
  bool output_is_in(std::size_t i, StorageId storage) const {
    bool is = false;
    for_each_part(outputs_, i, [&](std::size_t flat) {
      const ValueId value = graph_.outputs[flat].value();
      is |= value != kNoValue && graph_[value].storage == storage;
    });
    return is;
  }

 private:
  const Graph& graph_;
  const std::vector<FlattenRecord>*primals_, *outputs_;
  std::size_t primal_count_, output_count_;
};

void add_once(std::vector<std::size_t>& list, std::size_t item) {
  if (std::find(list.begin(), list.end(), item) == list.end()) list.push_back(item);
}

}  // namespace

GraphCall::GraphCall(const PartitionedCapture& capture, CompiledHalves compiled)
    : halves(std::move(compiled)),
      forward_outputs(Parts(capture.capture.joint).outputs()),
      written_in_graph_(capture.capture.joint.written_in_graph) {
  const JointGraph& joint = capture.capture.joint;
  for (const std::size_t primal : joint.written_in_backward)
    written_in_backward.push_back({primal, joint.graph.inputs[primal].name});
  plan_returned(capture.capture);
  plan_tangents(capture.capture);
  plan_saved(capture);
  if (!joint.tangents.empty()) device_of_gradients = joint.tangents[0].geometry.device;
  if (!halves.is_deferred.empty())
    PENSTOCK_INVARIANT(halves.is_deferred.size() == Parts(joint).primals(),
                       "a backward that is split has another number of gradients");
  if (capture.capture.second_derivatives == SecondDerivatives::Refuse) return;
  run_again = capture.capture.run_again;
  if (capture.capture.second_derivatives == SecondDerivatives::RunAgainKeepingInputs)
    kept_inputs.assign(kept_inputs.size(), 1);
}

void GraphCall::plan_returned(const FunctionCapture& capture) {
  const ViewAndMutationMeta& meta = capture.meta;
  const JointGraph& joint = capture.joint;
  const std::size_t mutated = meta.mutated_at_run_time().size();
  for (std::size_t i = 0; i < forward_outputs; ++i) {
    if (joint.graph.outputs[joint.first_output(i)].value() == kNoValue) continue;
    if (i >= mutated && i < mutated + meta.outputs.size() && meta.outputs[i - mutated].same_as) continue;
    returned_.push_back(joint.subclasses && joint.subclasses->forward_outputs[i].is_subclass()
                            ? Returned{i}
                            : plan_plain(capture, i));
  }
}

// A plain tensor that something else holds becomes a separate tensor for autograd. One inside a subclass
// shares its memory, as in the function.
GraphCall::Returned GraphCall::plan_plain(const FunctionCapture& capture, std::size_t output) const {
  const JointGraph& joint = capture.joint;
  const Parts parts(joint);
  const std::size_t flat = joint.first_output(output), mutated = capture.meta.mutated_at_run_time().size();
  const ValueId value = joint.graph.outputs[flat].value();
  Returned item{output};
  bool held_twice = false, held_inside = false;
  for (std::size_t j = 0; j < parts.primals(); ++j)
    if (parts.primal_has(j, value)) (parts.is_subclass_primal(j) ? held_inside : held_twice) = true;
  for (std::size_t j = 0; j < parts.outputs(); ++j)
    held_inside |= parts.is_subclass_output(j) && parts.output_has(j, value);
  for (const Returned& earlier : returned_) {
    const std::size_t their = joint.first_output(earlier.output);
    if (parts.is_subclass_output(earlier.output) || joint.graph.outputs[their].value() != value) continue;
    held_twice = true;
    if (!item.shares && output >= mutated && earlier.output >= mutated &&
        capture.memory_of_output[flat] == capture.memory_of_output[their])
      item.shares = earlier.output;
  }
  if (held_twice)
    item.how = Returned::How::Copied;
  else if (held_inside)
    item.how = Returned::How::Unshared;
  return item;
}

void GraphCall::plan_tangents(const FunctionCapture& capture) {
  const JointGraph& joint = capture.joint;
  const auto add = [&](const TangentInfo& tangent, std::optional<Geometry> geometry) {
    const std::size_t output = capture.meta.forward_return_of(tangent);
    PENSTOCK_INVARIANT(std::any_of(returned_.begin(), returned_.end(),
                                   [&](const Returned& item) { return item.output == output; }),
                       "a tangent belongs to a result that is not returned");
    differentiated_.push_back(output);
    tangents.push_back({std::move(geometry)});
  };
  if (joint.subclasses)
    for (const FlattenRecord& record : joint.subclasses->tangents)
      add(joint.tangents[record.first_flat()], std::nullopt);
  else
    for (const TangentInfo& tangent : joint.tangents) add(tangent, tangent.geometry);
}

void GraphCall::plan_saved(const PartitionedCapture& partitioned) {
  const FunctionCapture& capture = partitioned.capture;
  const Graph& graph = capture.joint.graph;
  const Parts parts(capture.joint);
  const std::vector<std::size_t> first_primals = parts.first_primals();
  kept_inputs.assign(parts.primals(), 0);
  saved.reserve(partitioned.halves.saved.size());
  for (const ValueId value : partitioned.halves.saved) {
    const StorageId storage = graph[value].storage;
    Saved how;
    bool in_written = false;  // in memory that this call itself writes, after the graph has run
    if (const std::size_t i = first_primals[index_of(storage)]; i < parts.primals()) {
      in_written = capture.primal_written[i] || capture.primal_shares_changed[i];
      if (capture.primal_written[i]) how.how = Saved::How::Copied;
      // What the graph itself writes is saved as a copy that it made before, and shares no memory.
      else if (capture.primal_shares_changed[i] || parts.is_subclass_primal(i))
        how.how = Saved::How::Unwatched;
      if (!in_written && (parts.is_subclass_primal(i) || !parts.primal_has(i, value)))
        add_once(watched.primals, i);
      if (!in_written) kept_inputs[i] = 1;  // its memory is kept anyway
    }
    if (!in_written)
      for (const Returned& item : returned_) {
        if (item.how == Returned::How::Copied || !parts.output_is_in(item.output, storage)) continue;
        const bool inside = parts.is_subclass_output(item.output) || item.how == Returned::How::Unshared;
        if (inside) how.how = Saved::How::Unwatched;
        if (inside || !parts.output_has(item.output, value)) add_once(watched.outputs, item.output);
      }
    saved.push_back(how);
  }
}

void GraphCall::count_writes_in_graph(const std::vector<at::Tensor>& primals) const {
  for (const std::size_t primal : written_in_graph_)
    if (!primals[primal].is_inference()) primals[primal].unsafeGetTensorImpl()->bump_version();
}

std::vector<at::Tensor> GraphCall::run(const std::vector<at::Tensor>& primals, const CallSizes& sizes) {
  std::vector<at::Tensor> results(forward_outputs);
  const auto keep = [&](const std::vector<c10::IValue>& values) {
    for (const Returned& item : returned_) {
      at::Tensor result = values[item.output].toTensor();
      if (item.shares)
        result = share_storage(results[*item.shares]);
      else if (item.how == Returned::How::Copied)
        result = copy_keeping_lazy_bits(result);
      else if (item.how == Returned::How::Unshared ||
               std::any_of(primals.begin(), primals.end(),
                           [&](const at::Tensor& primal) { return primal.is_same(result); }))
        // A kernel returned its argument: an input must not become a result of the function.
        result = result.variable_data();
      results[item.output] = std::move(result);
    }
  };
  if (tangents.empty()) {
    keep(halves.forward->run(primals, sizes.get()));
    count_writes_in_graph(primals);
    return results;
  }
  const auto self = c10::intrusive_ptr<GraphCall>::reclaim_copy(this);
  torch::autograd::edge_list edges = torch::autograd::collect_next_edges(at::TensorList(primals));
  // Made first: a backward runs it right after the other node.
  decltype(make_node<WeightsNode>(self, sizes)) weights;
  if (halves.weights) {
    weights = make_node<WeightsNode>(self, sizes);
    weights->add_input_metadata(carry({}, device_of_gradients));
    for (std::size_t i = 0; i < edges.size(); ++i)
      if (halves.is_deferred[i]) weights->add_next_edge(std::exchange(edges[i], torch::autograd::Edge()));
    edges.emplace_back(NodePtr(weights), 0);
  }
  const auto node = make_node<CapturedNode>(self, sizes);
  node->set_next_edges(std::move(edges));
  const std::vector<c10::IValue> values = halves.forward->run(primals, sizes.get());
  count_writes_in_graph(primals);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    keep(values);
  }
  for (const std::size_t output : differentiated_)
    torch::autograd::set_history(results[output], NodePtr(node));
  node->save_all(values, primals, results, weights ? &*weights : nullptr);
  node->hold(primals);
  for (const WrittenInBackward& written : written_in_backward)
    node->write_in_backward(primals[written.primal]);
  return results;
}

}  // namespace penstock::graph
