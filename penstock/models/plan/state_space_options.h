// The options of a selective state-space block (Mamba-2 family), and what follows from them without tensors.
//
//   models::StateSpaceOptions options{.width = 768};
//   options.check();
//   std::int64_t parameters = models::parameter_count(options);
//   double flops = models::flops_per_token(options, 1024);
//
// The block has an inner width of state_expand * width, split into heads. Every head has a state of
// state_head_width * state_size numbers. Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/transformer_options.h"

namespace penstock::models {

struct StateSpaceOptions {
  std::int64_t width = 128;            // elements of a hidden state
  std::int64_t state_size = 128;       // elements of a key and of a query
  std::int64_t state_head_width = 64;  // elements of a head; divides the inner width
  std::int64_t state_expand = 2;       // the inner width is this times `width`
  std::int64_t state_groups = 1;       // heads of a group share keys and queries; divides the heads
  std::int64_t state_kernel = 4;       // taps of the convolutions
  std::int64_t state_chunk = 128;      // tokens that are computed together
  double norm_epsilon = 1e-5;          // added to the mean square in the norm

  bool operator==(const StateSpaceOptions&) const = default;

  // Throws ConfigError that names the invalid field and the remedy.
  void check() const;
  // Throws ConfigError that names layout.tp unless each of `ranks` gets whole heads of whole groups, or heads
  // of one group.
  void check_tensor_parallel(std::int64_t ranks) const;

  std::int64_t inner() const { return state_expand * width; }
  std::int64_t heads() const { return inner() / state_head_width; }
  std::int64_t key_width() const { return state_groups * state_size; }  // of all groups
};

// Returns the parameters of a block in the order of its named_parameters(), each name after `prefix`
// ("blocks.3.state_space.").
std::vector<ParameterShape> parameter_shapes(const StateSpaceOptions& options, const std::string& prefix);

// Returns the number of elements of all parameters. Every token uses all of them.
std::int64_t parameter_count(const StateSpaceOptions& options);

// Returns the floating-point operations of one forward per token, two per multiply-add: projections,
// convolutions, and the products of the scan, in chunks of at most `length` tokens.
double flops_per_token(const StateSpaceOptions& options, std::int64_t length);

}  // namespace penstock::models
