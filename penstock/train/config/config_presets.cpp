#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/train/config/config_fields.h"

namespace penstock::train {

const std::vector<ConfigPreset>& config_presets() {
  static const std::vector<ConfigPreset> kPresets = {
      {"tiny",
       "1.6 million parameters, a plain transformer; about two minutes on two cores. The default value of "
       "every "
       "other key",
       {}},
      {"small",
       "24 million parameters; hours on a desktop CPU, minutes on a GPU",
       {{"model.width", "512"},
        {"model.layers", "8"},
        {"model.heads", "8"},
        {"model.key_value_heads", "4"},
        {"model.feed_width", "1408"},
        {"model.context", "512"},
        {"layout.microbatch_size", "4"},
        {"training.steps", "2000"},
        {"training.lr", "1e-3"},
        {"training.warmup_steps", "100"},
        {"training.validate_every", "200"},
        {"data.cap_bytes", "67108864"},
        {"checkpoint.every", "500"}}},
      {"gpt2-124m",
       "124 million parameters, the sizes of GPT-2's smallest model; for one GPU",
       {{"model.vocabulary", "50304"},  // 50257, rounded up for the tensor cores
        {"model.width", "768"},
        {"model.layers", "12"},
        {"model.heads", "12"},
        {"model.key_value_heads", "12"},
        {"model.feed_width", "2048"},
        {"model.context", "1024"},
        {"layout.pp", "1"},
        {"layout.microbatches", "2"},
        {"layout.microbatch_size", "16"},
        {"training.steps", "2000"},
        {"training.lr", "6e-4"},
        {"training.warmup_steps", "100"},
        {"training.precision", "bf16"},
        {"training.validate_every", "200"},
        {"data.cap_bytes", "0"},
        {"data.document_mask", "false"},
        {"checkpoint.every", "500"}}},
      {"hybrid-tiny",
       "1 million parameters, 0.4 million of them active: attention, experts, state space, and the structure "
       "of the "
       "text; about two minutes on two cores",
       {{"model.pattern", "AEME"},
        {"model.attention_feed", "false"},
        {"model.width", "128"},
        {"model.heads", "4"},
        {"model.key_value_heads", "2"},
        {"model.feed_width", "256"},
        {"model.experts", "8"},
        {"model.top_k", "2"},
        {"model.expert_width", "128"},
        {"model.state_size", "32"},
        {"model.state_head_width", "32"},
        {"model.state_chunk", "64"},
        {"model.structure_embedding", "true"},
        {"training.steps", "240"},
        {"training.lr", "4e-3"}}},
      {"hybrid-52",
       "AEME x 13, width 1,024, 64 experts of width 512, top 2; for several GPUs",
       {{"model.pattern", "AEMEAEMEAEMEAEMEAEMEAEMEAEMEAEMEAEMEAEMEAEMEAEMEAEME"},
        {"model.attention_feed", "false"},
        {"model.vocabulary", "50304"},
        {"model.width", "1024"},
        {"model.heads", "16"},
        {"model.key_value_heads", "16"},
        {"model.feed_width", "2816"},
        {"model.experts", "64"},
        {"model.top_k", "2"},
        {"model.expert_width", "512"},
        {"model.context", "1024"},
        {"training.lr", "3e-4"},
        {"training.steps", "2000"},
        {"training.warmup_steps", "100"},
        {"training.precision", "bf16"},
        {"training.validate_every", "200"},
        {"data.cap_bytes", "0"},
        {"checkpoint.every", "500"}}},
      {"llama-1b",
       "1.3 billion parameters: width 2,048, 24 layers; for one GPU",
       {{"model.vocabulary", "50304"},
        {"model.width", "2048"},
        {"model.layers", "24"},
        {"model.heads", "16"},
        {"model.key_value_heads", "16"},
        {"model.feed_width", "5632"},
        {"model.context", "1024"},
        {"layout.pp", "1"},
        {"layout.microbatches", "4"},
        {"layout.microbatch_size", "8"},
        {"training.steps", "2000"},
        {"training.lr", "3e-4"},
        {"training.warmup_steps", "100"},
        {"training.precision", "bf16"},
        {"training.validate_every", "200"},
        {"data.cap_bytes", "0"},
        {"data.document_mask", "false"},
        {"checkpoint.every", "500"}}},
      {"mixtral-small",
       "(AE) x 12, width 768, 8 experts of width 2,048, top 2; for one GPU",
       {{"model.pattern", "AEAEAEAEAEAEAEAEAEAEAEAE"},
        {"model.attention_feed", "false"},
        {"model.vocabulary", "50304"},
        {"model.width", "768"},
        {"model.heads", "12"},
        {"model.key_value_heads", "12"},
        {"model.feed_width", "2048"},
        {"model.experts", "8"},
        {"model.top_k", "2"},
        {"model.expert_width", "2048"},
        {"model.context", "1024"},
        {"layout.pp", "1"},
        {"layout.microbatches", "2"},
        {"layout.microbatch_size", "16"},
        {"training.steps", "2000"},
        {"training.lr", "6e-4"},
        {"training.warmup_steps", "100"},
        {"training.precision", "bf16"},
        {"training.validate_every", "200"},
        {"data.cap_bytes", "0"},
        {"data.document_mask", "false"},
        {"checkpoint.every", "500"}}},
      {"mamba2-130m",
       "M x 24, width 768, state 128; for one GPU",
       {{"model.pattern", "MMMMMMMMMMMMMMMMMMMMMMMM"},
        {"model.attention_feed", "false"},
        {"model.vocabulary", "50304"},
        {"model.width", "768"},
        {"model.heads", "12"},
        {"model.key_value_heads", "12"},
        {"model.context", "1024"},
        {"layout.pp", "1"},
        {"layout.microbatches", "2"},
        {"layout.microbatch_size", "16"},
        {"training.steps", "2000"},
        {"training.lr", "6e-4"},
        {"training.warmup_steps", "100"},
        {"training.precision", "bf16"},
        {"training.validate_every", "200"},
        {"data.cap_bytes", "0"},
        {"checkpoint.every", "500"}}},
  };
  return kPresets;
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const ConfigPreset& preset : config_presets()) names.emplace_back(preset.name);
  return names;
}

const ConfigPreset& find_preset(std::string_view name, std::string_view where) {
  const std::string lower = to_lower(name);
  for (const ConfigPreset& preset : config_presets()) {
    if (preset.name == lower) return preset;
  }
  const std::string nearest = nearest_name(lower, preset_names());
  throw ConfigError(describe(fmt::format("{}: model.preset", where), fmt::format("\"{}\"", name),
                             fmt::format("one of {}", fmt::join(preset_names(), ", ")),
                             nearest.empty() ? "" : fmt::format("did you mean {}?", nearest)));
}

}  // namespace penstock::train
