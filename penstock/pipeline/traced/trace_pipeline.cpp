#include "penstock/trace_pipeline.h"

#include <c10/core/DefaultDtype.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "penstock/base/checksum.h"
#include "penstock/base/describe.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/log.h"
#include "penstock/errors.h"
#include "penstock/pipeline/traced/pipe_state.h"
#include "penstock/pipeline/traced/same_program.h"
#include "penstock/pipeline/traced/trace_variant.h"

namespace penstock {
namespace {

// Puts all modules into evaluation mode for a scope.
class EvaluationScope {
 public:
  explicit EvaluationScope(const StageModule& module) : modules_(modules_of(module)) {
    for (const auto& each : modules_) before_.push_back(each->is_training());
    for (const auto& each : modules_) each->eval();
  }
  ~EvaluationScope() {
    // Parents first: train() also sets the flags of what is below.
    for (std::size_t i = 0; i < modules_.size(); ++i) modules_[i]->train(before_[i]);
  }
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<bool> before_;
};

PipeExample checked_example(PipeExample example) {
  if (example.args.kind() == Tree::Kind::List) example.args = Tree::tuple(example.args.entries());
  if (example.args.is_none()) example.args = Tree::tuple({});
  if (example.kwargs.is_none()) example.kwargs = Tree::dict({});
  if (example.args.kind() != Tree::Kind::Tuple || example.kwargs.kind() != Tree::Kind::Dict)
    throw ValueError(
        describe("trace_pipeline: the example",
                 fmt::format("args {}, kwargs {}", example.args.to_string(), example.kwargs.to_string()),
                 "args that are a tuple or list, kwargs that are a dictionary or None"));
  return example;
}

}  // namespace

struct PipeTracer {
  const StageModule& module;
  const PipeSplit& split;
  const TraceOptions& options;
  PipeState pipe = {};
  TensorAliases aliases = {};

  Pipe run(const Tree& args, const Tree& kwargs) {
    collect_model(module, pipe);
    aliases = aliases_of(module, pipe);
    pipe.device = traced_device(args, kwargs);
    pipe.autocast = autocast_state();
    pipe.default_dtype = c10::get_default_dtype_as_scalartype();
    const PipeExample example = checked_example({args, kwargs});
    PipeVariant first = trace_variant(module, pipe, aliases, example, options.device);
    const std::vector<std::size_t> places = places_of(first);
    first.cut = graph::cut_forward(first.trace, first.kinds, places);
    pipe.variants.push_back(std::move(first));
    for (const PipeExample& more : options.more) add(checked_example(more), places);
    add_evaluation(example, places);
    give_state();
    pipe.outer = outer_graph(pipe);
    pipe.outer.verify(pipe.stages());
    return Pipe(std::make_shared<const PipeState>(std::move(pipe)));
  }

  // Where operators without tensors among their arguments make some.
  at::Device traced_device(const Tree& args, const Tree& kwargs) const {
    for (const Tree& tree : {args, kwargs})
      for (const at::Tensor& tensor : tensors_of(tree))
        if (!tensor.is_meta()) return tensor.device();
    return options.device;
  }

  std::vector<std::size_t> places_of(const PipeVariant& variant) const {
    const graph::CutPlaces places(variant.trace, variant.kinds);
    if (const auto* splits = std::get_if<std::vector<SplitAt>>(&split.how_)) {
      std::vector<std::string> known, names;
      for (const ModelModule& each : pipe.modules) known.push_back(each.path);
      std::vector<std::size_t> found;
      for (const SplitAt& each : *splits) {
        const bool before = each.point == SplitPoint::Before;
        found.push_back(
            places.at({each.module, before ? graph::Split::Side::Before : graph::Split::Side::After}, known));
        names.push_back(fmt::format("{} '{}'", before ? "before" : "after", each.module));
      }
      return places.checked(std::move(found), std::move(names));
    }
    if (const int* stages = std::get_if<int>(&split.how_))
      return graph::automatic_places(places, graph::node_costs(variant.trace.graph),
                                     graph::bytes_across(variant.trace, variant.kinds), *stages,
                                     {.tolerance = options.tolerance});
    if (variant.trace.marks.empty())
      throw ValueError(
          "trace_pipeline: the forward has no marks; call pipe_split() in it where a stage ends, or split at "
          "modules");
    std::vector<std::string> names;
    for (std::size_t i = 0; i < variant.trace.marks.size(); ++i)
      names.push_back(fmt::format("pipe_split() number {}", i));
    return places.checked(variant.trace.marks, std::move(names));
  }

  // A trace with other sizes or in another mode, cut at the places that correspond to those of the first.
  PipeVariant like_first(const PipeExample& example, const std::vector<std::size_t>& places) const {
    PipeVariant variant = trace_variant(module, pipe, aliases, example, options.device);
    const graph::CutPlaces allowed(variant.trace, variant.kinds);
    std::vector<std::string> names;
    for (std::size_t i = 0; i < places.size(); ++i)
      names.push_back(fmt::format("the beginning of stage {}", i + 1));
    const std::vector<std::size_t> own =
        allowed.checked(matching_places(pipe.main().trace, places, variant.trace), std::move(names));
    variant.cut = graph::cut_forward(variant.trace, variant.kinds, own);
    if (const std::string why = difference(pipe.main(), variant); !why.empty())
      throw ValueError(
          fmt::format("trace_pipeline: the forward of another example or mode is another one: {}", why));
    refuse_a_twin(variant);
    return variant;
  }

  // A stage chooses the trace by what it is given. One that cannot tell two examples apart must compute the
  // same in both.
  void refuse_a_twin(const PipeVariant& variant) const {
    for (const PipeVariant& known : pipe.variants) {
      if (&known == &variant || !in_same_mode(known, variant) || !telling_keywords(known, variant).empty())
        continue;
      for (std::size_t stage = 1; stage < known.cut.stages.size(); ++stage)
        if (same_tensors(known, variant, stage) && !same_stage(known, variant, stage))
          throw ValueError(fmt::format(
              "trace_pipeline: stage {} is given tensors of the same sizes in two examples, but computes "
              "something else with them, beginning with '{}'; cut elsewhere, or pass on as a tensor, or as a "
              "keyword argument, what makes the difference",
              stage, variant.trace.line(variant.cut.stages[stage].first)));
    }
  }

  void add(const PipeExample& example, const std::vector<std::size_t>& places) {
    pipe.variants.push_back(like_first(example, places));
  }

  void add_evaluation(const PipeExample& example, const std::vector<std::size_t>& places) {
    const std::vector<bool>& training = pipe.main().training;
    if (!options.evaluation) {
      pipe.why_no_evaluation = "TraceOptions::evaluation is false";
      return;
    }
    if (training == std::vector<bool>(training.size(), false)) return;
    const EvaluationScope evaluation(module);
    std::vector<PipeExample> examples = {example};
    for (const PipeExample& more : options.more) examples.push_back(checked_example(more));
    for (std::size_t i = 0; i < examples.size(); ++i) {
      try {
        PipeVariant variant = like_first(examples[i], places);
        if (same_operators(variant, pipe.variants[i]))
          evaluate_with(pipe.variants[i]);
        else
          pipe.variants.push_back(std::move(variant));
      } catch (const std::exception&) {
        // Training does not need it. Whoever evaluates is told.
        pipe.why_no_evaluation = current_exception_text();
        log().debug("trace_pipeline: no evaluation: {}", pipe.why_no_evaluation);
        return;
      }
    }
  }

  // A trace in training that evaluation would repeat serves both modes.
  void evaluate_with(PipeVariant& variant) const {
    const std::vector<bool> before = variant.any_mode;
    for (std::size_t i = 0; i < variant.training.size(); ++i)
      if (variant.training[i]) variant.any_mode[i] = true;
    try {
      refuse_a_twin(variant);
    } catch (...) {
      variant.any_mode = before;
      throw;
    }
  }

  // ---- who owns what ----

  void give_state() {
    const std::size_t stages = pipe.main().cut.stages.size();
    std::vector<std::map<std::size_t, std::set<std::string>>> names(stages);
    std::set<std::size_t> used;
    for (const PipeVariant& variant : pipe.variants)
      for (std::size_t stage = 0; stage < stages; ++stage)
        for (const std::size_t index : variant.cut.stages[stage].state) {
          names[stage][index].merge(names_in(variant, variant.cut.stages[stage], index));
          used.insert(index);
        }
    for (std::size_t index = 0; index < pipe.tensors.size(); ++index)
      if (!used.contains(index)) names[stage_of_owner(pipe.names[index])][index] = all_names(index);
    for (const auto& of_stage : names) {
      std::vector<OwnedTensor>& owned = pipe.state.emplace_back();
      for (const auto& [index, of_tensor] : of_stage) {
        owned.push_back({index, {}});
        // In the order of the model.
        for (const std::string& name : ordered_names(index))
          if (of_tensor.contains(name)) owned.back().names.push_back(name);
      }
    }
  }

  std::vector<std::string> ordered_names(std::size_t index) const {
    const auto several = aliases.find(index);
    return several == aliases.end() ? std::vector<std::string>{pipe.names[index]} : several->second;
  }
  std::set<std::string> all_names(std::size_t index) const {
    const std::vector<std::string> names = ordered_names(index);
    return {names.begin(), names.end()};
  }

  // Of the names of a tensor, those whose module uses it in the stage.
  std::set<std::string> names_in(const PipeVariant& variant, const graph::CutStage& stage,
                                 std::size_t index) const {
    const graph::ValueId value = variant.trace.graph.inputs[index].value;
    const std::vector<std::string> names = ordered_names(index);
    if (names.size() == 1) return {names[0]};
    std::set<std::string> found;
    for (std::size_t i = stage.first; i < stage.end; ++i)
      graph::for_each_value(variant.trace.graph.nodes[i].arguments, [&](graph::ValueId taken) {
        if (taken != value) return;
        for (const std::string& name : names)
          if (graph::is_inside(variant.trace.module_of_node[i], graph::owner_of(name)) &&
              !graph::owner_of(name).empty())
            found.insert(name);
      });
    if (found.empty()) found.insert(names[0]);
    return found;
  }

  // The stage in which the module of a tensor that nothing uses runs, or else the module around it.
  std::size_t stage_of_owner(const std::string& name) const {
    const PipeVariant& variant = pipe.main();
    for (std::string owner = graph::owner_of(name);; owner = graph::owner_of(owner)) {
      for (std::size_t i = 0; i < variant.trace.module_of_node.size(); ++i)
        if (graph::is_inside(variant.trace.module_of_node[i], owner))
          return static_cast<std::size_t>(variant.cut.stage_of(i));
      if (owner.empty()) return 0;
    }
  }
};

Pipe trace_pipeline(const StageModule& module, const Tree& args, const Tree& kwargs, const PipeSplit& split,
                    const TraceOptions& options) {
  return PipeTracer{module, split, options}.run(args, kwargs);
}

// -------------------------------------------------------------------------------------------------------
// Pipe

const PipeState& state_of(const Pipe& pipe) { return *pipe.state_; }

int PipeState::first_user(std::size_t index) const {
  for (int stage = 0; stage < stages(); ++stage)
    for (const OwnedTensor& owned : state[static_cast<std::size_t>(stage)])
      if (owned.index == index) return stage;
  throw InvariantError("pipe: a tensor that no stage owns");
}

void check_stage(const PipeState& pipe, int stage) {
  if (stage < 0 || stage >= pipe.stages())
    throw ValueError(describe("pipe: a stage", std::to_string(stage),
                              fmt::format("0 to {}", pipe.stages() - 1),
                              "use the number of stages that the model was cut into"));
}

namespace {

std::vector<std::string> tensor_names(const PipeState& pipe, int stage, bool parameters) {
  check_stage(pipe, stage);
  std::vector<std::string> names;
  for (const OwnedTensor& owned : pipe.state[static_cast<std::size_t>(stage)])
    if (pipe.is_parameter(owned.index) == parameters)
      names.insert(names.end(), owned.names.begin(), owned.names.end());
  return names;
}

std::int64_t border_bytes(const graph::Geometry& geometry) {
  return geometry.numel() * static_cast<std::int64_t>(c10::elementSize(geometry.dtype));
}

}  // namespace

int Pipe::stages() const { return state_->stages(); }
const PipeGraph& Pipe::outer() const { return state_->outer; }

std::string Pipe::to_text() const {
  std::string text = fmt::format("pipe of {} stages\n", stages()) + outer().to_text();
  for (int stage = 0; stage < stages(); ++stage) {
    const graph::CutStage& cut = state_->main().cut.stages[static_cast<std::size_t>(stage)];
    text += fmt::format("# stage {}: {} operators, {} parameters, {} buffers\n", stage, cut.end - cut.first,
                        parameter_names(stage).size(), buffer_names(stage).size());
  }
  for (const PipeBorder& border : borders())
    text += fmt::format("# from stage {} to stage {}: {} tensors, {} bytes\n", border.from, border.to,
                        border.tensors, border.bytes);
  return text;
}

penstock::graph::Graph Pipe::stage_graph(int stage) const {
  check_stage(*state_, stage);
  const PipeVariant& variant = state_->main();
  const graph::Graph& whole = variant.trace.graph;
  const graph::CutStage& cut = variant.cut.stages[static_cast<std::size_t>(stage)];
  graph::Graph part;
  part.values = whole.values;
  part.storages = whole.storages;
  for (const auto* inputs : {&cut.state, &cut.keywords})
    for (const std::size_t input : *inputs) part.inputs.push_back(whole.inputs[input]);
  std::map<graph::ValueId, std::string> name_of;
  for (const PipeNode& node : outer().nodes)
    if (node.kind == PipeNode::Kind::Argument) name_of[whole.inputs[node.index].value] = node.name;
  if (stage == 0)
    for (const std::size_t input : variant.cut.positional) part.inputs.push_back(whole.inputs[input]);
  for (const auto* values : {&cut.main_inputs, &cut.skip_inputs})
    for (const graph::ValueId value : *values) {
      const auto argument = name_of.find(value);
      part.inputs.push_back({value, argument != name_of.end()
                                        ? argument->second
                                        : fmt::format("value{}", graph::index_of(value))});
    }
  const auto begin = whole.nodes.begin();
  part.nodes.assign(begin + static_cast<std::ptrdiff_t>(cut.first),
                    begin + static_cast<std::ptrdiff_t>(cut.end));
  std::set<graph::ValueId> taken;
  for (const graph::Node& node : part.nodes)
    graph::for_each_value(node.arguments, [&](graph::ValueId value) { taken.insert(value); });
  for (const graph::ConstantTensor& constant : whole.constants)
    if (taken.contains(constant.value)) part.constants.push_back(constant);
  if (stage + 1 == stages()) {
    part.outputs = whole.outputs;
  } else {
    for (const auto* values : {&cut.main_outputs, &cut.skip_outputs})
      for (const graph::ValueId value : *values) part.outputs.push_back(graph::Operand::of(value));
  }
  return part;
}

std::string Pipe::stage_text(int stage) const {
  check_stage(*state_, stage);
  const PipeVariant& variant = state_->main();
  const graph::CutStage& cut = variant.cut.stages[static_cast<std::size_t>(stage)];
  std::string text;
  for (std::size_t node = cut.first; node < cut.end; ++node) text += variant.trace.line(node) + "\n";
  return text;
}

std::vector<std::string> Pipe::parameter_names(int stage) const { return tensor_names(*state_, stage, true); }
std::vector<std::string> Pipe::buffer_names(int stage) const { return tensor_names(*state_, stage, false); }

std::vector<std::string> Pipe::keywords(int stage) const {
  check_stage(*state_, stage);
  std::vector<std::string> names;
  const auto at = static_cast<std::size_t>(stage);
  const auto add = [&](const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  const std::vector<PipeVariant>& variants = state_->variants;
  for (const PipeVariant& variant : variants)
    for (const std::size_t input : variant.cut.stages[at].keywords)
      add(keyword_of(variant.trace.graph.inputs[input].name));
  for (std::size_t i = 0; i < variants.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (in_same_mode(variants[i], variants[j]) && same_tensors(variants[i], variants[j], at) &&
          !same_stage(variants[i], variants[j], at))
        for (const std::string& name : telling_keywords(variants[j], variants[i])) add(name);
  return names;
}

std::vector<ParameterTie> Pipe::ties() const {
  std::vector<ParameterTie> found;
  for (std::size_t index = 0; index < state_->parameters; ++index) {
    int users = 0;
    std::vector<std::string> names;
    for (const auto& stage : state_->state)
      for (const OwnedTensor& owned : stage) {
        if (owned.index != index) continue;
        ++users;
        for (const std::string& name : owned.names)
          if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      }
    if (users > 1) found.push_back(tie(std::move(names)));
  }
  return found;
}

std::vector<SkipTensor> Pipe::skips(int copies) const {
  std::vector<SkipTensor> found;
  for (int copy = 0; copy < copies; ++copy)
    for (const graph::Hop& hop : state_->main().cut.hops)
      if (hop.skips())
        found.push_back({fmt::format("value{}", graph::index_of(hop.value)), hop.from + copy * stages(),
                         hop.to + copy * stages()});
  return found;
}

std::vector<PipeBorder> Pipe::borders() const {
  std::map<std::pair<int, int>, PipeBorder> found;
  for (const graph::Hop& hop : state_->main().cut.hops) {
    PipeBorder& border =
        found.try_emplace({hop.from, hop.to}, PipeBorder{hop.from, hop.to, 0, 0}).first->second;
    ++border.tensors;
    border.bytes += border_bytes(state_->main().geometry(hop.value));
  }
  std::vector<PipeBorder> all;
  for (const auto& [stages_of, border] : found) all.push_back(border);
  return all;
}

PipeInfo Pipe::info(bool training) const { return {outer().to_text(), stages(), training}; }

void Pipe::check_equal(const comm::Group& group) const {
  std::string text = to_text();
  for (int stage = 0; stage < stages(); ++stage) text += stage_text(stage);
  at::Tensor mine = at::empty({1}, at::kLong), all = at::empty({group.size()}, at::kLong);
  *mine.data_ptr<std::int64_t>() = static_cast<std::int64_t>(checksum64(text));
  group.all_gather(all, mine, {.label = "agreement on a traced pipeline", .timeout = {}}).wait();
  for (int i = 1; i < group.size(); ++i)
    if (all.data_ptr<std::int64_t>()[i] != all.data_ptr<std::int64_t>()[0])
      throw PipeliningMetadataError(
          describe("pipe: the traces of the ranks",
                   fmt::format("another one on rank {} than on rank {}", group.rank_at(i), group.rank_at(0)),
                   "the same model, example and split on all ranks",
                   "compare Pipe::to_text() and stage_text() of these ranks"));
}

}  // namespace penstock
