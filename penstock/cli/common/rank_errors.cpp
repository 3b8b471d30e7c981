#include "penstock/cli/common/rank_errors.h"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/env.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/checkpoint_types.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/errors.h"

namespace penstock::cli {

namespace {

namespace fs = std::filesystem;

constexpr const char* kVariable = "PENSTOCK_RANK_ERRORS";

fs::path file_of(const fs::path& folder, int rank) { return folder / fmt::format("rank-{}", rank); }

// Returns false if no parent listens or the message could not be written.
bool leave(const std::string& message) {
  const auto folder = env_text(kVariable);
  if (!folder) return false;
  std::ofstream file(file_of(*folder, comm::launch_env().rank));
  file << message;
  file.close();
  return static_cast<bool>(file);
}

}  // namespace

void RankErrors::listen(comm::LaunchOptions& options) const {
  options.environment.emplace_back(kVariable, folder_.path().string());
  options.explained = [folder = folder_.path()](int rank) { return fs::exists(file_of(folder, rank)); };
}

void RankErrors::print() const {
  std::map<int, std::string> by_rank;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_.path())) {
    std::ifstream file(entry.path());
    by_rank[static_cast<int>(parse_integer(entry.path().filename().string().substr(5)).value_or(0))] =
        std::string(std::istreambuf_iterator<char>(file), {});
  }
  std::vector<std::pair<std::string, std::vector<int>>>
      messages;  // ordered by the first rank with the message
  for (const auto& [rank, text] : by_rank) {
    auto same = messages.begin();
    while (same != messages.end() && same->first != text) ++same;
    if (same == messages.end()) same = messages.insert(messages.end(), {text, {}});
    same->second.push_back(rank);
  }
  for (const auto& [text, ranks] : messages)
    fmt::print(stderr, "penstock: {}{}\n",
               messages.size() > 1 ? fmt::format("rank {}: ", format_list(ranks)) : std::string(),
               printable(text));
}

int report_to_parent(const std::function<int()>& body) {
  try {
    return body();
  } catch (const ConfigError& error) {
    if (!leave(error.what())) throw;
    return 2;
  } catch (const checkpoint::CheckpointError& error) {
    if (!leave(error.what())) throw;
    return 1;
  }
}

}  // namespace penstock::cli
