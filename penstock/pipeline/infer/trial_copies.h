// Copies of a caller's tensors for a trial run, so that a module that writes to its arguments writes to the
// copies.
//
//   TrialCopies copies({x, mask}, /*fake=*/false);
//   at::Tensor own = copies.of(x);                 // the same tensor every time
//
// A tensor that occurs twice has one copy. Real copies of tensors that share memory share memory in the same
// way; fake ones have only the metadata. Subclasses become subclasses around copies of their inner tensors.
// Copies are leaves and require grad if the originals do.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace penstock {

class TrialCopies {
 public:
  // `tensors` are all tensors that will be requested and may share memory.
  TrialCopies(const std::vector<at::Tensor>& tensors, bool fake);

  // The copy of a tensor that was not passed to the constructor has memory of its own.
  at::Tensor of(const at::Tensor& tensor);

 private:
  // The range of bytes of a storage that the tensors use, and its copy.
  struct Span {
    std::int64_t begin = 0, end = 0;
    at::Tensor copy;
  };
  void add_span(const at::Tensor& tensor);
  at::Tensor copy(const at::Tensor& tensor);
  at::Tensor copy_strided(const at::Tensor& tensor);

  bool fake_;
  std::unordered_map<const void*, Span> spans_;  // by storage
  std::unordered_map<const c10::TensorImpl*, at::Tensor> made_;
  std::vector<at::Tensor> originals_;  // keep their addresses from being reused
};

}  // namespace penstock
