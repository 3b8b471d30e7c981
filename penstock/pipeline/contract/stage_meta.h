// Describes the tensors that a pipeline stage receives and sends, and the messages that tell its neighbours.
//
//   StageMeta meta;
//   meta.inputs = metas_of(example_inputs);            // filled step by step: from examples, or by inference
//   meta.outputs = metas_of(example_outputs);
//   StageForwardMeta to_next(*meta.outputs);           // becomes the inputs of the next stage
//
// record_messages.h encodes the messages as bytes. Plain values; a StageMeta belongs to one thread while it
// is filled.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "penstock/torch/tree/tensor_meta.h"

namespace penstock {

// Empty optionals are not known yet. Only gradients may have missing entries: a tensor that needs no gradient
// has none.
struct StageMeta {
  std::optional<TensorMetas> inputs;
  std::optional<TensorMetas> outputs;
  std::optional<OptionalTensorMetas> input_grads;
  std::optional<OptionalTensorMetas> output_grads;

  bool has_any() const { return inputs || outputs || input_grads || output_grads; }
  bool complete_for_forward() const { return inputs && outputs; }
  // Considers inputs and outputs; gradients follow from them and are ignored.
  bool has_distributed() const;

  bool operator==(const StageMeta&) const = default;
};

// "inputs (float32[2, 3]), outputs (float32[2, 4]), input_grads unknown, output_grads unknown"
std::string to_string(const StageMeta& meta);

// From stage i to stage i + 1: the records of the outputs of stage i, which are the inputs of stage i + 1.
// Immutable.
class StageForwardMeta {
 public:
  StageForwardMeta() = default;
  explicit StageForwardMeta(TensorMetas outputs) : outputs_(std::move(outputs)) {}
  const TensorMetas& outputs() const { return outputs_; }
  bool operator==(const StageForwardMeta&) const = default;

 private:
  TensorMetas outputs_;
};

// From stage i to stage i - 1: the records of the input gradients of stage i, which are the output gradients
// of stage i - 1. Their placements may differ from those of the activations: an activation that is replicated
// in forward can have a partial gradient.
class StageBackwardMeta {
 public:
  StageBackwardMeta() = default;
  explicit StageBackwardMeta(OptionalTensorMetas input_grads) : input_grads_(std::move(input_grads)) {}
  const OptionalTensorMetas& input_grads() const { return input_grads_; }
  bool operator==(const StageBackwardMeta&) const = default;

 private:
  OptionalTensorMetas input_grads_;
};

// Returns the records of the gradients of plain tensors: shape, stride and dtype of the tensor, without
// requires_grad; std::nullopt for a tensor that needs no gradient. Throws PipeliningMetadataError for a
// distributed tensor that needs one: the placements of its gradient do not follow from those of the tensor.
OptionalTensorMetas derive_gradient_metas(const TensorMetas& metas);

enum class StageSide { Input, Output };

// Checks the contract of static mode between the tensors on one side of a stage and their gradients, pair by
// pair:
//   - there are as many gradients as tensors,
//   - a tensor that needs no gradient has none,
//   - the gradient of a distributed tensor is distributed; its placements may differ.
// Each violation throws a PipeliningMetadataError that names stage, side and index. A tensor that needs a
// gradient and has none only causes a warning: at the ends of a pipeline that is legal.
void check_gradient_contract(int stage, StageSide side, const TensorMetas& tensors,
                             const OptionalTensorMetas& gradients);

}  // namespace penstock
