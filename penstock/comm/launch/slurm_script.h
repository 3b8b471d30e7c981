// The batch script with which Slurm runs a program on several hosts: one launcher for each host.
#pragma once

#include <string>
#include <vector>

namespace penstock::comm {

struct SlurmOptions {
  int least_nodes = 1, most_nodes = 1;
  int ranks = 1;      // on each host
  int cores = 1;      // of each rank
  bool gpus = false;  // one GPU for each rank
  int restarts = 0;
  std::string name = "penstock";    // of the job
  std::vector<std::string> sbatch;  // further options of sbatch, one in each element: "--time=02:00:00"
  std::vector<std::string>
      launcher;                      // the command that launches, and its own options: {"penstock", "launch"}
  std::vector<std::string> command;  // the program and its arguments
};

// Returns the text of the script. Throws ConfigError for an option of sbatch that does not begin with '-' or
// has a newline, and for a number of hosts or ranks that the options of sbatch set as well.
std::string slurm_script(const SlurmOptions& options);

}  // namespace penstock::comm
