// Moving the memory of one contiguous host tensor to or from one member. The two sides' contracts (dtype, size, tag, order)
// are what transfers are matched by, so a transfer that does not fit never moves a byte; the stall watch, or UCX at once,
// then turns it into an error that names both sides.
#pragma once

#include <ATen/ATen.h>

#include "penstock/comm/group/contract.h"
#include "penstock/comm/group/work_state.h"

namespace penstock::comm {

// Both start at once and make `work` wait for the end. `position` is the member's place in the group. Usable while
// `work` is being started and inside its steps.
void start_send(WorkState& work, const at::Tensor& data, int position, int tag);
void start_receive(WorkState& work, const at::Tensor& data, int position, int tag);

// "transfer mismatch: rank 0 sent ..., rank 1 expected ...; ...": what, by whom, and the remedy.
std::string describe_mismatch(int sender, const Contract& sent, int receiver, const Contract& expected, const std::string& label);

}  // namespace penstock::comm
