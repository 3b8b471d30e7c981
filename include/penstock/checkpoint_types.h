// The errors of checkpoints (checkpoint.h): a file that cannot be written or read, damage, contents that do
// not match.
//
//   try {
//     throw checkpoint::CheckpointError("run/checkpoints/step-00000120: model.safetensors is missing");
//   } catch (const checkpoint::CheckpointError& error) {
//     std::cerr << error.what() << "\n";
//   }
#pragma once

#include "penstock/errors.h"

namespace penstock::checkpoint {

// A checkpoint could not be saved or loaded. The message names the path, the cause and the remedy. If several
// ranks work together, all of them throw the same message.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

// A checkpoint that is intact, as far as this build can tell, but has an unknown format. Not treated as
// damage: an older checkpoint is not used in its place.
class CheckpointFormatError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

// ---- what a save costs ----
//
// How long saving a checkpoint delayed training.
//
//   checkpoint::SaveStall stall{.waiting = 0, .planning = 0.01, .copying = 0.2};
//   double seconds = stall.total();
//
// Returned by CheckpointWriter::save and passed to train::Observer::on_checkpoint. Independent of LibTorch.

// The time for which a save blocked its caller, in seconds. Writing to disk continues in the background and
// is not part of it.
struct SaveStall {
  double waiting = 0;   // for the previous save to finish
  double planning = 0;  // agreeing with the other ranks
  double copying = 0;   // copying the tensors

  // Returns the sum of the three.
  double total() const { return waiting + planning + copying; }
};

}  // namespace penstock::checkpoint
