// Collectives as dispatcher operators `penstock::*`. They are functional (each returns a new tensor), take
// the group by name, and have a shape-only kernel and a derivative. Modes can intercept them and graphs can
// capture them.
//
//   auto y = functional::wait_tensor(functional::all_reduce(x, ReduceOp::Sum, group));
//
// Each returns at once. Use its result only after `wait_tensor`, which returns the same tensor.
//
//   operator                                                   derivative with respect to input
//   all_reduce(Tensor, str op, str group)                      all_reduce of the gradient (sum, avg only)
//   all_gather_into_tensor(Tensor, int size, str group)        reduce_scatter (sum)
//   reduce_scatter_tensor(Tensor, str op, int size, str group) all_gather, divided by size for avg
//   all_to_all_single(Tensor, int[] out, int[] in, str group)  all_to_all with the splits exchanged
//   all_gather_flat(Tensor, int[] counts, str group)           reduce_scatter_flat (sum)
//   reduce_scatter_flat(Tensor, str op, int[] counts,          all_gather_flat, divided by size for avg
//                       int position, str group)
//   broadcast(Tensor, int source, str group)                   sum of gradients on the source, else zero
//   wait_tensor(Tensor)                                        identity
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "penstock/group.h"

namespace penstock::comm {

// Ensures that the operators are linked in. Called by World.
void register_operators();

namespace functional {

at::Tensor all_reduce(const at::Tensor& input, ReduceOp op, const Group& group);
// Inputs are joined along dim 0.
at::Tensor all_gather(const at::Tensor& input, const Group& group);
// Dim 0 is split evenly.
at::Tensor reduce_scatter(const at::Tensor& input, ReduceOp op, const Group& group);
// Parts of different sizes, as flat tensors: member i holds counts[i] elements.
at::Tensor all_gather_flat(const at::Tensor& input, const std::vector<std::int64_t>& counts,
                           const Group& group);
at::Tensor reduce_scatter_flat(const at::Tensor& input, ReduceOp op, const std::vector<std::int64_t>& counts,
                               const Group& group);
at::Tensor all_to_all(const at::Tensor& input, const std::vector<std::int64_t>& output_splits,
                      const std::vector<std::int64_t>& input_splits, const Group& group);
at::Tensor broadcast(const at::Tensor& input, int source, const Group& group);
at::Tensor wait_tensor(const at::Tensor& input);
// The same for a collective inside of an overlapped unit (torch/random/unit_half.h): the other half computes
// while it is under way. The derivative of all_to_all waits in this way, too. Every member of the group must
// call it at the same place of its half, as it must start the collective itself.
at::Tensor wait_in_turn(const at::Tensor& input);

}  // namespace functional

}  // namespace penstock::comm
