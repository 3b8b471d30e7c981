// penstock train: trains a model in the configured layout, starting its own ranks on this host.
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "penstock/base/errors.h"
#include "penstock/base/files.h"
#include "penstock/base/log.h"
#include "penstock/base/printable.h"
#include "penstock/cli/commands.h"
#include "penstock/comm/launch_env.h"
#include "penstock/comm/launcher.h"
#include "penstock/comm/world.h"
#include "penstock/train/dry_run.h"
#include "penstock/train/host_check.h"
#include "penstock/train/not_finite.h"
#include "penstock/train/metrics_file.h"
#include "penstock/train/progress.h"
#include "penstock/train/report_page.h"
#include "penstock/train/run_folder.h"
#include "penstock/train/trainer.h"

namespace penstock::cli {

namespace {

namespace fs = std::filesystem;

struct TrainFlags {
  bool dry_run = false;
  int restarts = 0;
  std::string worker;  // run folder: this process is one of the ranks
};

void stop_on_signal(int) { train::request_stop(); }

// Ends the run after its current step; a second signal ends the process as usual.
void catch_signals() {
  struct sigaction action {};
  action.sa_handler = stop_on_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  ::sigaction(SIGTERM, &action, nullptr);
  ::sigaction(SIGINT, &action, nullptr);
}

void report(const fs::path& folder) { fmt::print("report: {}\n", printable(train::write_report(folder).string())); }

int train_all_steps(const comm::World& world, const train::TrainConfig& config, const fs::path& folder) {
  try {
    train::Progress progress(world.rank() == 0 ? train::progress_options(config.output) : train::ProgressOptions{});
    train::MetricsFile metrics;
    train::Trainer trainer(world, config, folder, {&metrics, &progress});
    trainer.run();
    return 0;
  } catch (const train::NotFiniteError&) {
    if (world.rank() == 0) throw;
    return 1;  // all ranks have the same to say: once is enough
  }
}

int run_rank(const train::TrainConfig& config, const fs::path& folder) {
  catch_signals();
  const comm::World world = comm::World::from_env();
  return train_all_steps(world, config, folder);
}

// Ranks that somebody else started: rank 0 makes the folder and tells the others where it is.
int run_foreign_rank(const train::ResolvedConfig& resolved) {
  catch_signals();
  const comm::World world = comm::World::from_env();
  const fs::path folder = train::agree_on_run_folder(world, resolved);
  const int exit_code = train_all_steps(world, resolved.config, folder);
  if (world.rank() == 0) report(folder);
  return exit_code;
}

int start_ranks(const train::ResolvedConfig& resolved, const TrainFlags& flags) {
  train::check_host(resolved.config, resolved.config.layout.ranks);
  const fs::path folder = train::make_run_folder(resolved);
  fmt::print("{}\n", printable(folder.string()));
  std::fflush(stdout);
  comm::LaunchOptions options;
  options.ranks = static_cast<int>(resolved.config.layout.ranks);
  options.command = {fs::read_symlink("/proc/self/exe").string(), "train", "--worker", folder.string()};
  options.restarts = flags.restarts;
  options.grace = std::chrono::seconds(60);  // a step and a checkpoint
  options.prefix = false;
  winsize size{};
  const bool terminal = ::isatty(STDERR_FILENO) == 1 && ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0;
  options.environment.emplace_back("PENSTOCK_PROGRESS_TTY", std::to_string(terminal ? size.ws_col : 0));
  const int exit_code = comm::launch(options).exit_code;
  if (file_exists(folder / train::MetricsFile::kName)) report(folder);
  if (exit_code == 0 && resolved.config.output.sample_tokens > 0) {
    fmt::print("\nA sample of the model (penstock generate {}):\n\n", folder.string());
    print_sample(folder.string());
  }
  return exit_code;
}

int run(const CLI::App& command, const TrainFlags& flags) {
  if (!flags.worker.empty()) return run_rank(train::load_config({.file = fs::path(flags.worker) / "config.toml", .arguments = {}}).config, flags.worker);
  const train::ResolvedConfig resolved = train::load_config(config_sources(command));
  if (flags.dry_run) {
    fmt::print("{}", train::to_text(train::dry_run(resolved.config)));
    return 0;
  }
  if (comm::launch_env().launcher != "none") return run_foreign_rank(resolved);
  return start_ranks(resolved, flags);
}

}  // namespace

train::ConfigSources config_sources(const CLI::App& command) {
  train::ConfigSources sources;
  std::vector<std::string> rest = command.remaining();
  if (!rest.empty() && !rest.front().starts_with("-")) {
    sources.file = rest.front();
    rest.erase(rest.begin());
  }
  sources.arguments = rest;
  return sources;
}

void add_train_command(CLI::App& app, Outcome& outcome) {
  CLI::App* command = app.add_subcommand("train", "Train a model; the ranks of the layout are started on this host");
  command->footer(
      "Usage: penstock train [CONFIG.toml] [--section.key value ...]\n\n"
      "Examples:\n"
      "  penstock train\n"
      "  penstock train --preset small --pp 2 --schedule ZBVZeroBubble --steps 500\n"
      "  penstock train --pp 4 --dry-run\n"
      "  penstock train my.toml --resume runs/tiny-1/checkpoints/step-00000100 --restarts 2\n\n"
      "Every key is explained in docs/configuration.md. Under mpirun, srun or torchrun the ranks that they started are used.\n"
      "Ends with a checkpoint on SIGTERM and Ctrl-C; a second one ends at once.");
  const auto flags = std::make_shared<TrainFlags>();
  command->add_option("--restarts", flags->restarts, "Start all ranks again up to this often when one fails, from the last checkpoint (default 0)")->check(CLI::Range(0, 1000));
  command->add_flag("--dry-run", flags->dry_run, "Show mesh, partition, schedule, memory and predicted step time, and train nothing");
  command->add_option("--worker", flags->worker, "Internal: run as one of the ranks")->group("");
  command->allow_extras();
  command->callback([command, flags, &outcome] { outcome.exit_code = run(*command, *flags); });
}

}  // namespace penstock::cli
