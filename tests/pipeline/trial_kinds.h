// The kinds of trial runs, for tests that hold for all of them.
#pragma once

#include "penstock/stage.h"

namespace penstock::test {

inline constexpr TrialRun kTrials[] = {TrialRun::Auto, TrialRun::Fake, TrialRun::Real};

inline const char* name_of(TrialRun trial) {
  return trial == TrialRun::Auto ? "auto" : trial == TrialRun::Fake ? "fake" : "real";
}

inline StageOptions with(TrialRun trial) {
  StageOptions options;
  options.trial = trial;
  return options;
}

}  // namespace penstock::test
