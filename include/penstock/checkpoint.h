// Saves checkpoints while training goes on.
//
//   CheckpointWriter writer(world, run_folder / "checkpoints", {.files = {.keep_last = 3}});
//   writer.save(step, {.model = model_parts, .optimizer = optimizer_parts, .state_json = state});      // copies, returns
//   ...
//   writer.wait();                                                                                    // at the end of the run
//
// save() waits for an earlier save that is not finished, agrees with the other ranks on the plan, copies the parts that this rank
// writes into buffers of its own (kept for the next time), and returns. A thread does the rest (write.h). Its ranks meet by words
// in the world's store, never by the communicators of training. When a save fails, the temporary folder is removed, what was there
// stays, and the next save() or wait() throws the error: the same one on every rank. After that the writer can be used again. Whoever wants
// to know at once asks ended() now and then: a checkpoint counts from then on, not from the return of save().
//
// The folder must be one for all ranks: on one host, or on a shared file system. A second writer on it is refused.
// Call wait() before the end: a destroyed writer gives up what it has not finished, with a line in the log.
// Thread rule: one thread calls. [collective] functions are called by all ranks in the same order.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "penstock/save_stall.h"
#include "penstock/checkpoint/tensors/tensor_part.h"
#include "penstock/checkpoint/files/write.h"
#include "penstock/world.h"

namespace penstock::checkpoint {

struct CheckpointContents {
  std::vector<TensorPart> model, optimizer;
  std::string state_json = "{}";  // steps, schedules, random state, data position: the caller's; rank 0's counts
};

// How a save ended.
struct SaveOutcome {
  std::int64_t step = 0;
  std::string error;  // empty: it is on the disk
};

struct WriterOptions {
  WriteOptions files;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  // of one save, from the call on
};

class CheckpointWriter {
 public:
  // [collective] Makes the folder and removes what a crash has left in it. Throws CheckpointError.
  CheckpointWriter(const comm::World& world, std::filesystem::path folder, WriterOptions options = {});
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;
  ~CheckpointWriter();

  // [collective] Throws the error of the save before (this one is then not begun), or what is wrong with the parts.
  SaveStall save(std::int64_t step, const CheckpointContents& contents);

  // [collective] Returns when the last save is on the disk; throws its error.
  void wait();

  // The saves that have ended on this rank since the last question, oldest first. No communication, no waiting; errors are thrown by
  // save() and wait() as well.
  std::vector<SaveOutcome> ended();

  const std::filesystem::path& folder() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::checkpoint
