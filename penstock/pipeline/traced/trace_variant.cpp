#include "penstock/pipeline/traced/trace_variant.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/exception_text.h"
#include "penstock/errors.h"
#include "penstock/graph/run/leaf_values.h"
#include "penstock/pipeline/traced/align_traces.h"
#include "penstock/pipeline/traced/same_program.h"
#include "penstock/step_context.h"
#include "penstock/torch/fake/fake_watch.h"
#include "penstock/torch/random/running_step.h"

namespace penstock {

using graph::Values;

namespace {

std::string prefix_of(const StageModule& module, std::size_t root) {
  return module.modules().size() > 1 ? std::to_string(root) : std::string();
}

std::string path_below(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

template <class Visit>
void for_each_named_tensor(const StageModule& module, const Visit& visit) {
  for (const bool parameters : {true, false})
    for (std::size_t i = 0; i < module.modules().size(); ++i) {
      const torch::nn::Module& root = *module.modules()[i];
      for (const auto& item : parameters ? root.named_parameters() : root.named_buffers())
        if (item.value().defined())
          visit(path_below(prefix_of(module, i), item.key()), item.value(), parameters);
    }
}

// The context of a forward that will run in other steps.
StepContext traced_context() {
  StepContext context = *StepContext::current();
  context.running = true;
  if (!context.microbatch) context.microbatch = 0;
  context.captured = true;
  return context;
}

// Far away and of another parity: a forward that compares the step with a limit, or counts it modulo 2,
// becomes visible.
constexpr std::int64_t kStepsBetweenTraces = (std::int64_t{1} << 40) + 1;

// A context that has nothing in common with this one, except whether it has rows if it has. `rows`: of the
// example.
StepContext in_another_step(const StepContext& step, std::int64_t rows) {
  StepContext other = step;
  other.seed = step.seed ^ 0x5bd1e995u;
  other.step = step.step + kStepsBetweenTraces;
  other.microbatches = step.microbatches + 3;
  other.microbatch = *step.microbatch + 1;
  other.loss_scale = step.loss_scale >= 1 ? step.loss_scale / 2 : step.loss_scale * 2;
  const BatchRows here = step.rows.value_or(BatchRows{rows, 0, rows});
  other.rows = {here.global + here.count, here.first + here.count, here.count};
  return other;
}

std::int64_t rows_of_example(const std::vector<Tree>& leaves) {
  for (const Tree& leaf : leaves)
    if (leaf.is_tensor() && leaf.tensor().defined() && leaf.tensor().dim() > 0 && leaf.tensor().size(0) > 0)
      return leaf.tensor().size(0);
  return 1;
}

// Stages would repeat in every step what the forward computes with numbers of the running step.
void refuse_values_of_the_step(const PipeVariant& here, const PipeVariant& there) {
  const std::optional<std::size_t> node = first_other_node(here, there);
  if (!node) return;
  const auto line = [&](const PipeVariant& variant) {
    return *node < variant.trace.graph.nodes.size() ? "'" + variant.trace.line(*node) + "'"
                                                    : std::string("nothing");
  };
  const bool of_results = *node == here.trace.graph.nodes.size() && *node == there.trace.graph.nodes.size();
  throw StateError(fmt::format(
      "trace_pipeline: the forward computes with a value of the running step (StepContext: seed, step, "
      "microbatch, microbatches, rows or loss scale), which stages would repeat in every step: {}; take "
      "random "
      "numbers from StepContext::key() and StepContext::box_of(), or pass the value as a tensor argument",
      of_results ? "a result, or the backward of a torch::autograd::Function, is another one in another step"
                 : fmt::format("{}, in another step {}", line(here), line(there))));
}

}  // namespace

std::vector<std::shared_ptr<torch::nn::Module>> modules_of(const StageModule& module) {
  std::vector<std::shared_ptr<torch::nn::Module>> found;
  for (const auto& root : module.modules())
    for (const auto& each : root->modules(true)) found.push_back(each);
  return found;
}

void collect_model(const StageModule& module, PipeState& pipe) {
  if (module.modules().size() > 1) pipe.modules.push_back({"", "Modules", true});
  for (std::size_t i = 0; i < module.modules().size(); ++i)
    for (const auto& item : module.modules()[i]->named_modules(prefix_of(module, i), true))
      pipe.modules.push_back({item.key(), item.value()->name(), item.value()->is_training()});
  if (pipe.modules.empty()) pipe.modules.push_back({"", "Function", true});
  std::set<const c10::TensorImpl*> known;
  for_each_named_tensor(module, [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    if (!known.insert(tensor.unsafeGetTensorImpl()).second) return;
    pipe.names.push_back(name);
    pipe.tensors.push_back(tensor);
    if (is_parameter) pipe.parameters = pipe.tensors.size();
  });
}

TensorAliases aliases_of(const StageModule& module, const PipeState& pipe) {
  std::unordered_map<const c10::TensorImpl*, std::size_t> index;
  for (std::size_t i = 0; i < pipe.tensors.size(); ++i)
    index.emplace(pipe.tensors[i].unsafeGetTensorImpl(), i);
  TensorAliases all;
  for_each_named_tensor(module, [&](const std::string& name, const at::Tensor& tensor, bool) {
    all[index.at(tensor.unsafeGetTensorImpl())].push_back(name);
  });
  for (auto entry = all.begin(); entry != all.end();)
    entry = entry->second.size() > 1 ? std::next(entry) : all.erase(entry);
  return all;
}

namespace {

// In one step.
PipeVariant traced_in(const StepContext& context, const StageModule& module, const PipeState& pipe,
                      const TensorAliases& aliases, const FlatTree& args, const FlatTree& kwargs,
                      const Values& inputs, at::Device device) {
  PipeVariant variant;
  variant.args = args.spec;
  variant.kwargs = kwargs.spec;
  graph::TraceSettings settings{.roots = module.modules(),
                                .names = pipe.names,
                                .found = pipe.tensors.size(),
                                .aliases = aliases,
                                .device = device};
  for (std::string& path : args.spec.leaf_paths("args")) settings.names.push_back(std::move(path));
  for (std::string& path : kwargs.spec.leaf_paths("kwargs")) settings.names.push_back(std::move(path));
  const graph::Function function = [&](const Values& given) -> Values {
    std::vector<Tree> all = graph::leaves_of_values(std::span(given).subspan(pipe.tensors.size()));
    const auto middle = all.begin() + static_cast<std::ptrdiff_t>(args.spec.leaf_count());
    const Tree result = module.forward(unflatten_tree({all.begin(), middle}, args.spec),
                                       unflatten_tree({middle, all.end()}, kwargs.spec));
    FlatTree flat = flatten_tree(result);
    variant.result = flat.spec;
    return graph::values_of_leaves(flat.leaves);
  };
  {
    // Also for the backwards of a user's functions, which are recorded after the forward.
    const StepGuard step(context);
    const AnyRowsScope rows_of_each_step;
    variant.trace = graph::trace_forward(function, inputs, settings);
  }
  for (std::size_t i = 0; i < variant.trace.graph.inputs.size(); ++i)
    variant.kinds.push_back(i < variant.trace.found                       ? graph::InputKind::State
                            : variant.leaf_of(i) < args.spec.leaf_count() ? graph::InputKind::Positional
                                                                          : graph::InputKind::Keyword);
  return variant;
}

}  // namespace

PipeVariant trace_variant(const StageModule& module, const PipeState& pipe, const TensorAliases& aliases,
                          const PipeExample& example, at::Device device) {
  const FlatTree args = flatten_tree(example.args), kwargs = flatten_tree(example.kwargs);
  std::vector<Tree> leaves = args.leaves;
  leaves.insert(leaves.end(), kwargs.leaves.begin(), kwargs.leaves.end());
  Values inputs(pipe.tensors.begin(), pipe.tensors.end());
  for (c10::IValue& leaf : graph::values_of_leaves(leaves)) inputs.push_back(std::move(leaf));
  const auto traced = [&](const StepContext& context) {
    return traced_in(context, module, pipe, aliases, args, kwargs, inputs, device);
  };
  const StepContext here = traced_context();
  PipeVariant variant, elsewhere;
  std::string failed;
  FakeWatch watch;
  {
    const FakeWatch::Guard watching(watch);
    variant = traced(here);
    try {
      elsewhere = traced(in_another_step(here, rows_of_example(leaves)));
    } catch (const std::exception&) {
      failed = current_exception_text();
    }
  }
  for (const at::Tensor& kept : watch.survivors())
    mark_leftover(
        kept,
        "a module kept it from the trace of its pipeline, which computes nothing; make it before the "
        "trace, or return it");
  if (!failed.empty())
    throw StateError(fmt::format(
        "trace_pipeline: the forward was traced once, and again in another step, with another StepContext, "
        "where it failed: {}; let it do the same in every step, and make tensors that a module keeps before "
        "the trace",
        failed));
  if (variant.trace.graph.nodes.empty())
    throw ValueError("trace_pipeline: the forward has no operators, so there is nothing to cut into stages");
  for (Tree& leaf : leaves) variant.leaves.push_back(leaf.is_tensor() ? Tree() : std::move(leaf));
  refuse_values_of_the_step(variant, elsewhere);
  // The module that has several others below it, or none, is nobody's.
  if (module.modules().size() != 1) variant.training.push_back(true);
  variant.any_mode.assign(variant.training.size(), true);
  for (const auto& each : modules_of(module)) variant.training.push_back(each->is_training());
  variant.any_mode.resize(variant.training.size(), false);
  return variant;
}

std::vector<std::size_t> matching_places(const graph::ForwardTrace& trace,
                                         const std::vector<std::size_t>& places,
                                         const graph::ForwardTrace& other) {
  const std::vector<std::size_t> same = aligned_nodes(trace, other);
  std::vector<std::size_t> found;
  for (const std::size_t place : places) {
    // A place before an operator that the other trace lacks (a dropout) is before the next one that it has.
    const auto next = std::find_if(same.begin() + static_cast<std::ptrdiff_t>(place), same.end(),
                                   [](std::size_t node) { return node != kNotAligned; });
    if (next == same.end())
      throw ValueError(
          fmt::format("trace_pipeline: the forward of another example or mode has no operator after '{}', "
                      "where stage {} begins; "
                      "let the forward run the same modules in all of them, or leave the example out",
                      trace.line(place), found.size() + 1));
    found.push_back(*next);
  }
  return found;
}

namespace {

// The first operator of a stage that takes an input of the graph.
std::string first_use(const PipeVariant& variant, const graph::CutStage& stage, std::size_t input) {
  const graph::ValueId value = variant.trace.graph.inputs[input].value;
  for (std::size_t i = stage.first; i < stage.end; ++i) {
    bool takes = false;
    graph::for_each_value(variant.trace.graph.nodes[i].arguments,
                          [&](graph::ValueId argument) { takes |= argument == value; });
    if (takes) return "'" + variant.trace.line(i) + "'";
  }
  return "its results";
}

// A stage that uses a parameter or buffer of another one is cut at another place.
std::string moved_state(const PipeVariant& expected, const PipeVariant& actual) {
  for (std::size_t stage = 0; stage < actual.cut.stages.size(); ++stage)
    for (const std::size_t input : actual.cut.stages[stage].state) {
      const auto uses = [&](const graph::CutStage& of) {
        return std::find(of.state.begin(), of.state.end(), input) != of.state.end();
      };
      if (uses(expected.cut.stages[stage])) continue;
      for (std::size_t other = 0; other < expected.cut.stages.size(); ++other)
        if (uses(expected.cut.stages[other]))
          return fmt::format(
              "{} uses '{}' in stage {}, in the first trace only stage {} does; split at a module that runs "
              "in "
              "all examples and modes, and let modules report themselves with penstock::ModuleScope",
              first_use(actual, actual.cut.stages[stage], input), actual.trace.graph.inputs[input].name,
              stage, other);
    }
  return {};
}

}  // namespace

std::string difference(const PipeVariant& expected, const PipeVariant& actual) {
  const std::vector<graph::Hop>&wanted = expected.cut.hops, &hops = actual.cut.hops;
  if (wanted.size() != hops.size())
    return fmt::format("{} values travel between stages, {} in the first trace", hops.size(), wanted.size());
  for (std::size_t i = 0; i < hops.size(); ++i) {
    const graph::Geometry &a = expected.geometry(wanted[i].value), &b = actual.geometry(hops[i].value);
    if (wanted[i].from != hops[i].from || wanted[i].to != hops[i].to || a.dtype != b.dtype ||
        a.sizes.size() != b.sizes.size())
      return fmt::format("{} goes from stage {} to stage {}, in the first trace {} from stage {} to stage {}",
                         record_text(b), hops[i].from, hops[i].to, record_text(a), wanted[i].from,
                         wanted[i].to);
  }
  return moved_state(expected, actual);
}

}  // namespace penstock
