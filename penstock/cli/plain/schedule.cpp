// penstock schedule: prints or draws a schedule.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/cli/plain/schedule_flags.h"
#include "penstock/draw.h"
#include "penstock/errors.h"
#include "penstock/lower.h"
#include "penstock/schedule.h"
#include "penstock/simulator.h"
#include "penstock/validate.h"

namespace penstock::cli {

namespace {

struct ScheduleFlags {
  ShapeFlags shape;
  CostFlags costs;
  bool lowered = false;
  int max_active_stages = 3;
  bool defer_receives = false;
  std::string format = "csv";
  std::string output;
};

std::string to_json(const schedule::Schedule& schedule, const std::string& title) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const schedule::Row& row : schedule.rows()) {
    nlohmann::ordered_json cells = nlohmann::ordered_json::array();
    for (const schedule::Slot slot : row) cells.push_back(to_text(slot));
    rows.push_back(std::move(cells));
  }
  const nlohmann::ordered_json document = {{"schedule", title},
                                           {"ranks", schedule.ranks()},
                                           {"stages", schedule.stages().stages()},
                                           {"microbatches", schedule.microbatches()},
                                           {"lowered", schedule.has_transfers()},
                                           {"stage_to_rank", schedule.stages().stage_to_rank()},
                                           {"rows", std::move(rows)}};
  return document.dump() + "\n";
}

bool colour_wanted(const std::string& output) {
  return output.empty() && ::isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
}

void run(const CLI::App& command, const ScheduleFlags& flags) {
  const std::string format =
      one_of("--format", flags.format, {"csv", "grid", "svg", "html", "perfetto", "json"});
  require_auto_for_limits(command, flags.shape);
  if (!flags.lowered)
    refuse_options(command, {"--max-active-stages", "--defer-receives"}, "without --lowered",
                   "add --lowered, or leave it out");
  const bool timed = format == "svg" || format == "html" || format == "perfetto";
  if (!timed && !is_auto(flags.shape))
    refuse_options(command, {"--cost", "--memory", "--communication"},
                   fmt::format("for the {} format of a fixed schedule", format),
                   "use --format svg, html or perfetto, or penstock simulate");
  schedule::Schedule schedule = schedule_of(flags.shape, flags.costs);
  schedule::validate(schedule);
  if (flags.lowered) {
    schedule::LowerOptions options;
    options.max_active_stages = flags.max_active_stages;
    options.defer_receives = flags.defer_receives;
    schedule = schedule::lower(schedule, options);
  }
  const std::string name =
      is_auto(flags.shape) ? "auto" : std::string(to_text(schedule::schedule_kind(flags.shape.kind)));
  std::string text;
  if (format == "csv") {
    text = schedule::to_csv(schedule);
  } else if (format == "json") {
    text = to_json(schedule, name);
  } else if (format == "grid") {
    text = plan::draw_grid(schedule, {.colour = colour_wanted(flags.output)});
  } else {
    plan::CostModel model = cost_model(flags.costs);
    try {
      model.check(schedule.stages(), schedule.microbatches());
    } catch (const ValueError& error) {
      throw ConfigError(error.what());
    }
    const plan::Simulation simulation = plan::simulate(schedule, model, {.memory_curve = true});
    const plan::Drawing drawing = {schedule, simulation, name};
    text = format == "svg"    ? plan::draw_svg(drawing)
           : format == "html" ? plan::draw_html(drawing)
                              : plan::draw_perfetto(drawing);
  }
  write_text(flags.output, text);
}

}  // namespace

void add_schedule_command(CLI::App& app, CommandOutcome&) {
  CLI::App* command = app.add_subcommand("schedule", "Print or draw a pipeline schedule");
  const auto flags = std::make_shared<ScheduleFlags>();
  add_shape_flags(*command, flags->shape);
  command->add_flag("--lowered", flags->lowered,
                    "Include transfers, gathers and gradient reductions, as executed");
  add_whole(*command, "--max-active-stages", flags->max_active_stages, 1, 65536,
            "Maximum stages whose parameters a rank keeps gathered at once");
  command->add_flag("--defer-receives", flags->defer_receives,
                    "Receive just before use instead of when the sender sends");
  add_cost_flags(*command, flags->costs);
  add_limit_flags(*command, flags->costs);
  command->add_option("--format", flags->format, "csv, grid, svg, html, perfetto or json (default csv)")
      ->type_name("X");
  command->add_option("-o,--output", flags->output, "File to write (default: standard output)")
      ->type_name("F");
  command->footer(
      "Examples:\n"
      "  penstock schedule --kind 1F1B --ranks 4 --microbatches 8 --format grid\n"
      "  penstock schedule --kind ZBVZeroBubble --ranks 4 --microbatches 8 --format svg -o zbv.svg\n"
      "  penstock schedule --kind auto --ranks 4 --microbatches 12 --cost F=1:1:2:1,send=0.1 "
      "--max-activations 1f1b -o auto.csv\n"
      "--cost, --memory and --communication set the times of drawings and the target of auto; the limits "
      "apply to auto.");
  command->callback([command, flags] { run(*command, *flags); });
}

}  // namespace penstock::cli
