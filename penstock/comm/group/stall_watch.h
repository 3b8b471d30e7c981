// One thread per process that checks long waits of all groups. It wakes up every quarter of a second;
// operations that complete sooner pay nothing.
#pragma once

#include <memory>

namespace penstock::comm {

class GroupWaits;

// Checks the waits until their group is destroyed. The thread starts on first use and ends with the last
// group.
void watch_for_stalls(const std::shared_ptr<GroupWaits>& waits);

}  // namespace penstock::comm
