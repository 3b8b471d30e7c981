// The commands of `penstock`, one file per command. Each function adds a subcommand, with help and an
// example, to `app`.
//
// Exit codes of commands: 0 ok, 1 a check failed, 2 usage or parse error, 3 (train, resume) the last
// checkpoint was not saved. A command throws ConfigError for 2.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "penstock/train_config.h"

namespace penstock::cli {

// Exit code of the command that ran; set by the command's callback.
struct CommandOutcome {
  int exit_code = 0;
};

void add_doctor_command(CLI::App& app, CommandOutcome& outcome);
void add_launch_command(CLI::App& app, CommandOutcome& outcome);
void add_schedule_command(CLI::App& app, CommandOutcome& outcome);
void add_check_command(CLI::App& app, CommandOutcome& outcome);
void add_simulate_command(CLI::App& app, CommandOutcome& outcome);
void add_compare_command(CLI::App& app, CommandOutcome& outcome);
void add_partition_command(CLI::App& app, CommandOutcome& outcome);
void add_trace_command(CLI::App& app, CommandOutcome& outcome);
void add_data_command(CLI::App& app, CommandOutcome& outcome);
void add_train_command(CLI::App& app, CommandOutcome& outcome);
void add_resume_command(CLI::App& app, CommandOutcome& outcome);
void add_generate_command(CLI::App& app, CommandOutcome& outcome);
void add_parity_command(CLI::App& app, CommandOutcome& outcome);
void add_compile_command(CLI::App& app, CommandOutcome& outcome);
void add_inspect_command(CLI::App& app, CommandOutcome& outcome);

// Adds all commands, in the order of the help.
void add_all_commands(CLI::App& app, CommandOutcome& outcome);

// Throws ConfigError for an invalid value of a PENSTOCK_ variable, even if the command would not read it, and
// warns about names that look like misspelled ones.
void check_environment();

// The subcommands of `inspect`.
void add_inspect_memory_command(CLI::App& inspect, CommandOutcome& outcome);
void add_inspect_graph_command(CLI::App& inspect, CommandOutcome& outcome);
void add_inspect_costs_command(CLI::App& inspect, CommandOutcome& outcome);

// Returns the configuration sources on a command line: CONFIG.toml if it comes first, then --key value.
train::ConfigSources config_sources(const CLI::App& command);

// Throws ConfigError for keys given on the command line that `command` ignores: all for which `used` returns
// false.
void refuse_keys(const train::ResolvedConfig& resolved, const std::string& command,
                 const std::function<bool(const std::string& key)>& used);

// For commands that train a few steps and keep nothing: returns whether a key has an effect. Checkpoint and
// output keys have none.
bool has_effect_without_run(const std::string& key);

// Prints text generated from the newest checkpoint of a run, like `generate`.
void print_sample(const std::string& run_folder);
void add_report_command(CLI::App& app, CommandOutcome& outcome);

}  // namespace penstock::cli
