// Moving the memory of one contiguous host tensor to or from one member, checked on arrival: the bytes that arrive are the
// bytes that were expected, of the expected type, or it is an error that names both sides.
#pragma once

#include <ATen/ATen.h>

#include "penstock/comm/transfer_header.h"
#include "penstock/comm/work_state.h"

namespace penstock::comm {

// Both start at once and make `work` wait for the end. `position` is the member's place in the group. Usable while
// `work` is being started and inside its steps.
void start_send(WorkState& work, const at::Tensor& data, int position, int tag);
void start_receive(WorkState& work, const at::Tensor& data, int position, int tag);

// PipeliningMetadataError with what was sent, by whom, and what was expected, by whom.
[[noreturn]] void throw_mismatch(const WorkState& work, const TransferHeader& sent, const TransferHeader& expected);

}  // namespace penstock::comm
