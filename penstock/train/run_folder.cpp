#include "penstock/train/run_folder.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>
#include <fstream>
#include <iterator>
#include <system_error>

#include "penstock/base/errors.h"
#include "penstock/checkpoint/world_meeting.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;

std::string stamp() {
  const std::time_t now = std::time(nullptr);
  return fmt::format("{:%Y%m%d-%H%M%S}", fmt::localtime(now));
}

// A name that is not taken: runs that begin in the same second get numbers.
fs::path new_folder(const std::string& preset) {
  const fs::path base = fs::path("runs") / fmt::format("{}-{}", preset, stamp());
  fs::create_directories("runs");
  for (int number = 1;; ++number) {
    const fs::path path = number == 1 ? base : fs::path(fmt::format("{}-{}", base.string(), number));
    if (fs::create_directory(path)) return path;
  }
}

void write_config(const fs::path& folder, const std::string& text) {
  const fs::path path = folder / "config.toml";
  if (std::ifstream former(path); former) {
    const std::string before{std::istreambuf_iterator<char>(former), {}};
    if (before == text) return;
    fs::rename(path, folder / fmt::format("config-before-{}.toml", stamp()));
  }
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw ConfigError(describe("run folder", folder.string(), "a folder that can be written", "set output.run_folder"));
}

}  // namespace

fs::path make_run_folder(const ResolvedConfig& resolved) {
  try {
    const std::string& wanted = resolved.config.output.run_folder;
    fs::path folder = wanted.empty() ? new_folder(resolved.config.model.preset) : fs::path(wanted);
    fs::create_directories(folder);
    folder = fs::absolute(folder);
    ResolvedConfig written = resolved;
    written.config.output.run_folder = folder.string();
    write_config(folder, to_toml(written));
    return folder;
  } catch (const fs::filesystem_error& error) {
    throw ConfigError(describe(fmt::format("run folder {}", error.path1().string()), error.code().message(), "a folder that can be made and written", "set output.run_folder"));
  }
}

fs::path agree_on_run_folder(const comm::World& world, const ResolvedConfig& resolved) {
  checkpoint::WorldMeeting meeting(world);
  const checkpoint::Bytes path = meeting.agree(
      "making the run folder",
      [&] {
        const std::string made = world.rank() == 0 ? make_run_folder(resolved).string() : std::string();
        return checkpoint::Bytes(made.begin(), made.end());
      },
      [](const std::vector<checkpoint::Bytes>& said) { return said.at(0); });
  return std::string(path.begin(), path.end());
}

}  // namespace penstock::train
