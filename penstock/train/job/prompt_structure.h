// The structure of text that is being generated, for models that were trained with it.
//
//   PromptStructure structure(config, device);
//   models::GenerateOptions how{.use_cache = structure.allows_cache(), .metadata = structure.metadata()};
//
// The text, prompt included, is one document from its beginning, as a file is in training. Every byte is read
// once; its structure depends on the bytes before it only, so that it is the same as if the whole text were
// read at once. When the model sees only the last tokens, they have the structure of the whole text.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "penstock/pytree.h"
#include "penstock/train_config.h"

namespace penstock::train {

class PromptStructure {
 public:
  // Of a whole model. Nothing is found if it was not trained with structure.
  PromptStructure(const TrainConfig& config, at::Device device);

  // For GenerateOptions, of one row of byte tokens. Empty if the model uses no structure.
  std::function<Tree(const at::Tensor& tokens, std::int64_t first)> metadata() const;
  // Whether the model can use what it has computed for earlier tokens: not with parents and relations.
  bool allows_cache() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace penstock::train
