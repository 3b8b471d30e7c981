// Opening checkpoints: find the newest one, check it, read any part of any tensor of it.
//
//   auto opened = open_latest(meeting, folder, {.allow_fallback = true});        // nothing when there is none
//   opened->checkpoint.read(Section::Model, "head.weight", slice, bytes);
//
// Checking reads every block and compares its checksum; the ranks share the blocks out. Damage is named by file and byte range.
// All ranks get the same checkpoint or the same error. Knows nothing of Torch; load.h fills tensors.
// Thread rule: any number of threads may read an open checkpoint, also while it is deleted.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/folder.h"
#include "penstock/checkpoint/files/index.h"
#include "penstock/checkpoint/files/meeting.h"
#include "penstock/checkpoint/files/safetensors_file.h"
#include "penstock/checkpoint/files/save_plan.h"
#include "penstock/checkpoint/files/slice.h"

namespace penstock::checkpoint {

struct Damage {
  std::string file;
  std::uint64_t begin = 0, end = 0;  // bytes; both 0 when it is about the whole file
  std::string what;

  friend bool operator==(const Damage&, const Damage&) = default;
};

// "model.safetensors bytes 0-4194304: ..."
std::string to_text(const Damage& damage);

class Checkpoint {
 public:
  struct Place {
    const SafetensorsFile* file = nullptr;
    const TensorEntry* entry = nullptr;
  };
  using Table = std::map<std::string, Place, std::less<>>;

  // Checks the index, the sizes of the files and their headers, not the blocks. Throws CheckpointError.
  explicit Checkpoint(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::int64_t step() const { return index_.step; }
  const Index& index() const { return index_; }
  const std::string& state_json() const { return state_; }
  const Table& tensors(Section section) const { return section == Section::Model ? model_ : optimizer_; }

  // Fills the local tensor of the slice, row-major, in the dtype of the file. Throws CheckpointError for an unknown name or
  // another shape, ValueError for `local` of another size.
  void read(Section section, std::string_view name, const Slice& slice, std::span<std::uint8_t> local) const;

 private:
  std::filesystem::path path_;
  Index index_;
  std::string state_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  Table model_, optimizer_;
};

struct OpenPolicy {
  bool verify = true;           // every block; else index, sizes and headers alone
  bool allow_fallback = false;  // to an older checkpoint when the newest one is damaged
};

struct OpenedCheckpoint {
  Checkpoint checkpoint;
  std::vector<std::string> skipped;  // newer ones that were damaged, and how; the same on every rank
};

// [collective] All that is wrong with a checkpoint; none when it is sound. Throws where a rank does not see it at all.
std::vector<Damage> find_damage(Meeting& meeting, const std::filesystem::path& path, bool blocks = true);

// [collective] The newest sound checkpoint; rank 0's folder says which there are. Nothing when there is none. Throws
// CheckpointError, equally on every rank, when the newest is damaged and fallback is not allowed, when all are damaged, or when it has a newer
// format than this build reads.
std::optional<OpenedCheckpoint> open_latest(Meeting& meeting, const std::filesystem::path& folder, const OpenPolicy& policy = {});

// [collective] A certain one.
Checkpoint open_checkpoint(Meeting& meeting, const std::filesystem::path& path, const OpenPolicy& policy = {});

}  // namespace penstock::checkpoint
