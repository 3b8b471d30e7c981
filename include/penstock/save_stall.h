// How long saving a checkpoint delayed training.
//
//   checkpoint::SaveStall stall{.waiting = 0, .planning = 0.01, .copying = 0.2};
//   double seconds = stall.total();
//
// Returned by CheckpointWriter::save and passed to train::Observer::on_checkpoint. Independent of LibTorch.
#pragma once

namespace penstock::checkpoint {

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
