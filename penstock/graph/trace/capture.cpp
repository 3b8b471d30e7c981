#include "penstock/graph/trace/capture.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/trace/function_trace.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

bool holds_tensor(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

// Calls `seen` with all gradients that the nodes behind some results pass on.
class GradientWatch final : public torch::autograd::FunctionPostHook {
 public:
  using Seen = std::function<void(const at::Tensor&)>;
  explicit GradientWatch(const Seen& seen) : seen_(seen) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    for (const at::Tensor& gradient : outputs)
      if (gradient.defined()) seen_(gradient);
    return outputs;
  }

  // `seen` must live until backward has ended. The nodes belong to the capture and are not run again.
  static void attach(const torch::autograd::variable_list& results, const Seen& seen) {
    std::vector<torch::autograd::Node*> open;
    std::unordered_set<torch::autograd::Node*> known;
    const auto visit = [&](torch::autograd::Node* node) {
      // A leaf passes nothing on, and belongs to the tensor, not to the capture.
      if (node && node->num_outputs() > 0 && known.insert(node).second) open.push_back(node);
    };
    for (const at::Tensor& result : results) visit(result.grad_fn().get());
    while (!open.empty()) {
      torch::autograd::Node* node = open.back();
      open.pop_back();
      node->add_post_hook(std::make_unique<GradientWatch>(seen));
      for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
    }
  }

 private:
  const Seen& seen_;
};

// A fake tensor in place of the gradient of a result.
at::Tensor fake_tangent(const Geometry& geometry) {
  return make_fake_strided(geometry.sizes, geometry.strides,
                           at::dtype(geometry.dtype).device(geometry.device));
}

c10::SmallVector<std::int64_t, 5> contiguous_strides(const c10::SmallVector<std::int64_t, 5>& sizes) {
  c10::SmallVector<std::int64_t, 5> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;)
    strides[i - 1] = strides[i] * std::max<std::int64_t>(sizes[i], 1);
  return strides;
}

class JointCapture {
 public:
  JointCapture(FunctionTrace& trace, const ViewAndMutationMeta& meta)
      : trace_(trace),
        meta_(meta),
        tracer_(trace.tracer),
        inputs_(trace.inputs),
        outputs_(trace.outputs),
        primals_(trace.primals) {}

  JointGraph run() {
    if (outputs_.size() != meta_.outputs.size())
      throw StateError(describe("graph: number of results of the captured function",
                                std::to_string(outputs_.size()),
                                std::to_string(meta_.outputs.size()) + " as during analysis",
                                "make the function do the same on every call"));
    const ModeGuard below(trace_.fake_mode);
    const ModeGuard on(tracer_);
    result_.primals = tracer_.graph.inputs.size();
    for (const FlattenRecord& record : trace_.records) layout_.inputs.push_back(note(record));
    collect_bases();
    find_written_memory();
    return_forward();
    differentiate();
    if (any_subclass_) result_.subclasses = std::make_shared<const SubclassLayout>(std::move(layout_));
    result_.graph = std::move(tracer_.graph);
    verify(result_.graph);
    return std::move(result_);
  }

 private:
  void collect_bases() {
    bases_.resize(meta_.intermediate_bases);
    for (std::size_t i = 0; i < outputs_.size(); ++i)
      if (meta_.outputs[i].kind == OutputKind::AliasOfIntermediateSaveAsOutput)
        bases_[*meta_.outputs[i].base_index] = at::Tensor(outputs_[i].toTensor()._base());
  }

  // The graph inputs whose memory the function writes.
  void find_written_memory() {
    std::size_t primal = 0;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (!holds_tensor(inputs_[i])) continue;
      const std::size_t first = trace_.records[primal++].first_flat();
      if (!meta_.inputs[i].mutates_data) continue;
      for (std::size_t part = 0; part < trace_.parts[i].size(); ++part)
        written_memory_.emplace(tracer_.storage_of(trace_.parts[i][part]), first + part);
    }
  }

  // For a result that is an output of the graph.
  FlattenRecord return_result(const c10::IValue& value) {
    FlattenRecord record = return_value(value);
    layout_.in_mutated_input.resize(tracer_.graph.outputs.size());
    for (std::size_t i = record.first_flat(); i < tracer_.graph.outputs.size(); ++i)
      if (const ValueId part = tracer_.graph.outputs[i].value(); part != kNoValue)
        if (const auto input = written_memory_.find(tracer_.graph[part].storage);
            input != written_memory_.end())
          layout_.in_mutated_input[i] = input->second;
    return record;
  }

  // Adds a tensor, or any other returned value, to the outputs of the graph. `before`: the number of outputs
  // that do not count because they belong to the other phase.
  FlattenRecord return_value(const c10::IValue& value, std::size_t before = 0) {
    std::vector<Operand>& returned = tracer_.graph.outputs;
    const std::size_t first = returned.size() - before;
    if (!holds_tensor(value)) {
      returned.push_back(tracer_.operand_of(value));
      return PlainTensorMeta{first, std::nullopt};
    }
    for (const at::Tensor& part : plain_parts(value.toTensor()))
      returned.push_back(Operand::of(tracer_.value_of(part)));
    return note(FlattenRecord::of(value.toTensor(), first));
  }

  FlattenRecord note(FlattenRecord record) {
    any_subclass_ |= record.is_subclass();
    return record;
  }

  void return_forward() {
    std::vector<FlattenRecord>& records = layout_.forward_outputs;
    for (const std::size_t i : meta_.mutated_at_run_time()) records.push_back(return_value(inputs_[i]));
    for (std::size_t i = 0; i < outputs_.size(); ++i)
      records.push_back(
          return_result(is_fresh(meta_.outputs[i].kind) ? outputs_[i] : c10::IValue(at::Tensor())));
    for (const at::Tensor& base : bases_) records.push_back(return_value(base));
    for (const std::size_t i : meta_.mutated_in_graph()) {
      result_.written_in_graph.push_back(primal_of(i));
      records.push_back(return_value(inputs_[i]));
    }
    result_.forward_outputs = tracer_.graph.outputs.size();
    layout_.in_mutated_input.resize(result_.forward_outputs);
  }

  // The position of an input among those that are tensors.
  std::size_t primal_of(std::size_t input) const {
    return static_cast<std::size_t>(
        std::count_if(inputs_.begin(), inputs_.begin() + static_cast<std::ptrdiff_t>(input), holds_tensor));
  }

  // Adds graph inputs that represent the gradient of a result.
  at::Tensor add_tangent(const TangentInfo& tangent, const at::Tensor& result) {
    const std::size_t first = result_.tangents.size();
    const auto add = [&](const Geometry& geometry) {
      result_.tangents.push_back({tangent.kind, tangent.index, geometry});
      return tracer_.add_input(fake_tangent(geometry), fmt::format("tangents_{}", result_.tangents.size()));
    };
    at::Tensor made = rebuild_tangent(result, add);
    layout_.tangents.push_back(note(FlattenRecord::of(made, first)));
    return made;
  }

  // Dense in the order of the result's strides; contiguous if the result has gaps or overlapping elements
  // (expand).
  template <class Add>
  static at::Tensor rebuild_tangent(const at::Tensor& result, const Add& add) {
    if (!is_subclass(result)) {
      Geometry geometry = geometry_of(result);
      geometry.storage_offset = 0;
      geometry.conjugated = geometry.negated = false;
      if (!result.is_non_overlapping_and_dense()) geometry.strides = contiguous_strides(geometry.sizes);
      return add(geometry);
    }
    std::vector<at::Tensor> inner;
    for (const auto& [name, part] : payload_of(result)->inner_tensors())
      inner.push_back(rebuild_tangent(part, add));
    return payload_of(result)->rebuild_gradient(inner, penstock::geometry_of(result));
  }

  const at::Tensor& result_of(const TangentInfo& tangent) const {
    switch (tangent.kind) {
      case TangentInfo::Kind::MutatedInput:
        return inputs_[tangent.index].toTensor();
      case TangentInfo::Kind::Output:
        return outputs_[tangent.index].toTensor();
      case TangentInfo::Kind::IntermediateBase:
        return bases_[tangent.index];
    }
    throw InvariantError("graph: unknown kind of tangent");
  }

  // Autograd does not see the write that is applied to the input, so no gradient ever flows through it.
  bool is_written_unseen(std::size_t input) const {
    return meta_.inputs[input].mutations_under_no_grad || trace_.is_leaf_with_grad[input] != 0;
  }

  void differentiate() {
    torch::autograd::variable_list roots, tangents, leaves;
    for (const TangentInfo& tangent : meta_.tangents) {
      if (tangent.kind == TangentInfo::Kind::MutatedInput && is_written_unseen(tangent.index)) continue;
      const at::Tensor& result = result_of(tangent);
      // A tensor that is returned twice has one gradient.
      bool again = false;
      for (const at::Tensor& root : roots) again |= root.is_same(result);
      if (again) continue;
      PENSTOCK_INVARIANT(result.requires_grad(),
                         "a result that required a gradient during analysis no longer requires one");
      roots.push_back(result);
      tangents.push_back(add_tangent(tangent, result));
    }
    for (const at::Tensor& primal : primals_)
      if (primal.requires_grad()) leaves.push_back(primal);
    torch::autograd::variable_list gradients(leaves.size());
    tracer_.phase = Phase::Backward;
    const std::size_t first_node = tracer_.graph.nodes.size();
    for (std::size_t i = result_.primals; i < tracer_.graph.inputs.size(); ++i)
      note_passed_on(tracer_.graph[tracer_.graph.inputs[i].value].storage, first_node);
    const GradientWatch::Seen seen = [&](const at::Tensor& gradient) {
      if (is_fake(gradient)) return note_passed_on(tracer_.storage_of(gradient), tracer_.graph.nodes.size());
      for (const at::Tensor& part : plain_parts(gradient))
        if (is_fake(part)) note_passed_on(tracer_.storage_of(part), tracer_.graph.nodes.size());
    };
    // Backward follows what forward did, and usually runs outside the autocast scope.
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    if (!roots.empty() && !leaves.empty()) {
      GradientWatch::attach(roots, seen);
      gradients = torch::autograd::grad(roots, leaves, tangents, /*retain_graph=*/c10::nullopt,
                                        /*create_graph=*/false, /*allow_unused=*/true);
    }
    std::size_t next = 0;
    for (const at::Tensor& primal : primals_) {
      const at::Tensor gradient = primal.requires_grad() ? gradients[next++] : at::Tensor();
      layout_.input_gradients.push_back(return_value(gradient, result_.forward_outputs));
    }
    return_written_in_backward(first_node);
  }

  // Only the first time counts.
  void note_passed_on(StorageId storage, std::size_t nodes) {
    if (index_of(storage) >= passed_on_.size())
      passed_on_.resize(static_cast<std::size_t>(tracer_.graph.storages), kNotPassedOn);
    std::size_t& first = passed_on_[index_of(storage)];
    first = std::min(first, nodes);
  }

  // Handles writes in backward to tensors that backward did not create, as made by user-defined autograd
  // functions or hooks.
  void return_written_in_backward(std::size_t first_node) {
    const std::vector<Node>& nodes = tracer_.graph.nodes;
    if (std::none_of(nodes.begin() + static_cast<std::ptrdiff_t>(first_node), nodes.end(), writes)) return;
    std::map<StorageId, std::size_t> primals;
    for (std::size_t i = 0; i < result_.primals; ++i)
      primals.emplace(tracer_.graph[tracer_.graph.inputs[i].value].storage, i);
    std::set<StorageId> returned;
    for (const c10::IValue& output : outputs_)
      if (holds_tensor(output))
        for (const at::Tensor& part : plain_parts(output.toTensor()))
          returned.insert(tracer_.storage_of(part));
    // The memory of a written input that is not its own.
    std::set<StorageId> given;
    for (std::size_t i = 0; i < result_.forward_outputs; ++i)
      if (const ValueId value = tracer_.graph.outputs[i].value(); value != kNoValue)
        given.insert(tracer_.graph[value].storage);
    std::set<std::size_t> written;
    for (std::size_t i = first_node; i < tracer_.graph.nodes.size(); ++i) {
      const Node& node = tracer_.graph.nodes[i];
      for (const std::size_t argument : written_arguments(node))
        for (const ValueId value : node.arguments[argument].values) {
          if (value == kNoValue) continue;
          const StorageId storage = tracer_.graph[value].storage;
          const std::string& op = traits_of(node.op).name;
          if (const auto primal = primals.find(storage); primal != primals.end()) {
            check_written_in_backward(primal->second, node, op);
            written.insert(primal->second);
          } else if (returned.contains(storage)) {
            throw NotImplemented(fmt::format(
                "graph: backward writes a tensor that forward returned ({}); write to a clone of it", op));
          } else if (given.contains(storage)) {
            throw NotImplemented(fmt::format(
                "graph: backward writes memory that forward gave to an input by set_ ({}); write it in "
                "forward, or copy into the input instead",
                op));
          } else if (index_of(storage) < passed_on_.size() && passed_on_[index_of(storage)] <= i) {
            throw NotImplemented(
                fmt::format("graph: backward writes a gradient that was passed to it ({}), which others may "
                            "hold; create a new tensor in the "
                            "function's backward or in the hook",
                            op));
          }
        }
    }
    for (const std::size_t primal : written) {
      result_.written_in_backward.push_back(primal);
      tracer_.graph.outputs.push_back(Operand::of(tracer_.graph.inputs[primal].value));
    }
  }

  void check_written_in_backward(std::size_t primal, const Node& node, const std::string& op) const {
    const std::string& name = tracer_.graph.inputs[primal].name;
    if (any_subclass_)
      throw NotImplemented(fmt::format(
          "graph: backward writes {} ({}), in a function over tensor subclasses; write it in forward", name,
          op));
    std::size_t input = 0;
    for (std::size_t tensors = 0; input < inputs_.size(); ++input)
      if (holds_tensor(inputs_[input]) && tensors++ == primal) break;
    const InputInfo& info = meta_.inputs.at(input);
    if (primals_[primal].requires_grad() || info.requires_grad)
      throw NotImplemented(fmt::format(
          "graph: backward writes {} ({}), which requires a gradient; write to a clone of it", name, op));
    if (node.op.hasTag(at::Tag::inplace_view))
      throw NotImplemented(
          fmt::format("graph: backward changes the shape of {} in place ({}); take a view of it", name, op));
    if (info.mutation_type() != MutationType::NotMutated)
      throw NotImplemented(
          fmt::format("graph: forward and backward both write {} ({}); write it in one of them", name, op));
  }

  FunctionTrace& trace_;
  const ViewAndMutationMeta& meta_;
  Tracer& tracer_;
  const Values &inputs_, &outputs_;
  const std::vector<at::Tensor>& primals_;
  std::vector<at::Tensor> bases_;
  SubclassLayout layout_;
  std::map<StorageId, std::size_t> written_memory_;
  // By storage: the number of nodes when another autograd node received a gradient in it.
  static constexpr std::size_t kNotPassedOn = std::numeric_limits<std::size_t>::max();
  std::vector<std::size_t> passed_on_;
  bool any_subclass_ = false;
  JointGraph result_;
};

}  // namespace

Graph capture_forward(const Function& function, const Values& inputs) {
  FakeMode fake_mode;
  Tracer tracer;
  Values fakes;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (holds_tensor(inputs[i]) && is_subclass(inputs[i].toTensor()))
      throw TypeError(describe(fmt::format("graph: input {}", i), type_text(inputs[i].toTensor()),
                               "a plain tensor",
                               "pass its inner tensors, or use capture_joint, which flattens subclasses"));
    fakes.push_back(
        holds_tensor(inputs[i])
            ? c10::IValue(tracer.add_input(to_fake(inputs[i].toTensor().detach()), fmt::format("input{}", i)))
            : inputs[i]);
  }
  const c10::AutoGradMode no_gradients(false);
  const ModeGuard below(fake_mode);
  const ModeGuard on(tracer);
  for (const c10::IValue& output : function(fakes)) tracer.graph.outputs.push_back(tracer.operand_of(output));
  verify(tracer.graph);
  return std::move(tracer.graph);
}

JointGraph capture_joint(FunctionTrace& trace, const ViewAndMutationMeta& meta) {
  return JointCapture(trace, meta).run();
}

JointGraph capture_joint(const Function& function, const Values& inputs, const ViewAndMutationMeta& meta,
                         const Convention& convention) {
  if (inputs.size() != meta.inputs.size())
    throw ValueError(describe("graph: number of inputs", std::to_string(inputs.size()),
                              std::to_string(meta.inputs.size()),
                              "analyze the function with the inputs it is captured with"));
  FunctionTrace trace(function, inputs, convention, FunctionTrace::Leaves::Writable);
  return capture_joint(trace, meta);
}

AnalyzedCapture analyze_and_capture(const Function& function, const Values& inputs,
                                    const AnalyzeOptions& options) {
  AnalyzedCapture result;
  FunctionTrace trace(function, inputs, options.convention, FunctionTrace::Leaves::AsTheyAre);
  result.meta = analyze(trace, options);
  bool writes_leaf = false;
  for (const InputInfo& input : result.meta.inputs)
    writes_leaf |= input.is_touched && input.is_leaf && input.requires_grad;
  if (!writes_leaf) result.joint = capture_joint(trace, result.meta);
  return result;
}

}  // namespace penstock::graph
