// What a failed step tells, beyond its error: where all ranks were. Called by the runtime once a step has been given up.
#pragma once

#include <exception>

#include "penstock/errors.h"
#include "penstock/pipeline/runtime/step_watch.h"

namespace penstock::pipeline {

// Asks all ranks where they are, logs the report, writes it to PENSTOCK_STALL_DIR/stall-rank<r>.json where that variable is set, and
// throws the error again, of the same type and context, with the report in its text. `own` is where this rank was when the wait
// failed. `watch` is null in a pipeline of one rank: the error is thrown as it is.
[[noreturn]] void throw_with_report(const TimeoutError& error, RankPlace own, StepWatch* watch);
[[noreturn]] void throw_with_report(const PeerLostError& error, RankPlace own, StepWatch* watch);

// For the reports of the others: this rank failed by itself.
void leave_last_word(const std::exception& error, RankPlace own, StepWatch* watch);

}  // namespace penstock::pipeline
