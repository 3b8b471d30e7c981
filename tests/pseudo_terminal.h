// Checks whether this system has pseudo terminals. Some containers have none; tests that need one are skipped
// there.
#pragma once

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

namespace penstock::test {

inline bool has_pseudo_terminals() {
  const int master = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (master < 0) return false;
  const bool usable =
      ::grantpt(master) == 0 && ::unlockpt(master) == 0 && ::access(::ptsname(master), R_OK | W_OK) == 0;
  ::close(master);
  return usable;
}

}  // namespace penstock::test
