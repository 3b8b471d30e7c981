// Random configurations that `penstock train` must refuse: a valid layout of a small hybrid model with one or
// two settings that do not fit.
//
//   const InvalidConfiguration invalid = make_invalid_configuration(folder, chance);
//   run_command(penstock + " train " + invalid.arguments);
//   names_the_problem(invalid, output)
//
// Layouts (invalid_configurations.cpp) and corruptions (corruptions.cpp) are tables: a new key or schedule is
// one row.
#pragma once

#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "tests/cli/corruptions.h"

namespace penstock::test::configurations {

// Writes the files that corruptions refer to into `folder`. Throws std::runtime_error if `program` cannot
// make one of them.
ConfigurationFiles make_configuration_files(const std::string& program, const std::filesystem::path& folder);

struct InvalidConfiguration {
  std::string layout;                           // "ZBVZeroBubble"
  std::vector<std::string> corruptions;         // one or two: "more stages than blocks"
  std::vector<std::vector<std::string>> named;  // for each corruption: words, any of which names it
  std::string arguments;                        // for the shell, without the run folder
  bool needs_models = false;  // model.type is one of those that tests/cli/invalid_models.cpp registers
};

InvalidConfiguration make_invalid_configuration(const ConfigurationFiles& files, Chance& chance);

// The layouts without a corruption.
struct ValidConfiguration {
  std::string layout, arguments;
  std::string plan_arguments;  // those of [model] and [layout], which `penstock partition` takes
};
std::vector<ValidConfiguration> valid_configurations(const ConfigurationFiles& files);

// Returns whether the output names at least one of the corruptions: a start is refused at the first of them.
bool names_the_problem(const InvalidConfiguration& invalid, const std::string& output);

}  // namespace penstock::test::configurations
