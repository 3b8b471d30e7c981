// Which tokens of each row go through a block that a mixture of depths wraps, and how what belongs to tokens
// travels with them.
//
//   const auto attend = [&](const at::Tensor& rows, const ChosenTokens& chosen) {
//     const at::Tensor own = chosen.of_tokens(documents);       // [batch, length] -> [batch, k]
//     const at::Tensor turns = chosen.of_positions(table);      // [length, ...]   -> [batch, k, ...]
//     ...
//   };
//
// All shapes follow from batch, length and k, never from values. Nothing waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock::models {

class ChosenTokens {
 public:
  // The k tokens of each row with the highest scores [batch, length], in the order of the row. Equal scores
  // are taken in an order that LibTorch does not define.
  static ChosenTokens highest(const at::Tensor& scores, std::int64_t k);
  // All tokens, k = length: first those with a positive score in the order of the row, then the others, which
  // are not active. In a causal block the active ones see active ones only, as if the others did not exist.
  static ChosenTokens positive(const at::Tensor& scores);

  // Long [batch, k]: places in the row. Ascending, those of active tokens and those of the others separately.
  const at::Tensor& positions() const { return positions_; }
  // Bool [batch, k]: whether what the block adds to a token is used. Undefined: all are.
  const at::Tensor& active() const { return active_; }
  // Of the rows from which tokens were chosen.
  std::int64_t length() const { return length_; }

  // [batch, length, ...] -> [batch, k, ...], differentiable. Undefined stays undefined.
  at::Tensor of_tokens(const at::Tensor& per_token) const;
  // [length, ...] -> [batch, k, ...], for tables that all rows share.
  at::Tensor of_positions(const at::Tensor& per_position) const;
  // Adds [batch, k, ...] to the chosen tokens of [batch, length, ...], differentiable in both.
  at::Tensor add_to(const at::Tensor& per_token, const at::Tensor& added) const;
  // For references from token to token, like parents in a tree: Long [batch, length] of places in the row, or
  // -1 -> Long [batch, k] of places among the chosen ones, -1 where the other token was not chosen.
  at::Tensor of_references(const at::Tensor& places) const;

 private:
  at::Tensor positions_, active_;
  std::int64_t length_ = 0;
};

}  // namespace penstock::models
