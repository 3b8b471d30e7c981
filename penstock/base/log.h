// Logging to standard error through spdlog, with one logger per process.
//
// The level comes from PENSTOCK_LOG (trace, debug, info, warn, error, off; default info). After
// `set_log_rank` every line starts with the rank, so that interleaved output stays readable.
#pragma once

#include <spdlog/spdlog.h>

namespace penstock {

// Throws ConfigError if PENSTOCK_LOG is an unknown level (first call only).
spdlog::logger& log();

// Prefixes every further line of this process with "[rank r]".
void set_log_rank(int rank);

}  // namespace penstock
