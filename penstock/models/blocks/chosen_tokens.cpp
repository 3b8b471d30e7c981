#include "penstock/models/blocks/chosen_tokens.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <tuple>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/input_check.h"

namespace penstock::models {
namespace {

// [batch, k] as an index of the shape [batch, k, rest of `like`].
at::Tensor index_like(const at::Tensor& positions, const at::Tensor& like) {
  at::Tensor index = positions;
  std::vector<std::int64_t> sizes = positions.sizes().vec();
  for (std::int64_t dim = 2; dim < like.dim(); ++dim) {
    index = index.unsqueeze(-1);
    sizes.push_back(like.size(dim));
  }
  return index.expand(sizes);
}

void check_per_token(const at::Tensor& tensor, const at::Tensor& positions, std::int64_t length) {
  if (tensor.dim() < 2 || tensor.size(0) != positions.size(0) || tensor.size(1) != length)
    throw ValueError(describe("ChosenTokens: a tensor with an entry for each token", shown(tensor),
                              fmt::format("[{}, {}, ...]", positions.size(0), length)));
}

}  // namespace

ChosenTokens ChosenTokens::highest(const at::Tensor& scores, std::int64_t k) {
  if (scores.dim() != 2 || k < 0 || k > scores.size(1))
    throw ValueError(describe("ChosenTokens::highest",
                              fmt::format("{} tokens of scores {}", k, shown(scores)),
                              "scores [batch, length] and at most length tokens"));
  ChosenTokens chosen;
  chosen.length_ = scores.size(1);
  const at::Tensor found = std::get<1>(at::topk(scores.detach(), k, 1, /*largest=*/true, /*sorted=*/false));
  chosen.positions_ = std::get<0>(at::sort(found, 1));
  return chosen;
}

ChosenTokens ChosenTokens::positive(const at::Tensor& scores) {
  if (scores.dim() != 2)
    throw ValueError(describe("ChosenTokens::positive", shown(scores), "scores [batch, length]"));
  ChosenTokens chosen;
  chosen.length_ = scores.size(1);
  const at::Tensor active = scores.detach().gt(0);
  // Every key occurs once in its row, hence the order does not depend on the sort's stability.
  const at::Tensor places = at::arange(chosen.length_, scores.options().dtype(at::kLong));
  const at::Tensor keys = places.add(active.logical_not().to(at::kLong).mul(chosen.length_));
  chosen.positions_ = std::get<1>(at::sort(keys, 1));
  chosen.active_ = active.gather(1, chosen.positions_);
  return chosen;
}

at::Tensor ChosenTokens::of_tokens(const at::Tensor& per_token) const {
  if (!per_token.defined()) return per_token;
  check_per_token(per_token, positions_, length_);
  return per_token.gather(1, index_like(positions_, per_token));
}

at::Tensor ChosenTokens::of_positions(const at::Tensor& per_position) const {
  if (per_position.dim() < 1 || per_position.size(0) != length_)
    throw ValueError(describe("ChosenTokens: a table with an entry for each position", shown(per_position),
                              fmt::format("[{}, ...]", length_)));
  std::vector<std::int64_t> sizes = positions_.sizes().vec();
  for (std::int64_t dim = 1; dim < per_position.dim(); ++dim) sizes.push_back(per_position.size(dim));
  return per_position.index_select(0, positions_.reshape({-1})).view(sizes);
}

at::Tensor ChosenTokens::add_to(const at::Tensor& per_token, const at::Tensor& added) const {
  check_per_token(per_token, positions_, length_);
  return per_token.scatter_add(1, index_like(positions_, per_token), added);
}

at::Tensor ChosenTokens::of_references(const at::Tensor& places) const {
  check_ids("ChosenTokens: references", places, {positions_.size(0), length_}, "places of other tokens");
  const at::Tensor wanted = of_tokens(places.to(at::kLong));
  const at::Tensor numbers = at::arange(positions_.size(1), positions_.options()).expand_as(positions_);
  const at::Tensor place_of =
      at::full({positions_.size(0), length_}, -1, positions_.options()).scatter(1, positions_, numbers);
  return at::where(wanted.ge(0), place_of.gather(1, wanted.clamp_min(0)), wanted);
}

}  // namespace penstock::models
