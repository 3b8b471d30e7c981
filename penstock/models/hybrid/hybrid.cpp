#include "penstock/hybrid.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/models/blocks/any_norm.h"
#include "penstock/models/blocks/attention_metadata.h"
#include "penstock/models/blocks/auxiliary_loss.h"
#include "penstock/models/blocks/block.h"
#include "penstock/models/blocks/experts.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/models/blocks/multi_token_prediction.h"
#include "penstock/models/blocks/recomputed_block.h"
#include "penstock/models/blocks/relation_bias_table.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/models/blocks/split_rows.h"
#include "penstock/models/hybrid/hybrid_block.h"
#include "penstock/models/hybrid/hybrid_parallel.h"
#include "penstock/models/hybrid/input_embeddings.h"
#include "penstock/models/hybrid/routed_context.h"
#include "penstock/models/language/loss_totals.h"
#include "penstock/models/plan/hybrid_parts.h"
#include "penstock/random.h"
#include "penstock/torch/random/running_step.h"

namespace penstock::models {
namespace {

// Holds blocks under their indices in the whole model; a ModuleList would count from 0.
class NumberedHybridBlocks : public torch::nn::Module {
 public:
  void add(const HybridBlock& block) { register_module(std::to_string(block->number()), block); }
};

constexpr const char* kRelationsName = "relations";

// Keys and values of attention blocks, states of state-space blocks, choices of mixtures of depths, the last
// tokens for n-grams.
class HybridCache : public StageCache {
 public:
  HybridCache(std::int64_t context, std::int64_t capacity) : keys(context, capacity) {}
  std::int64_t length() const override { return seen; }

  // The tokens that are kept, then the new ones.
  at::Tensor with_history(const at::Tensor& added) const {
    return tokens.defined() ? at::cat({tokens, added.to(tokens.scalar_type())}, 1) : added;
  }
  void keep_last(const at::Tensor& added, std::int64_t count) {
    if (count == 0) return;
    const at::Tensor all = with_history(added);
    const std::int64_t kept = std::min(count, all.size(1));
    tokens = all.narrow(1, all.size(1) - kept, kept).clone();
  }
  void advance(std::int64_t added) {
    keys.advance(added);
    states.advance(added);
    seen += added;
  }

  KvCache keys;
  StateSpaceCache states;
  DepthCache depths;
  at::Tensor tokens;  // [batch, at most InputEmbeddings::reach()]; undefined before the first
  std::int64_t seen = 0;
};

AttentionMetadata attention_metadata(const HybridMetadata& metadata) {
  return {.documents = metadata.documents,
          .row_valid_tokens = metadata.row_valid_tokens,
          .row_valid_blocks = metadata.row_valid_blocks,
          .row_valid_slots = metadata.row_valid_slots,
          .base_block_tokens = metadata.base_block_tokens,
          .row_block_tokens = metadata.row_block_tokens};
}

// Metadata of tokens that follow those in a cache: what concerns each of them alone.
HybridMetadata per_token_metadata(const Tree& keywords) {
  const HybridMetadata given = HybridMetadata::from_keywords(keywords);
  const HybridMetadata rest{.structure_kinds = given.structure_kinds,
                            .dependency_levels = given.dependency_levels,
                            .syntax_depths = given.syntax_depths,
                            .sibling_indices = given.sibling_indices,
                            .node_types = given.node_types,
                            .platforms = given.platforms};
  const Tree kept = rest.keywords();
  if (keywords.size() != kept.size())
    throw NotImplemented(describe(
        "HybridStage: metadata with a cache", keywords.to_string(),
        "structure_kinds, dependency_levels, syntax_depths, sibling_indices, node_types or platforms",
        "generate without the cache"));
  return rest;
}

std::string input_text(const at::Tensor& x) {
  return fmt::format("{} [{}]", c10::toString(x.scalar_type()), fmt::join(x.sizes(), ", "));
}

}  // namespace

// Modules are registered with the stage, in the order of the model; here are the handles to call them.
struct HybridStageImpl::Impl {
  Impl(HybridStageImpl& the_stage, const HybridOptions& the_options, const StagePart& the_part)
      : stage(the_stage), options(the_options.resolved()), parts(hybrid_parts(options)), part(the_part) {
    const auto layers = static_cast<std::int64_t>(parts.pattern.blocks.size());
    if (part.count < 1 || part.index < 0 || part.index >= part.count || part.first_block < 0 ||
        part.first_block > part.end_block || part.end_block > layers)
      throw ValueError(describe("HybridStage",
                                fmt::format("stage {} of {} with blocks {} to {}", part.index, part.count,
                                            part.first_block, part.end_block),
                                fmt::format("a part of {} blocks", layers),
                                "take the parts from partition_model()"));
    if (has_attention() || (predicts_more() && parts.multi_token_kind == BlockKind::Attention))
      rotary.emplace(parts.attention.head_width, options.context, options.rope_theta);
  }

  void register_modules();
  // `before`: number of tokens in the cache.
  void check_input(const at::Tensor& x, std::int64_t before) const;
  // Rotary turns of the tokens of x, after `before` others; undefined if no block needs them.
  at::Tensor turns_of(const at::Tensor& x, std::int64_t before);
  // Whether this stage has an A of the pattern.
  bool has_attention() const;
  // Throws ValueError if the last stage is to predict further tokens and does not know them.
  void check_known(const HybridMetadata& metadata) const;
  // The metadata of a whole row, checked, with documents that begin at a token.
  HybridMetadata completed(HybridMetadata metadata, const at::Tensor& x) const;
  // What the blocks share, without the relation bias.
  HybridContext context_of(const at::Tensor& x, const HybridMetadata& metadata);
  HybridContext cached_context_of(const at::Tensor& x, HybridCache& cache);
  // The input of the first block.
  at::Tensor first_input(const at::Tensor& tokens, const HybridMetadata& metadata, const HybridCache* cache);
  // With a cache, `input` follows what the cache has seen.
  at::Tensor run(const at::Tensor& input, HybridContext context, const HybridMetadata& metadata,
                 const HybridCache* cache = nullptr);
  at::Tensor with_losses(const at::Tensor& hidden, const std::vector<NamedLoss>& losses);
  // Of tokens [batch, length], with the weight of the first or of the last stage. Divided over ranks with
  // sequence parallelism.
  at::Tensor embedded(const at::Tensor& weight, const at::Tensor& tokens) const;
  // The hidden states that a stage gets, as the blocks take them; tokens are returned unchanged.
  at::Tensor arrived(const at::Tensor& x) const;
  at::Tensor logits_of(const at::Tensor& hidden) const;
  // Whether the last stage uses the weight of the embedding, and whether this stage predicts further tokens.
  bool ties_embed() const { return options.tie_head || parts.multi_token.depth > 0; }
  bool predicts_more() const { return part.has_head() && parts.multi_token.depth > 0; }
  // Whether the activations of this block are recomputed in this microbatch.
  bool recomputes(const HybridBlock& block) const {
    return recomputes_now(recompute, {.number = block->number(), .letter = letter_of(block->kind())},
                          part.index);
  }
  static BlockResult run_again_later(const HybridBlock& block, const at::Tensor& x,
                                     const HybridContext& context) {
    return recomputed_block(
        x, [block = block.ptr(), context](const at::Tensor& in) { return block->forward(in, context); });
  }
  std::vector<NamedLoss> multi_token_losses(const at::Tensor& hidden, const HybridContext& context,
                                            const HybridMetadata& metadata);
  // The E blocks whose experts are balanced by a bias.
  std::vector<Experts> balanced_experts() const;
  // The weight of the embedding where the last stage uses it.
  const at::Tensor& last_embed() const { return tied_embed.defined() ? tied_embed : embed->weight; }

  HybridStageImpl& stage;
  HybridOptions options;
  HybridParts parts;
  StagePart part;
  std::optional<Rotary> rotary;  // if this stage has attention
  torch::nn::Embedding embed{nullptr};
  InputEmbeddings inputs;
  RelationBiasTable relations{nullptr};  // if this stage has attention
  std::vector<HybridBlock> blocks;
  AnyNorm norm;
  torch::nn::Linear head{nullptr};
  MultiTokenPrediction multi_token{nullptr};  // at the last stage, with a block for each depth
  std::vector<HybridBlock> multi_token_blocks;
  at::Tensor tied_embed;  // after separate_last_use
  double auxiliary_scale = 1;
  std::vector<AuxiliaryLoss> auxiliary;
  LossTotals totals;  // of the training steps since they were taken
  RecomputePlan recompute;
  bool sequence_parallel = false;
  // Over these ranks, after parallelize(), tokens of hidden states between blocks are divided.
  std::optional<comm::MeshGroups> token_ranks;
};

void HybridStageImpl::Impl::register_modules() {
  if (part.has_embed() || (part.has_head() && ties_embed()))
    embed = stage.register_module(
        "embed", torch::nn::Embedding(torch::nn::EmbeddingOptions(options.vocabulary, options.width)));
  if (part.has_embed()) inputs = InputEmbeddings(stage, parts.inputs);
  if (parts.relations && has_attention())
    relations = stage.register_module(kRelationsName, RelationBiasTable(*parts.relations));
  auto numbered = stage.register_module("blocks", std::make_shared<NumberedHybridBlocks>());
  for (std::int64_t number = part.first_block; number < part.end_block; ++number) {
    blocks.emplace_back(options, parts, number);
    numbered->add(blocks.back());
  }
  if (!part.has_head()) return;
  norm = AnyNorm(parts.norm);
  stage.register_module("norm", norm.module());
  if (!options.tie_head)
    head = stage.register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(options.width, options.vocabulary).bias(false)));
  if (!predicts_more()) return;
  multi_token = stage.register_module("multi_token", MultiTokenPrediction(parts.multi_token));
  const HybridParts more = parts.with_multi_token_blocks();
  for (std::int64_t d = 0; d < parts.multi_token.depth; ++d) {
    const auto layers = static_cast<std::int64_t>(parts.pattern.blocks.size());
    multi_token_blocks.emplace_back(options, more, layers + d);
    numbered->add(multi_token_blocks.back());
  }
}

void HybridStageImpl::Impl::check_input(const at::Tensor& x, std::int64_t before) const {
  const std::string where = fmt::format("HybridStage {} of {}: input", part.index, part.count);
  if (!x.defined())
    throw ValueError(
        describe(where, "no tensor",
                 part.has_embed() ? "tokens [batch, length]" : "hidden states [batch, length, width]"));
  if (part.has_embed()) {
    if (x.dim() != 2 || (x.scalar_type() != at::kLong && x.scalar_type() != at::kInt))
      throw ValueError(describe(where, input_text(x), "tokens [batch, length], Long or Int"));
  } else if (x.dim() != 3 || x.size(2) != options.width || !x.is_floating_point()) {
    throw ValueError(
        describe(where, input_text(x), fmt::format("hidden states [batch, length, {}]", options.width)));
  }
  if (before + x.size(1) > options.context)
    throw ValueError(describe(where, fmt::format("{} tokens", before + x.size(1)),
                              fmt::format("at most model.context, {}", options.context),
                              "shorten the sequences or set model.context higher"));
}

at::Tensor HybridStageImpl::Impl::turns_of(const at::Tensor& x, std::int64_t before) {
  if (!rotary) return {};
  // Tokens do not have the dtype of the model; the embedding does.
  const at::Tensor like =
      part.has_embed() ? x.new_empty({0}, x.options().dtype(embed->weight.scalar_type())) : own_tokens_of(x);
  return rotary->turns(before, x.size(1), like);
}

bool HybridStageImpl::Impl::has_attention() const {
  for (std::int64_t block = part.first_block; block < part.end_block; ++block)
    if (parts.kind(block) == BlockKind::Attention) return true;
  return false;
}

void HybridStageImpl::Impl::check_known(const HybridMetadata& metadata) const {
  if (metadata.tokens.defined() != metadata.targets.defined())
    throw ValueError(describe("HybridStage: keyword arguments tokens and targets", "one of them",
                              "both or neither, for multi-token prediction"));
  if (predicts_more() && stage.is_training() && at::GradMode::is_enabled() && !metadata.targets.defined())
    throw ValueError(
        describe("HybridStage in training mode", "no targets",
                 "the keywords \"tokens\" and \"targets\", for model.multi_token_depth",
                 "pass them to forward_with(), as TrainableModel::inputs() does, or call eval()"));
}

HybridMetadata HybridStageImpl::Impl::completed(HybridMetadata metadata, const at::Tensor& x) const {
  metadata.check(x.size(0), x.size(1));
  at::Tensor& documents = metadata.documents;
  if (!documents.defined() && options.bos_token > 0 && part.has_embed())
    documents = documents_from_bos(x, options.bos_token);
  // Blocks take these two only.
  if (documents.defined() && documents.scalar_type() != at::kLong && documents.scalar_type() != at::kInt)
    documents = documents.to(at::kInt);
  return metadata;
}

HybridContext HybridStageImpl::Impl::context_of(const at::Tensor& x, const HybridMetadata& metadata) {
  const AttentionMetadata of_rows = attention_metadata(metadata);
  HybridContext context{.attention = {.turns = turns_of(x, 0), .mask = of_rows.mask(x.size(0), x.size(1))},
                        .documents = metadata.documents,
                        .parents = metadata.parents};
  if (const at::Tensor counts = of_rows.valid_tokens(); counts.defined())
    context.valid = at::arange(x.size(1), counts.options()).unsqueeze(0).lt(counts.unsqueeze(1));
  return context;
}

HybridContext HybridStageImpl::Impl::cached_context_of(const at::Tensor& x, HybridCache& cache) {
  return {.attention = {.turns = turns_of(x, cache.seen),
                        .mask = AttentionMask::causal(x.size(1), cache.seen + x.size(1)),
                        .cache = &cache.keys},
          .documents = {},
          .states = &cache.states,
          .depths = &cache.depths};
}

at::Tensor HybridStageImpl::Impl::embedded(const at::Tensor& weight, const at::Tensor& tokens) const {
  // Fake weights of trial runs do not say how their results are placed.
  const at::Tensor x = token_ranks
                           ? with_split_rows(at::embedding(
                                 weight, from_local(tokens, *token_ranks, {Replicate{}}, {.check = false})))
                           : at::embedding(weight, tokens);
  return options.embed_scale ? x * std::sqrt(static_cast<double>(options.width)) : x;
}

at::Tensor HybridStageImpl::Impl::first_input(const at::Tensor& tokens, const HybridMetadata& metadata,
                                              const HybridCache* cache) {
  static const std::int64_t kPlace = layer_from_name("embed");
  const at::Tensor found = embedded(embed->weight, tokens);
  // Generation has whole rows: often of one token.
  const at::Tensor x = inputs.forward(cache != nullptr ? whole_rows(found) : found,
                                      cache != nullptr ? cache->with_history(tokens) : tokens, metadata);
  return drop(x, options.dropout, kPlace, stage.is_training());
}

at::Tensor HybridStageImpl::Impl::run(const at::Tensor& input, HybridContext context,
                                      const HybridMetadata& metadata, const HybridCache* cache) {
  const ForwardScope scope(stage);  // sharded parameters are gathered from here on
  at::Tensor x = scope.input(input);
  if (!relations.is_empty() && metadata.relations.defined())
    context.attention.mask = context.attention.mask.with_bias(relations->forward(metadata.relations));
  if (part.has_embed()) x = first_input(x, metadata, cache);
  // Blocks that run again derive masks for themselves: what other blocks have derived is not kept for them.
  const HybridContext fresh = context;
  std::vector<NamedLoss> losses;
  for (const HybridBlock& block : blocks) {
    BlockResult result =
        recomputes(block) ? run_again_later(block, x, fresh) : block.ptr()->forward(x, context);
    x = std::move(result.hidden);
    for (NamedLoss& loss : result.losses) losses.push_back(std::move(loss));
  }
  if (predicts_more() && stage.is_training() && metadata.targets.defined())
    for (NamedLoss& loss : multi_token_losses(whole_rows(x), context, metadata))
      losses.push_back(std::move(loss));
  x = with_losses(x, losses);
  if (!part.has_head()) return scope.output(own_tokens_of(x));
  return scope.output(logits_of(x));
}

at::Tensor HybridStageImpl::Impl::arrived(const at::Tensor& x) const {
  if (!token_ranks || !x.defined()) return x;
  const std::int64_t ranks = token_ranks->shape()[0];
  if (part.has_embed()) {
    if (x.dim() == 2)
      check_split_length(fmt::format("HybridStage {} of {}: input", part.index, part.count), x.size(1),
                         ranks);
    return x;
  }
  return x.dim() == 3 ? split_rows(x, *token_ranks) : x;
}

// A weight that is split over ranks gives logits that are, by vocabulary.
at::Tensor HybridStageImpl::Impl::logits_of(const at::Tensor& hidden) const {
  const at::Tensor& weight = options.tie_head ? last_embed() : head->weight;
  const at::Tensor x = norm.forward(hidden);
  const LocalRegion region(x, weight, Rows::BatchAndLength);
  return region.leave_split(at::linear(region.enter(x), region.weight(weight)), options.vocabulary);
}

// Divided like the loss of the model: by the tokens of the microbatch, whether their targets count or not.
std::vector<NamedLoss> HybridStageImpl::Impl::multi_token_losses(const at::Tensor& hidden,
                                                                 const HybridContext& context,
                                                                 const HybridMetadata& metadata) {
  return multi_token->forward(
      hidden,
      {.tokens = metadata.tokens,
       .targets = metadata.targets,
       .documents = context.documents,
       .ignored = kIgnoredTarget,
       .divisor = static_cast<double>(hidden.size(0) * hidden.size(1))},
      {.embed = [&](const at::Tensor& tokens) { return whole_rows(embedded(last_embed(), tokens)); },
       .head = [&](const at::Tensor& rows) { return logits_of(rows); },
       .block =
           [&](std::int64_t d, const at::Tensor& rows) {
             const HybridBlock& block = multi_token_blocks[static_cast<std::size_t>(d - 1)];
             const HybridContext own = first_context(context, rows.size(1));
             return recomputes(block) ? run_again_later(block, rows, own) : block.ptr()->forward(rows, own);
           }});
}

// A loss of the model is the mean over its blocks, wherever they are: each stage adds its own terms. They
// enter the backward with the factor of the model's own loss: the loss scale of the step, and the share of
// this run. The runtime divides all gradients by the number of microbatches.
at::Tensor HybridStageImpl::Impl::with_losses(const at::Tensor& hidden,
                                              const std::vector<NamedLoss>& losses) {
  auxiliary.clear();
  if (losses.empty()) return hidden;
  at::Tensor total;
  for (const NamedLoss& loss : losses) {
    const double share = 1 / static_cast<double>(parts.blocks_with(loss.name));
    const double weight = parts.weights.of(loss.name);
    const at::Tensor term = loss.value * (weight * share);
    total = total.defined() ? total + term : term;
    const at::Tensor value = loss.value.detach() * share;
    const auto same = std::find_if(auxiliary.begin(), auxiliary.end(),
                                   [&](const AuxiliaryLoss& each) { return each.name == loss.name; });
    if (same == auxiliary.end())
      auxiliary.push_back({loss.name, value, weight});
    else
      same->value = same->value + value;
  }
  if (!stage.is_training() || !at::GradMode::is_enabled()) return hidden;
  totals.add(auxiliary);
  return inject_loss(hidden, total, scale_of_running_step(total, auxiliary_scale));
}

HybridStageImpl::HybridStageImpl(const HybridOptions& options)
    : HybridStageImpl(options, whole_model(options)) {}

HybridStageImpl::HybridStageImpl(const HybridOptions& options, const StagePart& part)
    : impl_(std::make_unique<Impl>(*this, options, part)) {
  impl_->register_modules();
}

HybridStageImpl::~HybridStageImpl() = default;

const HybridOptions& HybridStageImpl::options() const { return impl_->options; }
const StagePart& HybridStageImpl::part() const { return impl_->part; }
const std::vector<AuxiliaryLoss>& HybridStageImpl::auxiliary_losses() const { return impl_->auxiliary; }
std::vector<AuxiliaryLoss> HybridStageImpl::take_auxiliary_losses() { return impl_->totals.take(); }
void HybridStageImpl::set_recompute(const RecomputePlan& plan) { impl_->recompute = plan; }
void HybridStageImpl::set_auxiliary_scale(double scale) { impl_->auxiliary_scale = scale; }

std::vector<std::shared_ptr<torch::nn::Module>> HybridStageImpl::blocks() const {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (const auto* blocks : {&impl_->blocks, &impl_->multi_token_blocks})
    for (const HybridBlock& block : *blocks) modules.push_back(block.ptr());
  return modules;
}

void HybridStageImpl::set_initial_values(std::uint64_t seed) {
  constexpr double kDeviation = 0.02;
  const c10::AutoGradMode no_grad(false);
  const BlockInit init{
      .seed = seed,
      .deviation = kDeviation,
      .residual = kDeviation / std::sqrt(static_cast<double>(impl_->parts.residuals(impl_->options)))};
  if (!impl_->embed.is_empty()) fill_normal(impl_->embed->weight, "embed.weight", seed, kDeviation);
  impl_->inputs.initialize(init);
  if (!impl_->relations.is_empty()) impl_->relations->initialize(kRelationsName, init);
  for (HybridBlock& block : impl_->blocks) block->initialize(init);
  if (part().has_head()) impl_->norm.initialize("norm", init);
  if (!impl_->head.is_empty()) fill_normal(impl_->head->weight, "head.weight", seed, kDeviation);
  if (!impl_->multi_token.is_empty()) impl_->multi_token->initialize("multi_token", init);
  for (HybridBlock& block : impl_->multi_token_blocks) block->initialize(init);
}

void HybridStageImpl::parallelize(const comm::MeshGroups& mesh) {
  parallelize_hybrid(*this, mesh, impl_->sequence_parallel ? TokensOfRanks::Divided : TokensOfRanks::All);
  if (impl_->sequence_parallel) impl_->token_ranks = mesh.with_mesh(mesh.mesh()["tp"]);
}

void HybridStageImpl::set_sequence_parallel() { impl_->sequence_parallel = true; }

void HybridStageImpl::set_replicas(const comm::Group& replicas) {
  if (impl_->options.balance_scope != "microbatch") return;
  for (const auto& module : modules(/*include_self=*/false))
    if (auto* experts = module->as<ExpertsImpl>()) experts->set_balance_ranks(replicas);
}

at::Tensor HybridStageImpl::forward(at::Tensor x, at::Tensor documents) {
  return forward_with(std::move(x), HybridMetadata{.documents = std::move(documents)});
}

at::Tensor HybridStageImpl::forward_with(at::Tensor x, const Tree& keywords) {
  return forward_with(std::move(x), HybridMetadata::from_keywords(keywords));
}

at::Tensor HybridStageImpl::forward_with(at::Tensor x, const HybridMetadata& metadata) {
  x = impl_->arrived(x);
  impl_->check_input(x, 0);
  impl_->check_known(metadata);
  const HybridMetadata whole = impl_->completed(metadata, x);
  return impl_->run(x, impl_->context_of(x, whole), whole);
}

std::unique_ptr<StageCache> HybridStageImpl::make_cache(std::int64_t capacity) const {
  return std::make_unique<HybridCache>(impl_->options.context, capacity);
}

at::Tensor HybridStageImpl::forward_cached(const at::Tensor& x, StageCache& cache) {
  return forward_cached_with(x, cache, Tree());
}

at::Tensor HybridStageImpl::forward_cached_with(const at::Tensor& x, StageCache& cache,
                                                const Tree& keywords) {
  auto* own = dynamic_cast<HybridCache*>(&cache);
  if (own == nullptr)
    throw TypeError(describe("HybridStage: cache", "a cache of another model", "one of make_cache()"));
  const c10::AutoGradMode no_grad(false);
  impl_->check_input(x, own->seen);
  const HybridMetadata metadata = per_token_metadata(keywords);
  metadata.check(x.size(0), x.size(1));
  at::Tensor result = impl_->run(x, impl_->cached_context_of(x, *own), metadata, own);
  if (part().has_embed()) own->keep_last(x, impl_->inputs.reach());
  own->advance(x.size(1));
  return result;
}

std::vector<Experts> HybridStageImpl::Impl::balanced_experts() const {
  std::vector<Experts> found;
  for (const auto* some : {&blocks, &multi_token_blocks})
    for (const HybridBlock& block : *some)
      if (!block->experts().is_empty() && block->experts()->router_bias.defined())
        found.push_back(block->experts());
  return found;
}

// A list of (name, value, weight).
Tree HybridStageImpl::values_left_by_forward() {
  std::vector<Tree> losses;
  for (const AuxiliaryLoss& loss : impl_->auxiliary)
    losses.push_back(Tree::tuple({Tree(loss.name), Tree(loss.value), Tree(loss.weight)}));
  return Tree::list(std::move(losses));
}

void HybridStageImpl::set_values_left_by_forward(const Tree& values) {
  impl_->auxiliary.clear();
  for (const Tree& loss : values.entries())
    impl_->auxiliary.push_back({loss[0].text(), loss[1].tensor(), loss[2].number()});
  if (!values.entries().empty() && is_training() && at::GradMode::is_enabled())
    impl_->totals.add(impl_->auxiliary);
}

std::vector<StateBuffer> HybridStageImpl::state_buffers() const {
  std::vector<StateBuffer> buffers;
  for (const Experts& experts : impl_->balanced_experts())
    buffers.push_back({experts->layer() + ".router_bias", experts->router_bias});
  return buffers;
}

void HybridStageImpl::after_step(const FinishedStep& step) {
  const std::vector<Experts> all = impl_->balanced_experts();
  if (all.empty()) return;
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> loads;
  for (const Experts& experts : all) loads.push_back(experts->router_load);
  at::Tensor sums = at::stack(loads);
  // A skipped step leaves the bias as it is.
  if (!step.updated)
    sums.zero_();
  else if (step.data_parallel)
    step.data_parallel->all_reduce(sums, comm::ReduceOp::Sum, {.label = "loads of experts", .timeout = {}})
        .wait();
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i]->router_load.copy_(sums[static_cast<std::int64_t>(i)]);
    all[i].ptr()->update_router_bias();
  }
}

at::Tensor HybridStageImpl::separate_last_use(const std::string& tied) {
  if (!is_whole() || !impl_->ties_embed() || impl_->tied_embed.defined() || tied != "embed.weight")
    throw StateError(
        fmt::format("separate_last_use: stage {} of {} does not have both uses of {}, or they are already "
                    "separate",
                    part().index, part().count, tied));
  const at::Tensor& weight = impl_->embed->weight;
  impl_->tied_embed = register_parameter("tied_embed", weight.detach(), weight.requires_grad());
  set_embedding_boundary(impl_->tied_embed,
                         impl_->sequence_parallel ? TokensOfRanks::Divided : TokensOfRanks::All);
  return impl_->tied_embed;
}

}  // namespace penstock::models
