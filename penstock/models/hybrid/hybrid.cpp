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
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/models/blocks/any_norm.h"
#include "penstock/models/blocks/attention_metadata.h"
#include "penstock/models/blocks/auxiliary_loss.h"
#include "penstock/models/blocks/block.h"
#include "penstock/models/blocks/multi_token_prediction.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/models/hybrid/hybrid_block.h"
#include "penstock/models/hybrid/routed_context.h"
#include "penstock/models/plan/hybrid_parts.h"
#include "penstock/random.h"
#include "penstock/step_context.h"

namespace penstock::models {
namespace {

// Holds blocks under their indices in the whole model; a ModuleList would count from 0.
class NumberedHybridBlocks : public torch::nn::Module {
 public:
  void add(const HybridBlock& block) { register_module(std::to_string(block->number()), block); }
};

// Keys and values of attention blocks, states of state-space blocks, choices of mixtures of depths.
class HybridCache : public StageCache {
 public:
  HybridCache(std::int64_t context, std::int64_t capacity) : keys(context, capacity) {}
  std::int64_t length() const override { return seen; }

  KvCache keys;
  StateSpaceCache states;
  DepthCache depths;
  std::int64_t seen = 0;
};

// What multi-token prediction needs besides the hidden states; undefined tensors: it is not computed.
struct KnownTokens {
  at::Tensor tokens;   // [batch, length]
  at::Tensor targets;  // Long [batch, length]: the token after each one
};

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
    bool attends = predicts_more() && parts.multi_token_kind == BlockKind::Attention;
    for (std::int64_t block = part.first_block; block < part.end_block; ++block)
      attends = attends || parts.kind(block) == BlockKind::Attention;
    if (attends) rotary.emplace(parts.attention.head_width, options.context, options.rope_theta);
  }

  void register_modules();
  // `before`: number of tokens in the cache.
  void check_input(const at::Tensor& x, std::int64_t before) const;
  // Rotary turns of the tokens of x, after `before` others; undefined if no block needs them.
  at::Tensor turns_of(const at::Tensor& x, std::int64_t before);
  at::Tensor forward(const at::Tensor& x, at::Tensor documents, const KnownTokens& known);
  at::Tensor run(const at::Tensor& input, const HybridContext& context, const KnownTokens& known);
  at::Tensor with_losses(const at::Tensor& hidden, const std::vector<NamedLoss>& losses);
  // Of tokens [batch, length], with the weight of the first or of the last stage.
  at::Tensor embedded(const at::Tensor& weight, const at::Tensor& tokens) const;
  at::Tensor logits_of(const at::Tensor& hidden) const {
    return at::linear(norm.forward(hidden), options.tie_head ? last_embed() : head->weight);
  }
  // Whether the last stage uses the weight of the embedding, and whether this stage predicts further tokens.
  bool ties_embed() const { return options.tie_head || parts.multi_token.depth > 0; }
  bool predicts_more() const { return part.has_head() && parts.multi_token.depth > 0; }
  std::vector<NamedLoss> multi_token_losses(const at::Tensor& hidden, const HybridContext& context,
                                            const KnownTokens& known);
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
  std::vector<HybridBlock> blocks;
  AnyNorm norm;
  torch::nn::Linear head{nullptr};
  MultiTokenPrediction multi_token{nullptr};  // at the last stage, with a block for each depth
  std::vector<HybridBlock> multi_token_blocks;
  at::Tensor tied_embed;  // after separate_last_use
  double auxiliary_scale = 1;
  std::vector<AuxiliaryLoss> auxiliary;
};

void HybridStageImpl::Impl::register_modules() {
  if (part.has_embed() || (part.has_head() && ties_embed()))
    embed = stage.register_module(
        "embed", torch::nn::Embedding(torch::nn::EmbeddingOptions(options.vocabulary, options.width)));
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
      part.has_embed() ? x.new_empty({0}, x.options().dtype(embed->weight.scalar_type())) : x;
  return rotary->turns(before, x.size(1), like);
}

at::Tensor HybridStageImpl::Impl::embedded(const at::Tensor& weight, const at::Tensor& tokens) const {
  const at::Tensor x = at::embedding(weight, tokens);
  return options.embed_scale ? x * std::sqrt(static_cast<double>(options.width)) : x;
}

at::Tensor HybridStageImpl::Impl::run(const at::Tensor& input, const HybridContext& context,
                                      const KnownTokens& known) {
  const ForwardScope scope(stage);
  at::Tensor x = scope.input(input);
  if (part.has_embed()) {
    static const std::int64_t kPlace = layer_from_name("embed");
    x = embedded(embed->weight, x);
    x = drop(x, options.dropout, kPlace, stage.is_training());
  }
  std::vector<NamedLoss> losses;
  for (HybridBlock& block : blocks) {
    BlockResult result = block->forward(x, context);
    x = std::move(result.hidden);
    for (NamedLoss& loss : result.losses) losses.push_back(std::move(loss));
  }
  if (known.targets.defined())
    for (NamedLoss& loss : multi_token_losses(x, context, known)) losses.push_back(std::move(loss));
  x = with_losses(x, losses);
  if (!part.has_head()) return scope.output(x);
  return scope.output(logits_of(x));
}

// Divided like the loss of the model: by the tokens of the microbatch, whether their targets count or not.
std::vector<NamedLoss> HybridStageImpl::Impl::multi_token_losses(const at::Tensor& hidden,
                                                                 const HybridContext& context,
                                                                 const KnownTokens& known) {
  return multi_token->forward(
      hidden,
      {.tokens = known.tokens,
       .targets = known.targets,
       .documents = context.documents,
       .ignored = kIgnoredTarget,
       .divisor = static_cast<double>(hidden.size(0) * hidden.size(1))},
      {.embed = [&](const at::Tensor& tokens) { return embedded(last_embed(), tokens); },
       .head = [&](const at::Tensor& rows) { return logits_of(rows); },
       .block =
           [&](std::int64_t d, const at::Tensor& rows) {
             return multi_token_blocks[static_cast<std::size_t>(d - 1)]->forward(
                 rows, first_context(context, rows.size(1)));
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
  return inject_loss(hidden, total, auxiliary_scale * StepContext::current()->loss_scale);
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
  for (HybridBlock& block : impl_->blocks) block->initialize(init);
  if (part().has_head()) impl_->norm.initialize("norm", init);
  if (!impl_->head.is_empty()) fill_normal(impl_->head->weight, "head.weight", seed, kDeviation);
  if (!impl_->multi_token.is_empty()) impl_->multi_token->initialize("multi_token", init);
  for (HybridBlock& block : impl_->multi_token_blocks) block->initialize(init);
}

at::Tensor HybridStageImpl::forward(at::Tensor x, at::Tensor documents) {
  return impl_->forward(x, std::move(documents), {});
}

at::Tensor HybridStageImpl::Impl::forward(const at::Tensor& x, at::Tensor documents,
                                          const KnownTokens& known) {
  check_input(x, 0);
  const std::int64_t length = x.size(1);
  if (!documents.defined() && options.bos_token > 0 && part.has_embed())
    documents = documents_from_bos(x, options.bos_token);
  if (documents.defined() && (documents.dim() != 2 || documents.size(0) != x.size(0) ||
                              documents.size(1) != length || documents.is_floating_point()))
    throw ValueError(describe("documents", input_text(documents),
                              fmt::format("integers [{}, {}], one for each token", x.size(0), length)));
  const bool predicts = predicts_more() && stage.is_training();
  if (predicts && !known.targets.defined() && at::GradMode::is_enabled())
    throw ValueError(
        describe("HybridStage in training mode", "no targets",
                 "the keywords \"tokens\" and \"targets\", for model.multi_token_depth",
                 "pass them to forward_with(), as TrainableModel::inputs() does, or call eval()"));
  return run(x,
             {.attention = {.turns = turns_of(x, 0),
                            .mask = documents.defined() ? AttentionMask::within_documents(documents)
                                                        : AttentionMask::causal(length, length)},
              .documents = documents},
             predicts ? known : KnownTokens{});
}

at::Tensor HybridStageImpl::forward_with(at::Tensor x, const Tree& keywords) {
  at::Tensor documents;
  KnownTokens known;
  if (!keywords.is_none()) {
    for (const std::string& name : keywords.keys()) {
      at::Tensor* place = name == "documents" ? &documents
                          : name == "tokens"  ? &known.tokens
                          : name == "targets" ? &known.targets
                                              : nullptr;
      if (place == nullptr)
        throw ValueError(describe("HybridStage: keyword argument", fmt::format("'{}'", name),
                                  "documents, tokens or targets"));
      if (!keywords[name].is_none()) *place = keywords[name].tensor();
    }
  }
  if (known.tokens.defined() != known.targets.defined())
    throw ValueError(describe("HybridStage: keyword arguments tokens and targets", "one of them",
                              "both or neither, for multi-token prediction"));
  return impl_->forward(x, std::move(documents), known);
}

std::unique_ptr<StageCache> HybridStageImpl::make_cache(std::int64_t capacity) const {
  return std::make_unique<HybridCache>(impl_->options.context, capacity);
}

at::Tensor HybridStageImpl::forward_cached(const at::Tensor& x, StageCache& cache) {
  auto* own = dynamic_cast<HybridCache*>(&cache);
  if (own == nullptr)
    throw TypeError(describe("HybridStage: cache", "a cache of another model", "one of make_cache()"));
  const c10::AutoGradMode no_grad(false);
  const std::int64_t added = x.size(1), before = own->seen;
  impl_->check_input(x, before);
  at::Tensor result = impl_->run(x,
                                 {.attention = {.turns = impl_->turns_of(x, before),
                                                .mask = AttentionMask::causal(added, before + added),
                                                .cache = &own->keys},
                                  .documents = {},
                                  .states = &own->states,
                                  .depths = &own->depths},
                                 {});
  own->keys.advance(added);
  own->states.advance(added);
  own->seen += added;
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
  else
    for (const comm::Group& group : step.data_parallel)
      group.all_reduce(sums, comm::ReduceOp::Sum, {.label = "loads of experts", .timeout = {}}).wait();
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
  return impl_->tied_embed;
}

}  // namespace penstock::models
