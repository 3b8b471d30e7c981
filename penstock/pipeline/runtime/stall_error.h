// Adds a report of where all ranks were to the error of a failed step. Called by the runtime once a step has
// been aborted.
#pragma once

#include <exception>

#include "penstock/errors.h"
#include "penstock/pipeline/runtime/step_watch.h"

namespace penstock {

// Asks all ranks where they are, logs the report, writes it to PENSTOCK_STALL_DIR/stall-rank<r>.json if that
// variable is set, and throws an error of the same type and context with the report in its text. `own` is
// where this rank was when the wait failed. In a pipeline of one rank `watch` is null, and the error is
// thrown unchanged.
[[noreturn]] void throw_with_report(const TimeoutError& error, RankPlace own, StepWatch* watch);
[[noreturn]] void throw_with_report(const PeerLostError& error, RankPlace own, StepWatch* watch);

// Posts, for the reports of the other ranks, that this rank failed with an error of its own.
void post_last_status(const std::exception& error, RankPlace own, StepWatch* watch);

}  // namespace penstock
