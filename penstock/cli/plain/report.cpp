// penstock report: writes the page about a run, or a comparison of several runs.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "penstock/base/printable.h"
#include "penstock/cli/common/commands.h"
#include "penstock/train/report/report_page.h"

namespace penstock::cli {

namespace {

struct ReportFlags {
  std::vector<std::string> runs;
  std::string out;
};

void report(const ReportFlags& flags) {
  std::vector<train::RunReport> runs;
  for (const std::string& run : flags.runs) runs.push_back(train::load_run(run));
  std::filesystem::path path = flags.out;
  if (path.empty())
    path = runs.size() == 1 ? runs[0].folder / "report.html" : std::filesystem::path("comparison.html");
  train::write_page(path, train::report_page(runs));
  for (const train::RunReport& run : runs) fmt::print("{}", printable(train::summary_text(run)));
  fmt::print("report: {}\n", printable(path.string()));
}

}  // namespace

void add_report_command(CLI::App& app, CommandOutcome&) {
  CLI::App* command =
      app.add_subcommand("report", "Write an HTML report of a run, or a comparison of several runs");
  const auto flags = std::make_shared<ReportFlags>();
  command->add_option("runs", flags->runs, "Folders of penstock train runs")->required()->type_name("RUN");
  command
      ->add_option("--out", flags->out,
                   "File to write (default: report.html in the run folder, or comparison.html in the working "
                   "folder for several runs)")
      ->type_name("FILE.html");
  command->footer(
      "The report is one HTML file that works offline: curves, times, the timeline of a traced step, memory, "
      "configuration.\n"
      "It can be written while the run is in progress, and for a run that was killed.\n"
      "Examples:\n"
      "  penstock report runs/first\n"
      "  penstock report runs/first runs/second --out both.html\n"
      "Exit codes: 0 ok, 2 a run cannot be read or the page cannot be written.");
  command->callback([flags] { report(*flags); });
}

}  // namespace penstock::cli
