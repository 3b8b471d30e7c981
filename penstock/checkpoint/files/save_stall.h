// What a save costs the training beside which it runs.
#pragma once

namespace penstock::checkpoint {

// How long CheckpointWriter::save kept its caller, in seconds.
struct SaveStall {
  double waiting = 0;   // for the save before
  double planning = 0;  // with the other ranks
  double copying = 0;

  double total() const { return waiting + planning + copying; }
};

}  // namespace penstock::checkpoint
