// N-gram embedding: for each order n the hash of a token and the n - 1 tokens before it selects a row of a
// table; the rows of all tables are added to the embedding of the token.
//
//   NgramEmbedding ngrams(NgramOptions{.width = 1024, .orders = {2, 3}});
//   x = ngrams->forward(embedding, tokens, documents);                    // [batch, length, width]
//   x = ngrams->forward(last_embedding, last_tokens);                     // one token, with its history
//
// Tokens before the start of a row, and tokens of another document, count as a padding token that differs
// from all others. The hash of tokens t_1 ... t_n, the last one being the newest, is a polynomial modulo the
// prime 2^31 - 1 with a constant of the table, multiplied by another constant:
//
//   h = 0;  h = (h * a + t_i + 1) mod p for each i;  row = (h * b mod p) mod buckets
//
// All intermediate values fit into 63 bits, so that rows are the same on every device and platform. The
// result depends on tokens up to the token itself only.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>

#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/plan/ngram_options.h"

namespace penstock::models {

// Constants of the hash of one table.
struct NgramHash {
  static constexpr std::int64_t kPrime = (std::int64_t{1} << 31) - 1;
  std::int64_t step, spread;  // a and b: odd, from 2^20 to less than the prime
  // Of the table with this index in NgramOptions::orders.
  static NgramHash of_table(std::int64_t table);
};

class NgramEmbeddingImpl : public torch::nn::Cloneable<NgramEmbeddingImpl> {
 public:
  // Throws ConfigError for options that are not valid.
  explicit NgramEmbeddingImpl(const NgramOptions& options);
  void reset() override;
  // `name`: of this module in the model.
  void initialize(const std::string& name, const BlockInit& init);

  // x [batch, length, width], tokens Long or Int [batch, h + length]: the h tokens before the row come first,
  // of which the last NgramOptions::reach() matter. documents: undefined, or integers shaped like the tokens.
  // Returns x plus the rows, in the dtype of x; the sum is computed in float32 (float64 for float64).
  at::Tensor forward(const at::Tensor& x, const at::Tensor& tokens, const at::Tensor& documents = {});
  // Rows of the tables, counted through all tables: Long [tables, batch, length].
  at::Tensor rows_of(const at::Tensor& tokens, const at::Tensor& documents, std::int64_t length) const;

  const NgramOptions& options() const { return options_; }

  at::Tensor weight;  // [tables, buckets, width]

 private:
  NgramOptions options_;
};
TORCH_MODULE(NgramEmbedding);

}  // namespace penstock::models
