#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "penstock/base/warnings.h"
#include "penstock/errors.h"
#include "penstock/graph/cache/byte_stream.h"
#include "penstock/graph/cache/cache_key.h"
#include "penstock/graph/compiler/built_in_compilers.h"
#include "penstock/graph/compiler/generated_kernel.h"
#include "penstock/graph/fused/fused_graph.h"
#include "penstock/mode.h"

namespace penstock::graph {

// Sources of a graph, which are compiled at the same time.
constexpr std::size_t kMostSources = 8;

// Objects of this process, by compiler and source: several graphs, and the ranks of a world of threads, have
// the same ones.
class KnownCode {
 public:
  static KnownCode& of_process() {
    static KnownCode known;
    return known;
  }
  std::shared_ptr<const FusedGraph::Code> find(const std::string& identity, const std::string& source) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(key(identity, source));
    return found == known_.end() ? nullptr : found->second.lock();
  }
  void add(const std::string& identity, const std::shared_ptr<const FusedGraph::Code>& code) {
    const std::lock_guard lock(mutex_);
    for (auto it = known_.begin(); it != known_.end();)
      it = it->second.expired() ? known_.erase(it) : std::next(it);
    known_[key(identity, code->source)] = code;
  }
  // Sources that do not compile are not tried again.
  std::string problem_of(const std::string& identity, const std::string& source) {
    const std::lock_guard lock(mutex_);
    const auto found = failed_.find(key(identity, source));
    return found == failed_.end() ? std::string() : found->second;
  }
  void add_problem(const std::string& identity, const std::string& source, const std::string& problem) {
    const std::lock_guard lock(mutex_);
    failed_[key(identity, source)] = problem;
  }

 private:
  static std::string key(const std::string& identity, const std::string& source) {
    return KeyBuilder().field("compiler", identity).field("source", source).key().text();
  }
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<const FusedGraph::Code>> known_;
  std::map<std::string, std::string> failed_;
};

class FusedCompilation {
 public:
  FusedCompilation(const Graph& graph, const FusedCompileOptions& options)
      : graph_(graph), options_(options) {}

  std::shared_ptr<const CompiledGraph> run(const std::vector<std::vector<std::uint8_t>>* stored) {
    try {
      if (auto made = fused(stored)) return made;
    } catch (const std::exception& error) {
      // Whatever it is, the operators can do without generated code.
      warn_once("graph", fmt::format("the compiler \"fused\" runs the operators instead: {}", error.what()));
    }
    return std::make_shared<const Executor>(graph_,
                                            ExecutorOptions{.donated_inputs = options_.donated_inputs});
  }

 private:
  // Null if there is nothing to fuse.
  std::shared_ptr<const CompiledGraph> fused(const std::vector<std::vector<std::uint8_t>>* stored) {
    const FusionPlan plan = plan_fusion(graph_, options_.fusion);
    if (plan.groups.empty()) return nullptr;
    const CodeTargets targets = targets_of(plan);
    const FusedSources sources = sources_of(plan, targets, kMostSources);
    const auto code = compiled(targets, sources, stored);
    std::shared_ptr<FusedGraph> made(new FusedGraph());
    made->graph_ = graph_;
    made->donated_inputs_ = options_.donated_inputs;
    made->code_ = code;
    for (std::size_t g = 0; g < plan.groups.size(); ++g) {
      const FusedSources::Place& place = sources.places[g];
      const FusedGroup& group = plan.groups[g];
      made->names_.push_back(place.function);
      made->kernels_.push_back(std::make_unique<const FusedKernel>(
          made->graph_, group, place.text, *targets.at(group.device.str()),
          code[place.source]->loaded->call(group.kernel, place.function), options_.kernels));
    }
    const Graph fused = with_groups(graph_, plan, [&](std::size_t group, Operand inputs, Operand outputs) {
      return generated_node(*made->kernels_[group], std::move(inputs), std::move(outputs));
    });
    made->fused_ =
        std::make_unique<const Executor>(fused, ExecutorOptions{.donated_inputs = options_.donated_inputs});
    return made;
  }

  // Throws StateError, with where source and output were saved, if something does not work.
  static std::vector<std::shared_ptr<const FusedGraph::Code>> compiled(
      const CodeTargets& targets, const FusedSources& sources,
      const std::vector<std::vector<std::uint8_t>>* stored) {
    std::vector<std::shared_ptr<const FusedGraph::Code>> code(sources.sources.size());
    for (const auto& [device, target] : targets) compile_for(device, *target, sources, stored, code);
    return code;
  }
  // Those of one device.
  static void compile_for(const std::string& device, const CodeTarget& target, const FusedSources& all,
                          const std::vector<std::vector<std::uint8_t>>* stored,
                          std::vector<std::shared_ptr<const FusedGraph::Code>>& code) {
    KnownCode& known = KnownCode::of_process();
    const std::string identity = target.identity();
    std::vector<std::string> missing;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < code.size(); ++i) {
      if (all.devices[i].str() != device) continue;
      const std::string& source = all.sources[i];
      code[i] = known.find(identity, source);
      if (!code[i] && stored && i < stored->size()) try {
          code[i] = std::make_shared<const FusedGraph::Code>(
              FusedGraph::Code{source, (*stored)[i], target.load((*stored)[i])});
        } catch (const StateError&) {
          // Compiled again.
        }
      if (code[i]) continue;
      if (const std::string problem = known.problem_of(identity, source); !problem.empty())
        throw StateError(problem);
      missing.push_back(source);
      places.push_back(i);
    }
    if (missing.empty()) return;
    std::vector<ObjectCode> objects = target.compile(missing);
    for (std::size_t i = 0; i < objects.size(); ++i) {
      std::shared_ptr<const GeneratedCode> loaded;
      std::string problem = objects[i].problem;
      try {
        if (problem.empty()) loaded = target.load(objects[i].bytes);
      } catch (const StateError& error) {
        problem = error.what();
      }
      if (!problem.empty()) {
        const std::string message = fmt::format(
            "{} {}; {}", target.compiler(), problem,
            save_for_inspection(missing[i], objects[i].output.empty() ? problem : objects[i].output));
        known.add_problem(identity, missing[i], message);
        throw StateError(message);
      }
      code[places[i]] = std::make_shared<const FusedGraph::Code>(
          FusedGraph::Code{missing[i], std::move(objects[i].bytes), std::move(loaded)});
      known.add(identity, code[places[i]]);
    }
  }

  const Graph& graph_;
  const FusedCompileOptions& options_;
};

namespace {

constexpr std::uint32_t kFusedVersion = 2;  // of the choice of groups, and of the stored form

class FusedCompiler final : public GraphCompiler {
 public:
  std::string_view name() const override { return kFusedCompiler; }

  std::shared_ptr<const CompiledGraph> compile(const Graph& graph,
                                               const CompileRequest& request) const override {
    return compiled(graph, request, nullptr);
  }

  std::string version() const override { return fmt::format("{}.{}", kFusedVersion, code_targets_version()); }

  std::optional<std::vector<std::uint8_t>> artifact(const CompiledGraph& compiled) const override {
    const FusedGraph* fused = fused_graph(compiled);
    if (!fused) return std::nullopt;
    ByteWriter out;
    out.count(fused->code().size());
    for (const auto& code : fused->code()) {
      out.text(source_key(code->source));
      out.count(code->object.size());
      out.raw(code->object);
    }
    return std::move(out.bytes);
  }

  std::shared_ptr<const CompiledGraph> load(const Graph& graph, const CompileRequest& request,
                                            std::span<const std::uint8_t> code) const override {
    try {
      ByteReader in(code, "generated code");
      std::vector<std::string> keys(in.count());
      std::vector<std::vector<std::uint8_t>> objects;
      for (std::string& key : keys) {
        key = in.text();
        const auto object = in.take(in.count());
        objects.emplace_back(object.begin(), object.end());
      }
      // Only what would be generated now.
      const FusionPlan plan = plan_fusion(graph, options_of(request).fusion);
      const FusedSources sources = sources_of(plan, targets_of(plan), kMostSources);
      if (sources.sources.size() != keys.size()) return nullptr;
      for (std::size_t i = 0; i < keys.size(); ++i)
        if (source_key(sources.sources[i]) != keys[i]) return nullptr;
      return compiled(graph, request, &objects);
    } catch (const Error&) {
      return nullptr;  // compiled again
    }
  }

 private:
  static std::string source_key(const std::string& source) {
    return KeyBuilder().field("source", source).key().text();
  }
  static FusedCompileOptions options_of(const CompileRequest& request) {
    FusedCompileOptions options;
    options.fusion.lowering.exact = request.exact;
    options.kernels = {.exact = request.exact, .check = request.check};
    options.donated_inputs = request.donated_inputs;
    return options;
  }
  static std::shared_ptr<const CompiledGraph> compiled(const Graph& graph, const CompileRequest& request,
                                                       const std::vector<std::vector<std::uint8_t>>* stored) {
    return compile_fused(graph, options_of(request), stored);
  }
};

}  // namespace

std::shared_ptr<const GraphCompiler> make_fused_compiler() { return std::make_shared<const FusedCompiler>(); }

std::shared_ptr<const CompiledGraph> compile_fused(const Graph& graph, const FusedCompileOptions& options,
                                                   const std::vector<std::vector<std::uint8_t>>* stored) {
  return FusedCompilation(graph, options).run(stored);
}

CodeTargets targets_of(const FusionPlan& plan) {
  CodeTargets targets;
  for (const FusedGroup& group : plan.groups)
    if (auto& target = targets[group.device.str()]; !target) target = code_target(group.device);
  return targets;
}

FusedSources sources_of(const FusionPlan& plan, const CodeTargets& targets, std::size_t most_sources) {
  constexpr std::size_t kFunctionsOfASource = 4;  // at least, as long as there are several
  FusedSources made;
  made.places.resize(plan.groups.size());
  for (const auto& [device, target] : targets) {
    std::map<std::string, std::size_t> known;  // text of a kernel to its number
    std::vector<NamedKernel> kernels;
    std::vector<std::pair<std::size_t, std::size_t>> kernel_of;  // group, kernel
    for (std::size_t g = 0; g < plan.groups.size(); ++g) {
      const FusedGroup& group = plan.groups[g];
      if (group.device.str() != device) continue;
      const auto [place, is_new] = known.try_emplace(to_text(group.kernel), kernels.size());
      if (is_new) kernels.push_back({fmt::format("k{}", kernels.size()), group.kernel, group.operators});
      kernel_of.emplace_back(g, place->second);
    }
    const std::size_t sources =
        std::clamp<std::size_t>(kernels.size() / kFunctionsOfASource, kernels.empty() ? 0 : 1, most_sources);
    // Neighbours are of similar size, so that each source gets some of each.
    std::vector<std::vector<NamedKernel>> parts(sources);
    for (std::size_t k = 0; k < kernels.size(); ++k) parts[k % sources].push_back(kernels[k]);
    const std::size_t first = made.sources.size();
    for (const std::vector<NamedKernel>& part : parts) {
      made.sources.push_back(target->emit(part));
      made.devices.emplace_back(device);
    }
    for (const auto& [group, k] : kernel_of)
      made.places[group] = {first + k % sources, kernels[k].name, target->emit_function(kernels[k])};
  }
  return made;
}

std::vector<c10::IValue> FusedGraph::run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const {
  if (!current_mode()) return (*fused_)(std::move(inputs), sizes);
  // A mode sees the operators as they were captured.
  {
    const std::lock_guard lock(mutex_);
    if (!plain_)
      plain_ = std::make_unique<const Executor>(graph_, ExecutorOptions{.donated_inputs = donated_inputs_});
  }
  return (*plain_)(std::move(inputs), sizes);
}

std::vector<FusedKernelReport> FusedGraph::kernels() const {
  std::vector<FusedKernelReport> reports;
  for (std::size_t i = 0; i < kernels_.size(); ++i) {
    const FusedKernel& kernel = *kernels_[i];
    const LoopForm form = kernel.group().kernel.form;
    reports.push_back({.name = names_[i],
                       .operators = kernel.group().operators,
                       .form = form == LoopForm::Elements ? "elements"
                               : form == LoopForm::Rows   ? "rows"
                                                          : "columns",
                       .bytes = kernel.group().kernel.bytes_moved(),
                       .calls = kernel.calls(),
                       .calls_of_operators = kernel.calls_of_operators(),
                       .seconds = 1e-9 * static_cast<double>(kernel.nanoseconds()),
                       .source = kernel.source()});
  }
  return reports;
}

void FusedGraph::measure(bool on) const {
  for (const auto& kernel : kernels_) {
    kernel->forget_times();
    kernel->measure(on);
  }
}

const FusedGraph* fused_graph(const CompiledGraph& compiled) {
  return dynamic_cast<const FusedGraph*>(&compiled);
}

}  // namespace penstock::graph
