// Dropout whose mask depends on the step, microbatch, layer and element, not on how the work is split.
//
//   KeyedDropout drop(KeyedDropoutOptions(0.1, "blocks.3.mlp.drop"));
//   y = drop->forward(x);  // seed, step and microbatch come from the StepContext
//   y = drop->forward(x, {.global_shape = {8, 16}, .offset = {4, 0}});  // x is a part of the whole tensor
//
// The mask is a function of (seed, step, microbatch) of the StepContext, the layer and the element's global
// index: the same under recomputation, on every pipeline split and for every sharding whose boxes are given.
// Without a box, dim 0 is taken to be the rows of the microbatch that the StepContext assigns to this rank,
// so that data-parallel ranks have different masks.
//
// In evaluation mode, and with p = 0, the input is returned unchanged. In training mode, forward throws
// StateError outside of a step: there is no key, and a default key would produce the same mask every time.
//
// A module that is called several times in one forward has the same mask each time, unless the calls pass
// different `use` values: counting calls here would make a recomputation differ.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string_view>

#include "penstock/random.h"

namespace penstock {

// Options of KeyedDropout.
struct KeyedDropoutOptions {
  // `layer`: the number of this layer in the whole model. Throws ValueError unless p is in [0, 1].
  KeyedDropoutOptions(double p, std::int64_t layer);
  // The same by name.
  KeyedDropoutOptions(double p, std::string_view layer_name)
      : KeyedDropoutOptions(p, layer_from_name(layer_name)) {}

  double p;            // probability of an element to be dropped
  std::int64_t layer;  // part of the key
};

// The module behind KeyedDropout.
class KeyedDropoutImpl : public torch::nn::Cloneable<KeyedDropoutImpl> {
 public:
  // Keeps the options.
  explicit KeyedDropoutImpl(KeyedDropoutOptions options) : options(options) {}

  // Has no parameters to reset.
  void reset() override {}
  // "KeyedDropout(p=0.1, layer=3)".
  void pretty_print(std::ostream& stream) const override;

  // `use` distinguishes calls within one forward: 0 to 2^31 - 1.
  torch::Tensor forward(const torch::Tensor& input, const GlobalBox& box = {}, std::int64_t use = 0);

  // Returns the key that forward would use now, from the running step.
  RandomKey key(std::int64_t use = 0) const;

  KeyedDropoutOptions options;  // may be changed between steps

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(GlobalBox())}, {2, torch::nn::AnyValue(std::int64_t{0})})
};

TORCH_MODULE(KeyedDropout);

}  // namespace penstock
