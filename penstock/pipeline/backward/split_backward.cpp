#include "penstock/pipeline/backward/split_backward.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/pipeline/backward/backward_plan.h"
#include "penstock/pipeline/backward/graph_node.h"
#include "penstock/tensor_subclass.h"

namespace penstock {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

// Keeps what arrives at a node, after all its other hooks have run.
struct KeepArriving final : torch::autograd::FunctionPreHook {
  variable_list arrived;
  variable_list operator()(const variable_list& grads) override { return arrived = grads; }
};

// Frees what a node saved as soon as it has run. In the first half the engine must not do so, since some
// nodes run again. Nodes that free what they saved on the way are told before (runs_once).
struct ReleaseAfterwards final : torch::autograd::FunctionPostHook {
  Node* node;  // which owns this hook
  explicit ReleaseAfterwards(Node* n) : node(n) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    node->release_variables();
    return outputs;
  }
};

void runs_once(Node& node) {
  node.add_post_hook(std::make_unique<ReleaseAfterwards>(&node));
  node.will_release_variables();
}

// The target of those edges of an opaque node that are left for the second half.
class KeepLeaving final : public Node {
 public:
  KeepLeaving() : Node(UINT64_MAX) {}
  Edge in_place_of(const Edge& edge, const NodePtr& self) {
    waiting.push_back(edge);
    // The engine adapts a gradient to the metadata of its target.
    input_metadata_.emplace_back(edge.function->input_metadata(edge.input_nr));
    return {self, static_cast<std::uint32_t>(waiting.size() - 1)};
  }

  edge_list waiting;
  variable_list arrived;

 private:
  variable_list apply(variable_list&& grads) override {
    arrived = std::move(grads);
    return {};
  }
};

// Replaces a node in the second half. It has the node's sequence number, so that the order of additions is
// that of one backward, and none of its hooks, which have run already. Without a node to call it passes on
// what the first half computed.
class SecondTurn final : public Node {
 public:
  SecondTurn(std::uint64_t number, edge_list&& edges, NodePtr node)
      : Node(number, std::move(edges)), node_(std::move(node)) {
    if (node_)
      for (std::uint32_t i = 0; i < node_->num_inputs(); ++i)
        input_metadata_.emplace_back(node_->input_metadata(i));
    else
      for (const Edge& edge : next_edges())
        input_metadata_.emplace_back(edge.function->input_metadata(edge.input_nr));
  }

 private:
  variable_list apply(variable_list&& grads) override {
    if (!node_) return std::move(grads);
    variable_list results = (*node_)(std::move(grads));
    node_->release_variables();
    return results;
  }

  NodePtr node_;
};

struct TwiceCalled {
  NodePtr node;
  KeepArriving* kept;  // owned by the node
  edge_list later;     // edges of the second half, at their places
};

struct OnceCalled {
  std::uint64_t number;
  NodePtr sink;  // a KeepLeaving
};

// An in-place operator on a view keeps the node of the inner operator, whose edges must equal those of the
// outer node except for the first.
void redirect(Node& node, std::uint32_t edge, const Edge& to) {
  node.next_edges()[edge] = to;
  if (auto* copy = dynamic_cast<torch::autograd::CopySlices*>(&node); copy && copy->fn && edge > 0)
    copy->fn->next_edges()[edge] = to;
}

std::string shape_text(at::IntArrayRef shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::vector<NodePtr> accumulators(const std::vector<at::Tensor>& inputs) {
  std::vector<NodePtr> found;
  found.reserve(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& input = inputs[i];
    if (!input.defined() || !input.requires_grad()) continue;
    if (!input.is_leaf())
      throw ValueError(describe(fmt::format("backward of a stage: input {}", i),
                                "a result of other operators", "a leaf of autograd",
                                "run the forward on input.detach().requires_grad_()"));
    input.mutable_grad() = at::Tensor();
    found.push_back(torch::autograd::impl::try_get_grad_accumulator(input));
  }
  return found;
}

// A gradient that came through a view may share its memory with the gradient of a weight, to which later
// microbatches add.
bool shares_memory(const at::Tensor& grad) {
  if (const Payload* payload = payload_of(grad)) {
    const auto parts = payload->inner_tensors();
    return std::any_of(parts.begin(), parts.end(),
                       [](const auto& part) { return shares_memory(part.second); });
  }
  return grad.has_storage() && grad.storage().use_count() > 1;
}

std::vector<at::Tensor> take_grads(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> grads(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined() && inputs[i].requires_grad()) grads[i] = inputs[i].grad();
  for (const at::Tensor& input : inputs)
    if (input.defined() && input.requires_grad()) input.mutable_grad() = at::Tensor();
  for (at::Tensor& grad : grads)
    if (grad.defined() && shares_memory(grad)) grad = grad.clone();
  return grads;
}

}  // namespace

struct OutputEdges::State {
  struct Output {
    Edge edge;  // invalid without a graph
    std::vector<std::int64_t> shape;
    bool defined = false;
  };
  std::vector<Output> outputs;
};

struct WeightBackward::State {
  PreparedBackward backward;
};

OutputEdges::OutputEdges() = default;
OutputEdges::~OutputEdges() = default;
OutputEdges::OutputEdges(OutputEdges&&) noexcept = default;
OutputEdges& OutputEdges::operator=(OutputEdges&&) noexcept = default;

OutputEdges OutputEdges::of(const std::vector<at::Tensor>& outputs) {
  OutputEdges edges;
  edges.state_ = std::make_unique<State>();
  edges.state_->outputs.reserve(outputs.size());
  for (const at::Tensor& output : outputs) {
    State::Output& entry = edges.state_->outputs.emplace_back();
    if (!output.defined()) continue;
    entry.defined = true;
    entry.shape = output.sizes().vec();
    if (output.requires_grad()) entry.edge = torch::autograd::impl::gradient_edge(output);
  }
  return edges;
}

std::size_t OutputEdges::size() const { return state_ ? state_->outputs.size() : 0; }

bool OutputEdges::needs_grad(std::size_t output) const {
  if (output >= size())
    throw ValueError(describe("number of an output of a stage", std::to_string(output),
                              fmt::format("less than {}", size())));
  return state_->outputs[output].edge.is_valid();
}

WeightBackward::WeightBackward() = default;
WeightBackward::~WeightBackward() = default;
WeightBackward::WeightBackward(WeightBackward&&) noexcept = default;
WeightBackward& WeightBackward::operator=(WeightBackward&&) noexcept = default;

bool WeightBackward::pending() const { return state_ != nullptr; }

void WeightBackward::run() {
  if (!state_)
    throw StateError(describe("weight half of a backward", "nothing pending",
                              "an input half that left weight gradients pending",
                              "run each weight half once, and only when pending()"));
  std::move(std::exchange(state_, nullptr)->backward).run();
}

struct BackwardPass {
  edge_list roots;
  variable_list grads;

  // The outputs that take part, with their gradients.
  BackwardPass(OutputEdges outputs, const std::vector<at::Tensor>& output_grads) {
    if (output_grads.size() != outputs.size())
      throw ValueError(describe("gradients for the outputs of a stage", std::to_string(output_grads.size()),
                                std::to_string(outputs.size()),
                                "pass one per output, undefined where there is none"));
    for (std::size_t i = 0; i < output_grads.size(); ++i) {
      if (!output_grads[i].defined()) continue;
      OutputEdges::State::Output& output = outputs.state_->outputs[i];
      if (output.defined && output_grads[i].sizes() != at::IntArrayRef(output.shape))
        throw ValueError(describe(fmt::format("shape of the gradient for output {} of a stage", i),
                                  shape_text(output_grads[i].sizes()), shape_text(output.shape),
                                  "send gradients in the order of the outputs"));
      if (!output.edge.is_valid()) continue;
      roots.push_back(std::move(output.edge));
      grads.push_back(output_grads[i]);
    }
  }

  void run_at_once() const {
    if (!roots.empty())
      Engine::get_default_engine().execute(roots, grads, /*keep_graph=*/false, /*create_graph=*/false,
                                           /*accumulate_grad=*/true, {});
  }

  WeightBackward run_first_half(const std::vector<NodePtr>& inputs) {
    WeightBackward weights;
    if (roots.empty()) return weights;
    const BackwardPlan plan(roots, inputs);
    const NodeIndex& index = plan.index();

    std::vector<TwiceCalled> twice;
    std::vector<OnceCalled> once;
    std::vector<Node*> done_lower;
    // The owners are stored in the edges that are changed below: copy them first.
    for (std::uint32_t n = 0; n < index.size(); ++n)
      if (plan.waits(n) && !BackwardPlan::opaque(*index[n].node))
        twice.push_back({*index[n].owner, nullptr, {}});
    std::size_t next_twice = 0;
    for (std::uint32_t n = 0; n < index.size(); ++n) {
      Node* node = index[n].node;
      if (node->num_outputs() == 0)
        continue;  // accumulators live as long as their tensors: no hooks may be left on them
      if (!plan.upper(n)) {
        if (!plan.in_first_half(n)) continue;
        done_lower.push_back(node);
        node->will_release_variables();
        continue;
      }
      edge_list& edges = node->next_edges();
      if (!plan.waits(n)) {
        runs_once(*node);
      } else if (BackwardPlan::opaque(*node)) {
        const auto sink = make_node<KeepLeaving>();
        for (std::uint32_t e = 0; e < edges.size(); ++e)
          if (edges[e].is_valid() && !plan.upper(index.target(n, e)))
            redirect(*node, e, sink->in_place_of(edges[e], sink));
        once.push_back({node->sequence_nr(), sink});
        runs_once(*node);
      } else {
        TwiceCalled& call = twice[next_twice++];
        auto hook = std::make_unique<KeepArriving>();
        call.kept = hook.get();
        node->add_pre_hook(std::move(hook));
        call.later.resize(edges.size());
        for (std::uint32_t e = 0; e < edges.size(); ++e)
          if (edges[e].is_valid() && !plan.upper(index.target(n, e))) std::swap(call.later[e], edges[e]);
      }
    }

    edge_list first_roots, second_roots;
    variable_list first_grads, second_grads;
    for (std::size_t i = 0; i < roots.size(); ++i) {
      const bool first = plan.in_first_half(index.find(roots[i].function.get()));
      (first ? first_roots : second_roots).push_back(std::move(roots[i]));
      (first ? first_grads : second_grads).push_back(std::move(grads[i]));
    }
    if (!first_roots.empty())
      Engine::get_default_engine().execute(first_roots, first_grads, /*keep_graph=*/true,
                                           /*create_graph=*/false, /*accumulate_grad=*/true, {});
    for (Node* node : done_lower) node->release_variables();

    const auto start = [&](const NodePtr& turn, variable_list& arrived) {
      for (std::uint32_t i = 0; i < arrived.size(); ++i) {
        if (!arrived[i].defined()) continue;
        second_roots.emplace_back(turn, i);
        second_grads.push_back(std::move(arrived[i]));
      }
      arrived.clear();
    };
    for (TwiceCalled& call : twice) {
      // From here on the node leads only to weights: it computes nothing else, and everything above it can be
      // freed.
      call.node->next_edges() = call.later;
      const std::uint64_t number = call.node->sequence_nr();
      start(make_node<SecondTurn>(number, std::move(call.later), std::move(call.node)), call.kept->arrived);
    }
    for (const OnceCalled& call : once) {
      auto& sink = static_cast<KeepLeaving&>(*call.sink);
      start(make_node<SecondTurn>(call.number, std::move(sink.waiting), NodePtr()), sink.arrived);
    }
    if (second_roots.empty()) return weights;
    const at::Tensor like = second_grads.front();
    weights.state_ = std::make_unique<WeightBackward::State>();
    weights.state_->backward = PreparedBackward::from(std::move(second_roots), std::move(second_grads), like);
    return weights;
  }
};

std::vector<at::Tensor> stage_backward(OutputEdges outputs, const std::vector<at::Tensor>& output_grads,
                                       const std::vector<at::Tensor>& inputs) {
  BackwardPass pass(std::move(outputs), output_grads);
  accumulators(inputs);
  pass.run_at_once();
  return take_grads(inputs);
}

InputBackward stage_backward_input(OutputEdges outputs, const std::vector<at::Tensor>& output_grads,
                                   const std::vector<at::Tensor>& inputs) {
  BackwardPass pass(std::move(outputs), output_grads);
  InputBackward result;
  result.weights = pass.run_first_half(accumulators(inputs));
  result.input_grads = take_grads(inputs);
  return result;
}

}  // namespace penstock
