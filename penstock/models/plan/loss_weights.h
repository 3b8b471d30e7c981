// Weights of auxiliary losses, by name.
//
//   LossWeights weights;
//   weights.set("balance", 0.02);
//   weights.of("router_z");        // 0.001
//
// Plain values, independent of LibTorch.
#pragma once

#include <map>
#include <string>

namespace penstock::models {

class LossWeights {
 public:
  // Names the losses of Penstock's own blocks (penstock/models/blocks/block_result.h).
  LossWeights();
  // For a loss of any name. Throws ConfigError for a weight that is negative or not finite.
  void set(const std::string& name, double weight);
  // Throws ValueError for a loss without a weight: it must not be dropped silently, nor counted in full.
  double of(const std::string& name) const;
  bool operator==(const LossWeights&) const = default;

 private:
  std::map<std::string, double> weights_;
};

}  // namespace penstock::models
