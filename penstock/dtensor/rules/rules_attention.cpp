// Fused attention: batch and heads may be split, sequences may not. Masks and biases are split likewise if
// they have these dims.
//
// query (batch, heads, length, width), key and value (batch, heads, length, width), output like query,
// logsumexp (batch, heads, length or more). Keys may have fewer heads than queries, each for a group of them:
// then a split must not divide such a group.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/dtensor/tensor/strategy_builder.h"
#include "penstock/errors.h"

namespace penstock::detail {
namespace {

constexpr std::array kHeadTensors{"query", "key", "value", "out", "grad_out", "grad_out_", "logsumexp"};
constexpr std::array kBiases{"attn_bias", "attn_mask"};

struct Heads {
  explicit Heads(const ShardingCall& call) {
    const auto& query = input_named(call, "query")->whole.shape;
    const auto& key = input_named(call, "key")->whole.shape;
    scores = {query[0], query[1], query[2], key[2]};
    keys = key[1];
  }
  // Whether a result has a heads dim, of queries or of keys, and is not the state of a generator.
  bool owns(const std::vector<std::int64_t>& shape) const {
    return shape.size() >= 3 && shape[0] == scores[0] && (shape[1] == scores[1] || shape[1] == keys);
  }
  std::vector<std::int64_t> scores;  // (batch, heads, queries, keys)
  std::int64_t keys = 0;
};

const ShardingInput* bias_of(const ShardingCall& call) {
  for (const char* name : kBiases)
    if (const ShardingInput* bias = input_named(call, name)) return bias;
  return nullptr;
}

std::vector<AxisStrategy> strategies(const ShardingCall& call, const Heads& heads, bool split_heads,
                                     bool bias_gradient) {
  std::vector<AxisStrategy> all;
  for (std::int64_t dim = 0; dim < (split_heads ? 2 : 1); ++dim) {
    StrategyBuilder strategy(call);
    for (const char* name : kHeadTensors) strategy.in(name, Shard{dim});
    const ShardingInput* bias = bias_of(call);
    const auto own = bias ? broadcast_dim(bias->whole.shape, dim, heads.scores) : std::nullopt;
    for (const char* name : kBiases)
      if (own) strategy.in(name, Shard{*own});
    for (std::size_t i = 0; i < call.outputs.size(); ++i)
      if (heads.owns(call.outputs[i].shape)) strategy.out(static_cast<int>(i), Shard{dim});
    if (bias_gradient)
      strategy.out(static_cast<int>(call.outputs.size()) - 1,
                   own ? Placement(Shard{*own}) : Placement(Partial{}));
    strategy.add_to(all);
  }
  return all;
}

Sharding attention(const ShardingCall& call) {
  // It would draw from each rank's own generator: replicated results would differ, and split ones would
  // repeat each other.
  if (const auto& dropout = call.argument("dropout_p"); dropout.isDouble() && dropout.toDouble() > 0)
    throw NotImplemented(
        fmt::format("{}: dropout {} inside fused attention of distributed tensors; set it to 0, or write the "
                    "attention as matmul, softmax, "
                    "dropout, matmul",
                    call.traits.name, dropout.toDouble()));
  const Heads heads(call);
  const bool bias_gradient = call.has_argument("grad_input_mask") && bias_of(call) &&
                             call.argument("grad_input_mask").toBoolList()[3];
  Sharding sharding = choose(call, strategies(call, heads, true, bias_gradient));
  if (heads.keys == heads.scores[1]) return sharding;
  if (const std::int64_t parts = plain_parts(call, sharding, "query", 1);
      heads.keys % parts != 0 || heads.scores[1] % parts != 0)
    sharding = choose(call, strategies(call, heads, false, bias_gradient));
  return sharding;
}

// Kernels reject an empty batch or no heads. The results are then empty, and the others have their usual
// values: no boundaries of packed sequences, the lengths of the others, a random state that is not read.
// Undefined results of the schema have a 0 in `given`; results that are not tensors are lengths, of queries
// and then of keys.
ShardingRule attention_giving(std::string given) {
  return [given = std::move(given)](const ShardingCall& call) {
    Sharding sharding = attention(call);
    const Heads heads(call);
    const auto query = static_cast<std::size_t>(call.index_at(call.argument_index("query")));
    const auto local = local_shape(call, call.inputs[query].whole.shape, sharding.inputs[query]);
    if (call.inputs[query].whole.numel() == 0 || std::find(local.begin(), local.end(), 0) == local.end())
      return sharding;
    PENSTOCK_INVARIANT(given.size() == call.traits.returns.size(),
                       fmt::format("the rule of {} lists all its results", call.traits.name));
    sharding.local = [given, lengths = std::array{heads.scores[2], heads.scores[3]}](
                         const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
      Stack results;
      std::size_t output = 0, number = 0;
      for (std::size_t i = 0; i < given.size(); ++i) {
        if (op.schema().returns()[i].type()->kind() != c10::TypeKind::TensorType) {
          results.emplace_back(lengths.at(number++));
        } else if (given[i] == '0' || output == context.call.outputs.size()) {
          results.emplace_back(at::Tensor());
        } else {
          const GlobalGeometry& whole = context.call.outputs[output];
          results.emplace_back(at::zeros(local_shape(context.call, whole.shape, context.outputs[output]),
                                         at::TensorOptions(whole.dtype).device(whole.device)));
          ++output;
        }
      }
      *stack = std::move(results);
    };
    return sharding;
  };
}

}  // namespace

void add_attention_rules(RuleTable& table) {
  const RuleOptions options{.numbers_matter = true};
  table.add({"_scaled_dot_product_flash_attention"}, attention_giving("1100__111"), options);
  table.add({"_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
             "_scaled_dot_product_flash_attention_for_cpu_backward"},
            attention_giving("111"), options);
  table.add({"_scaled_dot_product_cudnn_attention"}, attention_giving("1100__110"), options);
  table.add({"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"},
            attention_giving("1111"), options);
  table.add({"_scaled_dot_product_flash_attention_for_cpu"}, attention_giving("11"), options);
}

}  // namespace penstock::detail
