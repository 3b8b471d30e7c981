// The folder that holds the checkpoints of a run, and the names in it.
//
//   step-00000120             a complete checkpoint
//   .step-00000120.writing    being written, or left by a crash
//   .step-00000120.replaced   the previous checkpoint of a step that is being rewritten
//   .step-00000120.removing   being deleted
//   .writer                   locked by the writer during its lifetime
//
// Thread safety: free functions on the file system, without shared state.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::checkpoint {

struct FoundCheckpoint {
  std::int64_t step = 0;
  std::filesystem::path path;
};

std::string step_folder_name(std::int64_t step);                         // at least eight digits
std::optional<std::int64_t> step_of_folder_name(std::string_view name);  // std::nullopt for other names

std::filesystem::path writing_path(const std::filesystem::path& folder, std::int64_t step);

// Finds checkpoints by name alone, oldest first; returns none for a folder that does not exist. open_latest
// checks whether they are intact.
std::vector<FoundCheckpoint> find_checkpoints(const std::filesystem::path& folder);

// Removes what a crash left, and restores the name of a checkpoint that was to be replaced. Returns the names
// it handled. Only the writer of the folder may call it.
std::vector<std::string> clean_leftovers(const std::filesystem::path& folder);

// Atomically gives the finished temporary folder its final name; replaces a checkpoint of the same step.
void commit(const std::filesystem::path& folder, std::int64_t step);

// Deletes a checkpoint. Renames it first, so that an incomplete checkpoint is never found.
void remove_checkpoint(const std::filesystem::path& folder, std::int64_t step);

// Returns those older than the newest `keep_last` with a step up to `newest`; none if `keep_last` is 0. Later
// steps belong to another run and are not touched.
std::vector<FoundCheckpoint> outdated(const std::vector<FoundCheckpoint>& found, std::int64_t newest,
                                      int keep_last);

// Creates the folder if needed, and excludes a second writer during its lifetime. The system releases the
// lock when the process ends.
class FolderLock {
 public:
  static constexpr const char* kName = ".writer";

  explicit FolderLock(const std::filesystem::path& folder);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

 private:
  int file_ = -1;
};

}  // namespace penstock::checkpoint
