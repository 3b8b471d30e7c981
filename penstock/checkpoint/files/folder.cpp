#include "penstock/checkpoint/files/folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <system_error>

#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/checkpoint/files/output_file.h"
#include "penstock/checkpoint_types.h"
#include "penstock/errors.h"

namespace penstock::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kWriting = ".writing", kReplaced = ".replaced", kRemoving = ".removing";

fs::path hidden(const fs::path& folder, std::int64_t step, std::string_view ending) {
  return folder / fmt::format(".{}{}", step_folder_name(step), ending);
}

void rename_folder(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error) throw_file_error(fmt::format("rename to {}", to.filename().string()), from, error.value());
}

void remove_folder(const fs::path& path) {
  std::error_code error;
  remove_tree(path, error);
  if (error) throw_file_error("remove", path, error.value());
}

std::vector<fs::path> names_in(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> paths;
  fs::directory_iterator entry(folder, error);
  if (error == std::errc::no_such_file_or_directory) return paths;
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) paths.push_back(entry->path());
  if (error) throw_file_error("list", folder, error.value());
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

std::string step_folder_name(std::int64_t step) {
  if (step < 0) throw ValueError(describe("checkpoint step", fmt::format("{}", step), "at least 0"));
  return fmt::format("{}{:08}", kPrefix, step);
}

std::optional<std::int64_t> step_of_folder_name(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kPrefix.size());
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos) return std::nullopt;
  std::int64_t step = 0;
  if (std::from_chars(digits.data(), digits.data() + digits.size(), step).ec != std::errc{})
    return std::nullopt;
  if (step_folder_name(step) != name) return std::nullopt;
  return step;
}

fs::path writing_path(const fs::path& folder, std::int64_t step) { return hidden(folder, step, kWriting); }

std::vector<FoundCheckpoint> find_checkpoints(const fs::path& folder) {
  std::vector<FoundCheckpoint> found;
  for (const fs::path& path : names_in(folder))
    if (const auto step = step_of_folder_name(path.filename().string())) {
      std::error_code error;
      if (fs::is_directory(path, error)) found.push_back({*step, path});
    }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  return found;
}

std::vector<std::string> clean_leftovers(const fs::path& folder) {
  std::vector<std::string> dealt_with;
  for (const fs::path& path : names_in(folder)) {
    const std::string name = path.filename().string();
    for (const std::string_view ending : {kWriting, kReplaced, kRemoving}) {
      if (!name.starts_with(".") || !name.ends_with(ending)) continue;
      const auto step =
          step_of_folder_name(std::string_view(name).substr(1, name.size() - 1 - ending.size()));
      if (!step) continue;
      std::error_code error;
      if (ending == kReplaced && !fs::exists(folder / step_folder_name(*step), error))
        rename_folder(path, folder / step_folder_name(*step));
      else
        remove_folder(path);
      dealt_with.push_back(name);
    }
  }
  return dealt_with;
}

void commit(const fs::path& folder, std::int64_t step) {
  const fs::path draft = writing_path(folder, step), place = folder / step_folder_name(step);
  std::error_code error;
  if (!fs::exists(place, error)) {
    rename_folder(draft, place);
  } else if (::renameat2(AT_FDCWD, draft.c_str(), AT_FDCWD, place.c_str(), RENAME_EXCHANGE) == 0) {
    remove_folder(draft);  // which now holds the previous checkpoint
  } else if (errno == EINVAL || errno == ENOSYS) {
    // The file system cannot exchange two names: clean_leftovers repairs a crash between these lines.
    const fs::path former = hidden(folder, step, kReplaced);
    rename_folder(place, former);
    rename_folder(draft, place);
    remove_folder(former);
  } else {
    throw_file_error(fmt::format("exchange with {}", place.filename().string()), draft, errno);
  }
  sync_folder(folder);
}

void remove_checkpoint(const fs::path& folder, std::int64_t step) {
  const fs::path doomed = hidden(folder, step, kRemoving);
  rename_folder(folder / step_folder_name(step), doomed);
  remove_folder(doomed);
}

std::vector<FoundCheckpoint> outdated(const std::vector<FoundCheckpoint>& found, std::int64_t newest,
                                      int keep_last) {
  std::vector<FoundCheckpoint> own;
  for (const FoundCheckpoint& checkpoint : found)
    if (checkpoint.step <= newest) own.push_back(checkpoint);
  const auto keep = static_cast<std::size_t>(std::max(keep_last, 0));
  own.resize(keep == 0 || own.size() <= keep ? 0 : own.size() - keep);
  return own;
}

FolderLock::FolderLock(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw_file_error("create", folder, error.value());
  const fs::path path = folder / kName;
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) throw_file_error("create", path, errno);
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno != ENOTSUP && errno != ENOSYS) {
    const int code = errno;
    ::close(file_);
    if (code != EWOULDBLOCK) throw_file_error("lock", path, code);
    throw CheckpointError(
        fmt::format("{}: another run is writing its checkpoints there; end it, or choose another folder",
                    folder.string()));
  }
}

FolderLock::~FolderLock() {
  if (file_ >= 0) ::close(file_);
}

}  // namespace penstock::checkpoint
