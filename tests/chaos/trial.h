// Runs a trial and observes it; the judge decides.
#pragma once

#include <filesystem>
#include <string>

#include "tests/chaos/job.h"
#include "tests/chaos/judge.h"
#include "tests/chaos/plan.h"

namespace penstock::chaos {

// Why this machine or build cannot have the fault; empty if it can.
std::string why_skipped(const Plan& plan, const Settings& settings);

// The losses of a run that nothing disturbs, as long as the longest trial. Throws StateError if it fails.
Losses undisturbed_losses(const Settings& settings, Layout layout);

// Leaves all files and logs in `folder`. Adds to `expected` what only the trial can know: the name of a
// damaged file. Throws StateError if the trial itself does not work.
Outcome run_trial(const Settings& settings, const Plan& plan, const std::filesystem::path& folder,
                  Expectation& expected);

}  // namespace penstock::chaos
