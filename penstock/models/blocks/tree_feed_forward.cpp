#include "penstock/models/blocks/tree_feed_forward.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/mode.h"
#include "penstock/models/blocks/input_check.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/module_scope.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/kernels/fused_math.h"

namespace penstock::models {
namespace {

// Throws for a parent below -1 or not before its token, where values can be read without waiting. `places`:
// of the tokens, [length].
void check_parents(const at::Tensor& parents, const at::Tensor& places) {
  if (!parents.device().is_cpu() || is_wrapper(parents) || is_wrapper(places)) return;
  const NoModesGuard real;
  const at::Tensor wrong = parents.ge(places).logical_or(parents.lt(-1));
  if (!wrong.any().item<bool>()) return;
  const at::Tensor first = wrong.nonzero()[0];
  const auto row = first[0].item<std::int64_t>(), column = first[1].item<std::int64_t>();
  throw ValueError(
      describe("TreeFeedForward: parents",
               fmt::format("{} for token {} of row {}", parents[row][column].item<std::int64_t>(),
                           places[column].item<std::int64_t>(), row),
               "a place before the token, or -1 for no parent"));
}

// For each token its parent's place, and whether it has one.
struct Parents {
  at::Tensor places, present;  // Long and Bool [batch, length]
};

Parents usable_parents(const TreeContext& context, std::int64_t before, std::int64_t length) {
  const at::Tensor parents = own_rows(context.parents), documents = own_rows(context.documents);
  const at::Tensor tokens = at::arange(before, before + length, parents.options().dtype(at::kLong));
  check_parents(parents, tokens);
  Parents usable;
  usable.present = parents.ge(0).logical_and(parents.lt(tokens));
  usable.places = parents.to(at::kLong).masked_fill(usable.present.logical_not(), 0);
  if (documents.defined()) {
    const at::Tensor owner = documents.gather(1, usable.places);
    usable.present = usable.present.logical_and(owner.eq(documents.narrow(1, before, length)));
  }
  return usable;
}

// Rows [batch, n, width] at places [batch, length]. A lookup, whose backward sums the gradients of several
// children of a parent in a fixed order on every device.
at::Tensor rows_at(const at::Tensor& rows, const at::Tensor& places) {
  const std::int64_t batch = rows.size(0), count = rows.size(1);
  const at::Tensor first_of_row = at::arange(batch, places.options()).mul(count).unsqueeze(1);
  return at::embedding(rows.reshape({batch * count, rows.size(2)}), places.add(first_of_row));
}

}  // namespace

TreeFeedForwardImpl::TreeFeedForwardImpl(const TreeFeedOptions& options) : options_(options) {
  options_.check();
  reset();
}

void TreeFeedForwardImpl::reset() {
  const auto linear = [](std::int64_t in, std::int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  };
  mix = register_parameter("mix", at::zeros({options_.width}));
  gate = register_module("gate", linear(options_.width, options_.feed_width));
  up = register_module("up", linear(options_.width, options_.feed_width));
  down = register_module("down", linear(options_.feed_width, options_.width));
}

void TreeFeedForwardImpl::initialize(const std::string& name, const BlockInit& init) {
  fill_normal(gate->weight, name + ".gate.weight", init.seed, init.deviation);
  fill_normal(up->weight, name + ".up.weight", init.seed, init.deviation);
  fill_normal(down->weight, name + ".down.weight", init.seed, init.residual);
  const c10::AutoGradMode no_grad(false);
  mix.fill_(0);
}

at::Tensor TreeFeedForwardImpl::with_parents(const at::Tensor& own, const at::Tensor& own_mix,
                                             const TreeContext& context) const {
  const at::Tensor earlier = own_rows(context.earlier);
  const std::int64_t batch = own.size(0), length = own.size(1);
  if (earlier.defined() && (earlier.dim() != 3 || earlier.size(0) != batch ||
                            earlier.size(2) != options_.width || earlier.scalar_type() != own.scalar_type()))
    throw ValueError(describe("TreeFeedForward: earlier", shown(earlier),
                              fmt::format("inputs [{}, h, {}] of the dtype of x", batch, options_.width)));
  const std::int64_t before = earlier.defined() ? earlier.size(1) : 0;
  check_ids("TreeFeedForward: parents", own_rows(context.parents), {batch, length}, "places of parents");
  if (context.documents.defined())
    check_ids("TreeFeedForward: documents", own_rows(context.documents), {batch, before + length},
              "one for each token");
  const Parents parents = usable_parents(context, before, length);
  const at::Tensor all = before > 0 ? at::cat({earlier, own}, 1) : own;
  // Rounded once: products and sums in float32 for 16 bits.
  const at::ScalarType wide = wide_dtype(own.scalar_type());
  const at::Tensor share = own_mix.to(wide).mul(parents.present.unsqueeze(-1));
  return at::addcmul(own.to(wide), rows_at(all, parents.places).to(wide), share).to(own.scalar_type());
}

at::Tensor TreeFeedForwardImpl::forward(const at::Tensor& x, const TreeContext& context) {
  const ModuleScope running(*this);
  check_hidden("TreeFeedForward: input", x, options_.width);
  const bool mixes = context.parents.defined();
  // A parent may be anywhere before its token: rows are whole. Every rank mixes all of them for its columns.
  const LocalRegion region(x, gate->weight, mixes ? Rows::Batch : Rows::BatchAndLength);
  const at::Tensor own = region.enter(x);
  const at::Tensor in = cast_once(mixes ? with_parents(own, region.shared_weight(mix), context) : own);
  const at::Tensor gated =
      silu_product(at::linear(in, region.weight(gate->weight)), at::linear(in, region.weight(up->weight)));
  return region.leave_sum(at::linear(gated, region.weight(down->weight)));
}

}  // namespace penstock::models
