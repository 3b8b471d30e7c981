// What all drawings of a schedule share: the values drawn, the colours, and the words shown for an action.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "penstock/simulator.h"
#include "penstock/schedule.h"

namespace penstock::plan {

// A schedule and its simulation under some cost model. Refers to both; they must outlive it.
struct Drawing {
  const schedule::Schedule& schedule;
  const Simulation& simulation;
  std::string title;  // "1F1B"
};

// Colour of a kind of action on the `chunk`-th stage of its rank (of `chunks`): later stages are lighter.
// "#4f7fd9".
std::string fill_colour(schedule::ActionKind kind, int chunk, int chunks);
// Black or white, whichever reads better on it.
std::string_view text_colour(std::string_view fill);

// [stage]: which of its rank's stages it is, ascending from 0.
std::vector<int> chunk_of_stages(const schedule::StageMap& stages);
// The most stages that a rank has.
int most_chunks(const schedule::StageMap& stages);

// "4 ranks, 8 stages, 8 microbatches".
std::string shape_words(const schedule::Schedule& schedule);
// "time 27, bubble 11.1 %, in span 5.9 %, at most 4 activations and 2.0 GiB on a rank".
std::string totals_words(const Simulation& simulation);
// Lines: the action and its rank; start and end; what it waited for.
std::string hover_words(const Drawing& drawing, int rank, std::size_t slot);

// A distance of 1, 2 or 5 times a power of ten, so that `length` has about `count` ticks.
double tick_distance(double length, int count);

}  // namespace penstock::plan
