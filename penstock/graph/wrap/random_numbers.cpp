#include "penstock/graph/wrap/random_numbers.h"

#include <ATen/Context.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/graph/wrap/state_chains.h"
#include "penstock/torch/random/generator_state.h"
#include "penstock/torch/random/unit_half.h"

namespace penstock::graph {
namespace {

bool reads_generator(const Node& node) { return node.op.operator_name().name == "penstock::generator_state"; }
bool sets_generator(const Node& node) {
  return node.op.operator_name().name == "penstock::set_generator_state";
}

StateOfNode default_of(at::Device device) { return {device.str(), device, {}}; }

// Which generator each node draws from.
class GeneratorsOfNodes {
 public:
  explicit GeneratorsOfNodes(const Graph& graph) : graph_(graph) {}

  StateOfNode of(const Node& node) {
    for (const Operand& argument : node.arguments)
      if (argument.kind == Operand::Kind::Constant && argument.constant.isGenerator())
        return of(argument.constant.toGenerator());
    return default_of(device_of(node));
  }

 private:
  // One that the function has passed itself.
  StateOfNode of(const at::Generator& generator) {
    const at::Device device = generator.device();
    if (generator == default_generator(device)) return default_of(device);
    auto known = std::find(own_.begin(), own_.end(), generator);
    if (known == own_.end()) known = own_.insert(own_.end(), generator);
    return {fmt::format("{} generator {}", device.str(), known - own_.begin()), device, generator};
  }

  at::Device device_of(const Node& node) const {
    for (const std::vector<Operand>* operands : {&node.results, &node.arguments}) {
      ValueId found = kNoValue;
      for_each_value(*operands, [&](ValueId value) {
        if (found == kNoValue) found = value;
      });
      if (found != kNoValue) return graph_[found].geometry.device;
    }
    for (const Operand& argument : node.arguments)
      if (argument.kind == Operand::Kind::Constant && argument.constant.isDevice())
        return argument.constant.toDevice();
    return at::kCPU;
  }

  const Graph& graph_;
  std::vector<at::Generator> own_;
};

}  // namespace

bool accesses_generator(const Node& node) { return reads_generator(node) || sets_generator(node); }

void remove_idle_generator_accesses(Graph& graph) {
  std::vector<char> is_state(graph.values.size(), 0);
  for (const Node& node : graph.nodes) {
    if (is_random(node) && !accesses_generator(node)) return;
    if (reads_generator(node)) is_state[index_of(node.results[0].value())] = 1;
  }
  // A function may use a state for something else.
  bool used = false;
  const auto use = [&](ValueId value) { used |= is_state[index_of(value)] != 0; };
  for (const Node& node : graph.nodes)
    if (!sets_generator(node)) for_each_value(node.arguments, use);
  for_each_value(graph.outputs, use);
  if (!used) std::erase_if(graph.nodes, accesses_generator);
}

void make_random_states_explicit(JointGraph& joint) {
  Graph& graph = joint.graph;
  StateChains chains(joint, StateKind::Generator);
  GeneratorsOfNodes generators(graph);
  std::vector<ValueId> stands_for;  // by value
  for (std::size_t i = 0; i < graph.values.size(); ++i)
    stands_for.push_back(ValueId{static_cast<std::int32_t>(i)});
  const auto translate = [&](std::vector<Operand>& operands) {
    for (Operand& operand : operands)
      for (ValueId& value : operand.values)
        if (value != kNoValue && index_of(value) < stands_for.size()) value = stands_for[index_of(value)];
  };
  std::vector<Node> kept;
  kept.reserve(graph.nodes.size());
  for (Node& node : graph.nodes) {
    translate(node.arguments);
    if (reads_generator(node)) {
      const StateOfNode state = default_of(node.arguments[0].constant.toDevice());
      stands_for[index_of(node.results[0].value())] = chains.now(node.phase, state);
    } else if (sets_generator(node)) {
      chains.set(node.phase, default_of(node.arguments[1].constant.toDevice()), node.arguments[0].value());
    } else {
      if (is_random(node)) chains.pass_through(node, generators.of(node));
      kept.push_back(std::move(node));
    }
  }
  graph.nodes = std::move(kept);
  translate(graph.outputs);
  chains.finish();
}

// Reads the states of the generators before a run, and sets them after it.
class RandomNumbers::WithStates final : public CompiledGraph {
 public:
  WithStates(std::shared_ptr<const CompiledGraph> inner, const Half& half)
      : inner_(std::move(inner)), half_(half) {}

  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    // What the other half of an overlapped unit draws meanwhile would be forgotten.
    const UnitHalfGuard alone(nullptr);
    std::vector<at::Generator> generators;
    for (const StateChain& state : half_.generators) {
      generators.push_back(state.generator.defined() ? state.generator : default_generator(state.device));
      inputs.push_back(generator_state(generators.back()));
    }
    std::vector<c10::IValue> outputs = inner_->run(std::move(inputs), sizes);
    PENSTOCK_INVARIANT(outputs.size() >= half_.first_output + generators.size(),
                       "a graph did not return the states of generators");
    const auto first = outputs.begin() + static_cast<std::ptrdiff_t>(half_.first_output);
    for (std::size_t i = 0; i < generators.size(); ++i)
      set_generator_state(generators[i], first[static_cast<std::ptrdiff_t>(i)].toTensor());
    outputs.erase(first, first + static_cast<std::ptrdiff_t>(generators.size()));
    return outputs;
  }

 private:
  std::shared_ptr<const CompiledGraph> inner_;
  Half half_;
};

RandomNumbers::RandomNumbers(const JointGraph& joint, std::size_t kept)
    : decision_(states_text(joint, StateKind::Generator)) {
  for (const StateChain& state : joint.states)
    if (state.kind == StateKind::Generator)
      (state.phase == Phase::Forward ? forward_ : backward_).generators.push_back(state);
  // Tokens come before the results of forward, and after everything else of backward.
  forward_.first_output = joint.states_of(Phase::Forward, StateKind::Token) + joint.forward_returns();
  backward_.first_output = joint.backward_returns() + kept;
}

std::shared_ptr<const CompiledGraph> RandomNumbers::around(std::shared_ptr<const CompiledGraph> inner,
                                                           GraphRole role) const {
  const Half& half = role == GraphRole::Backward ? backward_ : forward_;
  if (half.generators.empty()) return inner;
  return std::make_shared<WithStates>(std::move(inner), half);
}

}  // namespace penstock::graph
