// Memory of this process as reported by the operating system.
#pragma once

#include <cstdint>

namespace penstock::train {

// Resident bytes now; 0 if unknown.
std::int64_t resident_bytes();

// Bytes of main memory and swap available to all processes of this machine or container; 0 if unknown.
std::int64_t machine_memory_bytes();

}  // namespace penstock::train
