// Tries every operation of a group for real, with known values, and times it. Used by `penstock doctor` and the tests.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "penstock/group.h"

namespace penstock::comm {

struct ProbeResult {
  std::string operation;
  bool ok = false;
  std::string error;         // what was wrong, when not ok
  double latency_us = 0;     // median of small transfers; 0: not measured
  double bandwidth_gbs = 0;  // of large ones, payload bytes per second / 1e9; 0: not measured
};

// Collective over the group. Wrong values do not throw: they are the result. A lost rank does throw.
std::vector<ProbeResult> self_test(const Group& group, at::Device device);

}  // namespace penstock::comm
