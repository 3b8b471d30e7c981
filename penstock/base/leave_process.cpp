#include "penstock/base/leave_process.h"

#include <unistd.h>

#include <cstdio>
#include <iostream>

namespace penstock {

void leave_process(int exit_code) {
  std::cout.flush();
  std::cerr.flush();
  std::clog.flush();
  std::fflush(nullptr);
  ::_exit(exit_code);
}

}  // namespace penstock
