#include "penstock/optimizer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::optim {

bool is_usually_undecayed(const NamedParameter& parameter) {
  if (parameter.tensor.dim() <= 1) return true;
  std::string_view rest = parameter.name;
  while (!rest.empty()) {
    const std::size_t dot = rest.find('.');
    const std::string_view part = rest.substr(0, dot);
    if (part == "bias" || part.find("norm") != std::string_view::npos) return true;
    rest = dot == std::string_view::npos ? std::string_view() : rest.substr(dot + 1);
  }
  return false;
}

std::vector<ParameterGroup> decay_groups(const std::vector<NamedParameter>& parameters) {
  ParameterGroup decayed, others;
  others.weight_decay = 0;
  for (const NamedParameter& parameter : without_ties(parameters))
    (is_usually_undecayed(parameter) ? others : decayed).parameters.push_back(parameter);
  std::vector<ParameterGroup> groups;
  for (ParameterGroup* group : {&decayed, &others})
    if (!group->parameters.empty()) groups.push_back(std::move(*group));
  return groups;
}

std::vector<NamedParameter> without_ties(const std::vector<NamedParameter>& parameters) {
  std::vector<NamedParameter> result;
  std::map<std::string_view, const void*> names;
  std::set<const void*> seen;
  for (const NamedParameter& parameter : parameters) {
    if (parameter.name.empty())
      throw ValueError("parameters: a parameter has no name; pass each with its name in the whole model");
    if (!parameter.tensor.defined())
      throw ValueError(
          fmt::format("parameters: {} is an undefined tensor; leave it out of the list or register it first",
                      parameter.name));
    const void* identity = parameter.tensor.unsafeGetTensorImpl();
    const auto [entry, added] = names.emplace(parameter.name, identity);
    if (!added && entry->second != identity)
      throw ValueError(
          describe(fmt::format("parameters: name {}", parameter.name), "two tensors", "one",
                   "names are those of the whole model; a tied parameter is the same tensor twice"));
    if (seen.insert(identity).second) result.push_back(parameter);
  }
  return result;
}

}  // namespace penstock::optim
