#include "penstock/train/job/write_artifact.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/cuda.h>

#include <array>
#include <chrono>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/microbatch.h"
#include "penstock/pipeline/infer/stage_trial.h"
#include "penstock/pipeline/stage/stage_state.h"
#include "penstock/step_context.h"
#include "penstock/torch/tree/dense_layout.h"
#include "penstock/train/config/configured_schedule.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/host_check.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/train/job/process_memory.h"
#include "penstock/train/job/stage_copies.h"
#include "penstock/train/job/stage_graphs.h"
#include "penstock/train/job/step_inputs.h"
#include "penstock/train/report/elapsed.h"
#include "penstock/world.h"

namespace penstock::train {
namespace {

namespace fs = std::filesystem;

// A kind of forward that a run has.
struct ForwardKind {
  const char* name;
  bool training;
};
constexpr std::array<ForwardKind, 2> kForwardKinds{{{"training", true}, {"validation", false}}};

// The device of a rank in training: with layout.device = cuda on hosts that have as many GPUs, and as many
// ranks, as this machine has GPUs; else as if all ranks ran here.
at::Device device_of_rank(const LayoutConfig& layout, const comm::World& world) {
  const int gpus = torch::cuda::is_available() ? static_cast<int>(torch::cuda::device_count()) : 0;
  if (layout.device != "cuda" || gpus == 0) return configured_device(layout, world);
  return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(world.rank() % gpus));
}

// The stages of one pipeline, in order: one data-parallel and one tensor-parallel rank.
class PipelineCompiler {
 public:
  PipelineCompiler(const TrainConfig& config, const schedule::Schedule& schedule,
                   const models::TrainableModel& model, std::shared_ptr<graph::Artifact> artifact,
                   WrittenArtifact& written,
                   const std::function<void(const ForwardKind&, const std::string&)>& begin)
      : config_(config),
        schedule_(schedule),
        model_(model),
        artifact_(std::move(artifact)),
        written_(written),
        begin_(begin) {}

  void compile(std::int64_t dp, std::int64_t tp) {
    sent_.clear();
    for (int stage = 0; stage < schedule_.stages().stages(); ++stage) compile_stage(stage, dp, tp);
  }

 private:
  void compile_stage(int index, std::int64_t dp, std::int64_t tp) {
    const schedule::StageMap& map = schedule_.stages();
    const LayoutConfig& of = config_.layout;
    const std::int64_t rank = (map.rank_of(index) * of.dp + dp) * of.tp + tp;
    const comm::World world =
        comm::World::fake_with_real_names(static_cast<int>(rank), static_cast<int>(of.ranks));
    const RankLayout layout(world, of);
    const at::Device device = device_of_rank(of, world);
    const StageGraphs graphs = stage_graphs_of(layout, config_, schedule_, model_, artifact_);
    const SingleStage stage = make_single_stage(layout, config_, schedule_, model_, index, device, graphs,
                                                [this](const StageCapture& capture) {
                                                  ++written_.graphs;
                                                  written_.nodes += capture.nodes;
                                                });
    for (const ForwardKind& kind : kForwardKinds) {
      begin_(kind, graphs.name_of(index));
      stage.module->train(kind.training);
      compile_kind(kind, stage, layout, device);
    }
  }

  void compile_kind(const ForwardKind& kind, const SingleStage& stage, const RankLayout& layout,
                    at::Device device) {
    const schedule::StageMap& map = schedule_.stages();
    const int index = stage.stage.index();
    const Microbatches batch = microbatch_of(layout, map.is_first(index), device);
    const Tree& keywords = batch.kwargs.front();
    Tree args = batch.args.front();
    StageTrial trial(stage.stage, {.has_backward = kind.training, .ends = map.is_last(index)});
    if (map.is_first(index)) {
      trial.forward(args, keywords);
    } else {
      const TensorMetas& inputs = sent_.at({index - 1, kind.training});
      trial.forward(inputs, keywords);
      args = received(inputs, stage.stage, kind.training);
    }
    TensorMetas outputs = trial.outputs();
    trial.end();
    // Stages of one rank hand their tensors over as they are.
    if (!map.is_last(index) && map.rank_of(index + 1) != map.rank_of(index))
      for (TensorMeta& meta : outputs) meta = dense_meta(meta);
    sent_[{index, kind.training}] = std::move(outputs);
    const StepGuard step(some_step(layout));
    const at::AutoGradMode grad_mode(kind.training);
    stage.prepare(args, keywords);
  }

  Microbatches microbatch_of(const RankLayout& layout, bool first, at::Device device) const {
    const schedule::StageMap& map = schedule_.stages();
    const std::vector<models::StagePart> parts =
        configured_parts(config_, model_.plan(), parts_of_model(map));
    std::vector<models::StagePart> own;
    for (const int stage : map.stages_of(layout.pp()))
      own.push_back(parts[static_cast<std::size_t>(part_of_stage(map, stage))]);
    const models::StageInputs inputs =
        blank_step_inputs(config_, model_, structure_needs(config_, own), device);
    return split_microbatches(first ? inputs.args : Tree::tuple({}), inputs.keywords, 1);
  }

  // What arrives from the stage before, without values.
  static Tree received(const TensorMetas& metas, const PipelineStage& stage, bool training) {
    std::vector<Tree> inputs;
    for (const TensorMeta& meta : metas) {
      at::Tensor input = tensor_from_local(stage, make_raw_tensor(meta, stage.device()), meta);
      if (!is_distributed(meta)) input = input.detach();
      input.set_requires_grad(training && requires_grad(meta));
      inputs.emplace_back(std::move(input));
    }
    return Tree::tuple(std::move(inputs));
  }

  // Of any step: graphs do not depend on which.
  StepContext some_step(const RankLayout& layout) const {
    StepContext context;
    context.seed = static_cast<std::uint64_t>(config_.training.seed);
    context.microbatch = 0;
    context.microbatches = schedule_.microbatches();
    context.rows = rows_of_microbatch(layout, config_);
    return context;
  }

  const TrainConfig& config_;
  const schedule::Schedule& schedule_;
  const models::TrainableModel& model_;
  std::shared_ptr<graph::Artifact> artifact_;
  WrittenArtifact& written_;
  const std::function<void(const ForwardKind&, const std::string&)>& begin_;
  std::map<std::pair<int, bool>, TensorMetas> sent_;  // by stage, and whether in training
};

std::uint64_t folder_bytes(const fs::path& folder) {
  std::uint64_t bytes = 0;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code none;
    const auto size = fs::file_size(it->path(), none);
    if (!none) bytes += size;
  }
  return bytes;
}

}  // namespace

WrittenArtifact write_artifact(const TrainConfig& config, const fs::path& folder,
                               const std::function<void(const ArtifactProgress&)>& progress) {
  const auto begin = std::chrono::steady_clock::now();
  if (config.training.compile == "off")
    throw ConfigError(describe("training.compile", fmt::format("\"{}\"", config.training.compile),
                               "graph or fused, for stages that can be compiled beforehand",
                               "set training.compile to \"graph\""));
  const schedule::Schedule schedule = configured_schedule(config.layout);
  const std::shared_ptr<models::TrainableModel> model = configured_model(config);
  check_stages(config, *model, schedule);
  const at::Device device =
      device_of_rank(config.layout, comm::World::fake(0, static_cast<int>(config.layout.ranks)));
  require_precision(config, device);
  if (device.is_cpu()) require_memory(minimum_memory_of_stage(config), machine_memory_bytes());
  const auto artifact =
      graph::Artifact::create(folder, artifact_configuration(config, schedule, *model),
                              {.device = device.str(), .compiler = graph_compiler_of(config)});
  WrittenArtifact written;
  written.stages = static_cast<std::size_t>(schedule.stages().stages());
  const std::int64_t replicas = replicas_have_own_graphs(config) ? config.layout.dp : 1;
  ArtifactProgress now{.doing = {},
                       .done = 0,
                       .graphs = written.stages * kForwardKinds.size() *
                                 static_cast<std::size_t>(replicas * config.layout.tp)};
  const std::function<void(const ForwardKind&, const std::string&)> next = [&](const ForwardKind& kind,
                                                                               const std::string& stage) {
    now.doing = fmt::format("{}: {}", stage, kind.name);
    if (progress) progress(now);
    ++now.done;
  };
  PipelineCompiler compiler(config, schedule, *model, artifact, written, next);
  for (std::int64_t dp = 0; dp < replicas; ++dp)
    for (std::int64_t tp = 0; tp < config.layout.tp; ++tp) compiler.compile(dp, tp);
  artifact->finish();
  written.bytes = folder_bytes(folder);
  written.seconds = seconds_since(begin);
  return written;
}

}  // namespace penstock::train
