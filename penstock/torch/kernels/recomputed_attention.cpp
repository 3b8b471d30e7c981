#include "penstock/torch/kernels/recomputed_attention.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "penstock/torch/compat/version.h"
#include "penstock/torch/kernels/window_attention.h"

namespace penstock {

at::ScalarType dtype_of_products(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The tensors of one call. q has 5 dims, k and v have 4 (see the header).
struct Piece {
  at::Tensor q, k, v, added;  // `added` may be undefined
  std::optional<MaskPart> part;

  std::int64_t rows() const { return q.size(2) * q.size(3); }
  double scale() const { return 1 / std::sqrt(static_cast<double>(q.size(4))); }
  at::Tensor allowed() const {
    // [batch or 1, 1, 1, queries, keys]
    return part->mask.allowed_within(part->range, part->window, q).unsqueeze(2);
  }
};

// ---- by products ----

// [n * groups, rows, width]
at::Tensor as_matrices(const at::Tensor& x) {
  return x.to(dtype_of_products(x.scalar_type())).reshape({x.size(0) * x.size(1), -1, x.size(-1)});
}

// Softmax of the scores, [n * groups, rows, keys].
at::Tensor probabilities(const Piece& piece, const at::Tensor& q, const at::Tensor& k) {
  const at::Tensor scores = at::bmm(q.mul(piece.scale()), k.transpose(1, 2));
  at::Tensor by_query =
      scores.view({piece.q.size(0), piece.q.size(1), piece.q.size(2), piece.q.size(3), k.size(1)});
  if (piece.added.defined()) by_query.add_(piece.added.to(scores.scalar_type()));
  if (piece.part)
    by_query.masked_fill_(piece.allowed().logical_not(), -std::numeric_limits<double>::infinity());
  return at::softmax(scores, -1);
}

at::Tensor forward_by_products(const Piece& piece) {
  const at::Tensor weights = probabilities(piece, as_matrices(piece.q), as_matrices(piece.k));
  return at::bmm(weights, as_matrices(piece.v)).to(piece.q.scalar_type());
}

struct PieceGradients {
  at::Tensor q, k, v, added;
};

PieceGradients backward_by_products(const Piece& piece, const at::Tensor& gradient, bool added_wanted) {
  const at::Tensor q = as_matrices(piece.q), k = as_matrices(piece.k), v = as_matrices(piece.v),
                   out = as_matrices(gradient);
  const at::Tensor weights = probabilities(piece, q, k);
  const at::Tensor scores =
      at::_softmax_backward_data(at::bmm(out, v.transpose(1, 2)), weights, -1, weights.scalar_type());
  PieceGradients result;
  const auto shaped = [](const at::Tensor& x, const at::Tensor& like) {
    return x.view(like.sizes()).to(like.scalar_type());
  };
  result.v = shaped(at::bmm(weights.transpose(1, 2), out), piece.v);
  result.q = shaped(at::bmm(scores, k).mul_(piece.scale()), piece.q);
  result.k = shaped(at::bmm(scores.transpose(1, 2), q).mul_(piece.scale()), piece.k);
  if (added_wanted)
    result.added =
        at::sum_to(scores.view({piece.q.size(0), piece.q.size(1), piece.q.size(2), piece.q.size(3), -1}),
                   piece.added.sizes())
            .to(piece.added.scalar_type());
  return result;
}

// ---- by the memory-efficient kernel ----

#if PENSTOCK_TORCH_AT_LEAST(2, 5)
bool has_efficient_kernel(const at::Tensor& q) {
  return q.is_cuda() && q.scalar_type() != at::kDouble && q.size(4) % 8 == 0 &&
         detail::device_has_fused_attention(q);
}

at::Tensor stacked(const at::Tensor& q) {
  return q.reshape({q.size(0), q.size(1), q.size(2) * q.size(3), q.size(4)});
}

// All that is added to the scores: [n, groups, rows, keys]. The kernel reads rows that start at multiples of
// sixteen elements.
at::Tensor whole_bias(const Piece& piece) {
  constexpr std::int64_t kAlignment = 16;
  const std::int64_t keys = piece.k.size(2), padded = (keys + kAlignment - 1) / kAlignment * kAlignment;
  const at::Tensor& q = piece.q;
  at::Tensor bias = q.new_zeros({q.size(0), piece.added.defined() && piece.added.size(1) > 1 ? q.size(1) : 1,
                                 q.size(2), q.size(3), padded});
  const at::Tensor used = bias.narrow(4, 0, keys);
  if (piece.added.defined()) used.add_(piece.added);
  if (piece.part) used.masked_fill_(piece.allowed().logical_not(), -std::numeric_limits<double>::infinity());
  return bias.view({q.size(0), bias.size(1), piece.rows(), padded})
      .narrow(3, 0, keys)
      .expand({q.size(0), q.size(1), piece.rows(), keys});
}

PieceGradients backward_by_kernel(const Piece& piece, const at::Tensor& gradient, const variable_list& kept,
                                  bool added_wanted) {
  const at::Tensor bias = whole_bias(piece);
  const auto [q, k, v, scores] = at::_scaled_dot_product_efficient_attention_backward(
      stacked(gradient), stacked(piece.q), piece.k, piece.v, bias, kept[0], kept[1], kept[2], kept[3], 0.0,
      {true, true, true, added_wanted}, false);
  PieceGradients result{q.reshape(piece.q.sizes()), k, v, {}};
  if (added_wanted)
    result.added =
        at::sum_to(scores.reshape({piece.q.size(0), piece.q.size(1), piece.q.size(2), piece.q.size(3), -1}),
                   piece.added.sizes())
            .to(piece.added.scalar_type());
  return result;
}
#endif

// ---- derivative ----

// A tensor that may be undefined, as saved data.
void keep(AutogradContext* context, const char* name, const at::Tensor& tensor) {
  if (tensor.defined()) context->saved_data[name] = tensor;
}
at::Tensor kept_or_undefined(AutogradContext* context, const char* name) {
  const auto found = context->saved_data.find(name);
  return found == context->saved_data.end() ? at::Tensor() : found->second.toTensor();
}

void keep_part(AutogradContext* context, const MaskPart& part) {
  const MaskRange& range = part.range;
  context->saved_data["part"] =
      c10::List<std::int64_t>({part.mask.queries(), part.mask.keys(), range.first_query, range.queries,
                               range.first_key, range.keys, part.window});
  keep(context, "documents", part.mask.documents());
  keep(context, "valid", part.mask.valid());
  keep(context, "positions", part.mask.positions());
}

std::optional<MaskPart> kept_part(AutogradContext* context) {
  const auto found = context->saved_data.find("part");
  if (found == context->saved_data.end()) return std::nullopt;
  const std::vector<std::int64_t> numbers = found->second.toIntVector();
  AttentionMask mask = AttentionMask::causal(numbers[0], numbers[1]);
  const at::Tensor documents = kept_or_undefined(context, "documents"),
                   valid = kept_or_undefined(context, "valid"),
                   positions = kept_or_undefined(context, "positions");
  if (documents.defined()) mask = mask.with_documents(documents);
  if (valid.defined()) mask = mask.with_valid(valid);
  if (positions.defined()) mask = mask.with_positions(positions);
  return MaskPart{mask, {numbers[2], numbers[3], numbers[4], numbers[5]}, numbers[6]};
}

// The result has its elements in the order of q, in the shape that the kernel gave it: autograd's functions
// must not return views.
struct RecomputedAttention : torch::autograd::Function<RecomputedAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const c10::optional<at::Tensor>& added,
                            const std::optional<MaskPart>& part) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const Piece piece{q, k, v, added ? *added : at::Tensor(), part};
    if (part) keep_part(context, *part);
    variable_list saved{q, k, v, piece.added};
    at::Tensor result;
#if PENSTOCK_TORCH_AT_LEAST(2, 5)
    if (has_efficient_kernel(q)) {
      const auto [out, sums, seed, offset] =
          at::_scaled_dot_product_efficient_attention(stacked(q), k, v, whole_bias(piece), true);
      for (const at::Tensor& tensor : {out, sums, seed, offset}) saved.push_back(tensor);
      result = out;
    }
#endif
    if (!result.defined()) result = forward_by_products(piece);
    context->save_for_backward(std::move(saved));
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor gradient = gradients[0].reshape(saved[0].sizes());
    const Piece piece{saved[0], saved[1], saved[2], saved[3], kept_part(context)};
    const bool added_wanted = piece.added.defined() && piece.added.requires_grad();
    PieceGradients result;
#if PENSTOCK_TORCH_AT_LEAST(2, 5)
    // The kernel's gradients have no derivative; those of products do.
    if (saved.size() > 4 && !c10::GradMode::is_enabled())
      result =
          backward_by_kernel(piece, gradient, variable_list(saved.begin() + 4, saved.end()), added_wanted);
#endif
    if (!result.q.defined()) result = backward_by_products(piece, gradient, added_wanted);
    return {result.q, result.k, result.v, result.added, at::Tensor()};
  }
};

}  // namespace

at::Tensor attend_recomputed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const c10::optional<at::Tensor>& added, const std::optional<MaskPart>& part) {
  return RecomputedAttention::apply(q, k, v, added, part).reshape(q.sizes());
}

}  // namespace penstock
