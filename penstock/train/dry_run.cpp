#include "penstock/train/dry_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <sstream>
#include <utility>

#include "penstock/base/errors.h"
#include "penstock/base/text.h"
#include "penstock/comm/launch_cores.h"
#include "penstock/comm/world.h"
#include "penstock/models/options.h"
#include "penstock/plan/draw_grid.h"
#include "penstock/train/byte_tokenizer.h"
#include "penstock/train/host_check.h"
#include "penstock/train/job.h"
#include "penstock/train/model_stages.h"
#include "penstock/train/process_memory.h"
#include "penstock/train/sampler.h"
#include "penstock/train/source_files.h"
#include "penstock/train/token_dataset.h"

namespace penstock::train {

namespace {

constexpr std::int64_t kRanksShown = 32;
constexpr std::size_t kSlotsDrawn = 40;
constexpr int kRanksDrawn = 8;
// Between processes of a host, by its memory.
constexpr double kLatency = 20e-6;
constexpr double kBandwidth = 4e9;

void check_vocabulary(const TrainConfig& config, std::uint64_t of_data) {
  if (static_cast<std::int64_t>(of_data) > config.model.vocabulary)
    throw ConfigError(describe("model.vocabulary", std::to_string(config.model.vocabulary), fmt::format("at least the {} of the data", of_data), "raise it, or use other data"));
}

// Found and checked, but nothing is made of it.
std::string look_at_data(const TrainConfig& config) {
  const DataConfig& data = config.data;
  if (!data.shards.empty()) {
    const auto dataset = TokenDataset::open(data.shards, data.validation_fraction > 0 ? Split::Training : Split::All, data.validation_fraction);
    check_vocabulary(config, dataset->vocabulary());
    const Sampler sampler(dataset, {.context = config.model.context, .seed = static_cast<std::uint64_t>(config.training.seed), .shuffle = true});
    return fmt::format("{} tokens to train on in {}, {} samples an epoch", dataset->tokens(), data.shards, sampler.samples_per_epoch());
  }
  check_vocabulary(config, byte_tokenizer::kVocabulary);
  SourceOptions options;
  options.paths.assign(data.sources.begin(), data.sources.end());
  options.extensions = data.extensions;
  options.cap_bytes = static_cast<std::uint64_t>(data.cap_bytes);
  options.skip_bad_files = data.skip_bad_files;
  const SourceList found = find_sources(options);
  return fmt::format("{} files, {}, to be made byte tokens", found.files.size(), format_bytes(found.bytes));
}

// How much of a rank's time the cores give it when there are more ranks than cores.
double slowdown(const DryRun& run) {
  if (run.device != "cpu") return 1;
  return std::max(1.0, static_cast<double>(run.config.layout.ranks) / run.cores);
}

plan::CostModel cost_model(const DryRun& run) {
  plan::CostModel model;
  model.stages.clear();
  model.memory.clear();
  model.latency = kLatency;
  model.bandwidth = kBandwidth;
  const double share = slowdown(run) / static_cast<double>(run.config.layout.tp);
  const PartMeasurements& measured = run.measured;
  for (const models::StagePart& part : run.parts) {
    const auto blocks = static_cast<double>(part.blocks());
    double forward = blocks * measured.block.forward, backward = blocks * measured.block.backward;
    std::int64_t kept = part.blocks() * measured.block.kept + measured.kept_by_stage;
    if (part.has_embed()) {
      forward += measured.embed.forward;
      backward += measured.embed.backward;
      kept += measured.embed.kept;
    } else {
      kept += measured.border;  // the input
    }
    if (part.has_head()) {
      forward += measured.head.forward;
      backward += measured.head.backward;
      kept += measured.head.kept;
    }
    plan::StageCost cost;
    cost.forward = forward * share;
    cost.backward = backward * share;
    cost.backward_input = cost.backward_weight = backward * share / 2;
    cost.output_bytes = static_cast<double>(measured.border);
    model.stages.push_back(cost);
    plan::StageMemory memory;
    memory.activation = kept;
    model.memory.push_back(memory);
  }
  return model;
}

std::string bytes_text(std::int64_t bytes) { return format_bytes(static_cast<std::uint64_t>(bytes)); }

std::string time_text(double seconds) {
  if (seconds < 1) return fmt::format("{:.3g} ms", seconds * 1e3);
  if (seconds < 120) return fmt::format("{:.3g} s", seconds);
  const auto minutes = static_cast<std::int64_t>(seconds / 60 + 0.5);
  return minutes < 120 ? fmt::format("{} min", minutes) : fmt::format("{} h {} min", minutes / 60, minutes % 60);
}

void write_mesh(std::string& text, const DryRun& run) {
  const LayoutConfig& layout = run.config.layout;
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "mesh: {} ranks = pp {} x dp {}{} x tp {}, on {}{}\n", layout.ranks, layout.pp, layout.dp, layout.shard > 1 ? fmt::format(" (shard {})", layout.shard) : std::string(), layout.tp, run.device, run.device == "cpu" ? fmt::format(" ({} cores, {} threads a rank)", run.cores, run.measured.threads) : std::string());
  for (std::int64_t rank = 0; rank < std::min(layout.ranks, kRanksShown); ++rank) {
    const std::int64_t pp = rank / (layout.dp * layout.tp);
    fmt::format_to(out, "  rank {}: pp {}, dp {}, tp {}; stages {}\n", rank, pp, rank / layout.tp % layout.dp, rank % layout.tp, format_list(run.schedule.stages().stages_of(static_cast<int>(pp))));
  }
  if (layout.ranks > kRanksShown) fmt::format_to(out, "  ... {} more, tp fastest, then dp, then pp\n", layout.ranks - kRanksShown);
}

void write_schedule(std::string& text, const DryRun& run) {
  const auto out = std::back_inserter(text);
  const schedule::Schedule& schedule = run.schedule;
  fmt::format_to(out, "schedule: {}, {} stages, {} microbatches of {} rows{}; bubble {:.1f} % of the run\n", run.config.layout.schedule, schedule.stages().stages(), schedule.microbatches(), run.config.layout.microbatch_size,
                 run.config.training.accumulation > 1 ? fmt::format(", {} runs a step", run.config.training.accumulation) : std::string(), 100 * run.simulation.bubble);
  std::size_t longest = 0;
  for (const schedule::Row& row : schedule.rows()) longest = std::max(longest, row.size());
  if (schedule.ranks() > kRanksDrawn || longest > kSlotsDrawn) {
    fmt::format_to(out, "  (too long to draw here: penstock schedule draws it)\n");
    return;
  }
  std::stringstream lines(plan::draw_grid(schedule));
  for (std::string line; std::getline(lines, line);) fmt::format_to(out, "  {}\n", line);
}

void write_memory(std::string& text, const DryRun& run) {
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "memory of a rank, by its place along the pipeline:\n  {:>4}  {:>11}  {:>11}  {:>11}  {:>11}  {:>11}  {:>11}\n", "pp", "parameters", "gathered", "gradients", "optimizer", "activations", "together");
  for (std::size_t rank = 0; rank < run.memory.size(); ++rank) {
    const RankMemory& memory = run.memory[rank];
    fmt::format_to(out, "  {:>4}  {:>11}  {:>11}  {:>11}  {:>11}  {:>11}  {:>11}   {} live at most\n", rank, bytes_text(memory.parameters), bytes_text(memory.gathered), bytes_text(memory.gradients), bytes_text(memory.optimizer), bytes_text(memory.activations),
                   bytes_text(memory.total()), memory.live);
  }
  fmt::format_to(out, "  activations: measured on real parts, one microbatch keeps {} in a block and {} at the head{}\n", bytes_text(run.measured.block.kept), bytes_text(run.measured.head.kept),
                 run.config.layout.tp > 1 ? "; tensor parallelism splits a part of them, which is not subtracted" : "");
}

void write_time(std::string& text, const DryRun& run) {
  const auto out = std::back_inserter(text);
  const auto part = [](const PartMeasurement& each) { return fmt::format("{} + {}", time_text(each.forward), time_text(each.backward)); };
  const LayoutConfig& layout = run.config.layout;
  fmt::format_to(out, "measured here, forward + backward of a microbatch: block {}, embedding {}, head with loss {}{}\n", part(run.measured.block), part(run.measured.embed), part(run.measured.head),
                 run.measured.measured_rows < layout.microbatch_size ? ", multiplied from one row" : "");
  std::vector<std::string> assumed;
  if (layout.tp > 1) assumed.push_back(fmt::format("each of {} tensor-parallel ranks does its share", layout.tp));
  if (slowdown(run) > 1) assumed.push_back(fmt::format("{} ranks share {} cores", layout.ranks, run.cores));
  assumed.push_back(fmt::format("transfers of {} at {:g} GB/s", bytes_text(run.measured.border), kBandwidth / 1e9));
  fmt::format_to(out, "assumed: {}; without sums over ranks, optimizer and data\n", fmt::join(assumed, ", "));
  fmt::format_to(out, "predicted: {} a step of {} tokens, {:.0f} tokens/s, {} for {} steps\n", time_text(run.step_seconds), run.tokens_per_step, static_cast<double>(run.tokens_per_step) / run.step_seconds,
                 time_text(run.step_seconds * static_cast<double>(run.config.training.steps)), run.config.training.steps);
}

}  // namespace

DryRun dry_run(const TrainConfig& config) {
  schedule::Schedule schedule = configured_schedule(config.layout);
  check_stages(config, schedule);
  const at::Device device = configured_device(config.layout, comm::World::fake(0, static_cast<int>(config.layout.ranks)));
  require_precision(config, device);
  if (device.is_cpu()) require_memory(least_need_of_parts(config), machine_memory_bytes());
  const int stages = schedule.stages().stages();
  DryRun run{.config = config, .device = device.is_cpu() ? "cpu" : "cuda", .data = look_at_data(config), .cores = comm::available_cores(), .schedule = std::move(schedule), .parts = configured_parts(config, stages), .measured = measure_parts(config, device),
             .simulation = {}, .memory = {}, .step_seconds = 0, .tokens_per_step = config.training.global_batch * config.model.context};
  run.simulation = plan::simulate(run.schedule, cost_model(run));
  run.memory = plan_memory(config, run.schedule, run.parts, run.simulation);
  run.step_seconds = run.simulation.time * static_cast<double>(config.training.accumulation);
  return run;
}

std::string to_text(const DryRun& run) {
  const models::TransformerOptions options = transformer_options(run.config.model);
  std::string text = fmt::format("model: {} blocks of width {}, {:.3f} M parameters, context {}, {}\ndata: {}\n", options.layers, options.width, static_cast<double>(models::parameter_count(options)) / 1e6, options.context, run.config.training.precision, run.data);
  write_mesh(text, run);
  text += "partition:\n";
  std::stringstream lines(models::describe_parts(run.parts, options));
  for (std::string line; std::getline(lines, line);) text += "  " + line + "\n";
  write_schedule(text, run);
  write_memory(text, run);
  write_time(text, run);
  return text;
}

}  // namespace penstock::train
