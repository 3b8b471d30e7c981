#include "penstock/train/job/run_folder.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <system_error>

#include "penstock/base/describe.h"
#include "penstock/base/log.h"
#include "penstock/checkpoint/files/folder.h"
#include "penstock/checkpoint/files/output_file.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint_types.h"
#include "penstock/errors.h"
#include "penstock/train/config/run_config.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;

std::string stamp() {
  const std::time_t now = std::time(nullptr);
  return fmt::format("{:%Y%m%d-%H%M%S}", fmt::localtime(now));
}

[[noreturn]] void refuse(const fs::path& folder, const std::string& why) {
  throw ConfigError(describe("run folder", fmt::format("{}: {}", folder.string(), why),
                             "a folder that can be created and written", "set output.run_folder"));
}

// Returns an unused name: runs started in the same second get numbers.
fs::path new_folder(const std::string& preset) {
  const fs::path base = fs::absolute(fs::path("runs")) / fmt::format("{}-{}", preset, stamp());
  fs::create_directories(base.parent_path());
  for (int number = 1;; ++number) {
    const fs::path path = number == 1 ? base : fs::path(fmt::format("{}-{}", base.string(), number));
    if (fs::create_directory(path)) return path;
  }
}

fs::path first_missing(const fs::path& path) {
  fs::path missing;
  for (fs::path at = path; !at.empty() && !fs::exists(at); at = at.parent_path()) missing = at;
  return missing;
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

fs::path absolute_folder(const fs::path& given) {
  const fs::path whole = fs::absolute(given).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

// Starting from elsewhere in a folder that has its own checkpoints would mix two histories: the next start
// would continue the wrong one.
void check_start(const fs::path& folder, const ResolvedConfig& resolved, const std::string& former) {
  const std::string& wanted = resolved.config.checkpoint.resume;
  if (wanted == "auto" || (wanted == former && wanted != "never")) return;
  const auto own = checkpoint::find_checkpoints(checkpoint_folder(resolved.config, folder));
  if (own.empty()) return;
  std::error_code error;
  if (wanted != "never" && fs::equivalent(wanted, own.back().path, error)) return;
  throw ConfigError(describe(
      fmt::format("checkpoint.resume in run folder {}", folder.string()), fmt::format("\"{}\"", wanted),
      fmt::format("auto: the run has its own checkpoints, the newest of step {}", own.back().step),
      "leave it out to continue the run, or start a new run in another --run_folder"));
}

RunPlan plan_continued(const fs::path& given, const ConfigSources& sources) {
  const fs::path folder = absolute_folder(given);
  RunPlan plan{.resolved = continue_run_config(folder, sources), .folder = folder, .continues = true};
  const bool is_own = sources.arguments.empty() && !sources.file;
  if (!is_own) check_start(folder, plan.resolved, load_run_config(folder).config.checkpoint.resume);
  return plan;
}

}  // namespace

fs::path checkpoint_folder(const TrainConfig& config, const fs::path& run_folder) {
  return config.checkpoint.folder.empty() ? run_folder / "checkpoints" : fs::path(config.checkpoint.folder);
}

TrainConfig continuing_config(TrainConfig config, const fs::path& run_folder) {
  if (!checkpoint::find_checkpoints(checkpoint_folder(config, run_folder)).empty())
    config.checkpoint.resume = "auto";
  return config;
}

RunPlan plan_run(const ConfigSources& sources) {
  const fs::path named = named_run_folder(sources);
  if (!named.empty() && contains_run(named)) return plan_continued(named, sources);
  const fs::path folder = named.empty() ? named : absolute_folder(named);
  RunPlan plan{
      .resolved = with_absolute_paths(load_config(sources), folder), .folder = folder, .continues = false};
  std::error_code error;
  // Data of unknown origin would replace the requested data.
  if (!folder.empty() && plan.resolved.config.data.shards.empty() && fs::exists(folder / "data", error))
    throw ConfigError(
        describe("run folder", fmt::format("{}, which has data/ but no {}", folder.string(), kRunConfigName),
                 "a run, or a folder without data/", "remove data/, or set another output.run_folder"));
  return plan;
}

RunPlan plan_resume(const fs::path& given, const ConfigSources& sources) {
  const fs::path folder = absolute_folder(given);
  if (!contains_run(folder)) {
    const bool is_checkpoint = checkpoint::step_of_folder_name(folder.filename().string()).has_value();
    throw ConfigError(describe(
        "resume", given.string(), fmt::format("the folder of a run, with its {}", kRunConfigName),
        is_checkpoint ? "give the run folder that contains the checkpoint; its newest checkpoint is used"
                      : "penstock train starts a new run"));
  }
  return plan_continued(folder, sources);
}

RunFolder::RunFolder(const RunPlan& plan) {
  try {
    if (plan.folder.empty()) {
      made_ = first_missing(fs::absolute("runs"));
      path_ = new_folder(plan.resolved.config.model.preset);
      if (made_.empty()) made_ = path_;
    } else {
      path_ = plan.folder;
      made_ = first_missing(path_);
      fs::create_directories(path_);
    }
  } catch (const fs::filesystem_error& error) {
    refuse(plan.folder.empty() ? fs::path("runs") : plan.folder, error.code().message());
  }
  lock();
}

void RunFolder::lock() {
  file_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file_ < 0) refuse(path_, std::strerror(errno));
  if (::flock(file_, LOCK_EX | LOCK_NB) == 0) return;
  if (errno != EWOULDBLOCK) {
    ::close(file_);
    file_ = ::open((path_ / ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file_ < 0) refuse(path_, std::strerror(errno));
    if (::flock(file_, LOCK_EX | LOCK_NB) == 0) return;
  }
  const int reason = errno;
  if (reason != EWOULDBLOCK) {
    log().warn("train: {} cannot be locked ({}); make sure that no other process trains in it",
               path_.string(), std::strerror(reason));
    return;
  }
  ::close(file_);
  throw ConfigError(
      fmt::format("run folder {}: another process is training in it; wait until it has ended, stop it, or "
                  "set another output.run_folder",
                  path_.string()));
}

RunFolder::~RunFolder() {
  if (file_ >= 0) ::close(file_);
  // Only empty folders are removed, so that a run that has started stays.
  std::error_code error;
  for (fs::path at = path_; !made_.empty() && fs::remove(at, error) && at != made_;) at = at.parent_path();
}

fs::path agree_on_run_folder(const comm::World& world, const RunPlan& plan,
                             std::unique_ptr<RunFolder>& held) {
  checkpoint::WorldAgreement agreement(world);
  try {
    const checkpoint::Bytes path = agreement.agree(
        "making the run folder",
        [&] {
          if (world.rank() != 0) return checkpoint::Bytes();
          held = std::make_unique<RunFolder>(plan);
          const std::string made = held->path().string();
          return checkpoint::Bytes(made.begin(), made.end());
        },
        [](const std::vector<checkpoint::Bytes>& answers) { return answers.at(0); });
    return std::string(path.begin(), path.end());
  } catch (const checkpoint::CheckpointError& error) {
    throw ConfigError(error.what());
  }
}

void write_run_config(const fs::path& folder, const ResolvedConfig& resolved) {
  const fs::path path = folder / kRunConfigName, draft = folder / ".config.toml.writing";
  const std::string text = run_config_text(resolved, folder);
  try {
    if (fs::exists(path) && text_of(path) == text) return;
    fs::remove(draft);
    checkpoint::write_file(draft, text);
    checkpoint::sync_file(draft);
    if (fs::exists(path)) {
      fs::path kept = folder / fmt::format("config-before-{}.toml", stamp());
      for (int number = 2; fs::exists(kept); ++number)
        kept = folder / fmt::format("config-before-{}-{}.toml", stamp(), number);
      checkpoint::write_file(kept, text_of(path));
    }
    fs::rename(draft, path);
    checkpoint::sync_folder(folder);
  } catch (const ConfigError&) {
    throw;
  } catch (const std::runtime_error& error) {  // from the file system or from writing
    std::error_code ignored;                   // the error below is reported instead
    fs::remove(draft, ignored);
    throw ConfigError(describe(path.string(), error.what(), "a file that can be written",
                               "free space there, or set another output.run_folder"));
  }
}

}  // namespace penstock::train
