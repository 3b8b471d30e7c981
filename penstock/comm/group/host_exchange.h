// The first thing that the ranks of a world do together: find out who is on which host, on which address each
// listens, whether the hosts reach each other, and whether every rank has a GPU of its own.
#pragma once

#include <cstdint>

#include "penstock/comm/group/work_state.h"

namespace penstock::comm {

// UCX reserves shared memory for its queues, and a process that runs out of it is killed.
inline constexpr std::uint64_t kLeastSharedMemoryBytes = 256u << 20;

// [collective over the world] Fills in what `core` says about hosts and GPUs. Throws on every rank:
// ConfigError or ValueError for a network interface or addresses that cannot be used, CommError if hosts do
// not reach each other, TimeoutError if ranks do not join by the deadline.
void exchange_hosts(WorldCore& core, Clock::time_point deadline);

}  // namespace penstock::comm
