// Tensors on their way between stages on different ranks (BorderOptions in pipeline.h): in shares of ranks
// that have the same tensors, and in a narrower dtype.
//
//   at::Tensor message = codec.encode(memory, meta);    // sender; codec.changes(meta)
//   at::Tensor buffer = codec.buffer_for(memory, meta); // receiver: for the message
//   codec.decode(buffer, memory, meta);                 // receiver: fills the tensor
//
// `memory`: a dense tensor as one row of elements (memory_of); `meta`: its agreed record, which is the same
// on both sides.
// Thread safety: one thread. decode() is collective over BorderOptions::equal_ranks: all of them run the same
// program and decode in its order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "penstock/pipeline.h"
#include "penstock/torch/tree/tensor_meta.h"

namespace penstock {

class BorderCodec {
 public:
  explicit BorderCodec(BorderOptions options);

  // Whether a tensor with this record is encoded; others are sent as they are.
  bool changes(const TensorMeta& meta) const;
  at::Tensor encode(const at::Tensor& memory, const TensorMeta& meta);
  at::Tensor buffer_for(const at::Tensor& memory, const TensorMeta& meta) const;
  // [collective over equal_ranks, if the tensor is sent in shares]
  void decode(const at::Tensor& message, const at::Tensor& memory, const TensorMeta& meta) const;

  // Counts a message as sent.
  void count(const at::Tensor& message) { bytes_ += message.numel() * message.element_size(); }
  // Starts the numbers of a new step.
  void begin_step();
  // What was sent since begin_step(). Waits for the device if the dtype is narrower.
  BorderReport report() const;

 private:
  // In which form a tensor travels.
  struct Form {
    std::int64_t ranks = 1;  // that send a share each
    BorderDtype dtype = BorderDtype::Same;
  };
  Form form_of(const TensorMeta& meta) const;
  std::int64_t share_size(std::int64_t elements, const Form& form) const;
  at::Tensor narrowed(const at::Tensor& values, BorderDtype dtype) const;
  at::Tensor widened(const at::Tensor& message, std::int64_t elements, const Form& form) const;

  BorderOptions options_;
  std::int64_t bytes_ = 0;
  at::Tensor squares_;  // Double [2], on the device: of the errors, and of the values
};

}  // namespace penstock
