// penstock check: reports whether a schedule in a file can be executed and computes the right result.
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <optional>

#include "penstock/base/printable.h"
#include "penstock/base/quote.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/plain/schedule_flags.h"
#include "penstock/errors.h"
#include "penstock/schedule.h"
#include "penstock/validate.h"

namespace penstock::cli {

namespace {

struct CheckFlags {
  std::string file;
  std::string placement;
  std::string sends = "blocking";
  bool all = false;
};

void run(const CheckFlags& flags, CommandOutcome& outcome) {
  std::optional<schedule::StagePlacement> placement;
  if (!flags.placement.empty())
    placement = schedule::parse_stage_placement(
        one_of("--placement", flags.placement, {"loop", "v", "bidirectional"}));
  schedule::ValidateOptions options;
  if (one_of("--sends", flags.sends, {"blocking", "posted"}) == "posted")
    options.sends = schedule::SendModel::Posted;
  const std::string text = read_text(flags.file);
  std::optional<schedule::Schedule> parsed;
  try {
    parsed = schedule::parse_schedule(text, placement);
  } catch (const ValueError& error) {
    throw ConfigError(fmt::format("{}: {}", flags.file, error.what()));
  }
  const std::string file = printable(flags.file);
  const schedule::Report report = schedule::check(*parsed, options);
  if (report.ok()) {
    fmt::print("{}: ok; {}, {}, {}, {}, {}\n", file, count_of(parsed->ranks(), "rank"),
               count_of(parsed->stages().stages(), "stage"),
               count_of(parsed->microbatches(), "microbatch", "microbatches"),
               count_of(parsed->actions(), "action"), parsed->has_transfers() ? "lowered" : "compute only");
    return;
  }
  outcome.exit_code = 1;
  if (flags.all) {
    fmt::print("{}: {}\n", file, report.text());
    return;
  }
  const schedule::Violation& first = report.violations.front();
  fmt::print("{}: {}: {}\n", file, to_text(first.kind), first.text);
  if (!report.grid.empty()) fmt::print("{}{}", report.grid, report.grid.back() == '\n' ? "" : "\n");
  if (report.violations.size() > 1)
    fmt::print("and {} more; --all shows them\n", report.violations.size() - 1);
}

}  // namespace

void add_check_command(CLI::App& app, CommandOutcome& outcome) {
  CLI::App* command =
      app.add_subcommand("check", "Check that a schedule is complete, in order and free of deadlocks");
  const auto flags = std::make_shared<CheckFlags>();
  command->add_option("file", flags->file, "Schedule as CSV, one line per rank; - for standard input")
      ->required()
      ->type_name("FILE.csv");
  command
      ->add_option("--placement", flags->placement,
                   "Placement of stages on ranks: loop, v or bidirectional (default: as in the file)")
      ->type_name("X");
  command
      ->add_option("--sends", flags->sends,
                   "blocking: a send waits for the matching receive; posted: it does not (default blocking)")
      ->type_name("X");
  command->add_flag("--all", flags->all, "Print all violations, not only the first");
  command->footer(
      "Example: penstock check my_schedule.csv --placement v\n"
      "Exit codes: 0 the schedule is valid, 1 it is not, 2 the file cannot be read.");
  command->callback([flags, &outcome] { run(*flags, outcome); });
}

}  // namespace penstock::cli
