#include "penstock/train/job/host_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/kernels/attention_scores.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/process_memory.h"
#include "penstock/train/job/stage_copies.h"
#include "penstock/world.h"

namespace penstock::train {

namespace {

constexpr double kFloat = 4;

// In double, because the product of the largest valid sizes overflows 64 bits. Matrices only.
double letter_parameters(char letter, const ModelConfig& model) {
  const auto width = static_cast<double>(model.width), feed = static_cast<double>(model.feed_width);
  switch (letter) {
    case 'A': {
      const double keys =
          width / static_cast<double>(model.heads) * static_cast<double>(model.key_value_heads);
      return 2 * width * width + 2 * keys * width + (model.attention_feed ? 3 * feed * width : 0);
    }
    case 'M': {
      const double inner = width * static_cast<double>(model.state_expand);
      return 3 * width * inner +
             2 * width * static_cast<double>(model.state_groups) * static_cast<double>(model.state_size);
    }
    case 'E':
      return 3 * width * (model.expert_width > 0 ? static_cast<double>(model.expert_width) : feed) *
             static_cast<double>(model.experts);
    case 'F':
      return 3 * feed * width;
    default:
      return 0;  // where a stage ends
  }
}

// Of all blocks, and of the largest.
struct BlockParameters {
  double all = 0, largest = 0;
};
// `expert_parts`: ranks over which the experts are divided.
BlockParameters block_parameters(const ModelConfig& model, std::int64_t expert_parts = 1) {
  if (model.pattern.empty()) {
    const double each = letter_parameters('A', model);
    return {.all = each * static_cast<double>(model.layers), .largest = each};
  }
  BlockParameters sum;
  for (const char letter : model.pattern) {
    const double each = letter_parameters(letter, model);
    sum.all += letter == 'E' ? each / static_cast<double>(expert_parts) : each;
    sum.largest = std::max(sum.largest, each);
  }
  return sum;
}

// Whether a block computes with all pairs of tokens: attention without a window.
bool has_all_pairs(const ModelConfig& model) {
  const bool attends = model.pattern.empty() || model.pattern.find('A') != std::string::npos;
  return attends && (model.windows.empty() ||
                     std::find(model.windows.begin(), model.windows.end(), 0) != model.windows.end());
}

double embedding_parameters(const ModelConfig& model) {
  return static_cast<double>(model.vocabulary) * static_cast<double>(model.width);
}

double square(std::int64_t value) { return static_cast<double>(value) * static_cast<double>(value); }

std::string key_text(const char* key, std::int64_t value) { return fmt::format("model.{} = {}", key, value); }

void add_activations(MinimumMemory& need, const TrainConfig& config, double rows) {
  const ModelConfig& model = config.model;
  const double positions = rows * static_cast<double>(model.context);
  need.parts.push_back(
      {fmt::format("the logits of {:.0f} tokens, {}", positions, key_text("vocabulary", model.vocabulary)),
       "lower model.vocabulary, model.context or layout.microbatch_size",
       kFloat * positions * static_cast<double>(model.vocabulary) / static_cast<double>(config.layout.tp)});
  need.parts.push_back(
      {fmt::format("hidden states of {:.0f} tokens, {}", positions, key_text("width", model.width)),
       "lower model.width, model.context or layout.microbatch_size",
       kFloat * positions * static_cast<double>(model.width)});
  if (attention_materializes_scores() && has_all_pairs(model))
    need.parts.push_back({fmt::format("the attention scores of {}", key_text("context", model.context)),
                          "lower model.context or layout.microbatch_size",
                          kFloat * rows * static_cast<double>(model.heads) /
                              static_cast<double>(config.layout.tp) * square(model.context)});
  // One byte for each pair of tokens, computed from their document numbers.
  if (config.data.document_mask && has_all_pairs(model))
    need.parts.push_back({fmt::format("the attention mask of {}", key_text("context", model.context)),
                          "lower model.context, or set data.document_mask to false",
                          rows * square(model.context)});
}

}  // namespace

double MinimumMemory::bytes() const {
  double sum = 0;
  for (const Part& part : parts) sum += part.bytes;
  return sum;
}

MinimumMemory minimum_memory(const TrainConfig& config, std::int64_t ranks) {
  const ModelConfig& model = config.model;
  const LayoutConfig& layout = config.layout;
  const double states = config.training.optimizer == "adamw" ? 2 : config.training.momentum > 0 ? 1 : 0;
  // Parameters, gradients and optimizer state; each group of `shard` replicas has one copy, distributed over
  // the pipeline and the tensor-parallel ranks, or two in a bidirectional schedule. `ranks` of these are on
  // this machine.
  const double copies = static_cast<double>(copies_of_model(layout)) * static_cast<double>(layout.dp) /
                        static_cast<double>(layout.shard) * static_cast<double>(ranks) /
                        static_cast<double>(layout.ranks);
  const double each = kFloat * (2 + states) * copies;
  MinimumMemory need;
  need.parts.push_back({fmt::format("blocks with gradients and optimizer, {} of {}",
                                    key_text("layers", model.layers), key_text("width", model.width)),
                        "lower model.layers, model.width or model.feed_width",
                        each * block_parameters(model, layout.shard == 1 ? layout.ep : 1).all});
  need.parts.push_back({fmt::format("the embedding with gradients and optimizer, {}",
                                    key_text("vocabulary", model.vocabulary)),
                        "lower model.vocabulary or model.width",
                        each * (model.tie_head ? 1 : 2) * embedding_parameters(model)});
  // At least one microbatch is in flight somewhere; the rank of the last stage is unknown here.
  if (ranks == layout.ranks) add_activations(need, config, static_cast<double>(layout.microbatch_size));
  return need;
}

MinimumMemory minimum_memory_of_parts(const TrainConfig& config) {
  const ModelConfig& model = config.model;
  MinimumMemory need;
  need.parts.push_back({fmt::format("a block with its gradients, {}", key_text("width", model.width)),
                        "lower model.width or model.feed_width",
                        kFloat * 2 * block_parameters(model).largest});
  need.parts.push_back(
      {fmt::format("the embedding with its gradients, {}", key_text("vocabulary", model.vocabulary)),
       "lower model.vocabulary or model.width", kFloat * 2 * embedding_parameters(model)});
  add_activations(need, config, 1);
  // Parts are measured one after the other: only the largest must fit.
  const auto largest = std::max_element(need.parts.begin(), need.parts.end(),
                                        [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  return {{*largest}};
}

MinimumMemory minimum_memory_of_capture(const TrainConfig& config) {
  const ModelConfig& model = config.model;
  MinimumMemory need;
  need.parts.push_back({fmt::format("{} blocks of {}", model.layers, key_text("width", model.width)),
                        "lower model.layers, model.width or model.feed_width",
                        kFloat * block_parameters(model).all});
  need.parts.push_back({fmt::format("the embedding, {}", key_text("vocabulary", model.vocabulary)),
                        "lower model.vocabulary or model.width",
                        kFloat * (model.tie_head ? 1 : 2) * embedding_parameters(model)});
  // One rotation of each pair of features at each position, and the tokens themselves.
  need.parts.push_back({fmt::format("rotary positions, {}", key_text("context", model.context)),
                        "lower model.context",
                        kFloat * static_cast<double>(model.context) * static_cast<double>(model.width) /
                            static_cast<double>(model.heads)});
  need.parts.push_back(
      {fmt::format("tokens and targets, layout.microbatch_size = {}", config.layout.microbatch_size),
       "lower layout.microbatch_size or model.context",
       16.0 * static_cast<double>(config.layout.microbatch_size) * static_cast<double>(model.context)});
  return need;
}

MinimumMemory minimum_memory_of_stage(const TrainConfig& config) {
  const ModelConfig& model = config.model;
  const LayoutConfig& layout = config.layout;
  const auto ranks = static_cast<double>(layout.tp);
  // Some stage has at least the average of the blocks.
  const auto stages = static_cast<double>(layout.pp * layout.virtual_stages);
  const std::vector<MinimumMemory::Part> parts = {
      {fmt::format("the blocks of a stage, {} of {} in {:.0f} stages", key_text("layers", model.layers),
                   key_text("width", model.width), stages),
       "lower model.layers, model.width or model.feed_width, or raise layout.pp",
       kFloat * block_parameters(model).all / stages / ranks},
      {fmt::format("the embedding, {}", key_text("vocabulary", model.vocabulary)),
       "lower model.vocabulary or model.width", kFloat * embedding_parameters(model) / ranks},
      {fmt::format("tokens of a microbatch, layout.microbatch_size = {}", layout.microbatch_size),
       "lower layout.microbatch_size or model.context",
       48.0 * static_cast<double>(layout.microbatch_size) * static_cast<double>(model.context)}};
  // They need not be in one stage.
  return {{*std::max_element(parts.begin(), parts.end(),
                             [](const auto& a, const auto& b) { return a.bytes < b.bytes; })}};
}

void require_memory(const MinimumMemory& need, std::int64_t available_bytes) {
  const double bytes = need.bytes();
  if (available_bytes <= 0 || need.parts.empty() || bytes <= static_cast<double>(available_bytes)) return;
  const auto text = [](double value) {
    return format_bytes(static_cast<std::uint64_t>(std::min(value, 9e18)));
  };
  const auto largest = std::max_element(need.parts.begin(), need.parts.end(),
                                        [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  throw ConfigError(describe(
      "memory",
      fmt::format("a need of at least {}, {} of it for {}", text(bytes), text(largest->bytes), largest->what),
      fmt::format("at most the {} of this machine", text(static_cast<double>(available_bytes))),
      largest->remedy));
}

void require_precision(const TrainConfig& config, at::Device device) {
  const std::string& precision = config.training.precision;
  if (precision == "fp32" || can_autocast(device.type(), precision == "bf16" ? at::kBFloat16 : at::kHalf))
    return;
  throw ConfigError(describe("training.precision",
                             fmt::format("{} on {}", precision, device.is_cpu() ? "the CPU" : "this device"),
                             device.is_cpu() ? "fp32 or bf16, with this LibTorch" : "fp32",
                             device.is_cpu() ? "set training.precision to bf16, or train on a GPU"
                                             : "set training.precision to fp32"));
}

void check_host(const TrainConfig& config, std::int64_t ranks) {
  const at::Device device = configured_device(config.layout, comm::World::fake(0, static_cast<int>(ranks)));
  require_precision(config, device);
  if (device.is_cpu()) require_memory(minimum_memory(config, ranks), machine_memory_bytes());
}

}  // namespace penstock::train
