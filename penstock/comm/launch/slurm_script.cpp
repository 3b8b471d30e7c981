#include "penstock/comm/launch/slurm_script.h"

#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/comm/launch/remote_shells.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

// Options of sbatch that the script sets itself, and what sets them instead.
struct OwnOption {
  const char* name;
  const char* instead;
};
constexpr OwnOption kOwnOptions[] = {{"--nodes", "--nnodes"},
                                     {"-N", "--nnodes"},
                                     {"--ntasks", "-n"},
                                     {"-n", "-n"},
                                     {"--ntasks-per-node", "-n"},
                                     {"--job-name", "--job-name"},
                                     {"-J", "--job-name"},
                                     {"--signal", "checkpoint.every"},
                                     {"--cpus-per-task", "--cores"},
                                     {"-c", "--cores"},
                                     {"--gpus-per-node", "--gpus"}};

void check_sbatch_option(const std::string& option) {
  const auto refuse = [&](const std::string& expected, const std::string& remedy) {
    throw ConfigError(describe("--sbatch", quote(option), expected, remedy));
  };
  if (option.size() < 2 || option[0] != '-' || option.find('\n') != std::string::npos)
    refuse("one option of sbatch, such as --time=02:00:00", "give --sbatch once for each option");
  const std::string name = option.substr(0, option.find_first_of("= "));
  for (const OwnOption& own : kOwnOptions)
    if (name == own.name)
      refuse("an option that the script does not set itself", fmt::format("use {}", own.instead));
}

}  // namespace

std::string slurm_script(const SlurmOptions& options) {
  for (const std::string& option : options.sbatch) check_sbatch_option(option);
  if (options.name.empty() || options.name.find_first_of(" \t\n\"'") != std::string::npos)
    throw ConfigError(describe("--job-name", quote(options.name), "a name without blanks and quotes"));
  const std::string nodes = options.least_nodes == options.most_nodes
                                ? fmt::format("{}", options.most_nodes)
                                : fmt::format("{}-{}", options.least_nodes, options.most_nodes);
  std::string script = "#!/bin/bash\n";
  const auto option = [&](const std::string& text) { script += "#SBATCH " + text + "\n"; };
  option("--job-name=" + options.name);
  option("--nodes=" + nodes);
  // One task for each host: the launcher, which starts the ranks and has all the cores of the host's share.
  option("--ntasks-per-node=1");
  option(fmt::format("--cpus-per-task={}", options.cores * options.ranks));
  if (options.gpus) option(fmt::format("--gpus-per-node={}", options.ranks));
  option("--output=%x-%j.out");
  // Ranks save a checkpoint before the time is over. Slurm signals the steps, that is, the launchers.
  option("--signal=TERM@120");
  for (const std::string& each : options.sbatch) option(each);
  script += R"(
set -euo pipefail

# Rank 0 runs on the first host of the job, and all ranks meet there.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
# Jobs that share a host need different ports.
port=$((20000 + SLURM_JOB_ID % 12000))
# Whoever does not know this text cannot take part. srun passes it on in the environment.
PENSTOCK_SECRET=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
export PENSTOCK_SECRET
export JOB_RDZV="$head:$port"

)";
  std::string start = "exec";
  for (const std::string& word : options.launcher) start += " " + shell_quoted(word);
  start += fmt::format(
      " --nnodes \"$SLURM_JOB_NUM_NODES\" --node-rank \"$SLURM_NODEID\" --rdzv \"$JOB_RDZV\""
      " -n {} --restarts {} -- \"$@\"",
      options.ranks, options.restarts);
  std::string program;
  for (const std::string& word : options.command) program += " " + shell_quoted(word);
  script += fmt::format(
      "srun --ntasks=\"$SLURM_JOB_NUM_NODES\" --ntasks-per-node=1 --cpus-per-task={} --cpu-bind=none "
      "--kill-on-bad-exit=1 \\\n"
      "  bash -c {} launcher{}\n",
      options.cores * options.ranks, shell_quoted(start), program);
  return script;
}

}  // namespace penstock::comm
