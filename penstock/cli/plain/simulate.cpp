// penstock simulate: time, bubble and memory of a schedule under given costs.
#include <memory>
#include <optional>

#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/cli/plain/schedule_flags.h"
#include "penstock/errors.h"
#include "penstock/lower.h"
#include "penstock/plan/simulate/simulation_report.h"
#include "penstock/schedule.h"
#include "penstock/validate.h"

namespace penstock::cli {

namespace {

struct SimulateFlags {
  std::string file;
  std::string placement;
  ShapeFlags shape;
  CostFlags costs;
  bool lowered = false;
  std::string format = "text";
};

schedule::Schedule read_schedule(const SimulateFlags& flags) {
  std::optional<schedule::StagePlacement> placement;
  if (!flags.placement.empty())
    placement = schedule::parse_stage_placement(
        one_of("--placement", flags.placement, {"loop", "v", "bidirectional"}));
  const std::string text = read_text(flags.file);
  try {
    return schedule::parse_schedule(text, placement);
  } catch (const ValueError& error) {
    throw ConfigError(fmt::format("{}: {}", flags.file, error.what()));
  }
}

void run(const CLI::App& command, const SimulateFlags& flags) {
  if (flags.file.empty() == flags.shape.kind.empty()) {
    throw ConfigError(
        describe("simulate", flags.file.empty() ? "neither a file nor --kind" : "both a file and --kind",
                 "one of them", "for example: penstock simulate --kind 1F1B --ranks 4 --microbatches 8"));
  }
  if (flags.file.empty()) {
    refuse_options(command, {"--placement"}, "without a file: the kind determines the placement");
    require_auto_for_limits(command, flags.shape);
  } else {
    refuse_options(command,
                   {"--ranks", "--stages-per-rank", "--microbatches", "--group-size", "--max-activations",
                    "--max-bytes"},
                   "with a file, which defines ranks, stages and microbatches itself");
  }
  const std::string format = one_of("--format", flags.format, {"text", "json"});
  plan::CostModel model = cost_model(flags.costs);
  schedule::Schedule schedule =
      flags.file.empty() ? schedule_of(flags.shape, flags.costs) : read_schedule(flags);
  try {
    model.check(schedule.stages(), schedule.microbatches());
  } catch (const ValueError& error) {
    throw ConfigError(error.what());
  }
  // Only a file can be invalid; rows with deferred receives need posted sends.
  if (!flags.file.empty()) {
    schedule::ValidateOptions options;
    if (model.communication == plan::Communication::Overlapped) options.sends = schedule::SendModel::Posted;
    schedule::validate(schedule, options);
  }
  if (flags.lowered && schedule::is_compute_only(schedule)) schedule = schedule::lower(schedule);
  const plan::Simulation simulation = plan::simulate(schedule, model);
  write_text("",
             format == "json" ? plan::to_json(schedule, simulation) : plan::to_text(schedule, simulation));
}

}  // namespace

void add_simulate_command(CLI::App& app, CommandOutcome&) {
  CLI::App* command =
      app.add_subcommand("simulate", "Simulate time, bubble and memory of a schedule under given costs");
  const auto flags = std::make_shared<SimulateFlags>();
  command->add_option("file", flags->file, "Schedule as CSV, compute-only or lowered; - for standard input")
      ->type_name("FILE.csv");
  command
      ->add_option("--placement", flags->placement,
                   "Placement of the file's stages: loop, v or bidirectional (default: as in the file)")
      ->type_name("X");
  add_shape_flags(*command, flags->shape);
  add_cost_flags(*command, flags->costs);
  add_limit_flags(*command, flags->costs);
  command->add_flag("--lowered", flags->lowered,
                    "Simulate the lowered form, with transfers and gathers as executed");
  command->add_option("--format", flags->format, "text or json (default text)")->type_name("X");
  command->footer(
      "Examples:\n"
      "  penstock simulate --kind ZBVZeroBubble --ranks 4 --microbatches 16 --cost F=1,I=1,W=1,send=0.1\n"
      "  penstock simulate my_schedule.csv --memory params=2G,grads=2G,act=120M --format json\n"
      "Exit codes: 0 ok, 1 the schedule cannot run, 2 usage or parse error.");
  command->callback([command, flags] { run(*command, *flags); });
}

}  // namespace penstock::cli
