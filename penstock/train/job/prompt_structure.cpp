#include "penstock/train/job/prompt_structure.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstddef>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/train/data/cpp_structure.h"
#include "penstock/train/job/structure_metadata.h"

namespace penstock::train {

struct PromptStructure::State {
  Tree keywords_of(const at::Tensor& tokens, std::int64_t first);

  StructureNeeds needs;
  at::Device device = at::kCPU;
  CppStructure reader;
  std::vector<TokenStructure> found;  // of the tokens that have been read
};

Tree PromptStructure::State::keywords_of(const at::Tensor& tokens, std::int64_t first) {
  if (tokens.dim() != 2 || tokens.size(0) != 1)
    throw ValueError(describe("structure of a prompt", fmt::format("{} rows", tokens.size(0)), "one row",
                              "generate one text at a time"));
  const std::int64_t length = tokens.size(1), known = static_cast<std::int64_t>(found.size());
  if (length > known) {
    const at::Tensor fresh = tokens.select(0, 0).narrow(0, known, length - known).to(at::kCPU).contiguous();
    found.resize(static_cast<std::size_t>(length));
    reader.read({fresh.data_ptr<std::int64_t>(), static_cast<std::size_t>(fresh.numel())},
                std::span(found).subspan(static_cast<std::size_t>(known)));
  }
  const auto count = static_cast<std::size_t>(length - first);
  const std::vector<std::int64_t> one_document(count, 0);
  return structure_metadata(needs,
                            {.tokens = std::span(found).subspan(static_cast<std::size_t>(first), count),
                             .documents = one_document,
                             .rows = 1,
                             .length = length - first},
                            device);
}

PromptStructure::PromptStructure(const TrainConfig& config, at::Device device)
    : state_(std::make_shared<State>()) {
  state_->needs =
      structure_needs(config, {{.index = 0, .count = 1, .first_block = 0, .end_block = config.model.layers}});
  state_->device = device;
}

std::function<Tree(const at::Tensor&, std::int64_t)> PromptStructure::metadata() const {
  if (!state_->needs.any()) return {};
  return [state = state_](const at::Tensor& tokens, std::int64_t first) {
    return state->keywords_of(tokens, first);
  };
}

bool PromptStructure::allows_cache() const { return !state_->needs.parents && state_->needs.relations == 0; }

}  // namespace penstock::train
