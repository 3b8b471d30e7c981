#include "penstock/pipeline/contract/stage_meta.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/base/warnings.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

template <class Metas>
std::string list_text(const std::optional<Metas>& metas) {
  if (!metas) return "unknown";
  std::string text = "(";
  for (const auto& meta : *metas) text += (text.size() > 1 ? "; " : "") + to_string(meta);
  return text + ')';
}

}  // namespace

bool StageMeta::has_distributed() const {
  const auto any = [](const std::optional<TensorMetas>& metas) {
    return metas && std::any_of(metas->begin(), metas->end(),
                                [](const TensorMeta& meta) { return is_distributed(meta); });
  };
  return any(inputs) || any(outputs);
}

std::string to_string(const StageMeta& meta) {
  return fmt::format("inputs {}, outputs {}, input_grads {}, output_grads {}", list_text(meta.inputs),
                     list_text(meta.outputs), list_text(meta.input_grads), list_text(meta.output_grads));
}

OptionalTensorMetas derive_gradient_metas(const TensorMetas& metas) {
  OptionalTensorMetas gradients;
  gradients.reserve(metas.size());
  for (const TensorMeta& meta : metas) {
    if (!requires_grad(meta)) {
      gradients.emplace_back(std::nullopt);
      continue;
    }
    if (is_distributed(meta))
      throw PipeliningMetadataError(describe(
          fmt::format("gradient record of tensor [{}]", gradients.size()), "a distributed tensor",
          "a plain one", "pass the gradient records of the stage, or let them be inferred (dynamic mode)"));
    gradients.emplace_back(local_record(meta).with_requires_grad(false));
  }
  return gradients;
}

void check_gradient_contract(int stage, StageSide side, const TensorMetas& tensors,
                             const OptionalTensorMetas& gradients) {
  const char* const side_name = side == StageSide::Input ? "input" : "output";
  if (tensors.size() != gradients.size())
    throw PipeliningMetadataError(
        describe(fmt::format("stage {}: {} gradients", stage, side_name), std::to_string(gradients.size()),
                 std::to_string(tensors.size()),
                 fmt::format("pass one gradient for each {}, an empty one where none is needed", side_name)));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& gradient = gradients[i];
    const std::string where = fmt::format("stage {}: gradient of {}[{}]", stage, side_name, i);
    if (!requires_grad(tensors[i])) {
      if (gradient)
        throw PipeliningMetadataError(
            describe(where, kind_text(*gradient), "nothing, since the tensor has requires_grad off",
                     "turn requires_grad on for the tensor, or leave this gradient empty"));
      continue;
    }
    if (!gradient) {
      warn("pipeline",
           describe(
               where, "nothing", "a gradient, since the tensor has requires_grad on",
               "legal at the ends of the pipeline; elsewhere pass the gradient or turn requires_grad off"));
    } else if (is_distributed(tensors[i]) && !is_distributed(*gradient)) {
      throw PipeliningMetadataError(
          describe(where, "a plain tensor", "a distributed one or nothing, since the tensor is distributed",
                   "pass a distributed gradient; its placements may differ from the tensor's"));
    }
  }
}

}  // namespace penstock
