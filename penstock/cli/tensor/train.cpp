// penstock train: trains a model in the configured layout and starts its own ranks, on this host or together
// with the same command on other hosts.
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/base/log.h"
#include "penstock/base/printable.h"
#include "penstock/checkpoint_types.h"
#include "penstock/cli/common/command_line.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/cli/common/rank_errors.h"
#include "penstock/cli/common/status_line.h"
#include "penstock/cli/common/work_folder.h"
#include "penstock/cli/tensor/train_run.h"
#include "penstock/comm/launch/compute_environment.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/errors.h"
#include "penstock/observer.h"
#include "penstock/train/config/run_config.h"
#include "penstock/train/job/configured_data.h"
#include "penstock/train/job/host_check.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/run_folder.h"
#include "penstock/train/plan/dry_run.h"
#include "penstock/train/report/metrics_file.h"
#include "penstock/train/report/progress.h"
#include "penstock/train/report/report_page.h"
#include "penstock/trainer.h"
#include "penstock/world.h"

namespace penstock::cli {

namespace {

namespace fs = std::filesystem;

// Files that the starting process and the ranks exchange, in a separate folder: the run folder must not
// change before the start is accepted.
constexpr const char* kHandedConfig = "config.toml";
constexpr const char* kAccepted = "accepted";

// A batch system that stops a job signals all of its processes, and the launcher passes on the signal that it
// got itself: within this time, a second one is the same.
constexpr std::int64_t kSameStop_ns = 2'000'000'000;
std::atomic<std::int64_t> first_stop_ns{0};
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

void stop_on_signal(int signal) {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  const std::int64_t now_ns = std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  std::int64_t first_ns = 0;
  if (first_stop_ns.compare_exchange_strong(first_ns, now_ns)) return train::request_stop();
  if (now_ns - first_ns < kSameStop_ns) return;
  std::signal(signal, SIG_DFL);
  ::raise(signal);  // takes effect when this handler returns
}

// Ends the run after the current step; a second signal ends the process immediately.
void catch_signals() {
  struct sigaction action {};
  action.sa_handler = stop_on_signal;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, nullptr);
  ::sigaction(SIGINT, &action, nullptr);
}

// A report that cannot be written is not a training failure.
void report(const fs::path& folder) {
  try {
    fmt::print("report: {}\n", printable(train::write_report(folder).string()));
  } catch (const ConfigError& error) {
    fmt::print(stderr,
               "penstock: the report could not be written: {}; to write it later: penstock report {}\n",
               printable(error.what()), printable(folder.string()));
  }
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

comm::World world_of(const train::TrainConfig& config) {
  comm::WorldOptions options;
  options.timeout = milliseconds(config.launch.timeout_s);
  return comm::World::from_env(options);
}

int train_all_steps(const comm::World& world, const train::ResolvedConfig& resolved, const fs::path& folder,
                    const std::function<void()>& accepted) {
  try {
    const train::TrainConfig config = train::continuing_config(resolved.config, folder);
    train::Progress progress(world.rank() == 0 ? train::progress_options(config.output)
                                               : train::ProgressOptions{});
    train::MetricsFile metrics;
    train::TrainerOptions options;
    options.accepted = [&] {
      train::write_run_config(folder, resolved);
      accepted();
    };
    std::optional<train::Trainer> trainer;
    try {
      trainer.emplace(world, config, folder, std::vector<train::Observer*>{&metrics, &progress}, options);
    } catch (const checkpoint::CheckpointError& error) {
      throw ConfigError(error.what());  // the start is refused
    }
    return trainer->run() == train::RunEnd::NotSaved ? kNotSaved : 0;
  } catch (const train::NotFiniteError&) {
    if (world.rank() == 0) throw;
    return 1;  // all ranks have the same message: print it once
  }
}

// One of the ranks started by start_ranks.
int run_rank(const fs::path& folder, const fs::path& handed) {
  const train::ResolvedConfig resolved = train::read_written_config(handed / kHandedConfig);
  const comm::World world = world_of(resolved.config);
  catch_signals();  // not before: until the ranks have met there is nothing to save, and a signal ends the
                    // wait
  return train_all_steps(world, resolved, folder, [&] { std::ofstream(handed / kAccepted).flush(); });
}

// Ranks started by another launcher: rank 0 creates the folder and sends its path to the others.
int run_foreign_rank(const train::RunPlan& plan) {
  const comm::World world = world_of(plan.resolved.config);
  catch_signals();
  std::unique_ptr<train::RunFolder> held;
  const fs::path folder = train::agree_on_run_folder(world, plan, held);
  const int exit_code =
      train_all_steps(world, train::with_absolute_paths(plan.resolved, folder), folder, [] {});
  if (world.rank() == 0) report(folder);
  return exit_code;
}

void show_dry_run(const train::TrainConfig& config) {
  std::string text;
  {
    StatusLine line("dry run");
    text = train::to_text(
        train::dry_run(config, [&](const std::string& what, double share) { line.show(what, share); }));
  }
  fmt::print("{}", text);
}

int start_ranks(const train::RunPlan& plan, const TrainFlags& flags) {
  // Reported once here instead of by every rank, and before any folder is created.
  train::check_host(plan.resolved.config, plan.resolved.config.layout.ranks);
  train::check_data(plan.resolved.config, train::DataCheck::Opening);
  const train::RunFolder held(plan);
  const fs::path& folder = held.path();
  const train::ResolvedConfig resolved = train::with_absolute_paths(plan.resolved, folder);
  const WorkFolder handed("train");
  std::ofstream config(handed.path() / kHandedConfig);
  config << train::to_toml(resolved);
  config.close();
  if (!config)
    throw ConfigError(describe("temporary folder", handed.path().string(),
                               "a writable folder with free space", "set TMPDIR"));
  fmt::print("{}\n", printable(folder.string()));
  std::fflush(stdout);
  comm::LaunchOptions options;
  options.ranks = static_cast<int>(resolved.config.layout.ranks);
  options.command = {fs::read_symlink("/proc/self/exe").string(),
                     "train",
                     "--worker",
                     folder.string(),
                     "--handed",
                     handed.path().string()};
  options.restarts = flags.restarts;
  options.final_exit_codes = {2, kNotSaved};
  options.grace = milliseconds(resolved.config.launch.grace_s);
  options.stop_grace = milliseconds(resolved.config.launch.stop_grace_s);
  options.prefix = false;
  winsize size{};
  const bool terminal = ::isatty(STDERR_FILENO) == 1 && ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0;
  options.environment.emplace_back("PENSTOCK_PROGRESS_TTY", std::to_string(terminal ? size.ws_col : 0));
  const RankErrors errors;
  errors.listen(options);
  const int exit_code = comm::launch(options).exit_code;
  errors.print();
  if (!fs::exists(handed.path() / kAccepted)) return exit_code;  // refused: the folder is unchanged
  if (file_exists(folder / train::MetricsFile::kName)) report(folder);
  // Token files have no known tokenizer, so that there is no text to sample.
  if (exit_code == 0 && resolved.config.output.sample_tokens > 0 &&
      !train::tokenizer_is_unknown(resolved.config.data)) {
    fmt::print("\nSample from the model (penstock generate {}):\n\n", folder.string());
    print_sample(folder.string());
  }
  return exit_code;
}

// The launcher of this host starts `penstock train` again as each of its ranks, which then are like those of
// any other launcher: no file that this process could hand them would be there on the other hosts.
int start_ranks_over_hosts(const train::RunPlan& plan, const TrainFlags& flags, comm::NodeOptions nodes) {
  const train::TrainConfig& config = plan.resolved.config;
  if (flags.restarts > 0 && plan.folder.empty())
    throw ConfigError(describe("--restarts on several hosts", "no run folder",
                               "--run_folder with a folder that all hosts share",
                               "a restart continues with the last checkpoint in that folder"));
  nodes.world = static_cast<int>(config.layout.ranks);
  comm::LaunchOptions options;
  options.nodes = std::move(nodes);
  std::vector<std::string> own_options = node_option_names();
  own_options.emplace_back("--restarts");
  options.command = without_options(own_command_line(), own_options, {});
  options.restarts = flags.restarts;
  options.final_exit_codes = {2, kNotSaved};
  options.grace = milliseconds(config.launch.grace_s);
  options.stop_grace = milliseconds(config.launch.stop_grace_s);
  options.prefix = false;
  return comm::launch(options).exit_code;
}

int run(const CLI::App& command, const TrainFlags& flags) {
  if (!flags.worker.empty()) return report_to_parent([&] { return run_rank(flags.worker, flags.handed); });
  const train::ConfigSources sources = config_sources(command);
  return train_run(command, flags, sources, [&] { return train::plan_run(sources); });
}

}  // namespace

int train_run(const CLI::App& command, const TrainFlags& flags, const train::ConfigSources& sources,
              const std::function<train::RunPlan()>& plan_of) {
  const comm::LaunchEnv env = comm::launch_env();
  const bool own_ranks = env.launcher == "none";
  train::RunPlan plan;
  try {
    plan = plan_of();
  } catch (const ConfigError&) {
    // Ranks of another launcher all read the same configuration: rank 0 reports the errors.
    const bool readable = !sources.file || ::access(sources.file->c_str(), R_OK) == 0;
    if (own_ranks || env.rank == 0 || !readable) throw;
    return 2;
  }
  std::optional<comm::NodeOptions> nodes;
  if (own_ranks)
    nodes =
        node_options(command, flags.nodes, without_options(own_command_line(), node_option_names(), {}), 2);
  if (own_ranks && !nodes) train::check_local_ranks(plan.resolved.config.layout);
  if (flags.dry_run) {
    if (plan.continues && env.rank == 0)
      train::RunFolder held(plan);  // throws if the folder is in use; changes nothing in it
    if (env.rank == 0)
      show_dry_run(plan.resolved.config);  // all ranks of another launcher have the same output
    return 0;
  }
  if (nodes) return start_ranks_over_hosts(plan, flags, std::move(*nodes));
  if (own_ranks) return start_ranks(plan, flags);
  refuse_options(command,
                 {"--restarts", "--nnodes", "--node-rank", "--rdzv", "--hosts", "--ssh", "--join-timeout",
                  "--last-call"},
                 fmt::format("for ranks started by {}", env.launcher), "let the launcher restart them");
  comm::restart_with_compute_environment(env.local_world_size);
  return run_foreign_rank(plan);
}

void add_train_flags(CLI::App& command, TrainFlags& flags) {
  add_whole(command, "--restarts", flags.restarts, 0, 1000,
            "Maximum number of restarts of all ranks from the last checkpoint after a failure");
  add_node_flags(command, flags.nodes);
  command.add_flag("--dry-run", flags.dry_run,
                   "Show mesh, partition, schedule, memory and predicted step time without training");
  command.allow_extras();
}

void add_train_command(CLI::App& app, CommandOutcome& outcome) {
  CLI::App* command = add_tensor_subcommand(app, "train");
  command->footer(
      std::string(
          "Usage: penstock train [CONFIG.toml] [--section.key value ...]\n\n"
          "Examples:\n"
          "  penstock train\n"
          "  penstock train --data input.txt\n"
          "  penstock train --preset small --pp 2 --schedule ZBVZeroBubble --steps 500\n"
          "  penstock train --pp 4 --dry-run\n"
          "  penstock train my.toml --resume runs/tiny-1/checkpoints/step-00000100 --restarts 2\n"
          "  penstock train --dp 4 --nnodes 2 --rdzv node1:29400     (on both hosts, in a shared folder)\n"
          "  penstock train --dp 4 --hosts node1,node2               (on node1, which starts node2 over "
          "ssh)\n\n"
          "On several hosts the ranks of the layout are divided evenly among them; set PENSTOCK_SECRET to "
          "the same "
          "text on all (--hosts does it).\n"
          "Under mpirun, srun or torchrun, the ranks that they started are used.\n"
          "If --run_folder contains a run, that run continues with its own configuration; keys given now "
          "override it (see penstock resume).\n"
          "SIGTERM or Ctrl-C saves a checkpoint and ends the run; a second signal ends it immediately.\n"
          "Exit codes: 0 ok, 1 a rank failed, 2 invalid usage or configuration, 3 the last checkpoint could "
          "not be written.\n\n") +
      train::configuration_help());
  const auto flags = std::make_shared<TrainFlags>();
  add_train_flags(*command, *flags);
  command->add_option("--worker", flags->worker, "Internal: run as one of the ranks")->group("");
  command->add_option("--handed", flags->handed, "Internal: folder with the files for the ranks")->group("");
  command->callback([command, flags, &outcome] { outcome.exit_code = run(*command, *flags); });
}

}  // namespace penstock::cli
