// Memory of this process as the system sees it.
#pragma once

#include <cstdint>

namespace penstock::train {

// Bytes in main memory now; 0 where the system does not say.
std::int64_t resident_bytes();

// Bytes that all processes of this machine, or of this container, can have together: main memory and swap; 0 where the system does not say.
std::int64_t machine_memory_bytes();

}  // namespace penstock::train
