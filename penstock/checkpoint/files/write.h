// Writing a checkpoint together: every rank its own slices into the same files.
//
// In a temporary folder, rank 0 makes the files at their full size and writes their headers; every rank writes what the plan
// gives it and flushes; the ranks share out the blocks, read them back and take their checksums; rank 0 writes the index, flushes
// and gives the folder its name. Only then are old checkpoints removed. After each of these steps the ranks meet: when one has
// failed, all of them throw the same error, and rank 0 removes the temporary folder. What was there before is untouched.
// No rank needs more memory than its parts and one block. Knows nothing of Torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/meeting.h"
#include "penstock/checkpoint/files/output_file.h"
#include "penstock/checkpoint/files/save_plan.h"

namespace penstock::checkpoint {

// What has just been done, for tests that break off there.
enum class WritePhase { FolderMade, PartsWritten, Checked, IndexWritten, Renamed, OldRemoved };

struct WriteOptions {
  std::uint64_t max_file_bytes = std::uint64_t{5} << 30;  // of the data of one file, see plan_files
  std::uint64_t block_bytes = std::uint64_t{4} << 20;
  int keep_last = 3;                                      // 0: all

  // For tests.
  std::function<void(WritePhase, int rank)> at_phase;
  WriteFault fault;
};

// A rank's part of a tensor, row-major; null for one that it does not write.
struct HostPart {
  AnnouncedTensor tensor;
  const std::uint8_t* bytes = nullptr;
};

// [collective] `plan` is of these parts in this order. `state_json` of rank 0 counts.
void write_checkpoint(Meeting& meeting, const std::filesystem::path& folder, std::int64_t step, const SavePlan& plan,
                      const std::vector<HostPart>& parts, const std::string& state_json, const WriteOptions& options);

}  // namespace penstock::checkpoint
