// cuDNN and oneDNN kernels that LibTorch calls by name. cuDNN's recurrent kernels are not among them: they
// move the parameters into a buffer of their own, which a shape-only run must not do.
#include <tuple>

#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock::detail {
namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Seven = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The size of what a kernel saves for its backward is private to it; nothing else reads it.
Tensor workspace(const Tensor& like) { return at::empty({0}, like.options().dtype(at::kByte)); }

Four cudnn_batch_norm(const Tensor& input, const Tensor& weight, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, bool training, double, double) {
  const Sizes saved = {training ? weight.numel() : 0};
  return {suggested_like(input), at::empty(saved, weight.options()), at::empty(saved, weight.options()),
          workspace(input)};
}

Three cudnn_batch_norm_backward(const Tensor& input, const Tensor&, const Tensor& weight,
                                const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                const OptionalTensor&, double, const Tensor&) {
  return {suggested_like(input), contiguous_like(weight), contiguous_like(weight)};
}

Four mkldnn_rnn_layer(const Tensor& input, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const Tensor& hidden, const Tensor& cell, bool, IntArrayRef, std::int64_t,
                      std::int64_t hidden_size, std::int64_t, bool, bool, bool, bool) {
  return {at::empty({input.size(0), input.size(1), hidden_size}, input.options()), contiguous_like(hidden),
          contiguous_like(cell), workspace(input)};
}

Seven mkldnn_rnn_layer_backward(const Tensor& input, const Tensor& weight1, const Tensor& weight2,
                                const Tensor& bias1, const Tensor& bias2, const Tensor& hidden,
                                const Tensor& cell, const Tensor&, const Tensor&, const Tensor&,
                                const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, bool,
                                std::int64_t, std::int64_t, std::int64_t, bool, bool, bool, IntArrayRef, bool,
                                const Tensor&) {
  return {contiguous_like(input), contiguous_like(weight1), contiguous_like(weight2), contiguous_like(bias1),
          contiguous_like(bias2), contiguous_like(hidden),  contiguous_like(cell)};
}

}  // namespace

void add_vendor_shapes() {
  register_where_missing("aten::cudnn_batch_norm", cudnn_batch_norm);
  register_where_missing("aten::cudnn_batch_norm_backward", cudnn_batch_norm_backward);
  register_where_missing("aten::mkldnn_rnn_layer", mkldnn_rnn_layer);
  register_where_missing("aten::mkldnn_rnn_layer_backward", mkldnn_rnn_layer_backward);
}

}  // namespace penstock::detail
