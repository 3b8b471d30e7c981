#include "penstock/train/job/load_model.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/checkpoint/files/folder.h"
#include "penstock/checkpoint/files/rank_agreement.h"
#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/load.h"
#include "penstock/checkpoint/tensors/tensor_part.h"
#include "penstock/errors.h"
#include "penstock/train/config/run_config.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/run_folder.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;

checkpoint::Checkpoint open_newest(const fs::path& run, const TrainConfig& config) {
  const fs::path folder = checkpoint_folder(config, run);
  checkpoint::SingleRankAgreement alone;
  auto opened =
      checkpoint::open_latest(alone, folder, {.verify = true, .allow_fallback = config.checkpoint.fallback});
  if (!opened)
    throw ConfigError(describe("checkpoints of the run", folder.string(), "at least one checkpoint",
                               "train first, or give the path of a checkpoint"));
  return std::move(opened->checkpoint);
}

}  // namespace

LoadedModel load_model(const fs::path& path, at::Device device) {
  const bool is_checkpoint = checkpoint::step_of_folder_name(path.filename().string()).has_value();
  const fs::path run = is_checkpoint ? fs::absolute(path).parent_path().parent_path() : path;
  if (!contains_run(run))
    throw ConfigError(describe("run folder", run.string(), "a folder with a config.toml",
                               "give the folder of a run (runs/...) or a checkpoint in it"));
  const TrainConfig config = load_run_config(run).config;
  checkpoint::SingleRankAgreement alone;
  const checkpoint::Checkpoint opened =
      is_checkpoint ? checkpoint::open_checkpoint(alone, path) : open_newest(run, config);
  const std::shared_ptr<models::TrainableModel> trainable = configured_model(config);
  const std::shared_ptr<models::ModelStage> model = trainable->make_stage(whole_model(trainable->plan()));
  model->to(device);
  std::vector<checkpoint::TensorPart> parts;
  for (const auto& entry : model->named_parameters())
    parts.push_back(checkpoint::tensor_part(entry.key(), entry.value()));
  for (const models::StateBuffer& buffer : model->state_buffers())
    parts.push_back(checkpoint::tensor_part(buffer.name, buffer.tensor));
  checkpoint::load_into(alone, opened, checkpoint::Section::Model, parts);
  model->eval();
  return {model, config, opened.path(), opened.step()};
}

}  // namespace penstock::train
