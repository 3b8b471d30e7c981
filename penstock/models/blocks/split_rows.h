// Activations [batch, length, width] whose tokens are divided over tensor-parallel ranks (sequence
// parallelism): each rank has a piece of every row, and a distributed tensor says so.
//
//   x = split_rows(own, mesh);          // from the tokens of this rank
//   x = x + feed->forward(norm->forward(x));
//   at::Tensor all = whole_rows(x);     // plain, for computations that need whole rows
//   x = rows_like(x, all);              // the tokens of this rank again
//   own = own_tokens_of(x);
//
// Blocks find out from the type: a plain activation is whole and equal on all ranks. A region of split
// parameters (local_region.h) gathers the tokens and scatters its sums; the gradients of a norm, which sees
// the tokens of its rank only, are terms of a sum over the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "penstock/world.h"

namespace penstock::models {

// `own`: the tokens of this rank, [batch, length / ranks, width]. `mesh` has one axis.
at::Tensor split_rows(const at::Tensor& own, const comm::MeshGroups& mesh);
// The tokens of this rank of a result of split_rows(); a plain tensor is returned unchanged.
at::Tensor own_tokens_of(const at::Tensor& x);

// [collective] Returns whole rows, plain. Every rank must compute the same from them: their gradients are
// complete on each rank. A plain tensor is returned unchanged.
at::Tensor whole_rows(const at::Tensor& x);
// Divides whole rows, equal on all ranks, as those of `like` are; [collective in backward]. Returns them
// unchanged if `like` is plain.
at::Tensor rows_like(const at::Tensor& like, const at::Tensor& whole);

// Throws ValueError unless rows of `length` tokens can be divided over `ranks`.
void check_split_length(const std::string& where, std::int64_t length, std::int64_t ranks);

}  // namespace penstock::models
