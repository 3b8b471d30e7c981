// Whether exchanges of experts overlap with computation in a configured run (layout.overlap_experts).
//
//   const ExpertOverlap overlap(config.layout, configured_schedule(config.layout));
//   if (overlap.on()) ...
//   overlap.text()              // "exchanges of experts overlap with computation in 6 units of DualPipeV"
//
// The same on all ranks: it depends on the configuration only.
#pragma once

#include <string>

#include "penstock/schedule.h"
#include "penstock/train_config.h"

namespace penstock::train {

class ExpertOverlap {
 public:
  ExpertOverlap(const LayoutConfig& layout, const schedule::Schedule& schedule);

  bool on() const { return experts_ && wanted_ && units_ > 0; }
  // Says so, and if not, why not; empty if no experts are divided.
  std::string text() const;

 private:
  std::string schedule_;
  bool experts_;   // divided among ranks
  bool wanted_;    // not switched off
  int units_ = 0;  // of all ranks, that pair a forward with a backward
};

}  // namespace penstock::train
