// Writes a checkpoint: every rank writes its own slices into the same files.
//
// In a temporary folder, rank 0 creates the files at full size and writes their headers. Every rank writes
// the parts that the plan assigns to it and flushes them. The ranks share the blocks, read them back and
// compute their checksums. Rank 0 writes the index, flushes it and renames the folder. Only then are old
// checkpoints removed. The ranks agree after each step: if one has failed, all throw the same error, and rank
// 0 removes the temporary folder. Earlier checkpoints are not touched. No rank needs more memory than its
// parts and one block. Independent of Torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/output_file.h"
#include "penstock/checkpoint/files/rank_agreement.h"
#include "penstock/checkpoint/files/save_plan.h"

namespace penstock::checkpoint {

// The phase just completed, for tests that interrupt a save there.
enum class WritePhase { FolderMade, PartsWritten, Checked, IndexWritten, Renamed, OldRemoved };

struct WriteOptions {
  std::uint64_t max_file_bytes = std::uint64_t{5} << 30;  // data per file, see plan_files
  std::uint64_t block_bytes = std::uint64_t{4} << 20;
  int keep_last = 3;  // 0: all

  // For tests.
  std::function<void(WritePhase, int rank)> at_phase;
  WriteFault fault;
};

// A rank's part of a tensor, row-major; null if the rank does not write it.
struct HostPart {
  AnnouncedTensor tensor;
  const std::uint8_t* bytes = nullptr;
};

// [collective] `plan` describes these parts in this order. Uses the `state_json` of rank 0.
void write_checkpoint(RankAgreement& agreement, const std::filesystem::path& folder, std::int64_t step,
                      const SavePlan& plan, const std::vector<HostPart>& parts, const std::string& state_json,
                      const WriteOptions& options);

}  // namespace penstock::checkpoint
