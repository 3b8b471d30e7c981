// penstock train: trains a model in the configured layout, starting its own ranks on this host.
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
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
#include "penstock/base/log.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/cli/commands.h"
#include "penstock/cli/number_options.h"
#include "penstock/cli/rank_errors.h"
#include "penstock/comm/launch_env.h"
#include "penstock/comm/launcher.h"
#include "penstock/comm/world.h"
#include "penstock/train/dry_run.h"
#include "penstock/train/job.h"
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

// Ends a rank quietly with exit code 2.
struct SaidByRank0 {};

void stop_on_signal(int) { train::request_stop(); }

// Ends the run after its current step; a second signal ends the process as usual.
void catch_signals() {
  struct sigaction action {};
  action.sa_handler = stop_on_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  ::sigaction(SIGTERM, &action, nullptr);
  ::sigaction(SIGINT, &action, nullptr);
}

void report(const fs::path& folder) { fmt::print("report: {}\n", train::write_report(folder).string()); }

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
  // Said once here instead of by every rank, and before anything is made.
  (void)train::configured_device(resolved.config.layout, comm::World::fake(0, static_cast<int>(resolved.config.layout.ranks)));
  const fs::path folder = train::make_run_folder(resolved);
  fmt::print("{}\n", folder.string());
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
  const RankErrors errors;
  errors.listen(options);
  const int exit_code = comm::launch(options).exit_code;
  errors.print();
  if (fs::exists(folder / train::MetricsFile::kName)) report(folder);
  if (exit_code == 0 && resolved.config.output.sample_tokens > 0) {
    fmt::print("\nA sample of the model (penstock generate {}):\n\n", folder.string());
    print_sample(folder.string());
  }
  return exit_code;
}

// Ranks that somebody else started all read the same configuration: rank 0 says what is wrong with it.
train::ResolvedConfig load_on_each_rank(const train::ConfigSources& sources, const comm::LaunchEnv& env) {
  try {
    return train::load_config(sources);
  } catch (const ConfigError&) {
    const bool readable = !sources.file || ::access(sources.file->c_str(), R_OK) == 0;
    if (env.rank == 0 || !readable) throw;
    throw SaidByRank0();
  }
}

int run(const CLI::App& command, const TrainFlags& flags) {
  if (!flags.worker.empty()) return tell_parent([&] { return run_rank(train::load_config({.file = fs::path(flags.worker) / "config.toml", .arguments = {}}).config, flags.worker); });
  const comm::LaunchEnv env = comm::launch_env();
  const train::ResolvedConfig resolved = load_on_each_rank(config_sources(command), env);
  if (flags.dry_run) {
    fmt::print("{}", train::to_text(train::dry_run(resolved.config)));
    return 0;
  }
  if (env.launcher != "none") {
    refuse_options(command, {"--restarts"}, fmt::format("for ranks that {} has started", env.launcher), "let it start them again");
    return run_foreign_rank(resolved);
  }
  return start_ranks(resolved, flags);
}

}  // namespace

namespace {

// What is no flag of the command is taken for a key of the configuration; a misspelt flag is told as what it is.
void refuse_near_flags(const CLI::App& command, const std::vector<std::string>& arguments) {
  std::vector<std::string> names, flags;
  for (const std::string& key : train::config_keys()) {
    names.push_back("--" + key);
    names.push_back("--" + key.substr(key.find('.') + 1));
  }
  for (const CLI::Option* option : command.get_options())
    if (!option->get_group().empty())
      for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
  std::vector<std::string> all = flags;
  all.insert(all.end(), names.begin(), names.end());
  for (const std::string& argument : arguments) {
    if (!argument.starts_with("--")) continue;
    const std::string flag = argument.substr(0, argument.find('='));
    std::string key = flag;
    std::replace(key.begin() + 2, key.end(), '-', '_');
    if (std::find(names.begin(), names.end(), key) != names.end() || flag == "--data") continue;
    const std::string meant = nearest_name(flag, all);
    if (std::find(flags.begin(), flags.end(), meant) != flags.end())
      throw ConfigError(describe("unknown flag", quote(flag), "", fmt::format("did you mean {}?", meant)));
  }
}

}  // namespace

bool trains_without_a_run(const std::string& key) { return !key.starts_with("checkpoint.") && !key.starts_with("output."); }

void refuse_keys(const train::ResolvedConfig& resolved, const std::string& command, const std::function<bool(const std::string& key)>& used) {
  for (const auto& [key, origin] : resolved.origins)
    if (origin.starts_with("--") && !used(key)) throw ConfigError(fmt::format("{}: {} has no meaning for penstock {}; leave it out", origin, key, command));
}

train::ConfigSources config_sources(const CLI::App& command) {
  train::ConfigSources sources;
  std::vector<std::string> rest = command.remaining();
  if (!rest.empty() && !rest.front().starts_with("-")) {
    sources.file = rest.front();
    rest.erase(rest.begin());
  }
  refuse_near_flags(command, rest);
  sources.arguments = rest;
  return sources;
}

void add_train_command(CLI::App& app, Outcome& outcome) {
  CLI::App* command = app.add_subcommand("train", "Train a model; the ranks of the layout are started on this host");
  command->footer(
      std::string("Usage: penstock train [CONFIG.toml] [--section.key value ...]\n\n"
      "Examples:\n"
      "  penstock train\n"
      "  penstock train --preset small --pp 2 --schedule ZBVZeroBubble --steps 500\n"
      "  penstock train --pp 4 --dry-run\n"
      "  penstock train my.toml --resume runs/tiny-1/checkpoints/step-00000100 --restarts 2\n\n"
      "Under mpirun, srun or torchrun the ranks that they started are used.\n"
      "Ends with a checkpoint on SIGTERM and Ctrl-C; a second one ends at once.\n\n") +
      train::configuration_help());
  const auto flags = std::make_shared<TrainFlags>();
  add_whole(*command, "--restarts", flags->restarts, 0, 1000, "Start all ranks again up to this often when one fails, from the last checkpoint");
  command->add_flag("--dry-run", flags->dry_run, "Show mesh, partition, schedule, memory and predicted step time, and train nothing");
  command->add_option("--worker", flags->worker, "Internal: run as one of the ranks")->group("");
  command->allow_extras();
  command->callback([command, flags, &outcome] {
    try {
      outcome.exit_code = run(*command, *flags);
    } catch (const SaidByRank0&) {
      outcome.exit_code = 2;
    }
  });
}

}  // namespace penstock::cli
