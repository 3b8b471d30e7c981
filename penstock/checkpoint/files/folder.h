// The folder that holds the checkpoints of a run, and the names in it.
//
//   step-00000120             a checkpoint; it has had this name since it was complete
//   .step-00000120.writing    being written, or left by a crash
//   .step-00000120.replaced   the former checkpoint of a step that is written again
//   .step-00000120.removing   being deleted
//   .writer                   locked by the writer while it lives
//
// Thread rule: free functions of the file system.
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
std::optional<std::int64_t> step_of_folder_name(std::string_view name);  // the inverse; nothing for other names

std::filesystem::path writing_path(const std::filesystem::path& folder, std::int64_t step);

// By name alone, oldest first; a folder that does not exist has none. Whether they are sound is open_latest's question.
std::vector<FoundCheckpoint> find_checkpoints(const std::filesystem::path& folder);

// Removes what a crash left, and gives a checkpoint back its name that was to be replaced. Returns the names it dealt with. Only
// for the one who writes there.
std::vector<std::string> clean_leftovers(const std::filesystem::path& folder);

// Gives the finished temporary folder its name, all at once; a checkpoint of the same step is replaced.
void commit(const std::filesystem::path& folder, std::int64_t step);

// Deletes a checkpoint. It loses its name first, so that no half of it is ever found.
void remove_checkpoint(const std::filesystem::path& folder, std::int64_t step);

// Those beyond the newest `keep_last` of steps up to `newest`; none for 0. Later steps belong to another run and are left alone.
std::vector<FoundCheckpoint> outdated(const std::vector<FoundCheckpoint>& found, std::int64_t newest, int keep_last);

// Makes the folder if need be, and keeps a second writer out while it lives. The system frees it when the process ends.
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
