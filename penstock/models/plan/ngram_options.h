// Options of the n-gram embedding: the last n tokens, hashed, select a row of a table that is added to the
// embedding of the token. See penstock/models/blocks/ngram_embedding.h.
//
//   NgramOptions ngrams{.width = 1024, .orders = {2, 3}, .buckets = 1 << 16};
//
// Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/transformer_options.h"

namespace penstock::models {

struct NgramOptions {
  std::int64_t width = 128;
  // model.ngram_orders: one table for each entry. An order that occurs twice has two tables with different
  // hashes, so that n-grams that collide in one are told apart by the other.
  std::vector<std::int64_t> orders = {2, 3};
  std::int64_t buckets = 65536;  // model.ngram_buckets: rows of each table
  bool operator==(const NgramOptions&) const = default;

  // Throws ConfigError that names the key.
  void check() const;
  // How many tokens before a token matter: the largest order - 1.
  std::int64_t reach() const;

  std::vector<ParameterShape> shapes(const std::string& prefix) const;
  std::int64_t parameter_count() const;
  // One row of each table.
  std::int64_t active_parameter_count() const;
  // Lookups are not counted.
  double flops_per_token(std::int64_t) const { return 0; }
};

}  // namespace penstock::models
