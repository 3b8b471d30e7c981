// What a block of a hybrid model is given for some of the tokens of a row.
//
//   routed_context   only the chosen tokens, as a shorter row: with their documents, parents and padding, and
//                    with the positions of the whole row, for rotary positions and for windows
//   hiding_context   the whole row, in which active tokens see only active ones; the results of the others
//                    are of no use. For attention, whose cache has the keys of all tokens
//   first_context    the first tokens of each row
//
// A parent that does not go through the block counts as none. Nothing waits for the device.
#pragma once

#include <cstdint>

#include "penstock/models/blocks/chosen_tokens.h"
#include "penstock/models/hybrid/hybrid_block.h"

namespace penstock::models {

// `window`: of the block; 0: none.
HybridContext routed_context(const HybridContext& whole, const ChosenTokens& chosen, std::int64_t window);

// `chosen` must have all tokens (ChosenTokens::positive). `block`: its number, for the cache of a generation.
HybridContext hiding_context(const HybridContext& whole, const ChosenTokens& chosen, std::int64_t block);

// Of rows without a cache; without the relation bias, whose table not every stage has.
HybridContext first_context(const HybridContext& whole, std::int64_t tokens);

}  // namespace penstock::models
