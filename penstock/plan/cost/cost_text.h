// Costs and limits as short text, for commands and configuration: "F=1,I=1,W=1,send=0.1".
//
// Entries have the form `name=value` and are separated by commas; names in any case. Values per stage are
// separated by colons: "F=1:1:2:1". A single number applies to all stages. Bytes accept the suffixes K, M, G
// and T (powers of 1024).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "penstock/cost_model.h"

namespace penstock::plan {

// Sets the entries in the text and leaves the rest unchanged. Throws ConfigError that names the entry, with
// the nearest known name for an unknown one.
//   F, I, W, B        time of an action; B only where it differs from I + W            per stage
//   send              time of a transfer, whatever its size
//   bytes, bandwidth  size of a transfer (per stage) and bytes per unit of time, on top of `send`
//   unshard, reduce   time of UNSHARD and REDUCE_GRAD                                  per stage
//   overlap           share of the shorter member of an overlapped pair that is hidden
void apply_cost_text(CostModel& model, std::string_view text);

//   params, unsharded, grads   bytes of a stage                                        per stage
//   act                        bytes of one microbatch from F to B or I                per stage
//   split                      bytes of one microbatch from I to W                     per stage
void apply_memory_text(CostModel& model, std::string_view text);

// "overlapped" or "blocking".
Communication parse_communication(std::string_view text);

// "4" or "4:3:2:1"; bytes with suffixes.
std::vector<std::int64_t> parse_bytes_list(std::string_view what, std::string_view text);

}  // namespace penstock::plan
