// The options of an expert block, and what follows from them without tensors: the shapes of its parameters
// and its cost.
//
//   models::ExpertOptions options{.width = 1024, .experts = 64, .top_k = 2, .expert_width = 512};
//   options.check();
//   std::int64_t all = models::parameter_count(options), used = models::active_parameter_count(options);
//
// A router scores the experts for each token; the `top_k` with the highest scores compute a SwiGLU of width
// `expert_width`, and their results are added up, weighted by the scores. A shared expert serves every token.
// Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/transformer_options.h"

namespace penstock::models {

// What the router computes from its logits.
enum class RouterScores {
  Softmax,  // over the experts
  Sigmoid   // of each expert on its own
};

// "softmax" or "sigmoid". Throws ConfigError that names model.router_scores for another text.
RouterScores parse_router_scores(std::string_view text);
std::string to_string(RouterScores scores);

// Sizes and constants of an expert block.
struct ExpertOptions {
  std::int64_t width = 128;         // elements of a hidden state
  std::int64_t experts = 8;         // number of experts
  std::int64_t top_k = 2;           // experts per token
  std::int64_t expert_width = 128;  // inner width of one expert
  RouterScores router_scores = RouterScores::Softmax;
  bool router_normalize = true;          // the weights of a token's experts sum to 1
  double router_bias_rate = 0;           // step of the bias that balances the experts; 0: no bias
  std::int64_t shared_expert_width = 0;  // inner width of the expert that serves every token; 0: none
  double capacity_factor = 0;            // 0: no token is dropped; else see expert_capacity()

  // Compares all fields.
  bool operator==(const ExpertOptions&) const = default;
  // Throws ConfigError that names the invalid field and the remedy.
  void check() const;
  // Throws ConfigError that names layout.ep if the experts cannot be divided evenly among `ranks`.
  void check_parallel(std::int64_t ranks) const;
  // Throws ConfigError that names layout.tp if the columns of an expert cannot be divided evenly.
  void check_columns(std::int64_t ranks) const;
};

// Returns the largest number of choices that an expert takes from a batch of `tokens`: capacity_factor times
// the even share, rounded up; 0, without a limit, if capacity_factor is 0.
std::int64_t expert_capacity(const ExpertOptions& options, std::int64_t tokens);

// Returns the parameters in the order of the module, their names beginning with `prefix` and a dot if the
// prefix is not empty.
std::vector<ParameterShape> parameter_shapes(const ExpertOptions& options, const std::string& prefix = {});

// Returns the number of elements of all parameters.
std::int64_t parameter_count(const ExpertOptions& options);
// Returns the number of elements of the parameters that one token uses.
std::int64_t active_parameter_count(const ExpertOptions& options);

// Returns the floating-point operations of the matrix products per token in one forward: two per
// multiply-add.
double flops_per_token(const ExpertOptions& options);

}  // namespace penstock::models
