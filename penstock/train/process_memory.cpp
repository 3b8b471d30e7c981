#include "penstock/train/process_memory.h"

#include <unistd.h>

#include <fstream>

namespace penstock::train {

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t whole = 0, resident = 0;
  if (!(file >> whole >> resident)) return 0;
  return resident * ::sysconf(_SC_PAGESIZE);
}

}  // namespace penstock::train
