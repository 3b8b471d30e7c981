#include "penstock/models/plan/hybrid_inputs.h"

#include <utility>

#include "penstock/models/plan/require_option.h"

namespace penstock::models {
namespace {

std::optional<NgramOptions> ngrams_of(const HybridOptions& options) {
  if (options.ngram_orders.empty()) return std::nullopt;
  NgramOptions ngrams{
      .width = options.width, .orders = options.ngram_orders, .buckets = options.ngram_buckets};
  ngrams.check();
  return ngrams;
}

std::optional<StructureOptions> structure_of(const HybridOptions& options) {
  if (!options.structure_embedding) return std::nullopt;
  StructureOptions structure{.width = options.width,
                             .structure_kinds = options.structure_kinds,
                             .dependency_levels = options.dependency_levels,
                             .syntax_depths = options.syntax_depths,
                             .sibling_indices = options.sibling_indices,
                             .node_types = options.node_types};
  structure.check();
  return structure;
}

std::optional<PlatformOptions> platform_of(const HybridOptions& options) {
  require_at_least(0, "platforms", options.platforms, "0 is no platform embedding");
  if (options.platforms == 0) return std::nullopt;
  return PlatformOptions{.width = options.width, .platforms = options.platforms};
}

std::optional<NormOptions> embed_norm_of(const HybridOptions& options) {
  if (options.embed_norm == "none") return std::nullopt;
  require_option(options.embed_norm == "rms_norm" || options.embed_norm == "dynamic_tanh", "embed_norm",
                 fmt::format("\"{}\"", options.embed_norm), "none, rms_norm or dynamic_tanh");
  return NormOptions{
      .kind = norm_kind_from(options.embed_norm), .width = options.width, .epsilon = options.norm_epsilon};
}

// Adds tables of which a token uses only some rows.
template <class Options>
void add_tables(ModelPlan& plan, const Options& options, const char* name) {
  for (ParameterShape& shape : options.shapes(name)) plan.embed.push_back(std::move(shape));
  plan.inactive_embed_parameters += options.parameter_count() - options.active_parameter_count();
  plan.embed_moved_per_token += static_cast<double>(options.active_parameter_count());
}

}  // namespace

HybridInputs hybrid_inputs(const HybridOptions& options) {
  return {.ngrams = ngrams_of(options),
          .structure = structure_of(options),
          .platform = platform_of(options),
          .norm = embed_norm_of(options)};
}

void HybridInputs::add_to(ModelPlan& plan) const {
  if (ngrams) add_tables(plan, *ngrams, kNgramsName);
  if (structure) add_tables(plan, *structure, kStructureName);
  if (platform) add_tables(plan, *platform, kPlatformName);
  if (!norm) return;
  for (ParameterShape& shape : norm->shapes(kEmbedNormName)) plan.embed.push_back(std::move(shape));
  plan.embed_moved_per_token += 2 * static_cast<double>(norm->width);
}

}  // namespace penstock::models
