// Opens checkpoints: finds the newest one, checks it, and reads any part of any of its tensors.
//
//   auto opened = open_latest(agreement, folder, {.allow_fallback = true});  // nullopt if there is none
//   opened->checkpoint.read(Section::Model, "head.weight", slice, bytes);
//
// Checking reads every block and compares its checksum; the ranks share the blocks. Damage is reported by
// file and byte range. All ranks get the same checkpoint or the same error. Independent of Torch; load.h
// fills tensors.
// Thread safety: any number of threads may read an open checkpoint, even while it is being deleted.
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
#include "penstock/checkpoint/files/rank_agreement.h"
#include "penstock/checkpoint/files/safetensors_file.h"
#include "penstock/checkpoint/files/save_plan.h"
#include "penstock/checkpoint/files/slice.h"

namespace penstock::checkpoint {

struct Damage {
  std::string file;
  std::uint64_t begin = 0, end = 0;  // bytes; both 0 if the whole file is affected
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

  // Checks the index, the sizes of the files and their headers, but not the blocks. Throws CheckpointError.
  explicit Checkpoint(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::int64_t step() const { return index_.step; }
  const Index& index() const { return index_; }
  const std::string& state_json() const { return state_; }
  const Table& tensors(Section section) const { return section == Section::Model ? model_ : optimizer_; }

  // Fills the local tensor of the slice, row-major, in the dtype of the file. Throws CheckpointError for an
  // unknown name or a different shape, ValueError if `local` has the wrong size.
  void read(Section section, std::string_view name, const Slice& slice, std::span<std::uint8_t> local) const;

 private:
  std::filesystem::path path_;
  Index index_;
  std::string state_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  Table model_, optimizer_;
};

struct OpenPolicy {
  bool verify = true;           // every block; else only index, sizes and headers
  bool allow_fallback = false;  // to an older checkpoint if the newest is damaged
};

struct OpenedCheckpoint {
  Checkpoint checkpoint;
  std::vector<std::string> skipped;  // newer checkpoints and their damage; the same on every rank
};

// [collective] Returns all damage of a checkpoint; empty if it is intact. Throws if a rank cannot see the
// checkpoint.
std::vector<Damage> find_damage(RankAgreement& agreement, const std::filesystem::path& path,
                                bool blocks = true);

// [collective] Opens the newest intact checkpoint of those in rank 0's folder. Returns std::nullopt if there
// is none. Throws CheckpointError, the same on every rank, if the newest is damaged and fallback is not
// allowed, if all are damaged, or if it has a newer format than this build reads.
std::optional<OpenedCheckpoint> open_latest(RankAgreement& agreement, const std::filesystem::path& folder,
                                            const OpenPolicy& policy = {});

// [collective] Opens a specific checkpoint.
Checkpoint open_checkpoint(RankAgreement& agreement, const std::filesystem::path& path,
                           const OpenPolicy& policy = {});

}  // namespace penstock::checkpoint
