// Trains a model of your own with Penstock's trainer, with all its schedules, checkpoints and layouts. The
// model mixes every token with the one before it.
//   ./run launch -n 2 -- build/release/bin/own_model RUN_FOLDER --data README.md --pp 2 --steps 20
#include <torch/torch.h>

#include <cstdio>

#include "examples/failure.h"
#include "penstock/penstock.h"

using namespace penstock;

struct MixStage : models::ModelStage {  // some of the blocks; embedding and head at the ends
  MixStage(const models::StagePart& which, const models::ModelPlan& sizes) : part_(which), sizes_(sizes) {
    if (which.has_embed())
      embed = register_module("embed", torch::nn::Embedding(sizes.vocabulary, sizes.width));
    for (std::int64_t i = which.first_block; i < which.end_block; ++i)
      mixes.push_back(
          register_module("mix" + std::to_string(i), torch::nn::Linear(2 * sizes.width, sizes.width)));
    if (which.has_head()) head = register_module("head", torch::nn::Linear(sizes.width, sizes.vocabulary));
  }
  const models::StagePart& part() const override { return part_; }
  std::int64_t context() const override { return sizes_.context; }
  at::Tensor forward_with(at::Tensor x, const Tree&) override {
    if (embed) x = embed->forward(x);
    for (torch::nn::Linear& mix : mixes) {
      const at::Tensor before = at::constant_pad_nd(x.narrow(1, 0, x.size(1) - 1), {0, 0, 1, 0});
      x = x + at::gelu(mix->forward(at::cat({before, x}, -1)));
    }
    return head ? head->forward(x) : x;
  }
  void set_initial_values(std::uint64_t seed) override {
    const torch::NoGradGuard no_grad;
    for (auto& each : named_parameters())
      keyed_normal_(each.value(), {.seed = seed, .layer = layer_from_name(each.key())}, 0, 0.05);
  }
  models::StagePart part_;
  models::ModelPlan sizes_;
  torch::nn::Embedding embed{nullptr};
  std::vector<torch::nn::Linear> mixes;
  torch::nn::Linear head{nullptr};
};

struct MixModel : models::TrainableModel {
  explicit MixModel(const train::ModelConfig& model)
      : sizes{.vocabulary = model.vocabulary, .width = model.width, .context = model.context},
        whole(plan_from_stages(sizes, model.layers, "mix",
                               [this](const auto& part) { return make_stage(part); })) {}
  const models::ModelPlan& plan() const override { return whole; }
  std::shared_ptr<models::ModelStage> make_stage(const models::StagePart& part) const override {
    return std::make_shared<MixStage>(part, sizes);
  }
  models::ModelPlan sizes, whole;
};

struct PrintLoss : train::Observer {
  void on_step(const train::StepOutcome& outcome, const train::StepExtras&) override {
    std::printf("step %d  loss %.4f\n", int(outcome.step), outcome.loss);
  }
};

int main(int argc, char** argv) try {
  if (argc < 2) return std::fprintf(stderr, "usage: own_model RUN_FOLDER [--KEY VALUE ...]\n"), 2;
  train::register_model("mix", [](const auto& config) { return std::make_shared<MixModel>(config.model); });
  train::ConfigSources sources{.file = {}, .arguments = {argv + 2, argv + argc}};
  sources.arguments.insert(sources.arguments.end(), {"--model.type", "mix"});
  PrintLoss print;
  train::Trainer(comm::World::from_env(), train::load_config(sources).config, argv[1], {&print}).run();
} catch (...) {
  return failure("own_model");
}
