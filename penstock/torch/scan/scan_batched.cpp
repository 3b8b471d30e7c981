// The scan by products of all chunks at once. What is between the products is in the kernels of
// scan_device.h; products take operands in the dtype of the values.
#include <ATen/ATen.h>

#include "penstock/torch/compat/version.h"
#include "penstock/torch/scan/scan_device.h"
#include "penstock/torch/scan/scan_kernels.h"
#include "penstock/torch/scan/scan_types.h"

namespace penstock::detail {
namespace {

at::Tensor padded(const at::Tensor& tensor, std::int64_t added) {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes[1] = added;
  return at::cat({tensor, at::zeros(sizes, tensor.options())}, 1);
}

// Whole chunks: tokens whose step is zero neither change the state nor use it.
ScanTensors in_whole_chunks(const ScanTensors& in) {
  const std::int64_t added = in.shape.chunks * in.shape.chunk - in.shape.length;
  if (added == 0) return in;
  ScanTensors whole = in;
  whole.shape.length += added;
  for (at::Tensor* part : {&whole.values, &whole.keys, &whole.queries, &whole.steps})
    *part = padded(*part, added);
  if (in.starts.defined())  // as in the last document
    whole.starts =
        at::cat({in.starts, in.starts.narrow(1, in.shape.length - 1, 1).expand({in.shape.batch, added})}, 1);
  return whole;
}

// Keys or queries as [batch * chunks * groups, chunk, state size]: a view if there is one group.
at::Tensor by_chunk(const at::Tensor& keys, const ScanShape& s) {
  return keys.view({s.batch, s.chunks, s.chunk, s.groups, s.state_size})
      .transpose(2, 3)
      .reshape({s.batch * s.chunks * s.groups, s.chunk, s.state_size});
}
at::Tensor by_token(const at::Tensor& keys, const ScanShape& s) {
  return keys.view({s.batch, s.chunks, s.groups, s.chunk, s.state_size})
      .transpose(2, 3)
      .reshape({s.batch, s.length, s.groups, s.state_size});
}

// Tensors of one scan: their sizes follow from the shape.
struct ChunkSizes {
  const ScanShape& s;
  at::TensorOptions options;

  std::int64_t group_batch() const { return s.batch * s.chunks * s.groups; }
  std::int64_t head_batch() const { return s.batch * s.chunks * s.heads; }
  at::Tensor group_major() const { return at::empty({group_batch(), s.chunk, s.group_width()}, options); }
  at::Tensor head_major() const { return at::empty({head_batch(), s.chunk, s.head_width}, options); }
  at::Tensor weights() const { return at::empty({head_batch(), s.chunk, s.chunk}, options); }
  at::Tensor states() const { return at::empty({group_batch(), s.state_size, s.group_width()}, options); }
  at::Tensor sums() const { return at::empty({s.batch, s.chunks, s.heads, s.chunk}, real()); }
  at::Tensor state() const { return at::empty({s.batch, s.groups, s.state_size, s.group_width()}, real()); }
  at::TensorOptions real() const {
    return options.dtype(real_of(c10::typeMetaToScalarType(options.dtype())));
  }
};

at::Tensor first_tokens(const at::Tensor& tensor, std::int64_t length) {
  return tensor.size(1) == length ? tensor : tensor.narrow(1, 0, length).contiguous();
}

// A product in float32 (float64 for float64), not rounded to 16 bits.
at::Tensor real_product(const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType real = real_of(a.scalar_type());
#if PENSTOCK_TORCH_AT_LEAST(2, 8)
  if (a.scalar_type() != real) return at::bmm(a, b, real);
#endif
  return at::bmm(a, b).to(real);
}

}  // namespace

ScanOutputs scan_batched(const ScanTensors& given) {
  const ScanTensors in = in_whole_chunks(given);
  const ScanShape& s = in.shape;
  const ChunkSizes sizes{s, in.values.options()};
  const at::Tensor keys = by_chunk(in.keys, s), queries = by_chunk(in.queries, s), sums = sizes.sums(),
                   inputs = sizes.head_major(), passed = sizes.group_major(), weights = sizes.weights();
  launch_sums(in, sums);
  launch_inputs(in, sums, inputs, passed);
  const at::Tensor added = at::bmm(keys.transpose(1, 2), passed), states = sizes.states(),
                   last = sizes.state();
  launch_pass(in, sums, added, states, last);
  const at::Tensor read = at::bmm(queries, states);
  launch_weights(in, sums, at::bmm(queries, keys.transpose(1, 2)), weights);
  const at::Tensor inside = at::bmm(weights, inputs), result = at::empty_like(in.values);
  launch_join(in, sums, inside, read, result);
  return {.values = first_tokens(result, given.shape.length),
          .states = states.view({s.batch, s.chunks, s.groups, s.state_size, s.group_width()}),
          .last = last};
}

ScanGradients scan_backward_batched(const ScanTensors& given, const ScanGradientInputs& from) {
  const ScanTensors in = in_whole_chunks(given);
  const ScanShape& s = in.shape;
  const std::int64_t length = given.shape.length;
  const at::Tensor gradient = s.length == length ? from.values : padded(from.values, s.length - length);
  const ChunkSizes sizes{s, in.values.options()};
  const at::Tensor keys = by_chunk(in.keys, s), queries = by_chunk(in.queries, s),
                   states = from.states.view({sizes.group_batch(), s.state_size, s.group_width()});
  const at::Tensor sums = sizes.sums(), row_sums = sizes.sums(), inputs = sizes.head_major(),
                   passed = sizes.group_major(), arrived = sizes.head_major(), scaled = sizes.group_major();
  launch_sums(in, sums);
  launch_inputs(in, sums, inputs, passed);
  launch_gradients(in, sums, gradient, arrived, scaled);

  // Through the states.
  const at::Tensor to_states = sizes.states(), initial = sizes.state(),
                   ends = at::empty({s.batch, s.chunks, s.heads}, sizes.real());
  launch_pass_backward(in, sums, at::bmm(queries.transpose(1, 2), scaled), from.last, to_states, initial);
  launch_ends(in, sums, states, to_states, ends);

  // Within the chunks.
  const at::Tensor gram = at::bmm(queries, keys.transpose(1, 2)), to_gram = at::empty_like(gram),
                   weights = sizes.weights(), own_weights = sizes.sums();
  launch_weights_backward(in, sums, gram, real_product(arrived, inputs.transpose(1, 2)), weights, to_gram,
                          row_sums, own_weights);
  const at::Tensor to_queries = at::bmm(scaled, states.transpose(1, 2)).baddbmm_(to_gram, keys),
                   to_keys =
                       at::bmm(passed, to_states.transpose(1, 2)).baddbmm_(to_gram.transpose(1, 2), queries);

  JoinedGradients joined{.gradient = gradient,
                         .inside = real_product(weights.transpose(1, 2), arrived),
                         .own_weights = own_weights,
                         .passed = at::bmm(keys, to_states),
                         .read = at::bmm(queries, states),
                         .values = at::empty_like(in.values),
                         .row_sums = row_sums,
                         .input_sums = sizes.sums(),
                         .state_sums = sizes.sums(),
                         .skip_sums = sizes.sums()};
  launch_join_backward(in, sums, joined);
  const at::Tensor to_steps = at::empty_like(in.steps), to_decay = sizes.sums();
  launch_steps_backward(in, joined, ends, to_steps, to_decay);
  return {.values = first_tokens(joined.values, length),
          .steps = first_tokens(to_steps, length),
          .decay = to_decay.sum(at::IntArrayRef{0, 1, 3}),
          .keys = first_tokens(by_token(to_keys, s), length),
          .queries = first_tokens(by_token(to_queries, s), length),
          .skip = joined.skip_sums.sum(at::IntArrayRef{0, 1, 3}),
          .initial = initial};
}

}  // namespace penstock::detail
