// Saves parts of tensors in the background while training continues; AsyncCheckpointer (checkpoint.h) is
// the public form.
//
//   CheckpointWriter writer(world, run_folder / "checkpoints", {.files = {.keep_last = 3}});
//   writer.save(step, {.model = model_parts, .state_json = state});  // copies, returns
//   writer.wait();                                                   // at the end
//
// save() waits for an earlier save that is not finished, agrees with the other ranks on the plan, copies
// the parts that this rank writes into its own buffers (kept for the next save), and returns. A thread does
// the rest (write.h). Its ranks agree through the world's store, never through the communicators of
// training. When a save fails, the temporary folder is removed, earlier checkpoints stay, and the next
// save() or wait() throws the error: the same one on every rank. After that the writer can be used again.
// To learn of the end of a save earlier, call ended(): a checkpoint exists from then on, not from the
// return of save().
//
// The folder must be the same for all ranks: on one host, or on a shared file system. A second writer on it
// is refused. Call wait() before destruction: a destroyed writer abandons what it has not finished and logs
// an error. Thread safety: one thread calls. [collective] functions are called by all ranks in the same
// order.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "penstock/checkpoint.h"
#include "penstock/checkpoint/files/write.h"
#include "penstock/checkpoint/tensors/tensor_part.h"
#include "penstock/checkpoint_types.h"
#include "penstock/world.h"

namespace penstock::checkpoint {

struct CheckpointContents {
  std::vector<TensorPart> model, optimizer;
  std::string state_json = "{}";  // the caller's; rank 0's is saved
};

struct WriterOptions {
  WriteOptions files;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  // of one save, from the call on
};

class CheckpointWriter {
 public:
  // [collective] Creates the folder and removes what a crash has left in it. Throws CheckpointError.
  CheckpointWriter(const comm::World& world, std::filesystem::path folder, WriterOptions options = {});
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;
  ~CheckpointWriter();

  // [collective] Throws the error of the previous save (this one is then not started), or what is wrong
  // with the parts.
  SaveStall save(std::int64_t step, const CheckpointContents& contents);

  // [collective] Returns when the last save is on the disk; throws its error.
  void wait();

  // The saves that have ended on this rank since the last call, oldest first. Does not wait or communicate;
  // errors are also thrown by save() and wait().
  std::vector<SaveOutcome> ended();

  const std::filesystem::path& folder() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::checkpoint
