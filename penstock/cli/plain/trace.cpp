// penstock trace: compares the measured times of a step with the simulated times of its schedule.
#include <memory>
#include <string>

#include "penstock/cli/common/commands.h"
#include "penstock/cli/plain/schedule_flags.h"
#include "penstock/pipeline/report/trace_comparison.h"

namespace penstock::cli {

void add_trace_command(CLI::App& app, CommandOutcome&) {
  struct TraceFlags {
    std::string file;
    bool csv = false;
  };
  CLI::App* command =
      app.add_subcommand("trace", "Compare measured and simulated times of a step, per action and per rank");
  const auto flags = std::make_shared<TraceFlags>();
  command->add_option("file", flags->file, "Trace of a step, as PipelineRuntime::write_trace writes it")
      ->required()
      ->type_name("FILE.json");
  command->add_flag("--csv", flags->csv,
                    "Print one line per action: rank,action,begin,end,simulated begin,simulated end,delay");
  command->footer(
      "The schedule in the trace is simulated with the measured times (medians per stage and kind of "
      "action).\n"
      "Efficiency is simulated / measured time. The trace file can be opened in ui.perfetto.dev.\n"
      "Examples:\n"
      "  penstock trace step.json\n"
      "  penstock trace step.json --csv > actions.csv\n"
      "Exit codes: 0 ok, 2 the file cannot be read.");
  command->callback([flags] {
    const TraceComparison comparison = compare_with_simulation(read_trace(flags->file));
    write_text("", flags->csv ? to_csv(comparison) : to_text(comparison));
  });
}

}  // namespace penstock::cli
