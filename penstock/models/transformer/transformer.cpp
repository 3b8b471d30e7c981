#include "penstock/transformer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/models/blocks/block.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/models/blocks/norm.h"
#include "penstock/models/blocks/recomputed_block.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/models/blocks/split_rows.h"
#include "penstock/models/transformer/transformer_access.h"
#include "penstock/random.h"
#include "penstock/tensor_parallel.h"

namespace penstock::models {
namespace {

// Holds blocks under their indices in the whole model; a ModuleList would count from 0.
class NumberedBlocks : public torch::nn::Module {
 public:
  void add(const Block& block) { register_module(std::to_string(block->number()), block); }
};

void check_part(const TransformerOptions& options, const StagePart& part) {
  if (part.count < 1 || part.index < 0 || part.index >= part.count || part.first_block < 0 ||
      part.first_block > part.end_block || part.end_block > options.layers)
    throw ValueError(describe("TransformerStage",
                              fmt::format("stage {} of {} with blocks {} to {}", part.index, part.count,
                                          part.first_block, part.end_block),
                              fmt::format("a part of {} blocks", options.layers),
                              "take the parts from partition_model()"));
}

// A split weight keeps its distributed lookup (parallel_plan.h); a replicated one is used like a plain one.
// Distributed tokens give a distributed result.
at::Tensor looked_up(const at::Tensor& weight, const at::Tensor& tokens) {
  const bool whole = is_dtensor(weight) && !is_dtensor(tokens) &&
                     std::none_of(placements_of(weight).begin(), placements_of(weight).end(),
                                  [](const Placement& placement) { return placement.splits(); });
  return at::embedding(whole ? to_local(weight) : weight, tokens);
}

at::Tensor local_rows(const at::Tensor& tensor) { return is_dtensor(tensor) ? to_local(tensor) : tensor; }

}  // namespace

// Modules are registered with the stage, in the order of the model; here are the handles to call them.
struct TransformerStageImpl::Impl {
  Impl(TransformerStageImpl& the_stage, const TransformerOptions& the_options, const StagePart& the_part)
      : stage(the_stage),
        options(the_options.resolved()),
        part(the_part),
        rotary(options.head_width(), options.context, options.rope_theta) {
    check_part(options, part);
  }

  void register_modules();
  // `before`: number of tokens in the cache.
  void check_input(const at::Tensor& x, std::int64_t before) const;
  // Rotary turns of `length` tokens after `before` others, on the device of `rows`.
  at::Tensor turns_of(const at::Tensor& rows, std::int64_t before, std::int64_t length);
  // The hidden states that a stage gets, as the blocks take them; tokens are returned unchanged.
  at::Tensor arrived(const at::Tensor& x) const;
  // The input of the first block.
  at::Tensor first_input(const at::Tensor& tokens, bool whole) const;
  at::Tensor run(const at::Tensor& input, const AttentionContext& context);
  // Whether the activations of this block are recomputed in this microbatch.
  bool recomputes(const Block& block) const {
    return recomputes_now(recompute, {.number = block->number(), .letter = 'A'}, part.index);
  }
  static at::Tensor run_again_later(const Block& block, const at::Tensor& x,
                                    const AttentionContext& context) {
    return recomputed_block(
        x, [block = block.ptr(), context](const at::Tensor& in) { return block->forward(in, context); });
  }

  TransformerStageImpl& stage;
  TransformerOptions options;
  StagePart part;
  std::vector<Block> blocks;
  RmsNorm norm{nullptr};  // at the last stage
  Rotary rotary;
  at::Tensor tied_head;  // after separate_last_use
  RecomputePlan recompute;
  bool sequence_parallel = false;
  // Over these ranks, after parallelize(), tokens of hidden states between blocks are divided.
  std::optional<comm::MeshGroups> token_ranks;
};

void TransformerStageImpl::Impl::register_modules() {
  if (part.has_embed() || (part.has_head() && options.tie_head))
    stage.embed = stage.register_module(
        "embed", torch::nn::Embedding(torch::nn::EmbeddingOptions(options.vocabulary, options.width)));
  auto numbered = stage.register_module("blocks", std::make_shared<NumberedBlocks>());
  for (std::int64_t number = part.first_block; number < part.end_block; ++number) {
    blocks.emplace_back(options, number);
    numbered->add(blocks.back());
  }
  if (!part.has_head()) return;
  norm = stage.register_module("norm", RmsNorm(options.width, options.norm_epsilon));
  if (!options.tie_head)
    stage.head = stage.register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(options.width, options.vocabulary).bias(false)));
}

void TransformerStageImpl::Impl::check_input(const at::Tensor& x, std::int64_t before) const {
  const std::string where = fmt::format("TransformerStage {} of {}: input", part.index, part.count);
  if (!x.defined())
    throw ValueError(
        describe(where, "no tensor",
                 part.has_embed() ? "tokens [batch, length]" : "hidden states [batch, length, width]"));
  const std::string actual =
      fmt::format("{} [{}]", c10::toString(x.scalar_type()), fmt::join(x.sizes(), ", "));
  if (part.has_embed()) {
    if (x.dim() != 2 || (x.scalar_type() != at::kLong && x.scalar_type() != at::kInt))
      throw ValueError(describe(where, actual, "tokens [batch, length], Long or Int"));
  } else if (x.dim() != 3 || x.size(2) != options.width || !x.is_floating_point()) {
    throw ValueError(
        describe(where, actual, fmt::format("hidden states [batch, length, {}]", options.width)));
  }
  if (before + x.size(1) > options.context)
    throw ValueError(describe(where, fmt::format("{} tokens", before + x.size(1)),
                              fmt::format("at most model.context, {}", options.context),
                              "shorten the sequences or set model.context higher"));
}

at::Tensor TransformerStageImpl::Impl::turns_of(const at::Tensor& rows, std::int64_t before,
                                                std::int64_t length) {
  // Tokens do not have the dtype of the model; the embedding does.
  const at::Tensor like =
      part.has_embed() ? rows.new_empty({0}, rows.options().dtype(stage.embed->weight.scalar_type())) : rows;
  return rotary.turns(before, length, like);
}

at::Tensor TransformerStageImpl::Impl::arrived(const at::Tensor& x) const {
  if (!token_ranks || !x.defined()) return x;
  if (part.has_embed()) {
    if (x.dim() == 2)
      check_split_length(fmt::format("TransformerStage {} of {}: input", part.index, part.count), x.size(1),
                         token_ranks->shape()[0]);
    return x;
  }
  return x.dim() == 3 ? split_rows(x, *token_ranks) : x;
}

at::Tensor TransformerStageImpl::Impl::first_input(const at::Tensor& tokens, bool whole) const {
  static const std::int64_t kPlace = layer_from_name("embed");
  at::Tensor x =
      looked_up(stage.embed->weight,
                token_ranks ? from_local(tokens, *token_ranks, {Replicate{}}, {.check = false}) : tokens);
  if (token_ranks && whole) x = whole_rows(x);
  return drop(x, options.dropout, kPlace, stage.is_training());
}

at::Tensor TransformerStageImpl::Impl::run(const at::Tensor& input, const AttentionContext& context) {
  const ForwardScope scope(stage);
  at::Tensor x = scope.input(input);
  // Generation has whole rows: often of one token.
  if (part.has_embed()) x = first_input(x, /*whole=*/context.cache != nullptr);
  // Blocks that run again derive masks for themselves: what other blocks have derived is not kept for them.
  const AttentionContext fresh = context;
  for (const Block& block : blocks)
    x = recomputes(block) ? run_again_later(block, x, fresh) : block.ptr()->forward(x, context);
  if (!part.has_head()) return scope.output(token_ranks ? own_tokens_of(x) : x);
  x = norm->forward(x);
  const at::Tensor& weight = stage.head_weight();
  const LocalRegion region(x, weight, Rows::BatchAndLength);
  return scope.output(
      region.leave_split(at::linear(region.enter(x), region.weight(weight)), options.vocabulary));
}

TransformerStageImpl::TransformerStageImpl(const TransformerOptions& options)
    : TransformerStageImpl(options, StagePart{0, 1, 0, options.layers}) {}

TransformerStageImpl::TransformerStageImpl(const TransformerOptions& options, const StagePart& part)
    : impl_(std::make_unique<Impl>(*this, options, part)) {
  impl_->register_modules();
}

TransformerStageImpl::~TransformerStageImpl() = default;

const TransformerOptions& TransformerStageImpl::options() const { return impl_->options; }
const StagePart& TransformerStageImpl::part() const { return impl_->part; }

std::vector<std::shared_ptr<torch::nn::Module>> TransformerStageImpl::blocks() const {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (const Block& block : impl_->blocks) modules.push_back(block.ptr());
  return modules;
}

const at::Tensor& TransformerStageImpl::head_weight() const {
  if (!part().has_head())
    throw StateError(
        fmt::format("stage {} of {} has no head; use the last stage", part().index, part().count));
  if (!options().tie_head) return head->weight;
  return impl_->tied_head.defined() ? impl_->tied_head : embed->weight;
}

at::Tensor TransformerStageImpl::forward(at::Tensor x, at::Tensor documents) {
  x = impl_->arrived(x);
  impl_->check_input(x, 0);
  const std::int64_t length = x.size(1);
  if (documents.defined() &&
      (documents.dim() != 2 || documents.size(1) != length || documents.is_floating_point()))
    throw ValueError(describe(
        "documents",
        fmt::format("{} [{}]", c10::toString(documents.scalar_type()), fmt::join(documents.sizes(), ", ")),
        fmt::format("integers [batch, {}], one for each token", length)));
  const at::Tensor local = local_rows(x);
  return impl_->run(x, {impl_->turns_of(local, 0, length),
                        documents.defined() ? AttentionMask::within_documents(local_rows(documents))
                                            : AttentionMask::causal(length, length)});
}

at::Tensor TransformerStageImpl::forward_with(at::Tensor x, const Tree& keywords) {
  at::Tensor documents;
  if (!keywords.is_none()) {
    for (const std::string& name : keywords.keys()) {
      if (name != "documents")
        throw ValueError(
            describe("TransformerStage: keyword argument", fmt::format("'{}'", name), "documents"));
      if (!keywords["documents"].is_none()) documents = keywords["documents"].tensor();
    }
  }
  return forward(std::move(x), std::move(documents));
}

at::Tensor TransformerAccess::forward_cached(TransformerStageImpl& stage, const at::Tensor& x,
                                             KvCache& cache) {
  TransformerStageImpl::Impl& impl = *stage.impl_;
  const c10::AutoGradMode no_grad(false);
  impl.check_input(x, cache.length());
  const std::int64_t added = x.size(1);
  const at::Tensor local = local_rows(x);
  const at::Tensor result = impl.run(x, {impl.turns_of(local, cache.length(), added),
                                         AttentionMask::causal(added, cache.length() + added), &cache});
  cache.advance(added);
  return result;
}

namespace {

class KeysAndValues : public StageCache {
 public:
  KeysAndValues(const TransformerOptions& options, std::int64_t capacity) : cache(options, capacity) {}
  std::int64_t length() const override { return cache.length(); }

  KvCache cache;
};

}  // namespace

std::unique_ptr<StageCache> TransformerStageImpl::make_cache(std::int64_t capacity) const {
  return std::make_unique<KeysAndValues>(options(), capacity);
}

at::Tensor TransformerStageImpl::forward_cached(const at::Tensor& x, StageCache& cache) {
  auto* own = dynamic_cast<KeysAndValues*>(&cache);
  if (own == nullptr)
    throw TypeError(describe("TransformerStage: cache", "a cache of another model", "one of make_cache()"));
  return TransformerAccess::forward_cached(*this, x, own->cache);
}

void TransformerStageImpl::set_initial_values(std::uint64_t seed) { initialize(*this, {.seed = seed}); }

void TransformerStageImpl::set_recompute(const RecomputePlan& plan) { impl_->recompute = plan; }

void TransformerStageImpl::parallelize(const comm::MeshGroups& mesh) {
  parallelize_transformer(*this, mesh);
  if (!impl_->sequence_parallel) return;
  impl_->token_ranks = mesh;
  if (part().has_embed())
    set_boundary(embed->weight, {.mesh = mesh,
                                 .axis = 0,
                                 .plain_input = Replicate{},
                                 .desired_input = Replicate{},
                                 .output = Shard{1}});
}

void TransformerStageImpl::set_sequence_parallel() { impl_->sequence_parallel = true; }

at::Tensor TransformerStageImpl::separate_last_use(const std::string& tied) {
  if (!is_whole() || !options().tie_head || impl_->tied_head.defined() || tied != "embed.weight")
    throw StateError(
        fmt::format("separate_last_use: stage {} of {} does not have both uses of {}, or they are already "
                    "separate",
                    part().index, part().count, tied));
  impl_->tied_head = register_parameter("tied_head", embed->weight.detach(), embed->weight.requires_grad());
  return impl_->tied_head;
}

}  // namespace penstock::models
