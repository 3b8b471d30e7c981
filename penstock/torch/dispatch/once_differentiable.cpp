#include "penstock/torch/dispatch/once_differentiable.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/torch/compat/autograd_node.h"

namespace penstock {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

constexpr const char* kHistory = "penstock_history";

// Weak: the node of the operator holds its edges, and a split backward cuts those that lead to weights.
struct NotedHistory final : torch::CustomClassHolder {
  struct WeakEdge {
    WeakNodePtr node;
    std::uint32_t input;
  };
  std::vector<WeakEdge> edges;
};

class NoSecondDerivative final : public torch::autograd::Node {
 public:
  NoSecondDerivative(const char* op, edge_list&& edges) : Node(std::move(edges)), op_(op) {}
  std::string name() const override { return "NoSecondDerivative"; }

 private:
  variable_list apply(variable_list&&) override {
    throw NotImplemented(fmt::format(
        "{} can be differentiated once: a gradient that its backward computed while it was recorded "
        "(create_graph) is differentiated; call backward without create_graph, detach this gradient, or "
        "compute this part of the model with LibTorch's operators",
        op_));
  }
  std::string op_;
};

}  // namespace

void note_history(AutogradContext* context, std::initializer_list<at::Tensor> inputs) {
  c10::intrusive_ptr<NotedHistory> history;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || !input.requires_grad()) continue;
    const Edge edge = torch::autograd::impl::gradient_edge(input);
    if (!edge.is_valid()) continue;
    if (!history) history = c10::make_intrusive<NotedHistory>();
    history->edges.push_back({WeakNodePtr(edge.function), edge.input_nr});
  }
  if (history) context->saved_data[kHistory] = c10::IValue::make_capsule(std::move(history));
}

edge_list detail::noted_history(AutogradContext* context) {
  edge_list edges;
  const auto found = context->saved_data.find(kHistory);
  if (found == context->saved_data.end()) return edges;
  const auto capsule = found->second.toCapsule();
  for (const NotedHistory::WeakEdge& edge : static_cast<const NotedHistory*>(capsule.get())->edges)
    if (NodePtr node = edge.node.lock()) edges.emplace_back(std::move(node), edge.input);
  return edges;
}

void refuse_second_derivative(const char* op, const variable_list& gradients, edge_list history,
                              variable_list& results) {
  for (const at::Tensor& gradient : gradients)
    if (gradient.defined() && gradient.requires_grad())
      history.push_back(torch::autograd::impl::gradient_edge(gradient));
  history.erase(
      std::remove_if(history.begin(), history.end(), [](const Edge& edge) { return !edge.is_valid(); }),
      history.end());
  if (history.empty()) return;
  const auto node = make_node<NoSecondDerivative>(op, std::move(history));
  for (at::Tensor& result : results) {
    if (!result.defined()) continue;
    // What is passed through keeps its own history elsewhere.
    if (result.requires_grad()) result = result.detach();
    torch::autograd::impl::set_gradient_edge(result, {node, node->add_input_metadata(result)});
  }
}

}  // namespace penstock
