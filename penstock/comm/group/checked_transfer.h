// Transfers the memory of one contiguous host tensor to or from one member. Transfers are matched by the
// contracts of the two sides (dtype, size, tag, order), so a mismatched transfer never moves a byte. The
// stall watch, or UCX immediately, turns the mismatch into an error that names both sides.
#pragma once

#include <ATen/ATen.h>

#include "penstock/comm/group/contract.h"
#include "penstock/comm/group/work_state.h"

namespace penstock::comm {

// Both return at once and make `work` wait for completion. `position` is the member's position in the group.
// May be called while `work` is being started and inside its steps.
void start_send(WorkState& work, const at::Tensor& data, int position, int tag);
void start_receive(WorkState& work, const at::Tensor& data, int position, int tag);

// "transfer mismatch: rank 0 sent ..., rank 1 expected ...; ...", with the remedy.
std::string describe_mismatch(int sender, const Contract& sent, int receiver, const Contract& expected,
                              const std::string& label);

}  // namespace penstock::comm
