// Attention by its definition, with a mask of all pairs of tokens: the reference of the attention tests.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace penstock::test {

// What a query may see. Tensors that are undefined restrict nothing.
struct AttentionRules {
  std::int64_t queries = 0, keys = 0;  // the queries are the last ones
  std::int64_t window = 0;             // 0: none
  at::Tensor documents;                // [batch, keys]
  at::Tensor valid;                    // [batch]
  at::Tensor bias;                     // [batch or 1, heads or 1, queries, keys]
  at::Tensor positions;                // [batch, keys]: what the window counts; undefined: 0, 1, ...
};

// bool [batch, queries, keys], pair by pair.
inline at::Tensor seen_by_definition(const AttentionRules& rules, std::int64_t batch) {
  at::Tensor seen = at::zeros({batch, rules.queries, rules.keys}, at::kBool);
  const auto on_host = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(at::kCPU, at::kLong).contiguous() : at::Tensor();
  };
  const at::Tensor documents = on_host(rules.documents), valid = on_host(rules.valid);
  const at::Tensor positions = rules.positions.defined()
                                   ? on_host(rules.positions)
                                   : at::arange(rules.keys, at::kLong).repeat({batch, 1}).contiguous();
  const std::int64_t* const position = positions.data_ptr<std::int64_t>();
  const std::int64_t* const document = documents.defined() ? documents.data_ptr<std::int64_t>() : nullptr;
  bool* write = seen.data_ptr<bool>();
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t used = valid.defined() ? valid.data_ptr<std::int64_t>()[b] : rules.keys;
    for (std::int64_t i = 0; i < rules.queries; ++i)
      for (std::int64_t j = 0; j < rules.keys; ++j) {
        const std::int64_t token = rules.keys - rules.queries + i;
        const std::int64_t distance = position[b * rules.keys + token] - position[b * rules.keys + j];
        *write++ = j <= token && (rules.window == 0 || distance < rules.window) && j < used &&
                   (document == nullptr || document[b * rules.keys + token] == document[b * rules.keys + j]);
      }
  }
  return seen;
}

// q [batch, heads, queries, width], k and v [batch, key heads, keys, width]. Padding queries give zero.
inline at::Tensor attend_by_definition(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       const AttentionRules& rules) {
  const std::int64_t batch = q.size(0), repeats = q.size(1) / k.size(1);
  const at::Tensor all_k = k.repeat_interleave(repeats, 1), all_v = v.repeat_interleave(repeats, 1);
  at::Tensor scores = at::matmul(q, all_k.transpose(2, 3)) / std::sqrt(static_cast<double>(q.size(3)));
  if (rules.bias.defined()) scores = scores + rules.bias;
  const at::Tensor seen = seen_by_definition(rules, batch).unsqueeze(1).to(q.device());
  const at::Tensor padding = rules.valid.defined()
                                 ? at::arange(rules.keys - rules.queries, rules.keys, rules.valid.options())
                                       .ge(rules.valid.unsqueeze(1))
                                       .view({batch, 1, rules.queries, 1})
                                 : at::zeros({batch, 1, rules.queries, 1}, q.options().dtype(at::kBool));
  const at::Tensor hidden = seen.logical_not().logical_and(padding.logical_not());
  const at::Tensor weights =
      at::softmax(scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()), -1);
  return at::matmul(weights, all_v).masked_fill(padding, 0);
}

}  // namespace penstock::test
