#include "tests/chaos/run_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "tests/chaos/random.h"

namespace penstock::chaos {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kCheckpoint = "step-";

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    names.push_back(entry->path().filename().string());
  return names;
}

}  // namespace

void write_text(const fs::path& folder) {
  fs::create_directories(folder);
  for (int file = 0; file < 12; ++file) {
    std::ofstream out(folder / fmt::format("{}.h", file));
    for (int line = 0; line < 30; ++line)
      out << fmt::format("int value_{} = {};\n", file * line % 7, file + line);
  }
}

std::string configuration(const Plan& plan, const RunFiles& files, const std::string& transport) {
  const bool pipeline = plan.layout == Layout::Pipeline;
  return fmt::format(
      "[model]\npreset = \"tiny\"\nwidth = 32\nlayers = 4\nheads = 2\nkey_value_heads = 2\nfeed_width = 64\n"
      "context = 32\n\n"
      "[layout]\npp = {}\ndp = {}\nmicrobatches = 4\nmicrobatch_size = 2\ndevice = \"cpu\"\n"
      "transport = \"{}\"\n\n"
      "[training]\nsteps = {}\nwarmup_steps = 2\ndecay = \"constant\"\nvalidate_every = 0\n\n"
      "[data]\nsources = [\"{}\"]\nvalidation_fraction = 0.2\n\n"
      "[checkpoint]\nevery = 4\nkeep = 100\nfolder = \"{}\"\nfallback = {}\n\n"
      "[output]\nrun_folder = \"{}\"\nprogress = \"lines\"\nsample_tokens = 0\ntrace_steps = []\n\n"
      "[launch]\ntimeout_s = {:.1f}\ngrace_s = 3.0\n",
      pipeline ? 2 : 1, pipeline ? 1 : 2, transport, plan.steps, files.text.string(),
      files.checkpoints.string(), plan.fallback, files.run.string(), timeout_s(plan));
}

RunProgress read_progress(const fs::path& run_folder) {
  RunProgress progress;
  std::ifstream file(run_folder / "metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    if (file.eof()) break;  // no newline yet: it is being written, or was cut off
    const auto entry = nlohmann::json::parse(line);
    if (entry.at("type") == "start") {
      progress.continued_after = entry.at("first_step");
      progress.losses.erase(progress.losses.upper_bound(progress.continued_after), progress.losses.end());
    } else if (entry.at("type") == "step") {
      const auto& loss = entry.at("loss");
      if (!loss.is_null()) progress.losses[entry.at("step")] = loss;
    }
  }
  if (!progress.losses.empty()) progress.last_step = progress.losses.rbegin()->first;
  return progress;
}

Checkpoints read_checkpoints(const fs::path& folder) {
  Checkpoints found;
  add_new_checkpoints(folder, found);
  return found;
}

void add_new_checkpoints(const fs::path& folder, Checkpoints& known) {
  for (const std::string& name : names_in(folder))
    if (name.starts_with(kCheckpoint) && !known.contains(name))
      known[name] = test::state_of(folder / name, false);
}

int step_of(const std::string& checkpoint) { return std::stoi(checkpoint.substr(kCheckpoint.size())); }

std::vector<std::string> lost_checkpoints(const Checkpoints& before, const Checkpoints& after) {
  std::vector<std::string> lost;
  for (const auto& [name, state] : before)
    if (const auto found = after.find(name); found == after.end())
      lost.push_back(name + " is gone");
    else if (const std::string changes = test::difference(state, found->second); !changes.empty())
      lost.push_back(name + ": " + changes);
  return lost;
}

std::vector<std::string> unfinished_saves(const fs::path& folder) {
  std::vector<std::string> left;
  for (const std::string& name : names_in(folder))
    if (name.starts_with("." + std::string(kCheckpoint))) left.push_back(name);
  return left;
}

std::string damage_checkpoint(const fs::path& checkpoint, Damage damage, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::string> names = names_in(checkpoint);
  if (names.empty()) throw std::runtime_error("no file in " + checkpoint.string());
  std::sort(names.begin(), names.end());
  const std::string name =
      names.at(static_cast<std::size_t>(random.whole(0, static_cast<int>(names.size()) - 1)));
  const fs::path path = checkpoint / name;
  std::vector<std::uint8_t> bytes = test::read_bytes(path);
  switch (damage) {
    case Damage::FlippedByte:
      bytes.at(random.next() % bytes.size()) ^= static_cast<std::uint8_t>(random.whole(1, 255));
      test::write_bytes(path, bytes);
      break;
    case Damage::Truncated:
      bytes.resize(random.next() % bytes.size());
      test::write_bytes(path, bytes);
      break;
    case Damage::MissingFile:
      fs::remove(path);
      break;
    case Damage::EmptyFile:
      test::write_bytes(path, {});
      break;
  }
  return name;
}

}  // namespace penstock::chaos
