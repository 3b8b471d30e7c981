#include "penstock/transformer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/dtensor.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/shard/state/forward_scope.h"
#include "penstock/random.h"

namespace penstock::models {
namespace {

// Holds blocks under their indices in the whole model; a ModuleList would count from 0.
class NumberedBlocks : public torch::nn::Module {
 public:
  void add(const Block& block) { register_module(std::to_string(block->number()), block); }
};

void check_part(const TransformerOptions& options, const StagePart& part) {
  if (part.count < 1 || part.index < 0 || part.index >= part.count || part.first_block < 0 || part.first_block > part.end_block || part.end_block > options.layers)
    throw ValueError(describe("TransformerStage", fmt::format("stage {} of {} with blocks {} to {}", part.index, part.count, part.first_block, part.end_block),
                              fmt::format("a part of {} blocks", options.layers), "take the parts from partition_model()"));
}

// A split weight keeps its distributed lookup (parallel_plan.h); a replicated one is used like a plain one.
at::Tensor looked_up(const at::Tensor& weight, const at::Tensor& tokens) {
  const bool whole = is_dtensor(weight) && !is_dtensor(tokens) &&
                     std::none_of(placements_of(weight).begin(), placements_of(weight).end(), [](const Placement& placement) { return placement.splits(); });
  return at::embedding(whole ? to_local(weight) : weight, tokens);
}

at::Tensor local_rows(const at::Tensor& tensor) { return is_dtensor(tensor) ? to_local(tensor) : tensor; }

}  // namespace

TransformerStageImpl::TransformerStageImpl(const TransformerOptions& options, const StagePart& part)
    : options_(options.resolved()), part_(part), rotary_(options_.head_width(), options_.context, options_.rope_theta) {
  check_part(options_, part_);
  if (part_.has_embed() || (part_.has_head() && options_.tie_head))
    embed = register_module("embed", torch::nn::Embedding(torch::nn::EmbeddingOptions(options_.vocabulary, options_.width)));
  auto numbered = register_module("blocks", std::make_shared<NumberedBlocks>());
  for (std::int64_t number = part_.first_block; number < part_.end_block; ++number) {
    blocks_.emplace_back(options_, number);
    numbered->add(blocks_.back());
  }
  if (!part_.has_head()) return;
  norm = register_module("norm", RmsNorm(options_.width, options_.norm_epsilon));
  if (!options_.tie_head)
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(options_.width, options_.vocabulary).bias(false)));
}

const at::Tensor& TransformerStageImpl::head_weight() const {
  if (!part_.has_head()) throw StateError(fmt::format("stage {} of {} has no head; use the last stage", part_.index, part_.count));
  if (!options_.tie_head) return head->weight;
  return tied_head_.defined() ? tied_head_ : embed->weight;
}

void TransformerStageImpl::separate_head() {
  if (!is_whole() || !options_.tie_head || tied_head_.defined())
    throw StateError(fmt::format("separate_head: stage {} of {} does not have both uses of a tied weight, or they are already separate", part_.index, part_.count));
  tied_head_ = register_parameter(kTiedHead, embed->weight.detach(), embed->weight.requires_grad());
}

void TransformerStageImpl::check_input(const at::Tensor& x, std::int64_t before) const {
  const std::string where = fmt::format("TransformerStage {} of {}: input", part_.index, part_.count);
  if (!x.defined()) throw ValueError(describe(where, "no tensor", part_.has_embed() ? "tokens [batch, length]" : "hidden states [batch, length, width]"));
  const std::string actual = fmt::format("{} [{}]", c10::toString(x.scalar_type()), fmt::join(x.sizes(), ", "));
  if (part_.has_embed()) {
    if (x.dim() != 2 || (x.scalar_type() != at::kLong && x.scalar_type() != at::kInt)) throw ValueError(describe(where, actual, "tokens [batch, length], Long or Int"));
  } else if (x.dim() != 3 || x.size(2) != options_.width || !x.is_floating_point()) {
    throw ValueError(describe(where, actual, fmt::format("hidden states [batch, length, {}]", options_.width)));
  }
  if (before + x.size(1) > options_.context)
    throw ValueError(describe(where, fmt::format("{} tokens", before + x.size(1)), fmt::format("at most model.context, {}", options_.context),
                              "shorten the sequences or set model.context higher"));
}

at::Tensor TransformerStageImpl::turns_of(const at::Tensor& rows, std::int64_t before, std::int64_t length) {
  // Tokens do not have the dtype of the model; the embedding does.
  const at::Tensor like = part_.has_embed() ? rows.new_empty({0}, rows.options().dtype(embed->weight.scalar_type())) : rows;
  return rotary_.turns(before, length, like);
}

at::Tensor TransformerStageImpl::run(const at::Tensor& input, const AttentionContext& context) {
  const ForwardScope scope(*this);
  at::Tensor x = scope.input(input);
  if (part_.has_embed()) {
    static const std::int64_t kPlace = layer_from_name("embed");
    x = drop(looked_up(embed->weight, x), options_.dropout, kPlace, is_training());
  }
  for (Block& block : blocks_) x = block->forward(x, context);
  if (!part_.has_head()) return scope.output(x);
  x = norm->forward(x);
  const at::Tensor& weight = head_weight();
  const LocalRegion region(x, weight, Rows::BatchAndLength);
  return scope.output(region.leave_split(at::linear(region.enter(x), region.weight(weight)), options_.vocabulary));
}

at::Tensor TransformerStageImpl::forward(at::Tensor x, at::Tensor documents) {
  check_input(x, 0);
  const std::int64_t length = x.size(1);
  if (documents.defined() && (documents.dim() != 2 || documents.size(1) != length || documents.is_floating_point()))
    throw ValueError(describe("documents", fmt::format("{} [{}]", c10::toString(documents.scalar_type()), fmt::join(documents.sizes(), ", ")),
                              fmt::format("integers [batch, {}], one for each token", length)));
  const at::Tensor local = local_rows(x);
  return run(x, {turns_of(local, 0, length), documents.defined() ? AttentionMask::within_documents(local_rows(documents)) : AttentionMask::causal(length, length, local)});
}

at::Tensor TransformerStageImpl::forward_with(at::Tensor x, const Tree& keywords) {
  at::Tensor documents;
  if (!keywords.is_none()) {
    for (const std::string& name : keywords.keys()) {
      if (name != "documents") throw ValueError(describe("TransformerStage: keyword argument", fmt::format("'{}'", name), "documents"));
      if (!keywords["documents"].is_none()) documents = keywords["documents"].tensor();
    }
  }
  return forward(std::move(x), std::move(documents));
}

at::Tensor TransformerStageImpl::forward_cached(at::Tensor x, KvCache& cache) {
  const c10::AutoGradMode no_grad(false);
  check_input(x, cache.length());
  const std::int64_t added = x.size(1);
  const at::Tensor local = local_rows(x);
  const at::Tensor result = run(x, {turns_of(local, cache.length(), added), AttentionMask::causal(added, cache.length() + added, local), &cache});
  cache.advance(added);
  return result;
}

}  // namespace penstock::models
