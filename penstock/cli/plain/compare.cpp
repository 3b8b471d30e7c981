// penstock compare: all schedule kinds side by side, fastest first.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "penstock/base/text.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/plain/schedule_flags.h"
#include "penstock/errors.h"
#include "penstock/simulator.h"

namespace penstock::cli {

namespace {

struct CompareFlags {
  ShapeFlags shape;
  CostFlags costs;
  std::string format = "text";
};

struct Line {
  std::string kind;
  int stages_per_rank = 1;
  plan::Simulation simulation;
  double activations = 0;  // in units of one rank's share of the model
  bool fits = true;
};

struct Absent {
  std::string kind;
  std::string why;
};

plan::CostModel model_for(const plan::CostModel& per_rank, int stages_per_rank) {
  return stages_per_rank == 1 ? per_rank : plan::split_evenly(per_rank, stages_per_rank);
}

class Comparison {
 public:
  explicit Comparison(const CompareFlags& flags) : flags_(flags), per_rank_(cost_model(flags.costs)) {
    if (per_rank_.stages.size() > 1 || per_rank_.memory.size() > 1) {
      throw ConfigError(
          "compare: schedule kinds split the model into different numbers of stages, so costs per stage "
          "cannot be "
          "compared; "
          "give one number per cost, for one rank's share of the model");
    }
    limits_ = memory_limits(flags.costs, flags.shape.ranks, flags.shape.microbatches);
    for (const schedule::ScheduleKind kind : schedule::all_schedule_kinds()) add(kind);
    add_auto();
    std::stable_sort(lines_.begin(), lines_.end(), [](const Line& a, const Line& b) {
      return std::tuple(!a.fits, a.simulation.time) < std::tuple(!b.fits, b.simulation.time);
    });
  }

  const std::vector<Line>& lines() const { return lines_; }
  const std::vector<Absent>& absent() const { return absent_; }

 private:
  void add(schedule::ScheduleKind kind) {
    ShapeFlags shape_flags = flags_.shape;
    shape_flags.kind = std::string(to_text(kind));
    if (shape_flags.stages_per_rank == 0 || required_stages_per_rank(kind))
      shape_flags.stages_per_rank = default_stages_per_rank(kind);
    const schedule::PipelineShape shape = shape_of(shape_flags);
    try {
      schedule::check_shape(kind, shape);
    } catch (const ValueError& error) {
      absent_.push_back({shape_flags.kind, error.what()});
      return;
    }
    add(shape_flags.kind, shape.stages_per_rank, generate(kind, shape));
  }

  void add_auto() {
    plan::AutoRequest request;
    ShapeFlags shape_flags = flags_.shape;
    shape_flags.kind = "auto";
    request.shape = shape_of(shape_flags);
    request.shape.group_size.reset();
    request.model = model_for(per_rank_, request.shape.stages_per_rank);
    request.limits = stage_limits(request.shape.stages_per_rank);
    request.placements = {schedule::StagePlacement::Loop, schedule::StagePlacement::V};
    try {
      add("auto", request.shape.stages_per_rank, plan::auto_schedule(request).schedule);
    } catch (const ValueError& error) {
      absent_.push_back({"auto", error.what()});
    }
  }

  // Limits are in units of one rank's share of the model; the simulator counts stages.
  std::vector<plan::MemoryLimit> stage_limits(int stages_per_rank) const {
    std::vector<plan::MemoryLimit> limits = limits_;
    for (plan::MemoryLimit& limit : limits) {
      if (limit.activations) *limit.activations *= stages_per_rank;
    }
    return limits;
  }

  void add(std::string kind, int stages_per_rank, const schedule::Schedule& schedule) {
    // In a bidirectional pipeline both directions hold whole shares; otherwise the stages of a rank divide
    // its share.
    const bool divided = schedule.stages().chains().size() == 1;
    const int parts = divided ? stages_per_rank : 1;
    Line line;
    line.kind = std::move(kind);
    line.stages_per_rank = stages_per_rank;
    line.simulation = plan::simulate(schedule, model_for(per_rank_, parts));
    line.activations = static_cast<double>(line.simulation.peak_activations()) / parts;
    line.fits = plan::fits(line.simulation, stage_limits(parts));
    lines_.push_back(std::move(line));
  }

  const CompareFlags& flags_;
  plan::CostModel per_rank_;
  std::vector<plan::MemoryLimit> limits_;
  std::vector<Line> lines_;
  std::vector<Absent> absent_;
};

std::string to_text(const Comparison& comparison) {
  std::string text;
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "{:<22} {:>6} {:>10} {:>8} {:>8} {:>12} {:>11}\n", "kind", "stages", "time", "bubble",
                 "in span", "activations", "memory");
  for (const Line& line : comparison.lines()) {
    fmt::format_to(out, "{:<22} {:>6} {:>10.6g} {:>6.2f} % {:>6.2f} % {:>12.4g} {:>11}{}\n", line.kind,
                   line.stages_per_rank, line.simulation.time, 100 * line.simulation.bubble,
                   100 * line.simulation.span_bubble, line.activations,
                   format_bytes(static_cast<std::uint64_t>(line.simulation.peak_bytes())),
                   line.fits ? "" : "  above the limit");
  }
  fmt::format_to(out,
                 "stages: per rank. time: per step; costs are for one rank's share of the model. "
                 "activations and memory: of the\n"
                 "fullest rank, activations in units of one rank's share.\n");
  for (const Absent& absent : comparison.absent())
    fmt::format_to(out, "not available for this shape: {}\n", absent.why);
  return text;
}

std::string to_json(const Comparison& comparison) {
  nlohmann::ordered_json lines = nlohmann::ordered_json::array();
  for (const Line& line : comparison.lines()) {
    lines.push_back({{"kind", line.kind},
                     {"stages_per_rank", line.stages_per_rank},
                     {"time", line.simulation.time},
                     {"bubble", line.simulation.bubble},
                     {"span_bubble", line.simulation.span_bubble},
                     {"peak_activations", line.activations},
                     {"peak_bytes", line.simulation.peak_bytes()},
                     {"fits", line.fits}});
  }
  nlohmann::ordered_json absent = nlohmann::ordered_json::array();
  for (const Absent& entry : comparison.absent())
    absent.push_back({{"kind", entry.kind}, {"why", entry.why}});
  const nlohmann::ordered_json document = {{"kinds", std::move(lines)}, {"absent", std::move(absent)}};
  return document.dump(2) + "\n";
}

void run(const CompareFlags& flags) {
  const std::string format = one_of("--format", flags.format, {"text", "json"});
  (void)shape_of(flags.shape);
  try {
    const Comparison comparison(flags);
    write_text("", format == "json" ? to_json(comparison) : to_text(comparison));
  } catch (const ConfigError&) {
    throw;
  } catch (const ValueError& error) {
    throw ConfigError(error.what());  // invalid costs are a usage error
  }
}

}  // namespace

void add_compare_command(CLI::App& app, CommandOutcome&) {
  CLI::App* command = app.add_subcommand("compare", "Compare all schedules, fastest first");
  const auto flags = std::make_shared<CompareFlags>();
  add_size_flags(*command, flags->shape,
                 "Stages per rank, for kinds that do not fix it (default 2; auto: 1)");
  add_cost_flags(*command, flags->costs);
  add_limit_flags(*command, flags->costs);
  command->add_option("--format", flags->format, "text or json (default text)")->type_name("X");
  command->footer(
      "Example: penstock compare --ranks 4 --microbatches 16 --cost F=1,I=1,W=1,send=0.1 --memory "
      "params=4G,grads=4G,act=300M\n"
      "Costs and memory are for one rank's share of the model; kinds with several stages per rank "
      "divide them.");
  command->callback([flags] { run(*flags); });
}

}  // namespace penstock::cli
