// Copies of a caller's tensors for a trial run, so that a module that writes its arguments writes the copies.
//
//   TrialCopies copies({x, mask}, /*fake=*/false);
//   at::Tensor own = copies.of(x);                 // the same tensor every time
//
// A tensor that occurs twice is one tensor among the copies. Real copies of tensors that share memory share memory in the same way; fake ones
// have the metadata only. Subclasses become subclasses around copies of what they hold. Copies are leaves and require grad as the originals do.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace penstock::pipeline {

class TrialCopies {
 public:
  // `tensors`: all that will be asked for and may share memory.
  TrialCopies(const std::vector<at::Tensor>& tensors, bool fake);

  // A tensor that was not named to the constructor has memory of its own.
  at::Tensor of(const at::Tensor& tensor);

 private:
  // The bytes of a storage that the tensors use, and their copy.
  struct Span {
    std::int64_t begin = 0, end = 0;
    at::Tensor copy;
  };
  void add_span(const at::Tensor& tensor);
  at::Tensor copy(const at::Tensor& tensor);
  at::Tensor copy_strided(const at::Tensor& tensor);

  bool fake_;
  std::unordered_map<const void*, Span> spans_;               // by storage
  std::unordered_map<const c10::TensorImpl*, at::Tensor> made_;
  std::vector<at::Tensor> originals_;                         // keep their addresses theirs
};

}  // namespace penstock::pipeline
