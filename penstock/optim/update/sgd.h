// Stochastic gradient descent with momentum.
//
//   g = g + weight_decay p                 (coupled decay, as in torch::optim::SGD)
//   m = momentum m + g
//   p = p - lr (nesterov ? g + momentum m : m)
//
// With decoupled decay, p = p (1 - lr weight_decay) comes first and g is unchanged, as in AdamW. State:
// momentum (m), none if the momentum is 0. See optimizer.h for everything else.
#pragma once

#include <vector>

#include "penstock/optimizer.h"

namespace penstock::optim {

struct SGDOptions {
  double lr = 1e-2;
  double momentum = 0;        // 0 .. 1, less than 1
  bool nesterov = false;      // needs momentum
  double weight_decay = 0;    // for groups without their own value
  bool decoupled = false;
  Kernels kernels = Kernels::Auto;
};

class SGD final : public Optimizer {
 public:
  // Throws ValueError that names the option or the parameter.
  explicit SGD(std::vector<ParameterGroup> groups, const SGDOptions& options = {});
  explicit SGD(std::vector<NamedParameter> parameters, const SGDOptions& options = {});

 private:
  bool update_fused(const Bucket& bucket) override;
  void update_lists(const Bucket& bucket) override;
  SGDOptions options_;
};

}  // namespace penstock::optim
