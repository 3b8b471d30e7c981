#include "penstock/models/blocks/block.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/random.h"
#include "penstock/step_context.h"

namespace penstock::models {

at::Tensor drop(const at::Tensor& x, double p, std::int64_t place, bool training) {
  if (!training || p == 0) return x;
  if (is_dtensor(x))
    throw NotImplemented(
        "dropout on distributed activations; pass plain ones to the model (the rows of this rank), or set "
        "model.dropout to 0");
  const auto step = StepContext::current();
  return keyed_dropout(x, p, step->key(place, purpose::kDropout), step->box_of(x.sizes()));
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
  const ForwardScope scope(*this);  // sharded parameters are gathered from here on
  const at::Tensor x = scope.input(input);
  const at::Tensor between = x + drop(attention->forward(attention_norm->forward(x), context),
                                      options_.dropout, attention_drop_, is_training());
  return scope.output(between + drop(feed->forward(feed_norm->forward(between)), options_.dropout, feed_drop_,
                                     is_training()));
}

}  // namespace penstock::models
