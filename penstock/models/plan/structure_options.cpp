#include "penstock/models/plan/structure_options.h"

#include "penstock/models/plan/require_option.h"

namespace penstock::models {

std::array<StructureTable, 5> StructureOptions::tables() const {
  return {{{"structure_kind", "structure_kinds", structure_kinds, false},
           {"dependency_level", "dependency_levels", dependency_levels, true},
           {"syntax_depth", "syntax_depths", syntax_depths, true},
           {"sibling_index", "sibling_indices", sibling_indices, true},
           {"node_type", "node_types", node_types, false}}};
}

void StructureOptions::check() const {
  require_at_least(1, "width", width);
  for (const StructureTable& table : tables()) require_at_least(1, table.key, table.entries);
}

std::vector<ParameterShape> StructureOptions::shapes(const std::string& prefix) const {
  std::vector<ParameterShape> all;
  for (const StructureTable& table : tables())
    all.push_back({parameter_name(prefix, fmt::format("{}.weight", table.name)), {table.entries, width}});
  return all;
}

std::int64_t StructureOptions::parameter_count() const { return element_count(shapes("")); }

void PlatformOptions::check() const {
  require_at_least(1, "width", width);
  require_at_least(1, "platforms", platforms);
}

std::vector<ParameterShape> PlatformOptions::shapes(const std::string& prefix) const {
  return {{parameter_name(prefix, "weight"), {platforms, width}}};
}

void RelationOptions::check() const {
  require_at_least(1, "relations", relations);
  require_at_least(1, "heads", heads);
}

std::vector<ParameterShape> RelationOptions::shapes(const std::string& prefix) const {
  return {{parameter_name(prefix, "weight"), {relations, heads}}};
}

double RelationOptions::flops_per_token(std::int64_t length) const {
  return 2.0 * static_cast<double>(relations) * static_cast<double>(heads) * static_cast<double>(length);
}

}  // namespace penstock::models
