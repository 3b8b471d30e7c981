// A model and data so small that a training run takes a fraction of a second in any layout.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "penstock/train/data/make_shards.h"
#include "penstock/train/data/sampler.h"
#include "penstock/train/data/token_dataset.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/structure_metadata.h"
#include "penstock/train_config.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {

// Text of several documents, so that masks and ignored targets matter.
struct SmallData {
  SmallData() {
    for (int file = 0; file < 24; ++file) {
      std::string text;
      for (int line = 0; line < 12; ++line)
        text += "int value_" + std::to_string(file * line % 7) + " = " + std::to_string(file + line) + ";\n";
      folder.write("text/" + std::to_string(file) + ".h",
                   text.substr(0, static_cast<std::size_t>(40 + 17 * file)));
    }
    train::MakeShardsOptions options;
    options.sources.paths = {folder / "text"};
    train::make_shards(folder / "shards", options);
  }
  train::TrainingData open(const train::TrainConfig& config) const {
    const auto sampler = [&](train::DataSplit split) {
      return std::make_shared<const train::Sampler>(
          train::TokenDataset::open(folder / "shards", split, 0.3),
          train::SamplerOptions{.context = config.model.context,
                                .seed = 5,
                                .shuffle = split == train::DataSplit::Training,
                                .cpp_structure = train::trains_on_structure(config)});
    };
    return {sampler(train::DataSplit::Training), sampler(train::DataSplit::Validation)};
  }
  ScratchFolder folder;
};

inline const SmallData& small_data() {
  static const SmallData data;
  return data;
}

struct Layout {
  std::string name;
  int pp = 1, virtual_stages = 1, dp = 1, tp = 1;
  std::string schedule = "1F1B";
  int microbatch_size = 2;
  int accumulation = 1;
  int microbatches = 4;
};

inline train::ResolvedConfig resolved_config_of(const Layout& layout,
                                                const std::vector<std::string>& more = {}) {
  std::vector<std::string> arguments{"--preset",
                                     "tiny",
                                     "--model.width",
                                     "16",
                                     "--layers",
                                     "4",
                                     "--heads",
                                     "2",
                                     "--key_value_heads",
                                     "2",
                                     "--feed_width",
                                     "32",
                                     "--context",
                                     "16",
                                     "--validate_batches",
                                     "2",
                                     "--warmup_steps",
                                     "2",
                                     "--model.vocabulary",
                                     "260",
                                     "--pp",
                                     std::to_string(layout.pp),
                                     "--virtual_stages",
                                     std::to_string(layout.virtual_stages),
                                     "--dp",
                                     std::to_string(layout.dp),
                                     "--tp",
                                     std::to_string(layout.tp),
                                     "--schedule",
                                     layout.schedule,
                                     "--microbatches",
                                     std::to_string(layout.microbatches),
                                     "--microbatch_size",
                                     std::to_string(layout.microbatch_size),
                                     "--accumulation",
                                     std::to_string(layout.accumulation),
                                     "--steps",
                                     "20",
                                     "--layout.device",
                                     "cpu"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return train::parse_config("", "test", arguments);
}

inline train::TrainConfig config_of(const Layout& layout, const std::vector<std::string>& more = {}) {
  return resolved_config_of(layout, more).config;
}

}  // namespace penstock::test
