// Runs every operation of a group with known values and times it. Used by `penstock doctor` and the tests.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "penstock/group.h"

namespace penstock::comm {

struct ProbeResult {
  std::string operation;
  bool ok = false;
  std::string error;         // set if not ok
  double latency_us = 0;     // median of small transfers; 0: not measured
  double bandwidth_gbs = 0;  // of large transfers, payload bytes per second / 1e9; 0: not measured
};

// Collective over the group. Wrong values are reported in the result and do not throw; a lost rank throws.
std::vector<ProbeResult> self_test(const Group& group, at::Device device);

}  // namespace penstock::comm
