#include "penstock/train/config/compiled_fields.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "penstock/base/text.h"
#include "penstock/train/config/config_fields.h"

namespace penstock::train {
namespace {

// All settings of the model decide what it computes, new ones too; the preset is a name for values of others.
bool decides_graphs(const ConfigField& field) {
  if (field.section == "model") return field.key != "preset";
  // Not the device, which keys and manifests hold by its model.
  constexpr std::array<std::string_view, 20> kOthers = {
      "layout.pp",
      "layout.virtual_stages",
      "layout.dp",
      "layout.shard",
      "layout.ep",
      "layout.tp",
      "layout.sequence_parallel",
      "layout.schedule",
      "layout.microbatches",
      "layout.microbatch_size",
      "layout.partition",
      "training.accumulation",
      "training.precision",
      "training.compile",
      "training.compile_exact",
      "training.activation_budget",
      "training.activation_policy",
      "training.disable_passes",
      "data.document_mask",
      "data.structure",
  };
  return std::find(kOthers.begin(), kOthers.end(), field.name()) != kOthers.end();
}

}  // namespace

std::vector<std::pair<std::string, std::string>> compiled_fields(const TrainConfig& config) {
  std::vector<std::pair<std::string, std::string>> fields;
  for (const ConfigField& field : config_fields()) {
    if (!decides_graphs(field)) continue;
    const FieldData value = field.get(config);
    const auto* text = std::get_if<std::string>(&value);
    // Where a schedule was read from does not matter, only its stages, which are a field of their own.
    const bool from_file = field.name() == "layout.schedule" && text != nullptr &&
                           (text->find('/') != std::string::npos || to_lower(*text).ends_with(".csv"));
    fields.emplace_back(field.name(), from_file ? "a file" : text != nullptr ? *text : to_toml(value));
  }
  return fields;
}

}  // namespace penstock::train
