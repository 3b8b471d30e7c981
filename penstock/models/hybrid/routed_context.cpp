#include "penstock/models/hybrid/routed_context.h"

#include <ATen/ATen.h>

namespace penstock::models {
namespace {

// The rows and columns of the chosen tokens: [batch or 1, heads or 1, length, length] -> [batch, ..., k, k].
at::Tensor chosen_pairs(const at::Tensor& bias, const ChosenTokens& chosen) {
  const at::Tensor& positions = chosen.positions();
  const std::int64_t batch = positions.size(0), heads = bias.size(1), k = positions.size(1);
  const at::Tensor whole = bias.expand({batch, heads, bias.size(2), bias.size(3)});
  const at::Tensor rows = positions.view({batch, 1, k, 1}).expand({batch, heads, k, bias.size(3)}),
                   columns = positions.view({batch, 1, 1, k}).expand({batch, heads, k, k});
  return whole.gather(2, rows).gather(3, columns);
}

AttentionMask chosen_mask(const AttentionMask& whole, const ChosenTokens& chosen, std::int64_t window) {
  const at::Tensor& positions = chosen.positions();
  AttentionMask mask = AttentionMask::causal(positions.size(1), positions.size(1));
  if (whole.documents().defined()) mask = mask.with_documents(chosen.of_tokens(whole.documents()));
  // Padding is at the end of a row, hence also at the end of its chosen tokens.
  if (whole.valid().defined()) mask = mask.with_valid(positions.lt(whole.valid().unsqueeze(1)).sum(1));
  if (whole.added().defined()) mask = mask.with_bias(chosen_pairs(whole.added(), chosen));
  return window > 0 ? mask.with_positions(positions) : mask;
}

// Parents among the chosen tokens. One that comes after its token, because it is not active, counts as none.
at::Tensor chosen_parents(const at::Tensor& parents, const ChosenTokens& chosen) {
  if (!parents.defined()) return parents;
  const at::Tensor places = chosen.of_references(parents.to(at::kLong));
  const at::Tensor own = at::arange(places.size(1), places.options());
  return places.masked_fill(places.ge(own), -1);
}

}  // namespace

HybridContext routed_context(const HybridContext& whole, const ChosenTokens& chosen, std::int64_t window) {
  HybridContext own = whole;
  own.documents = chosen.of_tokens(whole.documents);
  own.parents = chosen_parents(whole.parents, chosen);
  own.valid = chosen.of_tokens(whole.valid);
  if (chosen.active().defined()) {
    // The active ones come first. A cache, which only they change, is that of a state space. The others take
    // no place of a limited expert.
    own.counted = chosen.active().sum(1);
    own.valid = own.valid.defined() ? own.valid.logical_and(chosen.active()) : chosen.active();
    return own;
  }
  own.attention.mask = chosen_mask(whole.attention.mask, chosen, window);
  if (whole.attention.turns.defined()) own.attention.turns = chosen.of_positions(whole.attention.turns);
  return own;
}

HybridContext hiding_context(const HybridContext& whole, const ChosenTokens& chosen, std::int64_t block) {
  HybridContext own = whole;
  const AttentionMask& mask = whole.attention.mask;
  at::Tensor active = at::zeros_like(chosen.active()).scatter(1, chosen.positions(), chosen.active());
  if (whole.parents.defined()) {
    const at::Tensor seen = active.gather(1, whole.parents.to(at::kLong).clamp_min(0));
    own.parents = whole.parents.masked_fill(seen.logical_not(), -1);
  }
  if (whole.depths != nullptr) active = whole.depths->put(block, mask.keys() - mask.queries(), active);
  at::Tensor hidden = active.logical_not().to(at::kInt);
  // Twice its number for an active token of a document, one more for the others.
  if (mask.documents().defined()) hidden = mask.documents().mul(2).add(hidden);
  own.attention.mask = mask.with_documents(hidden);
  return own;
}

HybridContext first_context(const HybridContext& whole, std::int64_t tokens) {
  HybridContext own = whole;
  const AttentionMask& mask = whole.attention.mask;
  own.attention.mask = AttentionMask::causal(tokens, tokens);
  if (mask.documents().defined())
    own.attention.mask = own.attention.mask.with_documents(mask.documents().narrow(1, 0, tokens));
  if (mask.valid().defined())
    own.attention.mask = own.attention.mask.with_valid(mask.valid().clamp_max(tokens));
  if (whole.attention.turns.defined()) own.attention.turns = whole.attention.turns.narrow(0, 0, tokens);
  for (at::Tensor* each : {&own.documents, &own.parents, &own.valid})
    if (each->defined()) *each = each->narrow(1, 0, tokens);
  return own;
}

}  // namespace penstock::models
