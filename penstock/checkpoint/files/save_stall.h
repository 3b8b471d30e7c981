// How long a save delays training.
#pragma once

namespace penstock::checkpoint {

// The time CheckpointWriter::save blocked its caller, in seconds.
struct SaveStall {
  double waiting = 0;   // for the previous save
  double planning = 0;  // with the other ranks
  double copying = 0;

  double total() const { return waiting + planning + copying; }
};

}  // namespace penstock::checkpoint
