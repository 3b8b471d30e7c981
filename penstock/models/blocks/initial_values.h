// Initial values of parameters: functions of seed, name and element, hence the same bits in every layout and
// on every device. For distributed parameters each rank computes its own part.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace penstock::models {

// How the parameters of a block are initialized.
struct BlockInit {
  std::uint64_t seed = 0;
  double deviation = 0.02;  // of matrices
  double residual = 0.02;   // of matrices whose result is added to the residual stream
};

// Fills a parameter, plain or distributed, in place, with normally distributed values. `name` is its name in
// the whole model.
void fill_normal(const at::Tensor& parameter, const std::string& name, std::uint64_t seed, double deviation);

// The same with values uniform in [from, to).
void fill_uniform(const at::Tensor& parameter, const std::string& name, std::uint64_t seed, double from,
                  double to);

}  // namespace penstock::models
