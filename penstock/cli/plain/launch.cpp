// penstock launch: starts a program as several ranks, on this host or together with launchers on other hosts.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/node_flags.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/comm/launch/slurm_script.h"
#include "penstock/errors.h"

namespace penstock::cli {

namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  penstock launch -n 4 -- ./train --config model.toml\n"
    "  penstock launch -n 8 --restarts 2 --log-dir logs -- ./train --resume\n"
    "  on two hosts, the same on each (PENSTOCK_SECRET set to one text):\n"
    "    penstock launch --nnodes 2 --rdzv node1:29400 -n 4 -- ./train --config model.toml\n"
    "  two to four hosts, as many as join within 30 s:\n"
    "    penstock launch --nnodes 2:4 --rdzv node1:29400 -n 4 -- ./train --config model.toml\n"
    "  from node1, over ssh:\n"
    "    penstock launch --hosts node1,node2 -n 4 -- ./train --config model.toml\n"
    "  under Slurm:\n"
    "    penstock launch --slurm --nnodes 2 -n 4 --sbatch --time=02:00:00 -- ./train > job.sh; sbatch "
    "job.sh\n"
    "\n"
    "Each rank is started with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and\n"
    "PENSTOCK_RESTART_COUNT, and with OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and MKL_NUM_THREADS if they are "
    "not set.\n"
    "\n"
    "Exit code: that of the rank that failed first (128 + signal if it was killed); 0 if all ranks "
    "succeeded;\n"
    "1 if a host was lost; 126 or 127 if the program cannot be executed or does not exist; 2 for a usage "
    "error.";

struct LaunchFlags {
  comm::LaunchOptions options;
  double grace_s = 10;
  bool no_prefix = false;
  bool no_color = false;
  NodeFlags nodes;
  bool slurm = false;
  int cores = 1;
  bool gpus = false;
  std::string job_name;
  std::vector<std::string> sbatch;
  std::string first_word;
  std::vector<std::string> further_words;  // one per possible argument
};

class LaunchFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string name) const override {
    return "Usage: " + name + " -n N [OPTIONS] -- program [arguments...]\n";
  }
};

// Writes the batch script to standard output.
void write_slurm_script(const CLI::App& command, const LaunchFlags& flags) {
  refuse_options(command, {"--node-rank", "--rdzv", "--hosts", "--ssh", "--last-call", "--port"},
                 "with --slurm", "leave it out: the script finds hosts and ports");
  comm::SlurmOptions options;
  const NodeRange nodes = parse_node_range(flags.nodes.nodes.empty() ? "1" : flags.nodes.nodes);
  options.least_nodes = nodes.least;
  options.most_nodes = nodes.most;
  options.ranks = flags.options.ranks;
  options.cores = flags.cores;
  options.gpus = flags.gpus;
  options.restarts = flags.options.restarts;
  if (!flags.job_name.empty()) options.name = flags.job_name;
  options.sbatch = flags.sbatch;
  options.launcher = {own_command_line().front(), "launch", "--grace", fmt::format("{}", flags.grace_s)};
  if (command.count("--join-timeout") > 0)
    options.launcher.insert(options.launcher.end(),
                            {"--join-timeout", fmt::format("{}", flags.nodes.join_timeout_s)});
  if (!flags.options.log_dir.empty())
    options.launcher.insert(options.launcher.end(), {"--log-dir", flags.options.log_dir});
  if (flags.no_prefix) options.launcher.emplace_back("--no-prefix");
  options.launcher.emplace_back("--no-color");
  options.command = flags.options.command;
  fmt::print("{}", comm::slurm_script(options));
}

void run(CLI::App& command, LaunchFlags& flags, CommandOutcome& outcome) {
  const auto usage = [](const std::string& problem) {
    return ConfigError("launch: " + problem + "; for example: penstock launch -n 4 -- ./train --steps 100");
  };
  if (command.count("program") > 0) flags.options.command = {flags.first_word};
  for (std::size_t i = 0;
       i < flags.further_words.size() && command.count("argument" + std::to_string(i + 1)) > 0; ++i)
    flags.options.command.push_back(flags.further_words[i]);
  const std::vector<std::string> rest = command.remaining();
  const bool separated = std::find(rest.begin(), rest.end(), "--") != rest.end();
  if (flags.options.command.empty()) throw usage("no program is given; put it after --");
  // Without the separator, options of the program could be mistaken for options of launch and vice versa.
  if (!separated) throw usage("-- is missing before the program \"" + flags.options.command.front() + "\"");
  if (command.count("-n") + command.count("--nproc-per-node") == 0)
    throw usage("the number of ranks is missing; set it with -n");
  if (flags.slurm) return write_slurm_script(command, flags);
  refuse_options(command, {"--cores", "--gpus", "--job-name", "--sbatch"}, "without --slurm");
  flags.options.nodes =
      node_options(command, flags.nodes, without_options(own_command_line(), node_option_names(), {}), 2);
  flags.options.grace = std::chrono::milliseconds(static_cast<long long>(flags.grace_s * 1000));
  flags.options.prefix = !flags.no_prefix;
  if (flags.no_color) flags.options.color = comm::LaunchOptions::Color::Never;
  outcome.exit_code = comm::launch(flags.options).exit_code;
}

}  // namespace

void add_launch_command(CLI::App& app, CommandOutcome& outcome) {
  CLI::App* command =
      app.add_subcommand("launch", "Start a program as several ranks, on one or several hosts");
  const auto flags = std::make_shared<LaunchFlags>();
  comm::LaunchOptions& options = flags->options;
  add_whole(*command, "-n,--ranks", options.ranks, 1, comm::kMaxLocalRanks, "Number of ranks on this host");
  add_whole(*command, "--nproc-per-node,--nproc_per_node", options.ranks, 1, comm::kMaxLocalRanks,
            "torchrun's name of -n")
      ->excludes("-n");
  add_whole(*command, "--restarts", options.restarts, 0, 1'000'000,
            "Maximum number of restarts of all ranks after a failure");
  add_number(*command, "--grace", flags->grace_s, {.low = 0, .high = 86'400},
             "Seconds that the other ranks have to exit after one has failed, and all ranks after a signal")
      ->type_name("S");
  command
      ->add_option("--log-dir", options.log_dir,
                   "Also write each rank's output to DIR/attempt<k>/rank<r>.log")
      ->type_name("DIR");
  add_whole(*command, "--port", options.port, 0, 65535,
            "MASTER_PORT; 0, the default: a free port, chosen again for each attempt");
  add_node_flags(*command, flags->nodes);
  command->add_flag(
      "--slurm", flags->slurm,
      "Print a batch script for sbatch instead of starting anything; the program runs on --nnodes hosts "
      "with -n ranks each");
  add_whole(*command, "--cores", flags->cores, 1, 4096, "With --slurm: cores of each rank");
  command->add_flag("--gpus", flags->gpus, "With --slurm: one GPU for each rank");
  command->add_option("--job-name", flags->job_name, "With --slurm: name of the job (default: penstock)")
      ->type_name("NAME");
  command->add_option("--sbatch", flags->sbatch, "With --slurm: a further option of sbatch; may be repeated")
      ->type_name("OPTION")
      ->allow_extra_args(false);
  command->add_flag("--no-prefix", flags->no_prefix, "Do not prefix lines with [rank r]");
  command->add_flag("--no-color", flags->no_color, "Do not colour the prefix (also: set NO_COLOR)");
  command->add_option("program", flags->first_word, "Program to run and its arguments, after --")
      ->type_name("");
  // One option per further word: a single list option would split an argument such as [a,b].
  command->preparse_callback([command, flags](std::size_t words) {
    flags->further_words.resize(words);
    for (std::size_t i = 0; i < words; ++i)
      command->add_option("argument" + std::to_string(i + 1), flags->further_words[i])->group("");
  });
  command->formatter(std::make_shared<LaunchFormatter>());
  command->footer(kExamples);
  command->callback([command, flags, &outcome] { run(*command, *flags, outcome); });
}

}  // namespace penstock::cli
