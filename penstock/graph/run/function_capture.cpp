#include "penstock/graph/run/function_capture.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/partition/activation_plan.h"
#include "penstock/graph/partition/backward_split.h"
#include "penstock/graph/partition/written_inputs.h"
#include "penstock/graph/passes/pass_list.h"
#include "penstock/graph/run/graph_call.h"
#include "penstock/graph/run/graph_passes.h"
#include "penstock/graph/run/half_requests.h"
#include "penstock/graph/saving/activation_budget.h"
#include "penstock/graph/saving/activation_policy.h"
#include "penstock/graph/trace/capture.h"
#include "penstock/graph/wrap/effect_tokens.h"
#include "penstock/graph/wrap/random_numbers.h"
#include "penstock/graph/wrap/state_chains.h"
#include "penstock/graph/wrap/subclasses.h"
#include "penstock/graph/wrap/user_wrapper.h"

namespace penstock::graph {
namespace {

// What backward writes is known only after duplicate inputs were removed.
void check_written_in_backward(const JointGraph& joint, std::size_t primal,
                               const std::vector<at::Tensor>& primals) {
  const std::string& name = joint.graph.inputs[primal].name;
  for (std::size_t i = 0; i < primals.size(); ++i)
    if (i != primal && primals[i].is_alias_of(primals[primal]))
      throw NotImplemented(fmt::format("graph: backward writes {}, which shares memory with {}; pass a copy",
                                       name, joint.graph.inputs[i].name));
  if (overlaps_itself(geometry_of(primals[primal])))
    throw NotImplemented(
        fmt::format("graph: {} has elements that share memory (expand, unfold), and backward writes it; pass "
                    "a contiguous copy",
                    name));
}

// Whether some input may have to be replaced by another one before the function is captured.
bool needs_wrappers(const CallGuard& guard, const Values& inputs) {
  return guard.inputs_share_memory() ||
         std::any_of(inputs.begin(), inputs.end(), [](const c10::IValue& input) {
           return is_defined_tensor(input) && (input.toTensor().is_conj() || input.toTensor().is_neg());
         });
}

// In whose memory an input is after set_. An input that keeps its memory is in its own.
void find_memory_after(FunctionCapture& capture, const Values& inner) {
  const Graph& graph = capture.joint.graph;
  const std::vector<std::size_t> mutated = capture.meta.mutated_at_run_time();
  capture.memory_after.resize(mutated.size());
  if (capture.joint.subclasses) return;
  for (std::size_t i = 0; i < mutated.size(); ++i) {
    if (!capture.meta.inputs[mutated[i]].mutates_storage_metadata) continue;
    const StorageId memory = graph[graph.outputs[i].value()].storage;
    std::size_t primal = 0;
    for (std::size_t input = 0; input < inner.size(); ++input)
      if (is_defined_tensor(inner[input]) && graph[graph.inputs[primal++].value].storage == memory)
        capture.memory_after[i] = input;
  }
}

void find_written_primals(FunctionCapture& capture, const Values& inner) {
  std::vector<at::Tensor> primals, changed;
  for (std::size_t i = 0; i < inner.size(); ++i) {
    if (!is_defined_tensor(inner[i])) continue;
    const InputInfo& info = capture.meta.inputs[i];
    primals.push_back(inner[i].toTensor());
    if (info.mutation_type() != MutationType::NotMutated) changed.push_back(primals.back());
    capture.primal_written.push_back(info.mutation_type() == MutationType::MutatedOutOfGraph &&
                                     info.mutates_data);
  }
  // Changing a tensor, even only its metadata, increments the version of all tensors that share its memory.
  for (const at::Tensor& primal : primals)
    capture.primal_shares_changed.push_back(std::any_of(
        changed.begin(), changed.end(), [&](const at::Tensor& other) { return primal.is_alias_of(other); }));
}

// The number of symbols that backward depends on.
std::size_t count_symbols_for_backward(const JointGraph& joint, const Partition& halves) {
  const SymbolicTable* table = joint.graph.table.get();
  if (!table) return 0;
  std::vector<char> used(table->symbols.symbols(), 0);
  const auto use = [&](const SizeExpression& expression) {
    for (std::size_t variable = 0; variable < table->symbols.variables(); ++variable)
      for (std::size_t symbol = 0; symbol < used.size(); ++symbol)
        if (expression.uses(variable) && table->symbols.depends(variable, symbol)) used[symbol] = 1;
  };
  for (const Node& node : halves.backward.nodes)
    for (const Operand& operand : node.arguments)
      if (operand.symbolic != kNotSymbolic)
        for (const NumberOrSize& number :
             table->constants[static_cast<std::size_t>(operand.symbolic)].numbers)
          use(std::holds_alternative<SizeExpression>(number) ? std::get<SizeExpression>(number)
                                                             : std::get<NumberExpression>(number).size);
  for (const TangentInfo& tangent : joint.tangents)
    if (tangent.geometry.symbolic != kNotSymbolic) {
      const SymbolicGeometry& geometry =
          table->geometries[static_cast<std::size_t>(tangent.geometry.symbolic)];
      for (const auto& expressions : {geometry.sizes, geometry.strides})
        for (const auto& expression : expressions)
          if (expression) use(*expression);
    }
  return static_cast<std::size_t>(std::count(used.begin(), used.end(), char{1}));
}

}  // namespace

void FunctionCapture::set_function(Function function) {
  if (!run_again) return;
  for (const WrapperInUse& used : wrappers) function = used.wrapper->inner_function(std::move(function));
  RunAgain again = *run_again;
  again.set_function(std::move(function));
  run_again = std::make_shared<const RunAgain>(std::move(again));
}

FunctionCapture capture_function(const Function& function, const Values& inputs, const Convention& convention,
                                 const CallWrappers& wrappers, bool keep_input_mutations) {
  CallGuard guard(inputs, convention);
  const AnalyzeOptions options{.keep_input_mutations = keep_input_mutations,
                               .keep_only_data_mutations = true,
                               .convention = convention};
  // What a user puts first replaces inputs before the function sees them: it may not be able to run on
  // others.
  Values passed = inputs;
  std::vector<std::pair<const UserWrapper*, UserWrapper::Prepared>> users;
  CallWrappers others;
  for (const auto& wrapper : wrappers) {
    const auto* user = others.empty() ? dynamic_cast<const UserWrapper*>(wrapper.get()) : nullptr;
    if (user)
      users.emplace_back(user, user->prepare(passed, convention));
    else
      others.push_back(wrapper);
  }
  AnalyzedCapture at_once;  // if one run of the function is enough
  if (needs_wrappers(users.empty() ? guard : CallGuard(passed, convention), passed)) {
    at_once.meta = analyze(function, passed, options);
    reject_shared_writes(passed, at_once.meta, convention);
  } else {
    at_once = analyze_and_capture(function, passed, options);
  }
  FunctionForm form(function, passed, options, std::move(at_once.meta));
  FunctionCapture capture{.guard = std::move(guard), .wrappers = {}};
  for (const auto& [user, prepared] : users) {
    user->check_writes(prepared, form.meta(), convention);
    capture.wrappers.push_back({prepared.applied, form.meta()});
  }
  for (WrapperInUse& used : graph::apply(others, form)) capture.wrappers.push_back(std::move(used));
  capture.meta = form.meta();
  capture.convention = form.convention();
  capture.joint = at_once.joint && capture.wrappers.size() == users.size()
                      ? std::move(*at_once.joint)
                      : capture_joint(form.function(), form.inputs(), form.meta(), form.convention());
  JointGraph& joint = capture.joint;
  // The function made a subclass of its own.
  if (joint.subclasses && !joint.written_in_graph.empty())
    return capture_function(function, inputs, convention, wrappers, /*keep_input_mutations=*/false);
  for_each_meta(capture, [&](ViewAndMutationMeta& meta) {
    meta.static_inputs.resize(convention.found);
    std::iota(meta.static_inputs.begin(), meta.static_inputs.end(), std::size_t{0});
  });
  for (std::size_t i = 0; i < capture.meta.mutated_at_run_time().size(); ++i)
    capture.geometry_after.push_back(
        joint.graph[joint.graph.outputs[joint.first_output(i)].value()].geometry);
  find_memory_after(capture, form.inputs());
  find_written_primals(capture, form.inputs());
  for (std::size_t i = 0; i < joint.forward_outputs; ++i) {
    const ValueId value = joint.graph.outputs[i].value();
    capture.memory_of_output.push_back(value == kNoValue ? StorageId{-1} : joint.graph[value].storage);
  }
  remove_idle_generator_accesses(joint.graph);
  if (!joint.tangents.empty()) capture.run_again = std::make_shared<const RunAgain>(form, joint);
  for (const std::size_t primal : joint.written_in_backward)
    check_written_in_backward(joint, primal, tensors_among(form.inputs()));
  joint.graph = functionalize(std::move(joint.graph), joint.forward_outputs);
  remove_dead_nodes(joint.graph);
  return capture;
}

FunctionCapture with_explicit_states(FunctionCapture capture, const ExplicitStates& states) {
  if (states.effects) make_effects_explicit(capture.joint);
  if (states.random_numbers) make_random_states_explicit(capture.joint);
  for_each_meta(capture, [&](ViewAndMutationMeta& meta) {
    meta.explicit_random_states |= states.random_numbers;
    note_states(capture.joint, meta);
  });
  return capture;
}

void check_split(const SplitOptions& options) {
  parse_activation_budget(options.activations.budget, "graph: activations.budget");
  parse_activation_policy(options.activations.policy, "graph: activations.policy");
  if (options.activations.decide() && options.partitioner == Partitioner::MinCut)
    throw ValueError(
        "graph: partitioner MinCut recomputes by a rule of its own, which leaves nothing to activations; "
        "leave "
        "partitioner out, or activations");
}

Partition split_graph(const JointGraph& joint, const SplitOptions& options) {
  // Without a backward, nothing is saved.
  if (options.activations.decide() && !joint.tangents.empty())
    return plan_activations(joint, options.activations).halves;
  return options.partitioner == Partitioner::MinCut ? partition_min_cut(joint) : partition_default(joint);
}

PartitionedCapture partition(FunctionCapture capture, const SplitOptions& options) {
  return partition(std::move(capture), options, PassList(std::vector<PassPointer>(), false), nullptr);
}

PartitionedCapture partition(FunctionCapture capture, const SplitOptions& options, const PassList& passes,
                             PassLog* log) {
  Partition halves = split_graph(capture.joint, options);
  PartitionedCapture split{std::move(capture), std::move(halves)};
  run_passes_on_halves(split, passes, log);
  const JointGraph& joint = split.capture.joint;
  if (options.split_backward && !joint.tangents.empty()) {
    const BackwardRoles roles = backward_roles(split.capture, split.halves);
    Graph backward = with_divided_convolutions(split.halves.backward);
    split.halves.deferred = choose_deferred(backward, roles);
    if (!split.halves.deferred.empty()) split.halves.backward = std::move(backward);
  }
  // Afterwards, since passes work on graphs without writes.
  write_inputs_in_graph(joint, split.halves.forward);
  const std::size_t symbols = count_symbols_for_backward(joint, split.halves);
  for_each_meta(split.capture, [&](ViewAndMutationMeta& meta) { meta.symbols_for_backward = symbols; });
  return split;
}

}  // namespace penstock::graph
