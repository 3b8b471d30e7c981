#include "penstock/models/blocks/state_space.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/module_scope.h"
#include "penstock/tensor_parallel.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/kernels/fused_math.h"
#include "penstock/torch/kernels/rms_norm.h"
#include "penstock/torch/scan/causal_convolution.h"
#include "penstock/torch/scan/selective_scan.h"

namespace penstock::models {
namespace {

// Initial values: the decay of a head, and the step of a token whose projection is zero.
constexpr double kLeastDecay = 1, kMostDecay = 16;
constexpr double kLeastStep = 1e-3, kMostStep = 1e-1;

// From so many tokens on, all projections are one product.
constexpr std::int64_t kTokensOfOneProduct = 64;

// The part of a parameter that this rank holds.
at::Tensor local_part(const at::Tensor& parameter) {
  return is_dtensor(parameter) ? to_local(parameter) : parameter;
}

// The inputs of a convolution that precede what follows the first `counted` tokens of x [batch, length,
// channels], where `older` [batch, taps - 1, channels] precede x.
at::Tensor inputs_before(const at::Tensor& older, const at::Tensor& x, const at::Tensor& counted) {
  const at::Tensor places = at::arange(older.size(1), counted.options()).add(counted.unsqueeze(1));
  return at::cat({older, x}, 1)
      .gather(1, places.unsqueeze(-1).expand({older.size(0), older.size(1), older.size(2)}));
}

// Of a convolution, the part that this rank holds.
struct LocalTaps {
  at::Tensor weight, bias;
};

CausalConvolution convolution(const at::Tensor& x, const LocalTaps& taps, const at::Tensor& documents) {
  return {.x = x, .weight = taps.weight, .bias = taps.bias, .documents = documents, .silu = true};
}

}  // namespace

// ---- parameters ----

ChannelTapsImpl::ChannelTapsImpl(std::int64_t channels, std::int64_t taps)
    : channels_(channels), taps_(taps) {
  reset();
}

void ChannelTapsImpl::reset() {
  const double bound = 1 / std::sqrt(static_cast<double>(taps_));
  weight = register_parameter("weight", at::empty({channels_, taps_}).uniform_(-bound, bound));
  bias = register_parameter("bias", at::empty({channels_}).uniform_(-bound, bound));
}

StateSpaceImpl::StateSpaceImpl(const StateSpaceOptions& options, std::int64_t block)
    : options_(options), block_(block) {
  options_.check();
  reset();
}

void StateSpaceImpl::reset() {
  const std::int64_t width = options_.width, inner = options_.inner(), keys = options_.key_width(),
                     heads = options_.heads(), taps = options_.state_kernel;
  const auto linear = [](std::int64_t in, std::int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  };
  gate = register_module("gate", linear(width, inner));
  value = register_module("value", linear(width, inner));
  key = register_module("key", linear(width, keys));
  query = register_module("query", linear(width, keys));
  step = register_module("step", linear(width, heads));
  value_convolution = register_module("value_convolution", ChannelTaps(inner, taps));
  key_convolution = register_module("key_convolution", ChannelTaps(keys, taps));
  query_convolution = register_module("query_convolution", ChannelTaps(keys, taps));
  norm = register_module("norm", RmsNorm(inner, options_.norm_epsilon));
  output = register_module("output", linear(inner, width));
  step_bias = register_parameter("step_bias", at::full({heads}, std::log(std::expm1(kLeastStep))));
  decay_log = register_parameter("decay_log", at::zeros({heads}));
  skip = register_parameter("skip", at::ones({heads}));
}

void StateSpaceImpl::initialize(const std::string& name, const BlockInit& init) {
  const auto full = [&](const std::string& part) { return name + "." + part; };
  for (const auto& item : named_children()) {
    if (const auto* linear = item.value()->as<torch::nn::LinearImpl>()) {
      fill_normal(linear->weight, full(item.key() + ".weight"), init.seed,
                  item.key() == "output" ? init.residual : init.deviation);
    } else if (const auto* taps = item.value()->as<ChannelTapsImpl>()) {
      const double bound = 1 / std::sqrt(static_cast<double>(options_.state_kernel));
      fill_uniform(taps->weight, full(item.key() + ".weight"), init.seed, -bound, bound);
      fill_uniform(taps->bias, full(item.key() + ".bias"), init.seed, -bound, bound);
    }
  }
  fill_uniform(decay_log, full("decay_log"), init.seed, kLeastDecay, kMostDecay);
  fill_uniform(step_bias, full("step_bias"), init.seed, std::log(kLeastStep), std::log(kMostStep));
  const c10::AutoGradMode no_grad(false);
  local_part(decay_log).log_();
  local_part(step_bias).exp_().expm1_().log_();  // softplus of it is the step
  local_part(skip).fill_(1);
  local_part(norm->weight).fill_(1);
}

// ---- forward ----

// The parameters of this rank: of its heads and their groups.
struct StateSpaceImpl::Weights {
  at::Tensor gate, value, key, query, step, output, norm;
  LocalTaps value_taps, key_taps, query_taps;
  at::Tensor step_bias, decay_log, skip;
  std::int64_t heads = 0, groups = 0;
};

StateSpaceImpl::Weights StateSpaceImpl::weights(const LocalRegion& region) const {
  const auto own = [&](const at::Tensor& parameter) { return region.weight(parameter); };
  Weights weights;
  weights.heads = local_part(step->weight).size(0);
  weights.groups = std::max<std::int64_t>(1, options_.state_groups * weights.heads / options_.heads());
  // With fewer groups than ranks every rank has all keys and queries, and uses those of its heads.
  const bool shared = is_dtensor(key->weight) && placements_of(key->weight).at(0).is_replicate();
  const std::int64_t first_head =
      shared ? mesh_of(key->weight).coordinate().at(0) * weights.heads : std::int64_t{0};
  const std::int64_t group = first_head * options_.state_groups / options_.heads();
  const auto of_groups = [&](const at::Tensor& parameter) {
    if (!shared) return own(parameter);
    return region.shared_weight(parameter).narrow(0, group * options_.state_size,
                                                  weights.groups * options_.state_size);
  };
  weights.gate = own(gate->weight);
  weights.value = own(value->weight);
  weights.key = of_groups(key->weight);
  weights.query = of_groups(query->weight);
  weights.step = own(step->weight);
  weights.output = own(output->weight);
  weights.norm = own(norm->weight);
  weights.value_taps = {own(value_convolution->weight), own(value_convolution->bias)};
  weights.key_taps = {of_groups(key_convolution->weight), of_groups(key_convolution->bias)};
  weights.query_taps = {of_groups(query_convolution->weight), of_groups(query_convolution->bias)};
  weights.step_bias = own(step_bias);
  weights.decay_log = own(decay_log);
  weights.skip = own(skip);
  return weights;
}

struct StateSpaceImpl::Projected {
  at::Tensor gate, value, key, query;  // [batch, length, ...]
  at::Tensor steps;                    // [batch, length, heads], float32 (or float64)
};

// One product for all projections: the activation is read once, and its gradient is one product, too. For few
// tokens reading the weights is what takes time, and they are not joined first.
StateSpaceImpl::Projected StateSpaceImpl::project(const at::Tensor& x, const Weights& own) const {
  if (x.dim() != 3 || x.size(2) != options_.width || x.numel() == 0)
    throw ValueError(describe(fmt::format("blocks.{}: state space, hidden states", block_),
                              fmt::format("{} dims, {} elements", x.dim(), x.numel()),
                              fmt::format("[batch, length, {}], at least one token", options_.width)));
  std::vector<at::Tensor> weights, parts;
  std::vector<std::int64_t> widths;
  for (const at::Tensor& weight : {own.gate, own.value, own.key, own.query, own.step}) {
    weights.push_back(cast_once(weight));
    widths.push_back(weight.size(0));
  }
  const at::Tensor in = cast_once(x);
  if (x.size(0) * x.size(1) >= kTokensOfOneProduct)
    parts = at::split_with_sizes(at::linear(in, at::cat(weights)), widths, 2);
  else
    for (const at::Tensor& weight : weights) parts.push_back(at::linear(in, weight));
  const at::ScalarType real = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {.gate = parts[0],
          .value = parts[1],
          .key = parts[2],
          .query = parts[3],
          .steps = at::softplus(parts[4].to(real) + own.step_bias.to(real))};
}

at::Tensor StateSpaceImpl::forward(const at::Tensor& x, const at::Tensor& documents, StateSpaceCache* cache,
                                   const at::Tensor& counted) {
  const ModuleScope running(*this);
  const LocalRegion region(x, gate->weight, Rows::Batch);
  const Weights own = weights(region);
  const Projected in = project(region.enter(x), own);
  const at::Tensor mixed = cache != nullptr ? mix_after(in, own, documents, cache->memory_of(block_), counted)
                                            : mix(in, own, documents);
  const at::Tensor gated = silu_product(in.gate, mixed.reshape(in.gate.sizes()));
  return region.leave_sum(at::linear(normalized(gated, own, region), own.output));
}

// The norm of all heads: over ranks, the mean square needs a sum.
at::Tensor StateSpaceImpl::normalized(const at::Tensor& x, const Weights& own,
                                      const LocalRegion& region) const {
  if (!region.is_split()) return rms_norm(x, own.norm, options_.norm_epsilon);
  const at::ScalarType real = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor wide = x.to(real);
  const at::Tensor squares = region.sum_over_ranks(wide.square().sum(-1, /*keepdim=*/true));
  const at::Tensor scale = at::rsqrt(squares / static_cast<double>(options_.inner()) + options_.norm_epsilon);
  return (wide * scale * own.norm.to(real)).to(x.scalar_type());
}

// The scan of whole rows: [batch, length, heads, head width].
at::Tensor StateSpaceImpl::mix(const Projected& in, const Weights& own, const at::Tensor& documents) const {
  const std::int64_t batch = in.value.size(0), length = in.value.size(1);
  const std::vector<std::int64_t> keys{batch, length, own.groups, options_.state_size};
  const at::Tensor values = causal_convolution(convolution(in.value, own.value_taps, documents));
  return selective_scan(
             {.values = values.view({batch, length, own.heads, options_.state_head_width}),
              .steps = in.steps,
              .decay = at::exp(own.decay_log).neg(),
              .keys = causal_convolution(convolution(in.key, own.key_taps, documents)).view(keys),
              .queries = causal_convolution(convolution(in.query, own.query_taps, documents)).view(keys),
              .skip = own.skip,
              .documents = documents,
              .initial_state = {},
              .chunk = options_.state_chunk})
      .values;
}

// The same for tokens that follow those in memory. A token that does not count has a step of 0, which leaves
// the state as it is, is in the document of the last one that counts, and is not among the last inputs.
at::Tensor StateSpaceImpl::mix_after(const Projected& in, const Weights& own,
                                     const at::Tensor& given_documents, StateSpaceMemory& memory,
                                     const at::Tensor& counted) const {
  at::Tensor documents = given_documents;
  const c10::AutoGradMode no_grad(false);
  const std::int64_t batch = in.value.size(0), length = in.value.size(1), before = options_.state_kernel - 1;
  StateSpaceMemory now = memory;
  if (!now.state.defined()) {
    const auto zeros = [&](const at::Tensor& like) {
      return at::zeros({batch, before, like.size(2)}, like.options());
    };
    now = {.values = zeros(in.value),
           .keys = zeros(in.key),
           .queries = zeros(in.query),
           .documents = documents.defined()
                            ? documents.narrow(1, 0, 1).expand({batch, std::max<std::int64_t>(before, 1)})
                            : at::Tensor(),
           .state = at::zeros({batch, own.heads, options_.state_head_width, options_.state_size},
                              in.steps.options())};
  }
  if (now.state.size(0) != batch)
    throw ValueError(describe("StateSpaceCache: batch", fmt::format("{}", batch),
                              fmt::format("{}, as before", now.state.size(0)), "clear() the cache first"));
  if (now.documents.defined() != documents.defined())
    throw ValueError(describe("StateSpaceCache: documents", documents.defined() ? "given" : "none",
                              now.documents.defined() ? "given, as before" : "none, as before",
                              "pass documents with every piece of a row or with none"));
  at::Tensor steps = in.steps;
  if (counted.defined()) {
    const at::Tensor places = at::arange(length, counted.options()), count = counted.unsqueeze(1);
    steps = steps.masked_fill(places.ge(count).unsqueeze(-1), 0);
    if (documents.defined()) {
      const std::int64_t older = now.documents.size(1);
      documents = at::cat({now.documents, documents.to(now.documents.scalar_type())}, 1)
                      .gather(1, at::minimum(places, count.sub(1)).add(older));
    }
  }
  const at::Tensor seen =
      documents.defined() ? now.documents.narrow(1, now.documents.size(1) - before, before) : at::Tensor();
  const auto convolve = [&](const at::Tensor& x, const LocalTaps& taps, at::Tensor& last) {
    ConvolutionPiece piece = causal_convolution_step(convolution(x, taps, documents), last, seen);
    last = counted.defined() ? inputs_before(last, x, counted)
                             : piece.memory.clone();  // not a view of all tokens of a prompt
    return piece.y;
  };
  const std::vector<std::int64_t> keys{batch, length, own.groups, options_.state_size};
  SelectiveScan scan{.values = convolve(in.value, own.value_taps, now.values)
                                   .view({batch, length, own.heads, options_.state_head_width}),
                     .steps = steps,
                     .decay = at::exp(own.decay_log).neg(),
                     .keys = convolve(in.key, own.key_taps, now.keys).view(keys),
                     .queries = convolve(in.query, own.query_taps, now.queries).view(keys),
                     .skip = own.skip,
                     .documents = documents,
                     .initial_state = now.state,
                     .chunk = options_.state_chunk};
  if (documents.defined()) {
    // The scan lets the first token continue from the state, so a document that begins there is told here.
    const at::Tensor same = documents.select(1, 0).eq(now.documents.select(1, now.documents.size(1) - 1));
    scan.initial_state = at::where(same.view({batch, 1, 1, 1}), now.state, at::zeros_like(now.state));
    const at::Tensor all = at::cat({now.documents, documents.to(now.documents.scalar_type())}, 1);
    now.documents =
        counted.defined()
            ? all.gather(1, at::arange(now.documents.size(1), counted.options()).add(counted.unsqueeze(1)))
            : all.narrow(1, length, now.documents.size(1)).clone();
    if (length == 1) scan.documents = at::Tensor();
  }
  const ScanResult result = length == 1 ? selective_scan_step(scan) : selective_scan(scan);
  now.state = result.state;
  memory = now;
  return result.values;
}

// ---- tensor parallel ----

void parallelize_state_space(StateSpaceImpl& block, const comm::MeshGroups& mesh) {
  const std::int64_t ranks = mesh.shape().at(0);
  block.options().check_tensor_parallel(ranks);
  const auto split = [&](const at::Tensor& parameter, std::int64_t dim) {
    distribute_parameter(parameter, mesh, {Shard{dim}});
  };
  const bool by_groups = block.options().state_groups % ranks == 0;
  const auto groups = [&](const at::Tensor& parameter) {
    distribute_parameter(parameter, mesh, {by_groups ? Placement(Shard{0}) : Placement(Replicate{})});
  };
  for (const torch::nn::Linear& part : {block.gate, block.value, block.step}) split(part->weight, 0);
  for (const at::Tensor& parameter : {block.value_convolution->weight, block.value_convolution->bias,
                                      block.step_bias, block.decay_log, block.skip, block.norm->weight})
    split(parameter, 0);
  split(block.output->weight, 1);
  for (const torch::nn::Linear& part : {block.key, block.query}) groups(part->weight);
  for (const ChannelTaps& taps : {block.key_convolution, block.query_convolution}) {
    groups(taps->weight);
    groups(taps->bias);
  }
}

}  // namespace penstock::models
