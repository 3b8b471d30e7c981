#include "penstock/models/transformer/parallel_plan.h"

#include <fmt/format.h>

#include <cstddef>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::models {

ParallelPlan tensor_parallel_plan(const TransformerOptions& options) {
  return tensor_parallel_plan(options, whole_model(options));
}

ParallelPlan tensor_parallel_plan(const TransformerOptions& options, const StagePart& part) {
  ParallelPlan plan;
  if (part.has_embed() || (part.has_head() && options.tie_head))
    plan.emplace_back("embed", rowwise_parallel());
  if (part.blocks() > 0) {
    for (const char* name : {"query", "key", "value"})
      plan.emplace_back(fmt::format("blocks.*.attention.{}", name), colwise_parallel());
    plan.emplace_back("blocks.*.attention.output", rowwise_parallel());
    for (const char* name : {"gate", "up"})
      plan.emplace_back(fmt::format("blocks.*.feed.{}", name), colwise_parallel());
    plan.emplace_back("blocks.*.feed.down", rowwise_parallel());
  }
  if (part.has_head() && !options.tie_head) plan.emplace_back("head", colwise_parallel());
  return plan;
}

void check_tensor_parallel(const TransformerOptions& options, int size) {
  const TransformerOptions whole = options.resolved();
  if (size < 1) throw ConfigError(describe("tensor parallel size", fmt::format("{}", size), "at least 1"));
  const auto check = [&](const char* field, std::int64_t heads) {
    if (heads % size != 0)
      throw ConfigError(
          describe(fmt::format("tensor parallel size {}: model.{}", size, field), fmt::format("{}", heads),
                   fmt::format("a multiple of {}", size),
                   "each rank gets whole heads: change the number of heads or the tensor parallel size"));
  };
  check("heads", whole.heads);
  check("key_value_heads", whole.key_value_heads);
}

void parallelize_transformer(TransformerStageImpl& stage, const comm::MeshGroups& mesh,
                             const std::string& axis) {
  const int position = axis.empty() ? 0 : mesh.mesh().axis(axis);
  check_tensor_parallel(stage.options(), static_cast<int>(mesh.shape()[static_cast<std::size_t>(position)]));
  parallelize_module(stage, mesh, tensor_parallel_plan(stage.options(), stage.part()), {.axis = axis});
  distribute_module(stage, mesh);
}

}  // namespace penstock::models
