// What all drawings of a schedule share: colours, and the texts shown for an action.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/draw.h"
#include "penstock/schedule.h"
#include "penstock/simulator.h"

namespace penstock::plan {

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
