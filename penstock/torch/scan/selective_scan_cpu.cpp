// The scan on the CPU: chunk by chunk, by matrix products.
//
// The decay between two tokens is a running product of the factors exp(step * decay) in between, all of them
// at most 1, with a factor of 0 where a document begins. Nothing can overflow, no mask is needed, and an
// exponential is computed once per token and head. The weights of one head and chunk stay in the cache.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "penstock/torch/scan/scan_kernels.h"

namespace penstock::detail {
namespace {

// Rows of a triangular matrix that are multiplied at once; what is above them is left out.
constexpr std::int64_t kTile = 64;

template <class Real>
struct Matrix {
  Real* data;
  std::int64_t stride;  // of rows
  bool transposed = false;
};
template <class Real>
Matrix<Real> turned(Matrix<Real> matrix) {
  matrix.transposed = !matrix.transposed;
  return matrix;
}
template <class Real>
Matrix<Real> from_row(Matrix<Real> matrix, std::int64_t row) {
  matrix.data += row * matrix.stride;
  return matrix;
}

template <class Real>
at::Tensor as_tensor(const Matrix<Real>& matrix, std::int64_t rows, std::int64_t columns) {
  using Plain = std::remove_const_t<Real>;
  const auto strides = matrix.transposed ? std::array<std::int64_t, 2>{1, matrix.stride}
                                         : std::array<std::int64_t, 2>{matrix.stride, 1};
  return at::from_blob(const_cast<Plain*>(matrix.data), {rows, columns}, strides,
                       at::TensorOptions(c10::CppTypeToScalarType<Plain>::value));
}

// out [rows, columns] = left [rows, inner] * right [inner, columns] + keep * out. LibTorch passes such
// matrices to BLAS in place.
template <class Real>
void multiply(std::int64_t rows, std::int64_t columns, std::int64_t inner, Matrix<const Real> left,
              Matrix<const Real> right, Matrix<Real> out, Real keep = 0) {
  at::Tensor result = as_tensor(out, rows, columns);
  const at::Tensor a = as_tensor(left, rows, inner), b = as_tensor(right, inner, columns);
  if (keep == 0)
    at::mm_out(result, a, b);
  else
    result.addmm_(a, b, keep, 1);
}

// The tokens of one chunk of one row of the batch.
struct Span {
  std::int64_t row, chunk, begin, tokens;
};

template <class Real>
class CpuScan {
 public:
  explicit CpuScan(const ScanTensors& in)
      : s_(in.shape),
        values_(in.values.data_ptr<Real>()),
        keys_(in.keys.data_ptr<Real>()),
        queries_(in.queries.data_ptr<Real>()),
        steps_(in.steps.data_ptr<Real>()),
        decay_(in.decay.data_ptr<Real>()),
        skip_(in.skip.data_ptr<Real>()),
        starts_(in.starts.defined() ? in.starts.data_ptr<std::int32_t>() : nullptr),
        totals_(static_cast<std::size_t>(s_.batch * s_.chunks * s_.heads)) {}

  ScanOutputs forward(const at::Tensor& initial, const at::TensorOptions& options);
  ScanGradients backward(const ScanGradientInputs& from, const at::TensorOptions& options);
  void step(Real* state, Real* result) const;

 private:
  // Of one chunk, [tokens, heads]: the factor of a token, the product up to it, and the product after it.
  struct Decays {
    std::vector<Real> factor, until, after;
  };

  Span span_of(std::int64_t index) const {
    const std::int64_t chunk = index % s_.chunks, begin = chunk * s_.chunk;
    return {index / s_.chunks, chunk, begin, std::min(s_.chunk, s_.length - begin)};
  }
  std::int64_t token(const Span& span) const { return span.row * s_.length + span.begin; }
  bool begins_document(std::int64_t row, std::int64_t position) const {
    return starts_ != nullptr && starts_[row * s_.length + position] == position;
  }
  void fill_decays(const Span& span, Decays* decays) const;
  // out [tokens, inner] = values * steps, and times `scale` [tokens, heads] if it is not null.
  void fill_inputs(const Span& span, const Real* scale, Real* out) const;
  void scale_heads(const Real* in, const Real* scale, std::int64_t tokens, Real* out) const;

  // Matrices of group g of a chunk, [tokens, ...].
  Matrix<const Real> keys_of(const Span& span, std::int64_t g) const {
    return {grouped(keys_, span, g), row()};
  }
  Matrix<const Real> queries_of(const Span& span, std::int64_t g) const {
    return {grouped(queries_, span, g), row()};
  }
  std::int64_t row() const { return s_.groups * s_.state_size; }
  template <class T>
  T* grouped(T* keys, const Span& span, std::int64_t g) const {
    return keys + token(span) * row() + g * s_.state_size;
  }
  // The state of group g before a chunk: [state size, group width].
  template <class T>
  Matrix<T> state_of(T* states, const Span& span, std::int64_t g) const {
    return {states + ((span.row * s_.chunks + span.chunk) * s_.groups + g) * s_.state_size * s_.group_width(),
            s_.group_width()};
  }
  // Columns of group g of [tokens, inner].
  template <class T>
  Matrix<T> columns_of(T* rows, std::int64_t g) const {
    return {rows + g * s_.group_width(), s_.inner()};
  }

  void fill_gram(const Span& span, std::int64_t g, Real* gram) const;
  void weigh(const Real* gram, const Real* factor, std::int64_t tokens, Real* weights, Real* running) const;
  void weigh_backward(const Real* gram, const Real* factor, std::int64_t tokens, Real* products,
                      Real* to_gram, Real* row_sums, Real* own_weights, Real* running) const;
  void pass_states(Real* states, const Real* initial, Real* last) const;
  void pass_gradients(Real* states, const Real* last, Real* initial) const;
  void chunk_backward(const Span& span, const Real* gradient, const Real* states, const Real* state_gradients,
                      const ScanGradients& out, Real* to_decay, Real* to_skip);
  void finish_backward(const Span& span, const Decays& decays, const Real* gradient, const Real* read,
                       const Real* passed, const Real* row_sums, const Real* own_weights, const Real* ends,
                       const Real* inputs, const ScanGradients& out, Real* to_decay, Real* to_skip) const;

  const ScanShape s_;
  const Real* const values_;
  const Real* const keys_;
  const Real* const queries_;
  const Real* const steps_;
  const Real* const decay_;
  const Real* const skip_;
  const std::int32_t* const starts_;
  std::vector<Real> totals_;  // [batch, chunks, heads]: the product of all factors of a chunk
};

template <class Real>
std::vector<Real> room_for(std::int64_t elements) {
  return std::vector<Real>(static_cast<std::size_t>(elements));
}

template <class Real>
void CpuScan<Real>::fill_decays(const Span& span, Decays* decays) const {
  const std::int64_t heads = s_.heads, n = span.tokens;
  for (auto* part : {&decays->factor, &decays->until, &decays->after})
    part->resize(static_cast<std::size_t>(n * heads));
  Real* const factor = decays->factor.data();
  Real* const until = decays->until.data();
  Real* const after = decays->after.data();
  for (std::int64_t t = 0; t < n; ++t) {
    const bool begins = begins_document(span.row, span.begin + t);
    const Real* const steps = steps_ + (token(span) + t) * heads;
    for (std::int64_t h = 0; h < heads; ++h) {
      const Real own = begins ? Real(0) : std::exp(steps[h] * decay_[h]);
      factor[t * heads + h] = own;
      until[t * heads + h] = t == 0 ? own : own * until[(t - 1) * heads + h];
    }
  }
  std::fill_n(after + (n - 1) * heads, heads, Real(1));
  for (std::int64_t t = n - 1; t > 0; --t)
    for (std::int64_t h = 0; h < heads; ++h)
      after[(t - 1) * heads + h] = after[t * heads + h] * factor[t * heads + h];
}

template <class Real>
void CpuScan<Real>::fill_inputs(const Span& span, const Real* scale, Real* out) const {
  for (std::int64_t i = 0; i < span.tokens * s_.heads; ++i) {
    const Real by = steps_[token(span) * s_.heads + i] * (scale != nullptr ? scale[i] : Real(1));
    const Real* __restrict const from = values_ + (token(span) * s_.heads + i) * s_.head_width;
    Real* __restrict const to = out + i * s_.head_width;
    for (std::int64_t p = 0; p < s_.head_width; ++p) to[p] = from[p] * by;
  }
}

template <class Real>
void CpuScan<Real>::scale_heads(const Real* in, const Real* scale, std::int64_t tokens, Real* out) const {
  for (std::int64_t i = 0; i < tokens * s_.heads; ++i) {
    const Real by = scale[i];
    const Real* __restrict const from = in + i * s_.head_width;
    Real* __restrict const to = out + i * s_.head_width;
    for (std::int64_t p = 0; p < s_.head_width; ++p) to[p] = from[p] * by;
  }
}

// gram [tokens, tokens] = queries * keys^T, at and below the diagonal.
template <class Real>
void CpuScan<Real>::fill_gram(const Span& span, std::int64_t g, Real* gram) const {
  for (std::int64_t from = 0; from < span.tokens; from += kTile) {
    const std::int64_t rows = std::min(kTile, span.tokens - from);
    multiply<Real>(rows, from + rows, s_.state_size, from_row(queries_of(span, g), from),
                   turned(keys_of(span, g)), {gram + from * span.tokens, span.tokens});
  }
}

// weights[t, s] = gram[t, s] * decay from s to t; zero above the diagonal, as far as a tile reaches.
template <class Real>
void CpuScan<Real>::weigh(const Real* gram, const Real* factor, std::int64_t tokens, Real* weights,
                          Real* __restrict running) const {
  for (std::int64_t t = 0; t < tokens; ++t) {
    const Real by = factor[t * s_.heads];
    const Real* __restrict const in = gram + t * tokens;
    Real* __restrict const out = weights + t * tokens;
    for (std::int64_t i = 0; i < t; ++i) {
      const Real decay = running[i] * by;
      running[i] = decay;
      out[i] = decay * in[i];
    }
    running[t] = 1;
    out[t] = in[t];
    for (std::int64_t i = t + 1; i < std::min(tokens, (t / kTile + 1) * kTile); ++i) out[i] = 0;
  }
}

// `products` [tokens, tokens], gradient of token t times input s, becomes the weights. Adds decay * products
// to to_gram; row_sums[t] (stride: heads) = sum over s of weights * products. The weight of a token's own
// input is not decayed: it is in own_weights (like row_sums) instead, so that a difference of sums over rows
// and columns is not the rounding of its largest terms.
template <class Real>
void CpuScan<Real>::weigh_backward(const Real* gram, const Real* factor, std::int64_t tokens, Real* products,
                                   Real* to_gram, Real* row_sums, Real* own_weights,
                                   Real* __restrict running) const {
  for (std::int64_t t = 0; t < tokens; ++t) {
    const Real by = factor[t * s_.heads];
    const Real* __restrict const in = gram + t * tokens;
    Real* __restrict const inout = products + t * tokens;
    Real* __restrict const sums = to_gram + t * tokens;
    Real total = 0;
    for (std::int64_t i = 0; i < t; ++i) {
      const Real decay = running[i] * by;
      const Real product = inout[i], weight = decay * in[i];
      running[i] = decay;
      sums[i] += decay * product;
      total += weight * product;
      inout[i] = weight;
    }
    running[t] = 1;
    sums[t] += inout[t];
    row_sums[t * s_.heads] = total;
    own_weights[t * s_.heads] = in[t];
    for (std::int64_t i = t; i < std::min(tokens, (t / kTile + 1) * kTile); ++i) inout[i] = 0;
  }
}

// In: what each chunk adds to the state. Out: the state before each chunk.
template <class Real>
void CpuScan<Real>::pass_states(Real* states, const Real* initial, Real* last) const {
  const std::int64_t width = s_.group_width(), rows = s_.groups * s_.state_size;
  at::parallel_for(0, s_.batch * rows, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Real* __restrict const running = last + i * width;
      if (initial != nullptr)
        std::copy_n(initial + i * width, width, running);
      else
        std::fill_n(running, width, Real(0));
      const std::int64_t b = i / rows, g = i % rows / s_.state_size;
      for (std::int64_t c = 0; c < s_.chunks; ++c) {
        Real* __restrict const state = states + ((b * s_.chunks + c) * rows + i % rows) * width;
        const Real* const totals = totals_.data() + (b * s_.chunks + c) * s_.heads + g * s_.group_heads();
        for (std::int64_t h = 0; h < s_.group_heads(); ++h)
          for (std::int64_t p = h * s_.head_width; p < (h + 1) * s_.head_width; ++p) {
            const Real before = running[p];
            running[p] = before * totals[h] + state[p];
            state[p] = before;
          }
      }
    }
  });
}

// The same backward. In: the gradients of the state before each chunk that arise within the chunk. Out: the
// gradients of the state after each chunk.
template <class Real>
void CpuScan<Real>::pass_gradients(Real* states, const Real* last, Real* initial) const {
  const std::int64_t width = s_.group_width(), rows = s_.groups * s_.state_size;
  at::parallel_for(0, s_.batch * rows, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Real* __restrict const running = initial + i * width;
      if (last != nullptr)
        std::copy_n(last + i * width, width, running);
      else
        std::fill_n(running, width, Real(0));
      const std::int64_t b = i / rows, g = i % rows / s_.state_size;
      for (std::int64_t c = s_.chunks - 1; c >= 0; --c) {
        Real* __restrict const state = states + ((b * s_.chunks + c) * rows + i % rows) * width;
        const Real* const totals = totals_.data() + (b * s_.chunks + c) * s_.heads + g * s_.group_heads();
        for (std::int64_t h = 0; h < s_.group_heads(); ++h)
          for (std::int64_t p = h * s_.head_width; p < (h + 1) * s_.head_width; ++p) {
            const Real after = running[p];
            running[p] = after * totals[h] + state[p];
            state[p] = after;
          }
      }
    }
  });
}

template <class Real>
ScanOutputs CpuScan<Real>::forward(const at::Tensor& initial, const at::TensorOptions& options) {
  const ScanShape& s = s_;
  ScanOutputs out{.values = at::empty({s.batch, s.length, s.heads, s.head_width}, options),
                  .states = at::empty({s.batch, s.chunks, s.groups, s.state_size, s.group_width()}, options),
                  .last = at::empty({s.batch, s.groups, s.state_size, s.group_width()}, options)};
  Real* const states = out.states.data_ptr<Real>();
  Real* const results = out.values.data_ptr<Real>();
  at::parallel_for(0, s.batch * s.chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    Decays decays;
    std::vector<Real> inputs = room_for<Real>(s.chunk * s.inner());
    for (std::int64_t i = begin; i < end; ++i) {
      const Span span = span_of(i);
      fill_decays(span, &decays);
      std::copy_n(decays.until.data() + (span.tokens - 1) * s.heads, s.heads, totals_.data() + i * s.heads);
      fill_inputs(span, decays.after.data(), inputs.data());
      for (std::int64_t g = 0; g < s.groups; ++g)
        multiply<Real>(s.state_size, s.group_width(), span.tokens, turned(keys_of(span, g)),
                       columns_of<const Real>(inputs.data(), g), state_of(states, span, g));
    }
  });
  pass_states(states, initial.defined() ? initial.data_ptr<Real>() : nullptr, out.last.data_ptr<Real>());
  at::parallel_for(0, s.batch * s.chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    Decays decays;
    std::vector<Real> inputs = room_for<Real>(s.chunk * s.inner()), gram = room_for<Real>(s.chunk * s.chunk),
                      weights = gram, running = room_for<Real>(s.chunk);
    for (std::int64_t i = begin; i < end; ++i) {
      const Span span = span_of(i);
      const std::int64_t n = span.tokens;
      fill_decays(span, &decays);
      fill_inputs(span, nullptr, inputs.data());
      Real* const result = results + token(span) * s.inner();
      for (std::int64_t g = 0; g < s.groups; ++g)
        multiply<Real>(n, s.group_width(), s.state_size, queries_of(span, g),
                       state_of<const Real>(states, span, g), columns_of(result, g));
      for (std::int64_t k = 0; k < n * s.heads; ++k) {
        const Real by = decays.until[static_cast<std::size_t>(k)], skip = skip_[k % s.heads];
        const Real* __restrict const value = values_ + (token(span) * s.heads + k) * s.head_width;
        Real* __restrict const to = result + k * s.head_width;
        for (std::int64_t p = 0; p < s.head_width; ++p) to[p] = to[p] * by + value[p] * skip;
      }
      for (std::int64_t h = 0; h < s.heads; ++h) {
        if (h % s.group_heads() == 0) fill_gram(span, h / s.group_heads(), gram.data());
        weigh(gram.data(), decays.factor.data() + h, n, weights.data(), running.data());
        for (std::int64_t from = 0; from < n; from += kTile) {
          const std::int64_t rows = std::min(kTile, n - from);
          multiply<Real>(rows, s.head_width, from + rows, {weights.data() + from * n, n},
                         {inputs.data() + h * s.head_width, s.inner()},
                         {result + from * s.inner() + h * s.head_width, s.inner()}, Real(1));
        }
      }
    }
  });
  return out;
}

template <class Real>
ScanGradients CpuScan<Real>::backward(const ScanGradientInputs& from, const at::TensorOptions& options) {
  const ScanShape& s = s_;
  const ScanGradients out{.values = at::empty({s.batch, s.length, s.heads, s.head_width}, options),
                          .steps = at::empty({s.batch, s.length, s.heads}, options),
                          .decay = {},
                          .keys = at::empty({s.batch, s.length, s.groups, s.state_size}, options),
                          .queries = at::empty({s.batch, s.length, s.groups, s.state_size}, options),
                          .skip = {},
                          .initial = at::empty({s.batch, s.groups, s.state_size, s.group_width()}, options)};
  const at::Tensor state_gradients = at::empty_like(from.states),
                   to_decay = at::empty({s.batch * s.chunks, s.heads}, options),
                   to_skip = at::empty_like(to_decay);
  const Real* const gradient = from.values.data_ptr<Real>();
  Real* const to_states = state_gradients.data_ptr<Real>();
  at::parallel_for(0, s.batch * s.chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    Decays decays;
    std::vector<Real> scaled = room_for<Real>(s.chunk * s.inner());
    for (std::int64_t i = begin; i < end; ++i) {
      const Span span = span_of(i);
      fill_decays(span, &decays);
      std::copy_n(decays.until.data() + (span.tokens - 1) * s.heads, s.heads, totals_.data() + i * s.heads);
      scale_heads(gradient + token(span) * s.inner(), decays.until.data(), span.tokens, scaled.data());
      for (std::int64_t g = 0; g < s.groups; ++g)
        multiply<Real>(s.state_size, s.group_width(), span.tokens, turned(queries_of(span, g)),
                       columns_of<const Real>(scaled.data(), g), state_of(to_states, span, g));
    }
  });
  pass_gradients(to_states, from.last.defined() ? from.last.data_ptr<Real>() : nullptr,
                 out.initial.data_ptr<Real>());
  at::parallel_for(0, s.batch * s.chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      chunk_backward(span_of(i), gradient, from.states.data_ptr<Real>(), to_states, out,
                     to_decay.data_ptr<Real>() + i * s.heads, to_skip.data_ptr<Real>() + i * s.heads);
  });
  ScanGradients all = out;
  all.decay = to_decay.sum(0);
  all.skip = to_skip.sum(0);
  return all;
}

template <class Real>
void CpuScan<Real>::chunk_backward(const Span& span, const Real* gradients, const Real* states,
                                   const Real* state_gradients, const ScanGradients& out, Real* to_decay,
                                   Real* to_skip) {
  const ScanShape& s = s_;
  const std::int64_t n = span.tokens, inner = s.inner(), width = s.group_width();
  const Real* const gradient = gradients + token(span) * inner;
  Decays decays;
  fill_decays(span, &decays);
  std::vector<Real> inputs = room_for<Real>(n * inner), scaled = room_for<Real>(n * inner),
                    read = room_for<Real>(n * inner), passed = room_for<Real>(n * inner),
                    gram = room_for<Real>(n * n), products = room_for<Real>(n * n),
                    to_gram = room_for<Real>(n * n), running = room_for<Real>(n),
                    row_sums = room_for<Real>(n * s.heads), own_weights = room_for<Real>(n * s.heads),
                    ends = room_for<Real>(s.heads);
  // Through the states: y = until * queries * state, state' = sum of after * inputs * keys + ...
  for (std::int64_t g = 0; g < s.groups; ++g) {
    const Matrix<const Real> before = state_of(states, span, g), after = state_of(state_gradients, span, g);
    const Matrix<Real> to_keys{grouped(out.keys.data_ptr<Real>(), span, g), row()},
        to_queries{grouped(out.queries.data_ptr<Real>(), span, g), row()};
    multiply<Real>(n, width, s.state_size, queries_of(span, g), before, columns_of(read.data(), g));
    multiply<Real>(n, width, s.state_size, keys_of(span, g), after, columns_of(passed.data(), g));
    if (g == 0) scale_heads(gradient, decays.until.data(), n, scaled.data());
    multiply<Real>(n, s.state_size, width, columns_of<const Real>(scaled.data(), g), turned(before),
                   to_queries);
    if (g == 0) fill_inputs(span, decays.after.data(), inputs.data());
    multiply<Real>(n, s.state_size, width, columns_of<const Real>(inputs.data(), g), turned(after), to_keys);
    // The state that passes through the chunk, times its gradient: every decay has a share in it.
    for (std::int64_t h = 0; h < s.group_heads(); ++h) {
      Real total = 0;
      for (std::int64_t k = 0; k < s.state_size; ++k) {
        const Real* const a = before.data + k * width + h * s.head_width;
        const Real* const b = after.data + k * width + h * s.head_width;
        Real sum = 0;
        for (std::int64_t p = 0; p < s.head_width; ++p) sum += a[p] * b[p];
        total += sum;
      }
      const std::int64_t head = g * s.group_heads() + h;
      ends[static_cast<std::size_t>(head)] =
          total * decays.until[static_cast<std::size_t>((n - 1) * s.heads + head)];
    }
  }
  // Within the chunk. `scaled` becomes the gradient of the inputs.
  fill_inputs(span, nullptr, inputs.data());
  for (std::int64_t h = 0; h < s.heads; ++h) {
    const std::int64_t g = h / s.group_heads();
    if (h % s.group_heads() == 0) {
      fill_gram(span, g, gram.data());
      std::fill(to_gram.begin(), to_gram.end(), Real(0));
    }
    const Matrix<const Real> of_head{gradient + h * s.head_width, inner},
        input{inputs.data() + h * s.head_width, inner};
    const Matrix<Real> to_input{scaled.data() + h * s.head_width, inner};
    const auto tiles = [&](const auto& work) {  // the last one first, because it reaches all columns
      for (std::int64_t from = (n - 1) / kTile * kTile; from >= 0; from -= kTile)
        work(from, std::min(kTile, n - from));
    };
    tiles([&](std::int64_t from, std::int64_t rows) {
      multiply<Real>(rows, from + rows, s.head_width, from_row(of_head, from), turned(input),
                     {products.data() + from * n, n});
    });
    weigh_backward(gram.data(), decays.factor.data() + h, n, products.data(), to_gram.data(),
                   row_sums.data() + h, own_weights.data() + h, running.data());
    tiles([&](std::int64_t from, std::int64_t rows) {
      multiply<Real>(from + rows, s.head_width, rows, {products.data() + from * n, n, true},
                     from_row(of_head, from), to_input, from + rows == n ? Real(0) : Real(1));
    });
    if ((h + 1) % s.group_heads() == 0) {
      const Matrix<const Real> mixed{to_gram.data(), n};
      multiply<Real>(n, s.state_size, n, mixed, keys_of(span, g),
                     {grouped(out.queries.data_ptr<Real>(), span, g), row()}, Real(1));
      multiply<Real>(n, s.state_size, n, turned(mixed), queries_of(span, g),
                     {grouped(out.keys.data_ptr<Real>(), span, g), row()}, Real(1));
    }
  }
  finish_backward(span, decays, gradient, read.data(), passed.data(), row_sums.data(), own_weights.data(),
                  ends.data(), scaled.data(), out, to_decay, to_skip);
}

// Joins the paths. `to_inputs` [tokens, inner]: the gradient of values * steps that later tokens of the chunk
// give; its own output is added here. A decay acts
// on the pairs of tokens around it (rows minus columns, summed from the end), on the inputs before it that
// reach the next chunk (summed from the beginning), and on the state that passes through the chunk (`ends`).
template <class Real>
void CpuScan<Real>::finish_backward(const Span& span, const Decays& decays, const Real* gradient,
                                    const Real* read, const Real* passed, const Real* row_sums,
                                    const Real* own_weights, const Real* ends, const Real* to_inputs,
                                    const ScanGradients& out, Real* to_decay, Real* to_skip) const {
  const ScanShape& s = s_;
  const std::int64_t n = span.tokens, heads = s.heads, width = s.head_width;
  std::vector<Real> pairs = room_for<Real>(heads), reaching = room_for<Real>(n * heads);
  std::fill_n(to_decay, heads, Real(0));
  std::fill_n(to_skip, heads, Real(0));
  Real* const to_values = out.values.data_ptr<Real>() + token(span) * s.inner();
  Real* const to_steps = out.steps.data_ptr<Real>() + token(span) * heads;
  for (std::int64_t t = n - 1; t >= 0; --t) {
    const bool begins = begins_document(span.row, span.begin + t);
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t i = t * heads + h;
      const Real step = steps_[token(span) * heads + i], skip = skip_[h],
                 after = decays.after[static_cast<std::size_t>(i)], own = own_weights[i];
      const Real* __restrict const value = values_ + token(span) * s.inner() + i * width;
      const Real* __restrict const given = gradient + i * width;
      const Real* __restrict const inside = to_inputs + i * width;
      const Real* __restrict const from_state = passed + i * width;
      const Real* __restrict const of_state = read + i * width;
      Real* __restrict const to_value = to_values + i * width;
      Real inside_sum = 0, passed_sum = 0, read_sum = 0, skip_sum = 0;  // inside_sum: of later tokens
      for (std::int64_t p = 0; p < width; ++p) {
        const Real later = after * from_state[p];
        inside_sum += value[p] * inside[p];
        passed_sum += value[p] * later;
        read_sum += given[p] * of_state[p];
        skip_sum += given[p] * value[p];
        to_value[p] = step * (inside[p] + own * given[p] + later) + skip * given[p];
      }
      Real& sum = pairs[static_cast<std::size_t>(h)];
      sum += row_sums[i] + decays.until[static_cast<std::size_t>(i)] * read_sum - step * inside_sum;
      if (begins) sum = 0;  // no pair reaches across, whatever the rounding
      reaching[static_cast<std::size_t>(i)] = step * passed_sum;
      to_steps[i] = decay_[h] * sum + (inside_sum + own * skip_sum + passed_sum);
      to_decay[h] += step * sum;
      to_skip[h] += skip_sum;
    }
  }
  // Where a document begins in the chunk, the inputs before it do not reach the next one: their sums are
  // zero.
  std::copy_n(ends, heads, pairs.data());
  for (std::int64_t t = 0; t < n; ++t)
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t i = t * heads + h;
      Real& sum = pairs[static_cast<std::size_t>(h)];
      to_steps[i] += decay_[h] * sum;
      to_decay[h] += steps_[token(span) * heads + i] * sum;
      sum += reaching[static_cast<std::size_t>(i)];
    }
}

template <class Real>
void CpuScan<Real>::step(Real* states, Real* results) const {
  const ScanShape& s = s_;
  at::parallel_for(0, s.batch * s.heads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      for (std::int64_t t = 0; t < s.length; ++t) {
        const std::int64_t b = i / s.heads, h = i % s.heads, at = (b * s.length + t) * s.heads + h;
        const std::int64_t group = ((b * s.length + t) * s.groups + h / s.group_heads()) * s.state_size;
        const Real* __restrict const key = keys_ + group;
        const Real* __restrict const query = queries_ + group;
        const Real step = steps_[at], factor = std::exp(step * decay_[h]), skip = skip_[h];
        for (std::int64_t p = 0; p < s.head_width; ++p) {
          const Real value = values_[at * s.head_width + p], input = step * value;
          Real* __restrict const state = states + (i * s.head_width + p) * s.state_size;
          Real sum = 0;
          for (std::int64_t k = 0; k < s.state_size; ++k) {
            const Real now = state[k] * factor + input * key[k];
            state[k] = now;
            sum += now * query[k];
          }
          results[at * s.head_width + p] = sum + skip * value;
        }
      }
  });
}

template <class Work>
auto in_real(const ScanTensors& in, const Work& work) {
  return in.values.scalar_type() == at::kDouble ? work(CpuScan<double>(in)) : work(CpuScan<float>(in));
}

}  // namespace

ScanOutputs scan_on_cpu(const ScanTensors& in) {
  return in_real(in, [&](auto scan) { return scan.forward(in.initial, in.values.options()); });
}

ScanGradients scan_backward_on_cpu(const ScanTensors& in, const ScanGradientInputs& from) {
  return in_real(in, [&](auto scan) { return scan.backward(from, in.values.options()); });
}

void scan_step_on_cpu(const ScanTensors& in, const at::Tensor& state, const at::Tensor& result) {
  if (in.values.scalar_type() == at::kDouble)
    CpuScan<double>(in).step(state.data_ptr<double>(), result.data_ptr<double>());
  else
    CpuScan<float>(in).step(state.data_ptr<float>(), result.data_ptr<float>());
}

}  // namespace penstock::detail
