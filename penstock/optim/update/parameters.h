// Named parameters, in groups that share their options.
//
//   std::vector<NamedParameter> all;
//   for (const auto& item : module.named_parameters()) all.push_back({item.key(), item.value()});
//   AdamW optimizer(decay_groups(all), {.lr = 3e-4, .weight_decay = 0.1});
//
// Names are those of the whole model, the same in every layout; a rank lists the parameters that it holds. A
// tensor may be plain or distributed. Thread safety: as for tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace penstock::optim {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

struct ParameterGroup {
  std::vector<NamedParameter> parameters;
  double lr_scale = 1;                 // multiplies the optimizer's learning rate; 0 freezes the parameters
  std::optional<double> weight_decay;  // instead of the optimizer's
};

// Returns whether a parameter is usually excluded from weight decay: at most one dim, or "bias" or "norm" in
// its path.
bool is_usually_undecayed(const NamedParameter& parameter);

// Two groups: parameters with the optimizer's decay and parameters without, in the order given. An empty
// group is omitted.
std::vector<ParameterGroup> decay_groups(const std::vector<NamedParameter>& parameters);

// Returns every tensor once: a tied one under its first name. Throws ValueError for a name shared by two
// tensors, an empty name and an undefined tensor.
std::vector<NamedParameter> without_ties(const std::vector<NamedParameter>& parameters);

}  // namespace penstock::optim
