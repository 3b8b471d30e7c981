// AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
//
//   m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
//   p = p (1 - lr weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// State: exp_avg (m), exp_avg_sq (v), in the dtype of the parameter. See optimizer.h for everything else.
#pragma once

#include <vector>

#include "penstock/optimizer.h"

namespace penstock::optim {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;           // 0 .. 1, less than 1
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;   // for groups without their own value
  Kernels kernels = Kernels::Auto;
};

class AdamW final : public Optimizer {
 public:
  // Throws ValueError that names the option or the parameter.
  explicit AdamW(std::vector<ParameterGroup> groups, const AdamWOptions& options = {});
  explicit AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options = {});

 private:
  bool update_fused(const Bucket& bucket) override;
  void update_lists(const Bucket& bucket) override;
  AdamWOptions options_;
};

}  // namespace penstock::optim
