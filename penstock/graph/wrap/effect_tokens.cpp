#include "penstock/graph/wrap/effect_tokens.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/graph/wrap/random_numbers.h"
#include "penstock/graph/wrap/state_chains.h"

namespace penstock::graph {
namespace {

template <class List>
auto at_place(List& list, std::size_t place) {
  return list.begin() + static_cast<std::ptrdiff_t>(place);
}

class ForwardWithTokens final : public CompiledGraph {
 public:
  ForwardWithTokens(std::shared_ptr<const CompiledGraph> inner, std::size_t tokens)
      : inner_(std::move(inner)), tokens_(tokens) {}

  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    inputs.insert(inputs.begin(), tokens_, make_token());
    std::vector<c10::IValue> outputs = inner_->run(std::move(inputs), sizes);
    PENSTOCK_INVARIANT(outputs.size() >= tokens_, "a forward graph did not return its tokens");
    outputs.erase(outputs.begin(), at_place(outputs, tokens_));
    return outputs;
  }

 private:
  std::shared_ptr<const CompiledGraph> inner_;
  std::size_t tokens_;
};

class BackwardWithTokens final : public CompiledGraph {
 public:
  BackwardWithTokens(std::shared_ptr<const CompiledGraph> inner, std::size_t tokens)
      : inner_(std::move(inner)), tokens_(tokens) {}

  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    inputs.insert(inputs.end(), tokens_, make_token());
    std::vector<c10::IValue> outputs = inner_->run(std::move(inputs), sizes);
    PENSTOCK_INVARIANT(outputs.size() >= tokens_, "a backward graph did not return its tokens");
    outputs.resize(outputs.size() - tokens_);
    return outputs;
  }

 private:
  std::shared_ptr<const CompiledGraph> inner_;
  std::size_t tokens_;
};

}  // namespace

void make_effects_explicit(JointGraph& joint) {
  StateChains chains(joint, StateKind::Token);
  for (Node& node : joint.graph.nodes)
    if (has_side_effect(node) && !operator_inside(node.op) && !accesses_generator(node))
      chains.pass_through(node, {effect_of(node)});
  chains.finish();
}

EffectTokens::EffectTokens(const JointGraph& joint)
    : forward_tokens_(joint.states_of(Phase::Forward, StateKind::Token)),
      backward_tokens_(joint.states_of(Phase::Backward, StateKind::Token)),
      backward_generators_(joint.states_of(Phase::Backward, StateKind::Generator)),
      primals_(joint.primals),
      forward_returns_(joint.forward_returns()),
      decision_(states_text(joint, StateKind::Token)) {}

void EffectTokens::before_compile(Graph& graph, CompileRequest& request) const {
  if (request.role == GraphRole::Backward) {
    // Before: gradients, tokens, states of generators.
    std::rotate(graph.outputs.end() - static_cast<std::ptrdiff_t>(backward_tokens_ + backward_generators_),
                graph.outputs.end() - static_cast<std::ptrdiff_t>(backward_generators_), graph.outputs.end());
    return;
  }
  std::rotate(graph.inputs.begin(), at_place(graph.inputs, primals_),
              at_place(graph.inputs, primals_ + forward_tokens_));
  std::rotate(graph.outputs.begin(), at_place(graph.outputs, forward_returns_),
              at_place(graph.outputs, forward_returns_ + forward_tokens_));
  for (std::vector<std::size_t>* inputs : {&request.static_inputs, &request.donated_inputs})
    for (std::size_t& input : *inputs)
      if (input < primals_) input += forward_tokens_;
}

std::shared_ptr<const CompiledGraph> EffectTokens::around(std::shared_ptr<const CompiledGraph> inner,
                                                          GraphRole role) const {
  if (role == GraphRole::Backward) {
    if (backward_tokens_ == 0) return inner;
    return std::make_shared<BackwardWithTokens>(std::move(inner), backward_tokens_);
  }
  if (forward_tokens_ == 0) return inner;
  return std::make_shared<ForwardWithTokens>(std::move(inner), forward_tokens_);
}

}  // namespace penstock::graph
