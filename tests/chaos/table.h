// The results of a campaign: one line per trial in a file, and a table of them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tests/chaos/judge.h"
#include "tests/chaos/plan.h"

namespace penstock::chaos {

struct TrialResult {
  Fault fault{};
  std::uint64_t seed = 0;
  enum class Kind { SameLosses, NamedError, Failed, Skipped } kind = Kind::Failed;
  double seconds = 0;
  std::vector<std::string> notes;  // what is wrong, or why it was skipped
};

// One line of JSON.
std::string to_line(const TrialResult& result);
TrialResult parse_line(const std::string& line);  // throws ConfigError

// Later results of the same trial replace earlier ones. A file that does not exist has none.
std::vector<TrialResult> read_results(const std::filesystem::path& file);

// Faults without a trial are left out; the last line is the sum.
std::string text_table(const std::vector<TrialResult>& results);
std::string markdown_table(const std::vector<TrialResult>& results);

}  // namespace penstock::chaos
