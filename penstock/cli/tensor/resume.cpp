// penstock resume: continues a run with the configuration in its folder.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/cli/common/command_line.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/tensor/train_run.h"
#include "penstock/errors.h"
#include "penstock/train/config/run_config.h"
#include "penstock/train/job/run_folder.h"

namespace penstock::cli {

void add_resume_command(CLI::App& app, CommandOutcome& outcome) {
  CLI::App* command = add_tensor_subcommand(app, "resume");
  command->footer(
      "Usage: penstock resume RUN [--section.key value ...]\n\n"
      "Examples:\n"
      "  penstock resume runs/tiny-20270131-093005\n"
      "  penstock resume runs/tiny-20270131-093005 --steps 500 --lr 1e-4\n"
      "  penstock resume runs/tiny-20270131-093005 --pp 4 --schedule GPipe\n\n"
      "Uses the run's own configuration; keys given now override it. Model sizes, data, optimizer and seed "
      "cannot change: a\n"
      "refused change leaves the folder untouched. Under mpirun, srun or torchrun, the ranks that they "
      "started are used.\n"
      "Exit codes: 0 ok, 1 a rank failed, 2 invalid usage or configuration, 3 the last checkpoint could not "
      "be written.");
  struct ResumeFlags : TrainFlags {
    std::string run;
  };
  const auto flags = std::make_shared<ResumeFlags>();
  command->add_option("run", flags->run, "Folder of the run")->required()->type_name("RUN");
  add_train_flags(*command, *flags);
  command->callback([command, flags, &outcome] {
    // Values of keys cannot be distinguished from a run folder, so the run must come first.
    if (!train::contains_run(flags->run))
      for (const std::string& word : command->remaining())
        if (!word.starts_with("-") && train::contains_run(word))
          throw ConfigError(describe("resume", quote(flags->run),
                                     "the folder of the run as the first argument",
                                     fmt::format("penstock resume {} --section.key value ...", word)));
    const train::ConfigSources sources = config_sources(*command);
    if (sources.file)
      throw ConfigError(describe("resume", quote(sources.file->string()), "RUN and --section.key value",
                                 "the run's own configuration is used"));
    outcome.exit_code =
        train_run(*command, *flags, sources, [&] { return train::plan_resume(flags->run, sources); });
  });
}

}  // namespace penstock::cli
