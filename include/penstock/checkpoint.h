// Checkpoints: named tensors and a text, saved under one layout and loaded under any other.
//
//   torch::nn::Linear layer(4, 2);
//   checkpoint::CheckpointData data;
//   for (const auto& item : layer->named_parameters()) data.model.emplace_back(item.key(), item.value());
//   auto loaded = checkpoint::load_checkpoint(world, "run/checkpoints", data);  // fills the tensors
//   std::int64_t step = loaded ? loaded->step : 0;
//   checkpoint::AsyncCheckpointer checkpointer(world, "run/checkpoints", {.keep_last = 3});
//   data.state_json = R"({"batches": 120})";
//   checkpointer.save(step + 120, data);                                        // copies and returns
//   checkpointer.wait();                                                        // at the end of the run
//
// A checkpoint is a folder "step-00000120" whose files do not depend on the layout that wrote it; the model
// file is readable by Python's safetensors. Tensors may be plain, distributed (dtensor.h) with any
// placements but Partial, or parameters of a sharded module (fully_shard.h). Names are global: a tensor has
// the same name on all ranks and in every layout. A rank may lack tensors that others have, such as those
// of other pipeline stages.
//
// A checkpoint that is being written has another name until it is complete, so a crash leaves the earlier
// ones intact. The folder must be the same for all ranks: on one host, or on a shared file system.
//
// [collective] functions are called by all ranks in the same order.
// Thread safety: one thread at a time calls the functions of one world and folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/checkpoint_types.h"
#include "penstock/world.h"

namespace penstock::checkpoint {

// Tensors with their global names. They share memory with the tensors they were made from.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// What a rank saves, or the tensors it loads into.
struct CheckpointData {
  NamedTensors model;      // parameters and buffers
  NamedTensors optimizer;  // the state of the optimizer
  // Anything else, in JSON: steps, schedules, random state, data position. The one of rank 0 is saved.
  std::string state_json = "{}";
};

// How checkpoints are saved.
struct CheckpointOptions {
  int keep_last = 3;                                             // delete older checkpoints; 0: keep all
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  // of one save, from the call on
  std::uint64_t max_file_bytes = std::uint64_t{5} << 30;         // data per file; larger sections are split
};

// How a save ended.
struct SaveOutcome {
  std::int64_t step = 0;  // the step that was passed to save
  std::string error;      // empty: the checkpoint is on the disk
};

// Saves checkpoints in the background while training continues.
class AsyncCheckpointer {
 public:
  // [collective] Creates the folder and removes what a crash has left in it. Throws CheckpointError if the
  // folder cannot be written, or if another run is writing to it.
  AsyncCheckpointer(const comm::World& world, std::filesystem::path folder,
                    const CheckpointOptions& options = {});
  AsyncCheckpointer(const AsyncCheckpointer&) = delete;
  AsyncCheckpointer& operator=(const AsyncCheckpointer&) = delete;
  // Abandons an unfinished save and logs an error; call wait() first.
  ~AsyncCheckpointer();

  // [collective] Copies the parts that this rank writes and returns; a background thread writes them. Waits
  // for an earlier save that is not finished. Throws the error of that save, in which case this one is not
  // started, or a CheckpointError for tensors that cannot be saved; it is the same on every rank. After such
  // an error the object can be used again. Throws PeerLostError if a rank dies, fails or falls silent
  // meanwhile. A checkpoint of the same step is replaced.
  void save(std::int64_t step, const CheckpointData& data);

  // [collective] Returns when the last save is on the disk; throws its error.
  void wait();

  // The saves that have ended on this rank since the last call, oldest first. Does not wait or communicate;
  // errors are also thrown by save() and wait().
  std::vector<SaveOutcome> ended();

  // The folder that was passed to the constructor.
  const std::filesystem::path& folder() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// [collective] Saves one checkpoint and returns when it is on the disk. Throws as AsyncCheckpointer does.
void save_checkpoint(const comm::World& world, const std::filesystem::path& folder, std::int64_t step,
                     const CheckpointData& data, const CheckpointOptions& options = {});

// Which differences between a checkpoint and the tensors to be loaded are accepted.
struct LoadOptions {
  bool allow_fallback = false;  // if the newest checkpoint is damaged, load an older one
  bool verify = true;           // compare the checksums of all data; else check only index, sizes and headers
  bool allow_cast = false;      // convert values of another dtype
  bool allow_missing = false;   // tensors that the checkpoint does not have keep their values
  bool allow_extra = false;     // ignore tensors that no rank asks for, such as those of the optimizer
};

// Describes the checkpoint that was loaded; the same on every rank.
struct LoadedCheckpoint {
  std::int64_t step = 0;             // the step it was saved at
  std::filesystem::path path;        // of the checkpoint itself
  std::string state_json;            // as it was saved
  std::vector<std::string> skipped;  // newer checkpoints and their damage (LoadOptions::allow_fallback)
  std::vector<std::string> missing;  // tensors that were not in the checkpoint (LoadOptions::allow_missing)
  std::vector<std::string> extra;    // tensors that were ignored (LoadOptions::allow_extra)
  std::vector<std::string> cast;     // tensors that were converted, and how (LoadOptions::allow_cast)
};

// [collective] Fills the tensors of `data` in place from the newest intact checkpoint of the folder, whatever
// layout wrote it, and ignores data.state_json. Each rank reads only what its tensors need. Returns
// std::nullopt and changes nothing if the folder does not exist or has no checkpoint.
// Throws CheckpointError, the same on every rank, if the newest checkpoint is damaged and fallback is not
// allowed, if all are damaged, if it has a format that this build does not know, or if tensors are missing,
// extra, or of another shape or dtype; the message lists all of them. Model tensors are compared and loaded
// before optimizer tensors are compared.
std::optional<LoadedCheckpoint> load_checkpoint(const comm::World& world, const std::filesystem::path& folder,
                                                const CheckpointData& data, const LoadOptions& options = {});

}  // namespace penstock::checkpoint
