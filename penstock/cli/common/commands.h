// The commands of `penstock`, one file each. Every function adds its subcommand, with help and an example, to `app`.
//
// A command reports by its exit code: 0 ok, 1 a check failed, 2 usage or parse error, 3 (train, resume) the last checkpoint
// was not saved. It throws ConfigError for 2.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "penstock/train_config.h"

namespace penstock::cli {

// Exit code of the command that ran; set by its callback.
struct CommandOutcome {
  int exit_code = 0;
};

void add_doctor_command(CLI::App& app, CommandOutcome& outcome);
void add_launch_command(CLI::App& app, CommandOutcome& outcome);
void add_schedule_command(CLI::App& app, CommandOutcome& outcome);
void add_check_command(CLI::App& app, CommandOutcome& outcome);
void add_simulate_command(CLI::App& app, CommandOutcome& outcome);
void add_compare_command(CLI::App& app, CommandOutcome& outcome);
void add_trace_command(CLI::App& app, CommandOutcome& outcome);
void add_data_command(CLI::App& app, CommandOutcome& outcome);
void add_train_command(CLI::App& app, CommandOutcome& outcome);
void add_resume_command(CLI::App& app, CommandOutcome& outcome);
void add_generate_command(CLI::App& app, CommandOutcome& outcome);
void add_parity_command(CLI::App& app, CommandOutcome& outcome);
void add_inspect_command(CLI::App& app, CommandOutcome& outcome);

// All of them, in the order of the help.
void add_all_commands(CLI::App& app, CommandOutcome& outcome);

// Throws ConfigError for a value of a PENSTOCK_ variable that makes no sense, whether or not the command would have read it, and
// warns of names that look like a misspelt one.
void check_environment();

// The subcommands of `inspect`.
void add_inspect_memory_command(CLI::App& inspect, CommandOutcome& outcome);
void add_inspect_graph_command(CLI::App& inspect, CommandOutcome& outcome);

// What stands behind a command that takes a configuration: CONFIG.toml if it comes first, then --key value.
train::ConfigSources config_sources(const CLI::App& command);

// Throws ConfigError for keys given on the command line that `command` would ignore: all but those for which `used` holds.
void refuse_keys(const train::ResolvedConfig& resolved, const std::string& command, const std::function<bool(const std::string& key)>& used);

// Of commands that train a few steps and keep nothing: what a run would save and write has no meaning.
bool trains_without_a_run(const std::string& key);

// Text from the newest checkpoint of a run, as `generate` prints it.
void print_sample(const std::string& run_folder);
void add_report_command(CLI::App& app, CommandOutcome& outcome);

}  // namespace penstock::cli
