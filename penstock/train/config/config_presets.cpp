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
      {"tiny", "1.6 million parameters; about two minutes on two cores. The default value of every key", {}},
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
