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
#include "penstock/models/blocks/experts.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/models/hybrid/hybrid_block.h"
#include "penstock/models/hybrid/hybrid_parallel.h"
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

// Keys and values of attention blocks, states of state-space blocks.
class HybridCache : public StageCache {
 public:
  HybridCache(std::int64_t context, std::int64_t capacity) : keys(context, capacity) {}
  std::int64_t length() const override { return seen; }

  KvCache keys;
  StateSpaceCache states;
  std::int64_t seen = 0;
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
    for (std::int64_t block = part.first_block; block < part.end_block; ++block)
      if (parts.kind(block) == BlockKind::Attention && !rotary)
        rotary.emplace(parts.attention.head_width, options.context, options.rope_theta);
  }

  void register_modules();
  // `before`: number of tokens in the cache.
  void check_input(const at::Tensor& x, std::int64_t before) const;
  // Rotary turns of the tokens of x, after `before` others; undefined if no block needs them.
  at::Tensor turns_of(const at::Tensor& x, std::int64_t before);
  at::Tensor run(const at::Tensor& input, const HybridContext& context);
  at::Tensor with_losses(const at::Tensor& hidden, const std::vector<NamedLoss>& losses);
  const at::Tensor& head_weight() const {
    return !options.tie_head ? head->weight : tied_head.defined() ? tied_head : embed->weight;
  }

  HybridStageImpl& stage;
  HybridOptions options;
  HybridParts parts;
  StagePart part;
  std::optional<Rotary> rotary;  // if this stage has attention
  torch::nn::Embedding embed{nullptr};
  std::vector<HybridBlock> blocks;
  AnyNorm norm;
  torch::nn::Linear head{nullptr};
  at::Tensor tied_head;  // after separate_last_use
  double auxiliary_scale = 1;
  std::vector<AuxiliaryLoss> auxiliary;
};

void HybridStageImpl::Impl::register_modules() {
  if (part.has_embed() || (part.has_head() && options.tie_head))
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

at::Tensor HybridStageImpl::Impl::run(const at::Tensor& input, const HybridContext& context) {
  const ForwardScope scope(stage);
  at::Tensor x = scope.input(input);
  if (part.has_embed()) {
    static const std::int64_t kPlace = layer_from_name("embed");
    x = at::embedding(embed->weight, x);
    if (options.embed_scale) x = x * std::sqrt(static_cast<double>(options.width));
    x = drop(x, options.dropout, kPlace, stage.is_training());
  }
  std::vector<NamedLoss> losses;
  for (HybridBlock& block : blocks) {
    BlockResult result = block->forward(x, context);
    x = std::move(result.hidden);
    for (NamedLoss& loss : result.losses) losses.push_back(std::move(loss));
  }
  x = with_losses(x, losses);
  if (!part.has_head()) return scope.output(x);
  x = norm.forward(x);
  const LocalRegion region(x, head_weight(), Rows::BatchAndLength);
  return scope.output(
      region.leave_split(at::linear(region.enter(x), region.weight(head_weight())), options.vocabulary));
}

// A loss of the model is the mean over its blocks, wherever they are: each stage adds its own terms. They
// enter the backward with the factor of the model's own loss: the loss scale of the step, and the share of
// this run. The runtime divides all gradients by the number of microbatches.
at::Tensor HybridStageImpl::Impl::with_losses(const at::Tensor& hidden,
                                              const std::vector<NamedLoss>& losses) {
  auxiliary.clear();
  if (losses.empty()) return hidden;
  const double share = 1 / static_cast<double>(std::count(parts.pattern.blocks.begin(),
                                                          parts.pattern.blocks.end(), BlockKind::Experts));
  at::Tensor total;
  for (const NamedLoss& loss : losses) {
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
  for (const HybridBlock& block : impl_->blocks) modules.push_back(block.ptr());
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
}

void HybridStageImpl::parallelize(const comm::MeshGroups& mesh) { parallelize_hybrid(*this, mesh); }

void HybridStageImpl::set_replicas(const comm::Group& replicas) {
  if (impl_->options.balance_scope != "microbatch") return;
  for (const auto& module : modules(/*include_self=*/false))
    if (auto* experts = module->as<ExpertsImpl>()) experts->set_balance_ranks(replicas);
}

at::Tensor HybridStageImpl::forward(at::Tensor x, at::Tensor documents) {
  impl_->check_input(x, 0);
  const std::int64_t length = x.size(1);
  if (!documents.defined() && impl_->options.bos_token > 0 && part().has_embed())
    documents = documents_from_bos(x, impl_->options.bos_token);
  if (documents.defined() && (documents.dim() != 2 || documents.size(0) != x.size(0) ||
                              documents.size(1) != length || documents.is_floating_point()))
    throw ValueError(describe("documents", input_text(documents),
                              fmt::format("integers [{}, {}], one for each token", x.size(0), length)));
  return impl_->run(x, {.attention = {.turns = impl_->turns_of(x, 0),
                                      .mask = documents.defined() ? AttentionMask::within_documents(documents)
                                                                  : AttentionMask::causal(length, length)},
                        .documents = documents});
}

at::Tensor HybridStageImpl::forward_with(at::Tensor x, const Tree& keywords) {
  at::Tensor documents;
  if (!keywords.is_none()) {
    for (const std::string& name : keywords.keys()) {
      if (name != "documents")
        throw ValueError(describe("HybridStage: keyword argument", fmt::format("'{}'", name), "documents"));
      if (!keywords["documents"].is_none()) documents = keywords["documents"].tensor();
    }
  }
  return forward(std::move(x), std::move(documents));
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
  at::Tensor result = impl_->run(x, {.attention = {.turns = impl_->turns_of(x, before),
                                                   .mask = AttentionMask::causal(added, before + added),
                                                   .cache = &own->keys},
                                     .documents = {},
                                     .states = &own->states});
  own->keys.advance(added);
  own->states.advance(added);
  own->seen += added;
  return result;
}

at::Tensor HybridStageImpl::separate_last_use(const std::string& tied) {
  if (!is_whole() || !options().tie_head || impl_->tied_head.defined() || tied != "embed.weight")
    throw StateError(
        fmt::format("separate_last_use: stage {} of {} does not have both uses of {}, or they are already "
                    "separate",
                    part().index, part().count, tied));
  const at::Tensor& weight = impl_->embed->weight;
  impl_->tied_head = register_parameter("tied_head", weight.detach(), weight.requires_grad());
  return impl_->tied_head;
}

}  // namespace penstock::models
