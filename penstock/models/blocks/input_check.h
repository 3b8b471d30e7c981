// Checks of what a block is given: shapes and dtypes always, values of ids where reading them waits for
// nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace penstock::models {

// "Float [2, 3, 16]", or "no tensor".
std::string shown(const at::Tensor& tensor);

// Throws ValueError unless `x` is [batch, length, width] of a floating dtype. `what` begins the message.
void check_hidden(const std::string& what, const at::Tensor& x, std::int64_t width);

// Throws ValueError unless `ids` are Long or Int of these sizes; `expected` says what they are.
void check_ids(const std::string& what, const at::Tensor& ids, at::IntArrayRef sizes,
               const std::string& expected);

// Throws ValueError for an id outside `first` .. `last`. Only for real tensors on the CPU; on a device it
// would wait, and fake tensors have no values.
void check_id_range(const std::string& what, const at::Tensor& ids, std::int64_t first, std::int64_t last,
                    const std::string& remedy);

// The dtype in which sums of a tensor of this dtype are computed: float64 for float64, else float32.
at::ScalarType wide_dtype(at::ScalarType dtype);

// The rows of this rank, of a plain or distributed tensor; an undefined tensor stays undefined.
at::Tensor own_rows(const at::Tensor& tensor);

}  // namespace penstock::models
