// Logging through spdlog, to standard error, one logger for the process.
//
// The level comes from PENSTOCK_LOG (trace, debug, info, warn, error, off; default info). Lines carry the rank once
// `set_log_rank` was called, so that interleaved output stays readable.
#pragma once

#include <spdlog/spdlog.h>

namespace penstock {

// Throws ConfigError when PENSTOCK_LOG holds an unknown level (first call only).
spdlog::logger& log();

// Puts "[rank r]" in front of every further line of this process.
void set_log_rank(int rank);

}  // namespace penstock
