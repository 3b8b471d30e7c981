#include "penstock/compiled_stage.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/graph/run/call_guard.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/graph/run/leaf_values.h"
#include "penstock/graph/run/module_state.h"
#include "penstock/graph/run/spec_codec.h"
#include "penstock/mode.h"
#include "penstock/pipeline/compiled/prepare_stage.h"
#include "penstock/pipeline/compiled/step_independence.h"
#include "penstock/pipeline/stage/sharded_modules.h"
#include "penstock/shard/state/whole_forward_scope.h"
#include "penstock/step_context.h"
#include "penstock/torch/dispatch/any_operator_hook.h"
#include "penstock/torch/fake/fake_watch.h"

namespace penstock {
namespace {

using graph::Values;
using Clock = std::chrono::steady_clock;

// The part of the step that a capture is valid for.
std::string text_of(const StepContext& step, bool uses_rows) {
  std::string text = fmt::format("{} microbatches", step.microbatches);
  if (step.rows && uses_rows)
    text += fmt::format(", rows {} from {} of {}", step.rows->count, step.rows->first, step.rows->global);
  if (step.rows && !uses_rows) text += fmt::format(", {} of {} rows", step.rows->count, step.rows->global);
  if (!step.running) text += ", outside of a step";
  if (!step.microbatch) text += ", of the whole step";
  if (step.recorded) text += ", recorded";
  return text;
}

// Microbatches are views of one batch at different offsets, and several arguments may be views of the same
// tensor, which a graph would tell apart. Without gradients they are small: tokens, masks. All microbatches
// are copied, the first one too: they have the same strides then, and none of them can be written.
class OwnMemory {
 public:
  explicit OwnMemory(const std::vector<Tree>& leaves) {
    for (const Tree& leaf : leaves)
      if (concerns(leaf)) ++uses_[storage_of(leaf.tensor())];
  }
  // Replaces a leaf that has no memory of its own by a copy; returns whether it did.
  bool place(Tree& leaf) const {
    if (!concerns(leaf)) return false;
    const at::Tensor& tensor = leaf.tensor();
    if (uses_.at(storage_of(tensor)) == 1 && !is_part(tensor)) return false;
    leaf = Tree(tensor.clone());
    return true;
  }

 private:
  static bool concerns(const Tree& leaf) {
    if (!leaf.is_tensor()) return false;
    const at::Tensor& tensor = leaf.tensor();
    return !tensor.requires_grad() && !is_wrapper(tensor) && tensor.has_storage();
  }
  static const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  }
  static bool is_part(const at::Tensor& tensor) {
    return tensor.storage_offset() != 0 ||
           tensor.storage().nbytes() > static_cast<std::size_t>(tensor.numel()) * tensor.itemsize();
  }

  std::unordered_map<const c10::StorageImpl*, int> uses_;
};

std::string flags_of(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  std::string flags;
  for (const auto& module : modules) flags += module->is_training() ? '1' : '0';
  return flags;
}

class CompiledStage {
 public:
  CompiledStage(StageModule module, CompiledStageOptions options)
      : module_(std::move(module)), options_(std::move(options)) {}

  Tree forward(const Tree& args, const Tree& kwargs) {
    const auto step = StepContext::current();
    // A mode is to see the operators of the module: those of a search for bad values, of an outer capture.
    if (step->trial || step->recompute || step->captured || current_mode())
      return module_.forward(args, kwargs);
    collect_state();
    const WholeForwardScope gathered(sharded_->roots());
    const Call call = call_with(args, kwargs, *step);
    const Values values = run(call, [&] { return (*call.entry->compiled)(call.inputs); });
    const auto spec = static_cast<std::size_t>(values.back().toInt());
    const Tree both = unflatten_tree(graph::leaves_of_values(std::span(values).first(values.size() - 1)),
                                     call.entry->results->at(spec));
    if (options_.set_values_left) options_.set_values_left(both[1]);
    return both[0];
  }

  void prepare(const Tree& args, const Tree& kwargs) {
    const auto step = StepContext::current();
    collect_state();
    const WholeForwardScope gathered(sharded_->roots());
    const Call call = call_with(args, kwargs, *step);
    run(call, [&] {
      call.entry->compiled->prepare(call.inputs);
      return Values();
    });
  }

 private:
  // One kind of call.
  struct Entry {
    TreeSpec spec;
    std::string flags;  // training flags of all submodules
    bool grad = true;
    std::shared_ptr<std::vector<TreeSpec>> results;  // the structures that forward has returned so far
    graph::Function function;
    graph::Convention convention;
    std::unique_ptr<graph::Compiled> compiled;
    std::optional<graph::CallGuard> latest;     // of the latest capture
    const std::vector<char>* copied = nullptr;  // of the call that is running
  };

  struct Call {
    Entry* entry;
    Values inputs;
    std::vector<char> copied;  // by leaf of the arguments: whether it is a copy
  };

  Call call_with(const Tree& args, const Tree& kwargs, const StepContext& step) {
    FlatTree flat = flatten_tree(Tree::tuple({args, kwargs}));
    Call call{.entry = &entry_for(flat.spec), .inputs = Values(state_.begin(), state_.end()), .copied = {}};
    const OwnMemory own(flat.leaves);
    for (Tree& leaf : flat.leaves) call.copied.push_back(own.place(leaf));
    call.inputs.emplace_back(text_of(step, options_.uses_rows));
    for (c10::IValue& leaf : graph::values_of_leaves(flat.leaves)) call.inputs.push_back(std::move(leaf));
    return call;
  }

  // Modules, parameters and buffers may be replaced between calls (replace_module).
  void collect_state() {
    graph::ModuleParts parts;
    for (const auto& module : module_.modules()) parts.add(*module);
    if (sharded_ && parts == parts_) return;
    was_replaced_ = sharded_.has_value();
    sharded_.reset();
    entries_.clear();
    all_modules_.clear();
    names_.clear();
    state_.clear();
    std::unordered_set<const c10::TensorImpl*> known;
    const bool several = module_.modules().size() > 1;
    for (const bool parameters : {true, false})
      for (std::size_t i = 0; i < module_.modules().size(); ++i) {
        const torch::nn::Module& module = *module_.modules()[i];
        for (const auto& item : parameters ? module.named_parameters() : module.named_buffers()) {
          if (!item.value().defined() || !known.insert(item.value().unsafeGetTensorImpl()).second) continue;
          names_.push_back(several ? fmt::format("modules[{}].{}", i, item.key()) : item.key());
          state_.push_back(item.value());
        }
      }
    for (const auto& module : module_.modules())
      for (const auto& each : module->modules()) all_modules_.push_back(each);
    parts_ = std::move(parts);
    sharded_.emplace(module_);
  }

  Entry& entry_for(const TreeSpec& spec) {
    const std::string flags = flags_of(all_modules_);
    const bool grad = c10::GradMode::is_enabled();
    for (const auto& entry : entries_)
      if (entry->grad == grad && entry->flags == flags && entry->spec == spec) return *entry;
    auto entry = std::make_unique<Entry>();
    entry->spec = spec;
    entry->flags = flags;
    entry->grad = grad;
    entry->results = std::make_shared<std::vector<TreeSpec>>();
    const std::size_t first = state_.size() + 1;
    // Backward may outlive this object, and run it again for a second derivative.
    entry->function = [module = module_, values_left = options_.values_left, modules = all_modules_, flags,
                       spec, first, results = entry->results](const Values& inputs) {
      if (flags_of(modules) != flags)
        throw StateError(
            "compiled_stage: a training flag of a module was changed between forward and the second "
            "derivative, which runs the stage again; call train() or eval() after it");
      const Tree given = unflatten_tree(graph::leaves_of_values(std::span(inputs).subspan(first)), spec);
      // A capture runs under modes. A second derivative runs in the step of its forward.
      StepContext step = StepContext::current()->recomputation();
      if (current_mode()) step.recompute = false, step.captured = true;
      const StepGuard guard(std::move(step));
      const Tree result = module.forward(given[0], given[1]);
      FlatTree flat = flatten_tree(Tree::tuple({result, values_left ? values_left() : Tree()}));
      Values values = graph::values_of_leaves(flat.leaves);
      const auto known = std::find(results->begin(), results->end(), flat.spec);
      values.emplace_back(static_cast<std::int64_t>(known - results->begin()));
      if (known == results->end()) results->push_back(std::move(flat.spec));
      return values;
    };
    entry->convention = {state_.size(), names_};
    entry->convention.names.emplace_back("the step");
    for (std::string& path : spec.leaf_paths("")) entry->convention.names.push_back(argument_name(path));
    entry->compiled = std::make_unique<graph::Compiled>(entry->function, options_.compile, entry->convention,
                                                        identity_of(*entry));
    entries_.push_back(std::move(entry));
    return *entries_.back();
  }

  // For the compile cache and artifacts. A loaded graph is not checked again: only what has passed the checks
  // is kept.
  graph::FunctionIdentity identity_of(Entry& entry) {
    const auto results = entry.results;
    return {.text = fmt::format("stage, training {}, {}, rows {}, {}", entry.flags, entry.spec.to_string(),
                                options_.uses_rows ? "used" : "not used", fmt::join(names_, " ")),
            .save = [results] { return graph::encode_specs(*results); },
            .restore =
                [results](std::span<const std::uint8_t> bytes) {
                  std::vector<TreeSpec> stored = graph::decode_specs(bytes);
                  const std::size_t common = std::min(stored.size(), results->size());
                  // Results refer to their structure by its place in the list.
                  if (!std::equal(stored.begin(), stored.begin() + static_cast<std::ptrdiff_t>(common),
                                  results->begin()))
                    return false;
                  if (stored.size() > results->size()) *results = std::move(stored);
                  return true;
                },
            .check = [this, of = &entry](const graph::FunctionCapture& capture,
                                         const Values& inputs) { check_capture(*of, capture, inputs); },
            .check_run =
                [this, of = &entry](const graph::FunctionCapture& capture) { check_writes(*of, capture); }};
  }

  void check_capture(const Entry& entry, const graph::FunctionCapture& capture, const Values& inputs) const {
    check_writes(entry, capture);
    if (const auto step = StepContext::current(); step->running)
      check_independence_of_step(entry.function, inputs, entry.convention, *step, options_.uses_rows);
  }

  // A write would be lost in the copy. Whether an argument is copied differs from call to call of one graph.
  void check_writes(const Entry& entry, const graph::FunctionCapture& capture) const {
    for (std::size_t i = 0; entry.copied && i < entry.copied->size(); ++i)
      if (const std::size_t input = state_.size() + 1 + i;
          (*entry.copied)[i] != 0 && capture.user_meta().inputs[input].mutates_data)
        throw NotImplemented(fmt::format(
            "compiled_stage: forward writes {}, which is a part of a larger tensor (a microbatch of a batch) "
            "or shares memory with another argument; write a copy of it",
            entry.convention.name_of(input)));
  }

  // "[0][1]" -> "args[1]", "[1]['mask']" -> "kwargs['mask']"
  static std::string argument_name(const std::string& path) {
    return (path.starts_with("[0]") ? "args" : "kwargs") + path.substr(3);
  }

  template <class Body>
  Values run(const Call& call, const Body& body) {
    Entry& entry = *call.entry;
    const std::size_t captures = entry.compiled->captures(), loaded = entry.compiled->loaded();
    const auto begin = Clock::now();
    // Tensors that the module made while it was captured, and keeps, have no values.
    FakeWatch watch;
    Values values;
    {
      const FakeWatch::Guard watching(watch);
      // Everything is gathered and gradients have their way: operators on sharded parameters need nothing
      // more, and a capture replaces their data for a while.
      const NoAnyHookGuard no_hook;
      entry.copied = &call.copied;
      values = body();
      entry.copied = nullptr;
    }
    if (entry.compiled->captures() != captures)
      report(entry, call.inputs, entry.compiled->loaded() != loaded, begin);
    for (const at::Tensor& kept : watch.survivors())
      mark_leftover(kept,
                    "a module kept it from the capture of its stage as a graph, which computes nothing; "
                    "return it (values_left of compiled_stage, values_left_by_forward of ModelStage)");
    return values;
  }

  void report(Entry& entry, const Values& inputs, bool was_loaded, Clock::time_point begin) {
    const graph::Compiled& compiled = *entry.compiled;
    StageCapture capture{.graph = compiled.captures(),
                         .graphs = 0,
                         .nodes = compiled.joint(compiled.captures() - 1).graph.nodes.size(),
                         .deferred = compiled.partition(compiled.captures() - 1).deferred.size()};
    capture.made_in_seconds =
        std::chrono::duration<double>(compiled.made_in(compiled.captures() - 1)).count();
    if (was_loaded)
      capture.source = options_.compile.cache.artifact ? GraphSource::Artifact : GraphSource::Cache;
    for (const auto& each : entries_) capture.graphs += each->compiled->captures();
    if (entry.latest)
      capture.reason = entry.latest->difference(inputs);
    else if (std::exchange(was_replaced_, false))
      capture.reason = "a module, a parameter or a buffer of the stage was replaced";
    entry.latest.emplace(inputs, entry.convention);
    capture.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (options_.captured) options_.captured(capture);
    if (capture.graph > options_.max_graphs)
      throw StateError(
          fmt::format("compiled_stage: captured {} times for one kind of call, at most {} are allowed: {}; "
                      "make this equal in all "
                      "calls, mark the dim as dynamic (CompileOptions::dynamic), or raise max_graphs",
                      capture.graph, options_.max_graphs, capture.reason));
  }

  StageModule module_;
  CompiledStageOptions options_;
  graph::ModuleParts parts_;   // of which everything below was collected
  bool was_replaced_ = false;  // since the latest capture
  std::vector<std::shared_ptr<torch::nn::Module>> all_modules_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> state_;  // parameters, then buffers
  std::optional<ShardedModules> sharded_;
  std::vector<std::unique_ptr<Entry>> entries_;
};

}  // namespace

PreparableStage preparable_stage(StageModule module, CompiledStageOptions options) {
  if (static_cast<bool>(options.values_left) != static_cast<bool>(options.set_values_left))
    throw ValueError(
        "compiled_stage: only one of values_left and set_values_left is given; give both or neither");
  StageModule::Modules modules = module.modules();
  auto compiled = std::make_shared<CompiledStage>(std::move(module), std::move(options));
  return {.module = StageModule(
              [compiled](const Tree& args, const Tree& kwargs) { return compiled->forward(args, kwargs); },
              std::move(modules)),
          .prepare = [compiled](const Tree& args, const Tree& kwargs) { compiled->prepare(args, kwargs); }};
}

StageModule compiled_stage(StageModule module, CompiledStageOptions options) {
  return preparable_stage(std::move(module), std::move(options)).module;
}

}  // namespace penstock
