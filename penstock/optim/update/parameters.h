// Parameters by name, in groups that share their options.
//
//   std::vector<NamedParameter> all;
//   for (const auto& item : module.named_parameters()) all.push_back({item.key(), item.value()});
//   AdamW optimizer(decay_groups(all), {.lr = 3e-4, .weight_decay = 0.1});
//
// Names are those of the whole model, the same in every layout; a rank lists the parameters that it holds. A tensor may be plain
// or distributed. Thread rule: as for tensors.
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
  double lr_scale = 1;                 // times the optimizer's rate; 0 holds the parameters still
  std::optional<double> weight_decay;  // instead of the optimizer's
};

// Whether a parameter is usually left out of weight decay: at most one dim, or "bias" or a "norm" in its path.
bool is_usually_undecayed(const NamedParameter& parameter);

// Two groups: those with the optimizer's decay and those with none, in the order given. An empty group is left out.
std::vector<ParameterGroup> decay_groups(const std::vector<NamedParameter>& parameters);

// Every tensor once: of a tied one the first name stays. Throws ValueError for a name that two tensors have, an empty name and an
// undefined tensor.
std::vector<NamedParameter> without_ties(const std::vector<NamedParameter>& parameters);

}  // namespace penstock::optim
