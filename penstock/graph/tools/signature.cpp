#include "penstock/graph/tools/signature.h"

#include <fmt/format.h>

#include <iterator>
#include <unordered_map>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/wrap/effect_tokens.h"

namespace penstock::graph {
namespace {

// The outputs of the graph by unique names.
std::vector<GraphOutput> names_of_outputs(const Graph& graph) {
  std::vector<GraphOutput> names;
  std::unordered_map<std::string, std::size_t> times;
  for (const Operand& output : graph.outputs) {
    std::string name = to_text(output);
    const std::size_t before = times[name]++;
    if (before > 0) name += fmt::format(".{}", before);
    names.emplace_back(std::move(name));
  }
  return names;
}

void add_state(StateSignature& states, StateKind kind, GraphInput input, GraphOutput output) {
  const bool token = kind == StateKind::Token;
  (token ? states.input_tokens : states.input_random_states).push_back(std::move(input));
  (token ? states.output_tokens : states.output_random_states).push_back(std::move(output));
}

// Where the states of a half begin.
struct PlacesOfStates {
  std::size_t tokens_in, tokens_out, generators_in, generators_out;
};
HalfSignature sign(const Graph& half, std::size_t tokens, std::size_t generators,
                   const PlacesOfStates& places) {
  HalfSignature signature;
  for (const Placeholder& input : half.inputs) signature.inputs.emplace_back(input.name);
  signature.outputs = names_of_outputs(half);
  for (std::size_t i = 0; i < tokens; ++i)
    add_state(signature.states, StateKind::Token, signature.inputs.at(places.tokens_in + i),
              signature.outputs.at(places.tokens_out + i));
  for (std::size_t i = 0; i < generators; ++i)
    add_state(signature.states, StateKind::Generator, signature.inputs.at(places.generators_in + i),
              signature.outputs.at(places.generators_out + i));
  return signature;
}

Graph as_compiled(const JointGraph& joint, const Graph& half, GraphRole role) {
  Graph graph = half;
  CompileRequest request{.role = role};
  EffectTokens(joint).before_compile(graph, request);
  return graph;
}

class SignatureMaker {
 public:
  SignatureMaker(const JointGraph& joint, const ViewAndMutationMeta& meta, const SignatureOptions& options)
      : joint_(joint), meta_(meta), options_(options), outputs_(names_of_outputs(joint.graph)) {}

  GraphSignature run() {
    if (joint_.subclasses)
      throw ValueError(
          "graph: some inputs or results are tensor subclasses, which consist of several tensors each and "
          "cannot be described by a signature; capture the function over plain tensors");
    if (!joint_.written_in_backward.empty())
      throw ValueError(
          fmt::format("graph: backward writes {}, which a signature cannot describe; write it in forward",
                      joint_.graph.inputs[joint_.written_in_backward[0]].name));
    signature_.in_spec = options_.in_spec;
    signature_.out_spec = options_.out_spec;
    add_inputs();
    add_mutations();
    add_results();
    signature_.states = states_of(Phase::Forward);
    if (!joint_.tangents.empty()) add_gradients();
    return std::move(signature_);
  }

 private:
  std::size_t parameters() const { return options_.state ? options_.state->parameters : 0; }
  std::size_t state_size() const { return options_.state ? options_.state->names.size() : 0; }

  void add_inputs() {
    if (state_size() > joint_.primals)
      throw ValueError(
          fmt::format("graph: the module has {} parameters and buffers, the graph {} inputs; create the "
                      "signature from a capture of this module",
                      state_size(), joint_.primals));
    if (joint_.graph.inputs.size() != joint_.primals + joint_.tangents.size() + joint_.states.size())
      throw ValueError(fmt::format(
          "graph: {} inputs, of which {} belong to the function and {} are gradients{}; the rest is unknown",
          joint_.graph.inputs.size(), joint_.primals, joint_.tangents.size(), states_text()));
    for (std::size_t i = 0; i < joint_.primals; ++i) {
      const GraphInput name(joint_.graph.inputs[i].name);
      inputs_.push_back(name);
      if (i >= state_size()) {
        signature_.user_inputs.push_back(name);
        continue;
      }
      const Qualified qualified(options_.state->names[i]);
      (i < parameters() ? signature_.parameters : signature_.buffers).push_back(qualified);
      (i < parameters() ? signature_.inputs_to_parameters : signature_.inputs_to_buffers)
          .emplace(name, qualified);
    }
  }

  void add_mutations() {
    std::size_t primal = 0, written = 0;
    for (std::size_t i = 0; i < meta_.inputs.size(); ++i) {
      const InputInfo& info = meta_.inputs[i];
      const std::size_t place = primal;
      primal += info.is_tensor ? 1 : 0;
      if (info.mutation_type() == MutationType::NotMutated) continue;
      const std::string who = place < inputs_.size() ? inputs_[place].text : fmt::format("input {}", i);
      if (info.mutation_type() == MutationType::MutatedInGraph)
        throw ValueError(
            fmt::format("graph: {} is written inside the graph, which a signature cannot describe; capture "
                        "without keep_input_mutations",
                        who));
      if (!info.mutates_data)
        throw ValueError(
            fmt::format("graph: only the shape of {} is changed, which a signature cannot describe; change "
                        "the shape of a view of it",
                        who));
      if (options_.joint_checks && !joint_.tangents.empty() && info.requires_grad)
        throw ValueError(
            fmt::format("graph: {} {}, which requires a gradient, is written in a graph with backward; write "
                        "only what requires none, or switch joint_checks off",
                        place < parameters() ? "parameter" : "input", who));
      const GraphOutput& output = outputs_[written++];
      if (place < parameters())
        signature_.parameters_to_mutate.emplace(output, Qualified(options_.state->names[place]));
      else if (place < state_size())
        signature_.buffers_to_mutate.emplace(output, Qualified(options_.state->names[place]));
      else
        signature_.user_inputs_to_mutate.emplace(output, inputs_[place]);
    }
    PENSTOCK_INVARIANT(written == meta_.mutated_at_run_time().size(), "written inputs do not add up");
  }

  void add_results() {
    const std::size_t first = meta_.mutated_at_run_time().size();
    if (options_.hidden_outputs > meta_.outputs.size())
      throw ValueError(fmt::format("graph: hidden_outputs is {}, but there are only {} results",
                                   options_.hidden_outputs, meta_.outputs.size()));
    if (meta_.intermediate_bases > 0)
      throw ValueError(
          "graph: several results are views of one internal tensor, which a signature cannot describe; "
          "return clones of them");
    for (std::size_t i = 0; i + options_.hidden_outputs < meta_.outputs.size(); ++i) {
      if (meta_.outputs[i].type == OutputType::Tensor && !is_fresh(meta_.outputs[i].kind))
        throw ValueError(
            fmt::format("graph: result {} is made at run time ({}), which a signature cannot describe; "
                        "return a clone of it",
                        i, to_text(meta_.outputs[i].kind)));
      signature_.user_outputs.push_back(outputs_.at(first + i));
    }
  }

  void add_gradients() {
    BackwardSignature backward;
    if (outputs_.size() != joint_.forward_outputs + joint_.primals + joint_.states.size())
      throw ValueError(fmt::format(
          "graph: {} outputs, of which {} belong to forward{}; expected one gradient for each of {} inputs",
          outputs_.size(), joint_.forward_outputs, states_text(), joint_.primals));
    for (std::size_t i = 0; i < joint_.primals; ++i) {
      const std::size_t output = joint_.forward_outputs + i;
      if (joint_.graph.outputs[output].value() == kNoValue) continue;
      if (i < parameters())
        backward.gradients_to_parameters.emplace(outputs_[output], Qualified(options_.state->names[i]));
      else
        backward.gradients_to_user_inputs.emplace(outputs_[output], inputs_[i]);
    }
    std::optional<std::size_t> loss = options_.loss_index;
    for (std::size_t i = 0; i < meta_.outputs.size() && !loss; ++i)
      if (meta_.outputs[i].requires_grad) loss = i;
    if (!loss || *loss >= signature_.user_outputs.size())
      throw ValueError(describe("graph: the result that is the loss", loss ? std::to_string(*loss) : "none",
                                fmt::format("one of {} results", signature_.user_outputs.size()),
                                "set loss_index"));
    backward.loss_output = signature_.user_outputs[*loss];
    backward.states = states_of(Phase::Backward);
    signature_.backward = std::move(backward);
  }

  std::string states_text() const {
    return joint_.states.empty() ? std::string() : fmt::format(", and {} are states", joint_.states.size());
  }

  StateSignature states_of(Phase phase) const {
    StateSignature states;
    for (std::size_t i = 0; i < joint_.states.size(); ++i)
      if (joint_.states[i].phase == phase)
        add_state(states, joint_.states[i].kind,
                  GraphInput(joint_.graph.inputs[joint_.first_state_input() + i].name),
                  outputs_[joint_.first_state_output() + i]);
    return states;
  }

  const JointGraph& joint_;
  const ViewAndMutationMeta& meta_;
  const SignatureOptions& options_;
  const std::vector<GraphOutput> outputs_;
  std::vector<GraphInput> inputs_;
  GraphSignature signature_;
};

template <class Map>
void append_map(std::string& text, const char* title, const Map& map) {
  for (const auto& [from, to] : map)
    fmt::format_to(std::back_inserter(text), "  {} {} -> {}\n", title, from.text, to.text);
}

void append_states(std::string& text, const char* phase, const StateSignature& states) {
  const auto append = [&](const char* title, const auto& inputs, const auto& outputs) {
    for (std::size_t i = 0; i < inputs.size(); ++i)
      fmt::format_to(std::back_inserter(text), "  {}{} {} -> {}\n", phase, title, inputs[i].text,
                     outputs[i].text);
  };
  append("token", states.input_tokens, states.output_tokens);
  append("random state", states.input_random_states, states.output_random_states);
}

}  // namespace

GraphSignature make_signature(const JointGraph& joint, const ViewAndMutationMeta& meta,
                              const SignatureOptions& options) {
  return SignatureMaker(joint, meta, options).run();
}

HalfSignature forward_signature(const JointGraph& joint, const Partition& halves) {
  const std::size_t tokens = joint.states_of(Phase::Forward, StateKind::Token),
                    generators = joint.states_of(Phase::Forward, StateKind::Generator);
  HalfSignature signature = sign(as_compiled(joint, halves.forward, GraphRole::Forward), tokens, generators,
                                 {0, 0, tokens + joint.primals, tokens + joint.forward_returns()});
  signature.saved.assign(signature.outputs.end() - static_cast<std::ptrdiff_t>(halves.saved.size()),
                         signature.outputs.end());
  return signature;
}

HalfSignature backward_signature(const JointGraph& joint, const Partition& halves) {
  const std::size_t tokens = joint.states_of(Phase::Backward, StateKind::Token),
                    generators = joint.states_of(Phase::Backward, StateKind::Generator);
  const std::size_t taken = halves.saved.size() + joint.tangents.size(), returned = joint.backward_returns();
  return sign(as_compiled(joint, halves.backward, GraphRole::Backward), tokens, generators,
              {taken, returned + generators, taken + tokens, returned});
}

std::string to_text(const GraphSignature& signature) {
  std::string text = "signature\n";
  append_states(text, "", signature.states);
  append_map(text, "parameter", signature.inputs_to_parameters);
  append_map(text, "buffer", signature.inputs_to_buffers);
  for (const GraphInput& input : signature.user_inputs) text += "  input " + input.text + "\n";
  append_map(text, "writes buffer", signature.buffers_to_mutate);
  append_map(text, "writes parameter", signature.parameters_to_mutate);
  append_map(text, "writes input", signature.user_inputs_to_mutate);
  for (const GraphOutput& output : signature.user_outputs) text += "  result " + output.text + "\n";
  if (signature.backward) {
    text += "  loss " + signature.backward->loss_output.text + "\n";
    append_map(text, "gradient", signature.backward->gradients_to_parameters);
    append_map(text, "gradient", signature.backward->gradients_to_user_inputs);
    append_states(text, "backward ", signature.backward->states);
  }
  return text;
}

}  // namespace penstock::graph
