// One thread of the process that looks at waits which last, of all groups. Sleeps a quarter of a second at a time; costs
// nothing to operations that end sooner.
#pragma once

#include <memory>

namespace penstock::comm {

class GroupState;

// From now on the group is looked at, until it is gone. Starts the thread on first use; it ends with the last group.
void watch_for_stalls(const std::shared_ptr<GroupState>& group);

}  // namespace penstock::comm
