#include "penstock/train/plan/dry_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <sstream>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/comm/launch/launch_cores.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/comm/transport/ucx_transport.h"
#include "penstock/draw.h"
#include "penstock/errors.h"
#include "penstock/graph/cache/directory_cache.h"
#include "penstock/graph/saving/activation_budget.h"
#include "penstock/train/config/configured_schedule.h"
#include "penstock/train/config/expert_overlap.h"
#include "penstock/train/config/layout_text.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/host_check.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/train/job/process_memory.h"
#include "penstock/train/job/stage_copies.h"
#include "penstock/train/job/stage_graphs.h"
#include "penstock/world.h"

namespace penstock::train {

namespace {

constexpr std::int64_t kRanksListed = 8;  // larger worlds are listed as ranges
constexpr std::size_t kSlotsDrawn = 40;
constexpr int kRanksDrawn = 8;
// Between processes of a host, through shared memory.
constexpr double kLatency = 20e-6;
constexpr double kBandwidth = 4e9;

// Slowdown of a rank when there are more ranks than cores.
double slowdown(const DryRun& run) {
  if (run.device != "cpu") return 1;
  return std::max(1.0, static_cast<double>(run.config.layout.ranks) / run.cores);
}

// On one host.
bool uses_ucx(const LayoutConfig& layout) {
  return layout.transport == "ucx" || (layout.transport == "auto" && comm::ucx_available());
}

// What a stage takes and keeps for a microbatch whose activations are recomputed, or kept.
struct StageEstimate {
  double forward = 0, backward = 0;  // seconds
  plan::MicrobatchMemory memory;
};

// Hidden states that a rank keeps, or has a buffer for: all tokens, or those of the rank.
std::int64_t hidden_bytes(const DryRun& run) {
  const LayoutConfig& layout = run.config.layout;
  return layout.sequence_parallel ? run.measured.border / layout.tp : run.measured.border;
}

// What a rank sends to the next stage: tensor-parallel ranks share the work.
std::int64_t sent_bytes(const DryRun& run) {
  const std::int64_t ranks = run.config.layout.tp;
  return (run.measured.border + ranks - 1) / ranks;
}

// Of what a stage keeps operator by operator, what its graph keeps at most under training.activation_budget.
// As little as possible (0) is about the input of the stage.
std::int64_t within_budget(const DryRun& run, std::int64_t kept) {
  if (run.config.training.compile == "off") return kept;
  const graph::ActivationBudget budget =
      graph::parse_activation_budget(run.config.training.activation_budget, "training.activation_budget");
  return std::min(kept, budget.bytes_of(kept, hidden_bytes(run)));
}

// The blocks of multi-token prediction, which belong to the head, have one letter.
bool recomputes_multi_token(const DryRun& run, int stage) {
  const std::string& letters = run.plan.multi_token_letters;
  const auto first = static_cast<std::int64_t>(run.plan.blocks.size());
  return !letters.empty() &&
         run.recompute.recomputes({.number = first, .letter = letters.front()}, stage, {});
}

StageEstimate estimate_stage(const DryRun& run, const models::StagePart& part, bool recomputes) {
  const PartMeasurements& measured = run.measured;
  StageEstimate stage;
  std::int64_t& kept = stage.memory.activation;
  std::int64_t for_weights = 0;
  bool knows_weights = true;
  const auto add = [&](const PartMeasurement& each) {
    stage.forward += each.forward;
    stage.backward += each.backward;
    kept += each.kept;
    for_weights += each.kept_for_weights.value_or(0);
    knows_weights = knows_weights && each.kept_for_weights;
  };
  std::map<std::string, int> sharing;  // blocks, by kind
  for (std::int64_t i = part.first_block; i < part.end_block; ++i) {
    const models::BlockPlan& block = run.plan.blocks[static_cast<std::size_t>(i)];
    const bool again =
        recomputes && run.recompute.recomputes({.number = i, .letter = block.letter}, part.index, {});
    add((again ? measured.recomputed : measured.blocks).at(block.kind));
    kept += hidden_bytes(run);  // the input
    const auto shared = measured.shared.find(block.kind);
    if (!again && shared != measured.shared.end() && sharing[block.kind]++ > 0) kept -= shared->second;
  }
  if (part.has_embed()) add(measured.embed);
  if (part.has_head()) {
    add(recomputes && recomputes_multi_token(run, part.index) ? measured.recomputed_head.value()
                                                              : measured.head);
    kept += hidden_bytes(run);
  }
  if (knows_weights) stage.memory.between_input_and_weight = for_weights;
  kept = within_budget(run, kept);
  return stage;
}

plan::CostModel cost_model(const DryRun& run) {
  plan::CostModel model;
  model.stages.clear();
  model.memory.clear();
  model.latency = kLatency;
  model.bandwidth = kBandwidth;
  const double share = slowdown(run) / static_cast<double>(run.config.layout.tp);
  const std::vector<std::int64_t>& chosen = run.recompute.microbatches;
  const double recomputed =
      chosen.empty() ? 1
                     : static_cast<double>(chosen.size()) / static_cast<double>(run.schedule.microbatches());
  const schedule::StageMap& map = run.schedule.stages();
  for (int stage = 0; stage < map.stages(); ++stage) {
    const models::StagePart& part = run.parts[static_cast<std::size_t>(part_of_stage(map, stage))];
    const StageEstimate plain = estimate_stage(run, part, false);
    StageEstimate again = estimate_stage(run, part, true);
    // The first half of a backward computes again what a plain one has kept.
    if (!again.memory.between_input_and_weight)
      again.memory.between_input_and_weight = plain.memory.activation;
    const double backward = plain.backward + (again.backward - plain.backward) * recomputed;
    plan::StageCost cost;
    cost.forward = (plain.forward + (again.forward - plain.forward) * recomputed) * share;
    cost.backward = backward * share;
    cost.backward_input = cost.backward_weight = backward * share / 2;
    cost.output_bytes = static_cast<double>(sent_bytes(run));
    model.stages.push_back(cost);
    const plan::MicrobatchMemory& usual = (chosen.empty() ? again : plain).memory;
    plan::StageMemory memory;
    memory.activation = usual.activation;
    memory.between_input_and_weight = usual.between_input_and_weight;
    for (const std::int64_t microbatch : chosen)
      memory.exceptions[static_cast<int>(microbatch)] = again.memory;
    model.memory.push_back(std::move(memory));
  }
  return model;
}

std::string bytes_text(std::int64_t bytes) { return format_bytes(static_cast<std::uint64_t>(bytes)); }

std::string time_text(double seconds) {
  if (seconds < 1) return fmt::format("{:.3g} ms", seconds * 1e3);
  if (seconds < 120) return fmt::format("{:.3g} s", seconds);
  const auto minutes = static_cast<std::int64_t>(seconds / 60 + 0.5);
  return minutes < 120 ? fmt::format("{} min", minutes)
                       : fmt::format("{} h {} min", minutes / 60, minutes % 60);
}

using Lines = std::vector<std::string>;

// "3", "3-7"
std::string range_text(std::int64_t first, std::int64_t last) {
  return first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last);
}

std::string model_text(const DryRun& run) {
  const auto millions = [](std::int64_t count) {
    return fmt::format("{:.3f} M", static_cast<double>(count) / 1e6);
  };
  const std::int64_t all = models::parameter_count(run.plan),
                     active = models::active_parameter_count(run.plan);
  return fmt::format(
      "model: {} of width {}, {} parameters{}, context {}, {:.3g} MFLOP per token, {}",
      count_of(static_cast<std::int64_t>(run.plan.blocks.size()), "block"), run.plan.width, millions(all),
      active == all ? "" : fmt::format(" ({} active per token)", millions(active)), run.plan.context,
      models::training_flops_per_token(run.plan) / 1e6, run.config.training.precision);
}

// "1.2 MiB in a block", "1.2 MiB in attention, 3.4 MiB in experts"
std::string kept_text(const DryRun& run) {
  const auto& blocks = run.measured.blocks;
  std::vector<std::string> texts;
  for (const auto& [kind, measured] : blocks)
    texts.push_back(
        fmt::format("{} in {}", bytes_text(measured.kept), blocks.size() == 1 ? "a block" : kind));
  for (const auto& [kind, measured] : run.measured.recomputed)
    texts.push_back(fmt::format("{} in {} that is recomputed", bytes_text(measured.kept),
                                blocks.size() == 1 ? "a block" : kind));
  return fmt::format("{}", fmt::join(texts, ", "));
}

// "3.4 MiB in the head", "3.4 MiB in the head, 1.2 MiB in a head whose blocks are recomputed"
std::string kept_in_head_text(const DryRun& run) {
  const std::string text = bytes_text(run.measured.head.kept) + " in the head";
  return run.measured.recomputed_head ? fmt::format("{}, {} in a head whose blocks are recomputed", text,
                                                    bytes_text(run.measured.recomputed_head->kept))
                                      : text;
}

std::string mesh_text(const DryRun& run) {
  const LayoutConfig& layout = run.config.layout;
  return fmt::format("mesh: {} = pp {} x dp {} x tp {}{}, on {}{}", count_of(layout.ranks, "rank"), layout.pp,
                     dp_text(layout), layout.tp, layout.sequence_parallel ? " with sequence parallelism" : "",
                     run.device,
                     run.device == "cpu" ? fmt::format(" ({}, {} per rank)", count_of(run.cores, "core"),
                                                       count_of(run.measured.threads, "thread"))
                                         : std::string());
}

// One line per rank of a small world, else one line for all ranks at a pipeline position.
Lines rank_lines(const DryRun& run) {
  const LayoutConfig& layout = run.config.layout;
  const std::int64_t each = layout.dp * layout.tp;
  const auto stages = [&](std::int64_t pp) {
    return format_list(run.schedule.stages().stages_of(static_cast<int>(pp)));
  };
  Lines lines;
  if (layout.ranks <= kRanksListed) {
    for (std::int64_t rank = 0; rank < layout.ranks; ++rank)
      lines.push_back(fmt::format("rank {}: pp {}, dp {}, tp {}; stages {}", rank, rank / each,
                                  rank / layout.tp % layout.dp, rank % layout.tp, stages(rank / each)));
    return lines;
  }
  for (std::int64_t pp = 0; pp < layout.pp; ++pp)
    lines.push_back(fmt::format("rank{} {}: pp {}, dp {}, tp {}; stages {}", each == 1 ? "" : "s",
                                range_text(pp * each, (pp + 1) * each - 1), pp, range_text(0, layout.dp - 1),
                                range_text(0, layout.tp - 1), stages(pp)));
  return lines;
}

// Where the graphs of the stages will come from. Throws ConfigError for an artifact that cannot be used.
std::string graphs_text(const TrainConfig& config, const schedule::Schedule& schedule,
                        const models::TrainableModel& model, at::Device device) {
  if (config.training.compile == "off") return {};
  if (!config.training.artifact.empty()) {
    const auto artifact = open_artifact(config, schedule, model, device);
    return fmt::format("graphs: {} in the artifact {}; nothing is captured", artifact->calls().size(),
                       config.training.artifact);
  }
  const graph::CacheEnvironment cache = graph::cache_environment();
  if (!cache.asked_for)
    return "graphs: captured in the first step of each start; PENSTOCK_CACHE=FOLDER keeps them";
  return fmt::format("graphs: loaded from the cache {} if it has them, else captured in the first step",
                     cache.folder.string());
}

std::string schedule_text(const DryRun& run) {
  const schedule::Schedule& schedule = run.schedule;
  const std::string experts = ExpertOverlap(run.config.layout, schedule).text();
  return fmt::format("schedule: {}, {} stage{}, {} microbatches of {} rows{}; bubble {:.1f} % of the run{}",
                     run.config.layout.schedule, schedule.stages().stages(),
                     schedule.stages().stages() == 1 ? "" : "s", schedule.microbatches(),
                     run.config.layout.microbatch_size,
                     run.config.training.accumulation > 1
                         ? fmt::format(", {} runs per step", run.config.training.accumulation)
                         : std::string(),
                     100 * run.simulation.bubble, experts.empty() ? "" : "; " + experts);
}

Lines grid_lines(const schedule::Schedule& schedule) {
  std::size_t longest = 0;
  for (const schedule::Row& row : schedule.rows()) longest = std::max(longest, row.size());
  if (schedule.ranks() > kRanksDrawn || longest > kSlotsDrawn)
    return {"(too large to show here; use penstock schedule)"};
  Lines all;
  std::stringstream grid(plan::draw_grid(schedule));
  for (std::string line; std::getline(grid, line);) all.push_back(line);
  return all;
}

Lines memory_lines(const DryRun& run) {
  Lines lines;
  const auto row = [&](const RankMemory& memory) {
    return fmt::format("{:>11}  {:>11}  {:>11}  {:>11}  {:>11}  {:>11}   at most {} live",
                       bytes_text(memory.parameters), bytes_text(memory.gathered),
                       bytes_text(memory.gradients), bytes_text(memory.optimizer),
                       bytes_text(memory.activations), bytes_text(memory.total()), memory.live);
  };
  for (std::size_t begin = 0; begin < run.memory.size();) {
    const std::string text = row(run.memory[begin]);
    std::size_t end = begin + 1;
    while (end < run.memory.size() && row(run.memory[end]) == text) ++end;
    lines.push_back(fmt::format(
        "{:>9}  {}", range_text(static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end) - 1), text));
    begin = end;
  }
  return lines;
}

// The largest memory of a rank, for worlds whose lines are not all shown.
std::string largest_text(const DryRun& run) {
  const auto largest =
      std::max_element(run.memory.begin(), run.memory.end(),
                       [](const RankMemory& a, const RankMemory& b) { return a.total() < b.total(); });
  return fmt::format("the maximum is {} at pp {}", bytes_text(largest->total()),
                     largest - run.memory.begin());
}

// Reduces the lines to at most `room`: the first ones and the last one, and between them the number of
// omitted lines.
void shorten(Lines& lines, std::size_t room, const std::string& what) {
  if (lines.size() <= room) return;
  const std::size_t first = room - 2;
  const std::string between =
      fmt::format("... {} more lines{}{}", lines.size() - first - 1, what.empty() ? "" : "; ", what);
  lines.erase(lines.begin() + static_cast<std::ptrdiff_t>(first), lines.end() - 1);
  lines.insert(lines.end() - 1, between);
}

// What was measured, if not whole microbatches.
std::string extrapolation_text(const DryRun& run) {
  if (run.measured.measured_tokens < run.config.model.context)
    return fmt::format(", extrapolated from rows of {} tokens", run.measured.measured_tokens);
  return run.measured.measured_rows < run.config.layout.microbatch_size ? ", extrapolated from one row" : "";
}

void write_time(std::string& text, const DryRun& run) {
  const auto out = std::back_inserter(text);
  const auto part = [](const PartMeasurement& each) {
    return fmt::format("{} + {}", time_text(each.forward), time_text(each.backward));
  };
  const LayoutConfig& layout = run.config.layout;
  std::vector<std::string> blocks;
  for (const auto& [kind, each] : run.measured.blocks)
    blocks.push_back(fmt::format("{} {}", run.measured.blocks.size() == 1 ? "block" : kind, part(each)));
  fmt::format_to(out,
                 "measured on this machine, forward + backward per microbatch: {}, embedding {}, head "
                 "with loss {}{}\n",
                 fmt::join(blocks, ", "), part(run.measured.embed), part(run.measured.head),
                 extrapolation_text(run));
  std::vector<std::string> assumed;
  if (layout.tp > 1)
    assumed.push_back(fmt::format("each of {} tensor-parallel ranks does an equal share", layout.tp));
  if (slowdown(run) > 1) assumed.push_back(fmt::format("{} ranks share {} cores", layout.ranks, run.cores));
  assumed.push_back(
      fmt::format("transfers of {} at {:g} GB/s", bytes_text(sent_bytes(run)), kBandwidth / 1e9));
  fmt::format_to(out, "assumptions: {}; not included: sums over ranks, optimizer, data loading\n",
                 fmt::join(assumed, ", "));
  fmt::format_to(out, "predicted: {} per step of {} tokens, {:.0f} tokens/s, {} for {}\n",
                 time_text(run.step_seconds), run.tokens_per_step,
                 static_cast<double>(run.tokens_per_step) / run.step_seconds,
                 time_text(run.step_seconds * static_cast<double>(run.config.training.steps)),
                 count_of(run.config.training.steps, "step"));
}

}  // namespace

void check_local_ranks(const LayoutConfig& layout) {
  if (layout.ranks > comm::kMaxLocalRanks)
    throw ConfigError(
        describe("layout.ranks", std::to_string(layout.ranks),
                 fmt::format("at most {}, the limit of penstock train on one host", comm::kMaxLocalRanks),
                 "start the ranks with mpirun, srun or torchrun on several hosts, or lower layout.pp, "
                 "layout.dp or layout.tp"));
}

void check_launched_ranks(const LayoutConfig& layout, int launched) {
  if (layout.ranks != launched)
    throw ConfigError(describe(
        "ranks", std::to_string(launched),
        fmt::format("pp * dp * tp = {} * {} * {} = {}", layout.pp, layout.dp, layout.tp, layout.ranks),
        "start that many ranks, or change the layout"));
}

DryRun dry_run(const TrainConfig& config, const DataCheckProgress& progress) {
  const auto now = [&](const char* what) {
    if (progress) progress(what, -1);
  };
  if (const comm::LaunchEnv env = comm::launch_env(); env.launcher == "none") {
    check_local_ranks(config.layout);
  } else {
    check_launched_ranks(config.layout, env.world_size);
  }
  now("generating the schedule");
  schedule::Schedule schedule = configured_schedule(config.layout);
  const std::shared_ptr<models::TrainableModel> model = configured_model(config);
  check_stages(config, *model, schedule);
  const at::Device device =
      configured_device(config.layout, comm::World::fake(0, static_cast<int>(config.layout.ranks)));
  require_precision(config, device);
  if (device.is_cpu()) require_memory(minimum_memory_of_parts(config), machine_memory_bytes());
  const int stages = parts_of_model(schedule.stages());
  std::vector<models::StagePart> parts = configured_parts(config, model->plan(), stages);
  const models::RecomputePlan recompute = configured_recompute(config, *model, stages);
  const bool splits = has_weight_backwards(schedule);
  std::string data = check_data(config, DataCheck::Reading, progress);
  std::string graphs = graphs_text(config, schedule, *model, device);
  now("measuring an embedding, a block and a head");
  DryRun run{.config = config,
             .device = device.is_cpu() ? "cpu" : "cuda",
             .data = std::move(data),
             .cores = comm::available_cores(),
             .schedule = std::move(schedule),
             .plan = model->plan(),
             .parts = std::move(parts),
             .recompute = recompute,
             .measured = measure_parts(config, *model, device, recompute, splits),
             .simulation = {},
             .memory = {},
             .step_seconds = 0,
             .tokens_per_step = config.training.global_batch * config.model.context,
             .graphs = std::move(graphs)};
  now("simulating a step");
  const plan::CostModel costs = cost_model(run);
  run.simulation = plan::simulate(run.schedule, costs);
  now("planning memory");
  run.memory = plan_memory(config, run.plan, run.schedule, run.parts, run.simulation,
                           {.stages = costs.memory,
                            .border = hidden_bytes(run),
                            .knows_sent = !device.is_cpu() || uses_ucx(config.layout)});
  run.step_seconds = run.simulation.time * static_cast<double>(config.training.accumulation);
  return run;
}

std::string to_text(const DryRun& run) {
  std::string text = model_text(run) + fmt::format("\ndata: {}\n", run.data);
  Lines ranks = rank_lines(run), parts = models::summarize_parts(run.parts, run.plan),
        memory = memory_lines(run);
  const Lines grid = grid_lines(run.schedule);
  // model, data, mesh, partition, schedule, graphs, memory (3), time (3)
  constexpr std::size_t kFixedLines = 12;
  const std::size_t room = kDryRunLines - kFixedLines - grid.size();
  // If not all lines fit, each section gets a third, or the room that shorter sections leave.
  for (Lines* lines : {&ranks, &parts, &memory}) {
    const std::size_t others = ranks.size() + parts.size() + memory.size() - lines->size();
    shorten(*lines, std::max(room / 3, others < room ? room - others : 0),
            lines == &memory  ? largest_text(run)
            : lines == &ranks ? "tp fastest, then dp, then pp"
                              : "");
  }
  const auto add = [&](const Lines& lines) {
    for (const std::string& line : lines) text += "  " + line + "\n";
  };
  text += mesh_text(run) + "\n";
  add(ranks);
  text += "partition:\n";
  add(parts);
  text += schedule_text(run) + "\n";
  add(grid);
  if (!run.graphs.empty()) text += run.graphs + "\n";
  fmt::format_to(
      std::back_inserter(text),
      "memory per rank, by pipeline position:\n  {:>9}  {:>11}  {:>11}  {:>11}  {:>11}  {:>11}  {:>11}\n",
      "pp", "parameters", "gathered", "gradients", "optimizer", "activations", "together");
  add(memory);
  fmt::format_to(
      std::back_inserter(text),
      "  activations: measured on real parts; one microbatch keeps {} and {}, and their "
      "inputs{}\n",
      kept_text(run), kept_in_head_text(run),
      run.config.layout.tp > 1 ? "; the part that tensor parallelism splits is not subtracted" : "");
  write_time(text, run);
  return text;
}

}  // namespace penstock::train
