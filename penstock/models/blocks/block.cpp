#include "penstock/models/blocks/block.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstddef>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/models/blocks/split_rows.h"
#include "penstock/module_scope.h"
#include "penstock/random.h"
#include "penstock/step_context.h"

namespace penstock::models {

namespace {

// Of rows whose tokens are divided over the ranks of a mesh with one axis (split_rows.h).
GlobalBox box_of_split_rows(const at::Tensor& x, const StepContext& step) {
  const Placements& placements = placements_of(x);
  if (placements.size() != 1 || !placements[0].splits(1))
    throw NotImplemented(
        "dropout on distributed activations, except those with rows that are divided over tensor-parallel "
        "ranks; pass plain ones to the model (the rows of this rank), or set model.dropout to 0");
  GlobalBox box = step.box_of(x.sizes());
  if (box.whole()) box = {x.sizes().vec(), std::vector<std::int64_t>(static_cast<std::size_t>(x.dim()), 0)};
  const comm::MeshGroups& mesh = mesh_of(x);
  box.offset[1] =
      local_shape_and_offset(x.sizes().vec(), mesh.shape(), mesh.coordinate(), placements).offset[1];
  return box;
}

}  // namespace

at::Tensor drop(const at::Tensor& x, double p, std::int64_t place, bool training) {
  if (!training || p == 0) return x;
  const auto step = StepContext::current();
  const RandomKey key = step->key(place, purpose::kDropout);
  if (!is_dtensor(x)) return keyed_dropout(x, p, key, step->box_of(x.sizes()));
  return split_rows(keyed_dropout(own_tokens_of(x), p, key, box_of_split_rows(x, *step)), mesh_of(x));
}

BlockImpl::BlockImpl(const TransformerOptions& options, std::int64_t number)
    : options_(options.resolved()),
      number_(number),
      attention_drop_(layer_from_name(fmt::format("blocks.{}.attention", number))),
      feed_drop_(layer_from_name(fmt::format("blocks.{}.feed", number))) {
  reset();
}

void BlockImpl::reset() {
  attention_norm = register_module("attention_norm", RmsNorm(options_.width, options_.norm_epsilon));
  attention = register_module("attention", Attention(attention_options(options_), number_));
  feed_norm = register_module("feed_norm", RmsNorm(options_.width, options_.norm_epsilon));
  feed = register_module("feed", FeedForward(options_));
}

at::Tensor BlockImpl::forward(const at::Tensor& input, const AttentionContext& context) {
  const ModuleScope running(*this);
  const ForwardScope scope(*this);  // sharded parameters are gathered from here on
  const at::Tensor x = scope.input(input);
  const at::Tensor between = x + drop(attention->forward(attention_norm->forward(x), context),
                                      options_.dropout, attention_drop_, is_training());
  return scope.output(between + drop(feed->forward(feed_norm->forward(between)), options_.dropout, feed_drop_,
                                     is_training()));
}

}  // namespace penstock::models
