#include "penstock/models/hybrid/hybrid_block.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <utility>

#include "penstock/fully_shard.h"
#include "penstock/models/blocks/block.h"
#include "penstock/models/blocks/split_rows.h"
#include "penstock/models/hybrid/routed_context.h"
#include "penstock/module_scope.h"
#include "penstock/random.h"

namespace penstock::models {
namespace {

const char* module_name(BlockKind kind) {
  switch (kind) {
    case BlockKind::Attention:
      return "attention";
    case BlockKind::StateSpace:
      return "state_space";
    case BlockKind::Experts:
      return "experts";
    case BlockKind::FeedForward:
      return "feed";
  }
  return "";
}

}  // namespace

HybridBlockImpl::HybridBlockImpl(const HybridOptions& options, const HybridParts& parts, std::int64_t number)
    : dropout_(options.dropout), number_(number), kind_(parts.kind(number)) {
  const std::string name = module_name(kind_);
  first_norm_ = AnyNorm(parts.norm);
  register_module(name + "_norm", first_norm_.module());
  switch (kind_) {
    case BlockKind::Attention:
      attention_ = register_module(name, Attention(parts.attention, number));
      window_ = parts.attention.window_of(number);
      break;
    case BlockKind::StateSpace:
      state_space_ = register_module(name, StateSpace(parts.state_space, number));
      break;
    case BlockKind::Experts:
      experts_ = register_module(name, Experts(parts.experts, fmt::format("blocks.{}.experts", number)));
      break;
    case BlockKind::FeedForward:
      register_feed(options);
      break;
  }
  if (kind_ == BlockKind::Attention && options.attention_feed) {
    feed_norm_ = AnyNorm(parts.norm);
    register_module("feed_norm", feed_norm_.module());
    register_feed(options);
  }
  if (parts.is_routed(number)) depth_ = register_module("depth", MixtureOfDepths(parts.depth));
}

void HybridBlockImpl::register_feed(const HybridOptions& options) {
  if (options.tree_feed)
    tree_feed_ = register_module(
        "feed", TreeFeedForward(TreeFeedOptions{.width = options.width, .feed_width = options.feed_width}));
  else
    feed_ = register_module("feed", FeedForward(options.width, options.feed_width));
}

at::Tensor HybridBlockImpl::feed(const at::Tensor& in, const HybridContext& context) {
  if (tree_feed_.is_empty()) return feed_->forward(in);
  return tree_feed_->forward(in, {.parents = context.parents, .documents = context.documents});
}

at::Tensor HybridBlockImpl::dropped(const at::Tensor& added, const char* residual) const {
  if (dropout_ == 0 || !is_training()) return added;
  return drop(added, dropout_, layer_from_name(fmt::format("blocks.{}.{}", number_, residual)), true);
}

BlockResult HybridBlockImpl::forward(const at::Tensor& input, const HybridContext& context) {
  const ModuleScope running(*this);
  const ForwardScope scope(*this);  // sharded parameters are gathered from here on
  const at::Tensor x = scope.input(input);
  if (!depth_.is_empty()) {
    // Its tokens come from anywhere in a row: with rows that are divided over ranks, every rank has all.
    BlockResult routed = forward_routed(whole_rows(x), context);
    return {scope.output(rows_like(x, routed.hidden)), std::move(routed.losses)};
  }
  BlockResult first = first_addition(x, context);
  at::Tensor sum = x + first.hidden;
  if (has_second()) sum = sum + second_addition(sum, context);
  return {scope.output(sum), std::move(first.losses)};
}

BlockResult HybridBlockImpl::first_addition(const at::Tensor& x, const HybridContext& context) {
  const at::Tensor in = first_norm_.forward(x);
  BlockResult added;
  switch (kind_) {
    case BlockKind::Attention:
      added.hidden = attention_->forward(in, context.attention);
      break;
    case BlockKind::StateSpace:
      added.hidden = state_space_->forward(in, context.documents, context.states, context.counted);
      break;
    case BlockKind::Experts:
      added = experts_->forward(in, context.valid);
      break;
    case BlockKind::FeedForward:
      added.hidden = feed(in, context);
      break;
  }
  added.hidden = dropped(added.hidden, module_name(kind_));
  return added;
}

at::Tensor HybridBlockImpl::second_addition(const at::Tensor& sum, const HybridContext& context) {
  return dropped(feed(feed_norm_.forward(sum), context), "feed");
}

BlockResult HybridBlockImpl::addition(const at::Tensor& x, const HybridContext& context) {
  BlockResult added = first_addition(x, context);
  if (has_second()) added.hidden = added.hidden + second_addition(x + added.hidden, context);
  return added;
}

// Training takes a fixed number of tokens; evaluation and generation take those that the router accepts,
// which depends on no later token, so that generating a row and scoring it agree.
BlockResult HybridBlockImpl::forward_routed(const at::Tensor& x, const HybridContext& context) {
  const ModuleScope running(*this);
  const bool generates = context.attention.cache != nullptr || context.states != nullptr;
  const DepthChoice choice = is_training() && !generates ? DepthChoice::Capacity : DepthChoice::Threshold;
  return depth_->forward(
      x,
      [&](const at::Tensor& rows, const ChosenTokens& chosen) {
        if (choice == DepthChoice::Capacity || kind_ != BlockKind::Attention)
          return addition(rows, routed_context(context, chosen, window_));
        // Keys of a cache are in the order of the row.
        BlockResult added = addition(x, hiding_context(context, chosen, number_));
        added.hidden = chosen.of_tokens(added.hidden);
        return added;
      },
      choice, context.valid);
}

void HybridBlockImpl::initialize(const BlockInit& init) {
  const std::string at = fmt::format("blocks.{}.", number_), name = at + module_name(kind_);
  first_norm_.initialize(name + "_norm", init);
  if (!attention_.is_empty()) attention_->initialize(name, init);
  if (!state_space_.is_empty()) state_space_->initialize(name, init);
  if (!experts_.is_empty()) experts_->initialize(name, init);
  if (!depth_.is_empty()) depth_->initialize(at + "depth", init);
  if (!has_feed()) return;
  if (kind_ == BlockKind::Attention) feed_norm_.initialize(at + "feed_norm", init);
  if (!tree_feed_.is_empty()) return tree_feed_->initialize(at + "feed", init);
  fill_normal(feed_->gate->weight, at + "feed.gate.weight", init.seed, init.deviation);
  fill_normal(feed_->up->weight, at + "feed.up.weight", init.seed, init.deviation);
  fill_normal(feed_->down->weight, at + "feed.down.weight", init.seed, init.residual);
}

}  // namespace penstock::models
