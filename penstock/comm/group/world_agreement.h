// How the ranks of a world agree on something before they have a group: each posts a text in the store, rank
// 0 reads them all and decides. Internal to World.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "penstock/comm/group/work_state.h"

namespace penstock::comm {

// What an error of the judge is about: a ValueError or a CommError on every rank.
enum class Wrong { Arguments, Network };

// [collective over the world] `judge` runs on rank 0, gets the texts by rank and returns the verdict that
// every rank gets, or sets an error text that becomes an error of the kind `wrong` on every rank. If ranks
// post nothing by the deadline, every rank throws a TimeoutError that names them.
std::string agree(
    const WorldCore& core, const std::string& topic, const std::string& own_text, Clock::time_point deadline,
    const std::function<std::string(const std::vector<std::string>&, std::string& error)>& judge,
    Wrong wrong = Wrong::Arguments);

}  // namespace penstock::comm
