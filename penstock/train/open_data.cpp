// The data of a run: opened, and made first where there are none.
#include <fmt/format.h>

#include <memory>

#include "penstock/base/files.h"
#include "penstock/base/log.h"
#include "penstock/checkpoint/world_meeting.h"
#include "penstock/train/make_shards.h"
#include "penstock/train/token_dataset.h"
#include "penstock/train/trainer.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;

void make_data(const DataConfig& config, const fs::path& folder) {
  if (file_exists(folder)) return;  // of a run that is resumed: shards appear as a whole
  MakeShardsOptions options;
  options.sources.paths.assign(config.sources.begin(), config.sources.end());
  options.sources.extensions = config.extensions;
  options.sources.cap_bytes = static_cast<std::uint64_t>(config.cap_bytes);
  options.sources.skip_bad_files = config.skip_bad_files;
  const MadeShards made = make_shards(folder, options);
  for (const BadFile& file : made.bad) log().warn("data: skipped {}: {}", file.path.string(), file.why);
  log().info("data: {} tokens of {} files", made.tokens, made.documents);
}

std::shared_ptr<const Sampler> sampler_of(const TrainConfig& config, const fs::path& folder, Split split) {
  const double fraction = config.data.validation_fraction;
  return std::make_shared<const Sampler>(TokenDataset::open(folder, split, fraction),
                                         SamplerOptions{.context = config.model.context, .seed = static_cast<std::uint64_t>(config.training.seed), .shuffle = split != Split::Validation});
}

}  // namespace

TrainingData open_data(const comm::World& world, const TrainConfig& config, const fs::path& folder) {
  const bool made_here = config.data.shards.empty();
  const fs::path shards = made_here ? folder / "data" : fs::path(config.data.shards);
  checkpoint::WorldMeeting meeting(world);
  meeting.agree("making the training data", [&] {
    if (made_here && world.rank() == 0) make_data(config.data, shards);
  });
  TrainingData data;
  meeting.agree("opening the training data", [&] {
    const bool validates = config.data.validation_fraction > 0;
    data.training = sampler_of(config, shards, validates ? Split::Training : Split::All);
    if (validates) data.validation = sampler_of(config, shards, Split::Validation);
  });
  return data;
}

}  // namespace penstock::train
