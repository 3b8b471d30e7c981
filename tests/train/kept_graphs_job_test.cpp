// Training with graphs that an earlier run has stored, in the cache folder or in an artifact: nothing is
// captured, and losses, gradients and parameters have the bits of a run that captures. Artifacts that do not
// fit are refused by name, on every rank.
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/random.h"
#include "penstock/train/config/compiled_fields.h"
#include "penstock/train/config/configured_schedule.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/stage_graphs.h"
#include "penstock/train/job/write_artifact.h"
#include "penstock/trainable_model.h"
#include "penstock/trainer.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/hybrid_job.h"

namespace penstock::train {
namespace kept_graphs_job_test {

using namespace penstock::test;
namespace fs = std::filesystem;

const Options kGraph = {"--compile", "graph"};

// PENSTOCK_CACHE for a scope.
class CacheFolder {
 public:
  explicit CacheFolder(const fs::path& folder) { ::setenv("PENSTOCK_CACHE", folder.c_str(), 1); }
  ~CacheFolder() { ::unsetenv("PENSTOCK_CACHE"); }
  CacheFolder(const CacheFolder&) = delete;
  CacheFolder& operator=(const CacheFolder&) = delete;
};

TrainedJob train(const Layout& layout, const Options& options, int steps = 3) {
  return train_job(layout, options,
                   {.steps = steps, .validates = true, .validates_first = true, .keeps = {.local = true}});
}

TrainedJob train_cached(const fs::path& folder, const Layout& layout, const Options& options) {
  const CacheFolder cache(folder);
  return train(layout, options);
}

void expect_same(const TrainedJob& ours, const TrainedJob& captured) {
  EXPECT_EQ(ours.losses(), captured.losses());
  EXPECT_EQ(ours.norms(), captured.norms());
  EXPECT_EQ(ours.validation, captured.validation);
  EXPECT_GT(captured.local.size(), 20u);
  expect_equal_tensors(ours.local, captured.local);
  expect_equal_tensors(ours.buffers, captured.buffers);
  ASSERT_EQ(ours.steps.size(), captured.steps.size());
  for (std::size_t i = 0; i < captured.steps.size(); ++i) {
    ASSERT_EQ(ours.steps[i].auxiliary.size(), captured.steps[i].auxiliary.size());
    for (std::size_t k = 0; k < captured.steps[i].auxiliary.size(); ++k)
      EXPECT_EQ(ours.steps[i].auxiliary[k].value, captured.steps[i].auxiliary[k].value);
  }
}

// One graph of every stage for training and one for validation, none of them captured.
void expect_loaded(const TrainedJob& job, const Layout& layout, const std::string& source) {
  EXPECT_EQ(job.steps.at(0).loads, 2 * layout.pp * layout.virtual_stages * layout.dp * layout.tp);
  for (const StepOutcome& step : job.steps) {
    EXPECT_EQ(step.first_captures, 0);
    EXPECT_EQ(step.recaptures, 0);
  }
  for (std::size_t i = 1; i < job.steps.size(); ++i) EXPECT_EQ(job.steps[i].loads, 0);
  ASSERT_FALSE(job.steps[0].compiled.empty());
  for (const CompiledForward& forward : job.steps[0].compiled) {
    EXPECT_EQ(forward.source, source);
    EXPECT_GE(forward.nodes, 10);
  }
}

// Everything that a forward reads or writes besides its arguments.
const Options kEverything =
    with(with(hybrid_blocks(), hybrid_losses()), {"--router_bias_rate", "0.002", "--dropout", "0.1"});
const Options kTransformer = {"--dropout", "0.1"};
const Options kNoDropout = {"--dropout", "0"};

struct Case {
  Layout layout;
  Options options;
};

class KeptGraphs : public ::testing::TestWithParam<Case> {};

TEST_P(KeptGraphs, HaveTheBitsOfCapturedOnes) {
  const Layout& layout = GetParam().layout;
  const Options options = with(GetParam().options, kGraph);
  const ScratchFolder folder;
  const TrainedJob captured = train(layout, options);
  const TrainedJob cold = train_cached(folder / "cache", layout, options);
  expect_same(cold, captured);
  EXPECT_GT(cold.steps.at(0).first_captures, 0);
  const TrainedJob warm = train_cached(folder / "cache", layout, options);
  expect_same(warm, captured);
  expect_loaded(warm, layout, "cache");
  const WrittenArtifact written = write_artifact(config_of(layout, options), folder / "artifact");
  EXPECT_EQ(written.stages, static_cast<std::size_t>(layout.pp * layout.virtual_stages));
  const TrainedJob prepared = train(layout, with(options, {"--artifact", (folder / "artifact").string()}));
  expect_same(prepared, captured);
  expect_loaded(prepared, layout, "artifact");
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, KeptGraphs,
    ::testing::Values(
        Case{{.name = "Transformer"}, kTransformer}, Case{{.name = "Everything"}, kEverything},
        Case{{.name = "Untied"}, with(kEverything, {"--tie_head", "false"})},
        Case{{.name = "OneF1B", .pp = 2}, kEverything},
        Case{{.name = "GPipe", .pp = 2, .schedule = "GPipe"}, kTransformer},
        Case{{.name = "Interleaved", .pp = 2, .virtual_stages = 2, .schedule = "Interleaved1F1B"},
             kEverything},
        Case{{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"}, kEverything},
        Case{{.name = "DualPipe", .pp = 2, .virtual_stages = 2, .schedule = "DualPipe"}, kTransformer},
        Case{{.name = "StagesOfOneRank", .pp = 1, .virtual_stages = 2, .schedule = "Interleaved1F1B"},
             kTransformer},
        Case{{.name = "Accumulated", .pp = 2, .accumulation = 2}, kEverything},
        Case{{.name = "Replicated", .dp = 2}, kTransformer},
        Case{{.name = "ReplicatedWithoutDropout", .dp = 2}, kNoDropout},
        Case{{.name = "Sharded", .dp = 2}, with(kTransformer, {"--shard", "2"})},
        Case{{.name = "ShardedStages", .pp = 2, .dp = 2}, with(kNoDropout, {"--shard", "2"})},
        Case{{.name = "Bfloat16", .pp = 2}, with(kEverything, {"--precision", "bf16"})}),
    [](const auto& info) { return info.param.layout.name; });

// Ranks that need the same graph capture it once: replicas without dropout.
TEST(KeptGraphsOfReplicas, AreCapturedOnce) {
  const ScratchFolder folder;
  const Layout layout{.name = "dp4", .dp = 4};
  const TrainedJob cold = train_cached(folder / "cache", layout, with(kNoDropout, kGraph));
  EXPECT_EQ(cold.steps.at(0).first_captures, 2);
  EXPECT_EQ(cold.steps[0].loads, 2 * 3);
  const TrainedJob own = train_cached(folder / "others", layout, with(kTransformer, kGraph));
  EXPECT_EQ(own.steps.at(0).first_captures, 2 * 4);  // dropout: every replica has its own rows
}

// The last rank of a pipeline waits while the stages before it look up their graphs, one after the other.
TEST(KeptGraphsOfStages, AreWaitedForWithinTheTimeoutOfTheRun) {
  const TrainConfig config = config_of({.name = "pp2", .pp = 2}, kGraph);
  const schedule::Schedule schedule = configured_schedule(config.layout);
  const comm::World world = comm::World::fake(0, 2);
  const StageGraphs graphs =
      stage_graphs_of(RankLayout(world, config.layout), config, schedule, *configured_model(config), nullptr);
  std::chrono::milliseconds all{0};
  for (int stage = 0; stage < 2; ++stage) {
    EXPECT_GT(graphs.cache_of(stage).longest_wait.count(), 0);
    all += graphs.cache_of(stage).longest_wait;
  }
  EXPECT_LE(all, world.group().timeout() / 3);
}

TEST(KeptGraphsOfReplicas, HaveOneArtifactUnlessTheyDependOnRows) {
  const ScratchFolder folder;
  const Layout layout{.name = "dp2", .dp = 2};
  EXPECT_EQ(write_artifact(config_of(layout, with(kNoDropout, kGraph)), folder / "one").graphs, 2u);
  std::vector<std::string> doing;
  EXPECT_EQ(write_artifact(config_of(layout, with(kTransformer, kGraph)), folder / "two",
                           [&](const ArtifactProgress& now) {
                             EXPECT_EQ(now.graphs, 4u);
                             EXPECT_EQ(now.done, doing.size());
                             doing.push_back(now.doing);
                           })
                .graphs,
            4u);
  EXPECT_EQ(doing,
            (std::vector<std::string>{"stage 0, dp rank 0: training", "stage 0, dp rank 0: validation",
                                      "stage 0, dp rank 1: training", "stage 0, dp rank 1: validation"}));
}

// ---- models of the program ----

struct OwnStage : models::ModelStage {
  OwnStage(const models::StagePart& which, const models::ModelPlan& plan, double given_factor)
      : part_(which), plan_(plan), factor(given_factor) {
    if (which.has_embed())
      embed = register_module("embed", torch::nn::Embedding(plan.vocabulary, plan.width));
    for (std::int64_t i = which.first_block; i < which.end_block; ++i)
      mixes.push_back(register_module("mix" + std::to_string(i), torch::nn::Linear(plan.width, plan.width)));
    if (which.has_head()) head = register_module("head", torch::nn::Linear(plan.width, plan.vocabulary));
  }
  const models::StagePart& part() const override { return part_; }
  std::int64_t context() const override { return plan_.context; }
  at::Tensor forward_with(at::Tensor x, const Tree&) override {
    if (embed) x = embed->forward(x);
    for (torch::nn::Linear& mix : mixes) x = x + factor * at::gelu(mix->forward(x));
    return head ? head->forward(x) : x;
  }
  void set_initial_values(std::uint64_t seed) override {
    const at::NoGradGuard no_grad;
    for (auto& each : named_parameters())
      keyed_normal_(each.value(), {.seed = seed, .layer = layer_from_name(each.key())}, 0, 0.05);
  }
  models::StagePart part_;
  models::ModelPlan plan_;
  double factor;
  torch::nn::Embedding embed{nullptr};
  std::vector<torch::nn::Linear> mixes;
  torch::nn::Linear head{nullptr};
};

// Its factor is not in the configuration.
struct OwnModel : models::TrainableModel {
  OwnModel(const ModelConfig& model, double given_factor, bool states_it)
      : factor(given_factor),
        has_identity(states_it),
        sizes{.vocabulary = model.vocabulary, .width = model.width, .context = model.context},
        whole(plan_from_stages(sizes, model.layers, "mix",
                               [this](const auto& part) { return make_stage(part); })) {}
  const models::ModelPlan& plan() const override { return whole; }
  std::shared_ptr<models::ModelStage> make_stage(const models::StagePart& part) const override {
    return std::make_shared<OwnStage>(part, sizes, factor);
  }
  std::optional<std::string> identity() const override {
    return has_identity ? std::optional("factor " + std::to_string(factor)) : std::nullopt;
  }
  double factor;
  bool has_identity;
  models::ModelPlan sizes, whole;
};

double factor_of_own = 1;

Options own_model(bool states_identity) {
  static const bool registered = [] {
    for (const bool states : {false, true})
      register_model(states ? "own with identity" : "own", [states](const TrainConfig& config) {
        return std::make_shared<OwnModel>(config.model, factor_of_own, states);
      });
    return true;
  }();
  EXPECT_TRUE(registered);
  return {"--model.type",    states_identity ? "own with identity" : "own",
          "--document_mask", "false",
          "--compile",       "graph"};
}

TEST(KeptGraphsOfOwnModels, AreKeptIfTheModelStatesItsOptions) {
  const ScratchFolder folder;
  const Layout layout{.name = "pp2", .pp = 2};
  for (const bool states : {false, true}) {
    SCOPED_TRACE(states);
    const fs::path cache = folder / (states ? "with" : "without");
    for (const double factor : {1.0, 0.5, 1.0}) {
      factor_of_own = factor;
      const TrainedJob captured = train(layout, own_model(states), 1);
      const CacheFolder in(cache);
      const TrainedJob cached = train(layout, own_model(states), 1);
      EXPECT_EQ(cached.losses(), captured.losses());
      EXPECT_EQ(cached.validation, captured.validation);
      expect_equal_tensors(cached.local, captured.local);
    }
    const CacheFolder in(cache);
    const TrainedJob again = train(layout, own_model(states), 1);
    EXPECT_EQ(again.steps.at(0).loads, states ? 4 : 0);
    EXPECT_EQ(again.steps.at(0).first_captures, states ? 0 : 4);
  }
  factor_of_own = 1;
  const TrainConfig without = config_of(layout, own_model(false)),
                    with_it = config_of(layout, own_model(true));
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { write_artifact(without, folder / "none"); }),
                       "override TrainableModel::identity"));
  write_artifact(with_it, folder / "artifact");
  const Options prepared = with(own_model(true), {"--artifact", (folder / "artifact").string()});
  EXPECT_EQ(train(layout, prepared, 1).steps.at(0).loads, 4);
  factor_of_own = 0.5;
  EXPECT_THROW(open_artifact(config_of(layout, prepared), configured_schedule(with_it.layout),
                             *configured_model(with_it), at::kCPU),
               ConfigError);
  factor_of_own = 1;
}

// ---- another configuration ----

TEST(KeptGraphsOfOtherRuns, AreNotThoseOfAnotherConfiguration) {
  const ScratchFolder folder;
  const Layout layout{.name = "pp2", .pp = 2};
  train_cached(folder.path(), layout, kGraph);
  // Each changes what a graph computes, with the same shapes.
  for (const Options& change : {Options{"--rope_theta", "500"}, Options{"--norm_epsilon", "0.001"},
                                Options{"--dropout", "0.2"}, Options{"--nope_layers", "1"}}) {
    SCOPED_TRACE(change[0]);
    const TrainedJob other = train_cached(folder.path(), layout, with(kGraph, change));
    expect_same(other, train(layout, with(kGraph, change)));
    EXPECT_GT(other.steps.at(0).first_captures, 0);
  }
  // These do not.
  for (const Options& change :
       {Options{"--seed", "7"}, Options{"--lr", "0.001"}, Options{"--optimizer", "sgd"}}) {
    SCOPED_TRACE(change[0]);
    const TrainedJob other = train_cached(folder.path(), layout, with(kGraph, change));
    expect_same(other, train(layout, with(kGraph, change)));
    expect_loaded(other, layout, "cache");
  }
}

TEST(CompiledFields, HoldWhatDecidesGraphsAndNothingElse) {
  const auto fields = compiled_fields(config_of({.name = "pp2", .pp = 2}, kGraph));
  const auto value = [&](const std::string& name) -> std::string {
    for (const auto& [key, text] : fields)
      if (key == name) return text;
    return "absent";
  };
  EXPECT_EQ(value("model.width"), "16");
  EXPECT_EQ(value("model.tie_head"), "true");
  EXPECT_EQ(value("layout.schedule"), "1F1B");
  EXPECT_EQ(value("training.precision"), "fp32");
  for (const char* other : {"model.preset", "training.seed", "training.lr", "training.artifact",
                            "layout.device", "data.sources", "output.run_folder"})
    EXPECT_EQ(value(other), "absent") << other;
}

// The error of each rank.
std::vector<std::string> refusals(const TrainConfig& config) {
  std::vector<std::string> errors(static_cast<std::size_t>(config.layout.ranks));
  comm::run_ranks(static_cast<int>(config.layout.ranks), std::chrono::seconds(60), [&](comm::World& world) {
    errors[static_cast<std::size_t>(world.rank())] =
        message_of<ConfigError>([&] { TrainingJob(world, config, small_data().open(config)).train_step(); });
  });
  return errors;
}

TEST(StaleArtifacts, AreRefusedByTheFieldOnEveryRank) {
  const ScratchFolder folder;
  const Layout layout{.name = "pp2", .pp = 2};
  write_artifact(config_of(layout, kGraph), folder / "artifact");
  const TrainConfig config = config_of(layout, with(kGraph, {"--artifact", (folder / "artifact").string()}));
  struct Change {
    std::function<void(TrainConfig&)> make;
    std::string text;
  };
  const std::vector<Change> changes = {
      {[](TrainConfig& of) { of.model.feed_width = 64; },
       "model.feed_width is \"64\", in the artifact \"32\""},
      {[](TrainConfig& of) { of.model.norm_epsilon = 0.001; },
       "model.norm_epsilon is \"0.001\", in the artifact \"1e-05\""},
      {[](TrainConfig& of) { of.model.dropout = 0.25; },
       "model.dropout is \"0.25\", in the artifact \"0.0\""},
      {[](TrainConfig& of) { of.model.pattern = "A|AAA"; },
       "model.pattern is \"A|AAA\", in the artifact \"\""},
      {[](TrainConfig& of) { of.layout.microbatch_size = 1; },
       "layout.microbatch_size is \"1\", in the artifact \"2\""},
      {[](TrainConfig& of) { of.layout.schedule = "GPipe"; },
       "layout.schedule is \"GPipe\", in the artifact \"1F1B\""},
      {[](TrainConfig& of) { of.layout.pp = of.layout.ranks = 1; },
       "layout.pp is \"1\", in the artifact \"2\""},
      {[](TrainConfig& of) { of.training.precision = "bf16"; },
       "training.precision is \"bf16\", in the artifact \"fp32\""},
      {[](TrainConfig& of) { of.data.document_mask = false; },
       "data.document_mask is \"false\", in the artifact \"true\""},
  };
  for (const Change& change : changes) {
    TrainConfig other = config;
    change.make(other);
    for (const std::string& error : refusals(other)) {
      EXPECT_TRUE(has_text(error, "it is stale: " + change.text));
      EXPECT_TRUE(has_text(error, "penstock compile"));
    }
  }
}

std::string text_of_file(const fs::path& path) {
  const std::vector<std::uint8_t> bytes = read_bytes(path);
  return {bytes.begin(), bytes.end()};
}

// Another LibTorch, device, compiler or build: as if the artifact had been written there.
TEST(StaleArtifacts, AreRefusedForAnotherEnvironment) {
  const ScratchFolder folder;
  const Layout layout{.name = "one"};
  write_artifact(config_of(layout, kGraph), folder / "artifact");
  const fs::path manifest = folder / "artifact" / "manifest.json";
  const std::string original = text_of_file(manifest);
  const TrainConfig config = config_of(layout, with(kGraph, {"--artifact", (folder / "artifact").string()}));
  for (const std::string field :
       {"libtorch", "device", "compiler", "program", "penstock", "format", "stages"}) {
    SCOPED_TRACE(field);
    const std::size_t name = original.find("\"name\": \"" + field + "\"");
    ASSERT_NE(name, std::string::npos);
    const std::size_t value = original.find("\"value\": \"", name) + 10;
    std::string other = original;
    other.insert(value, "another ");
    folder.write("artifact/manifest.json", other);
    const std::string error = refusals(config).at(0);
    EXPECT_TRUE(has_text(error, "it is stale: " + field + " is \""));
    EXPECT_TRUE(has_text(error, "in the artifact \"another "));
  }
  folder.write("artifact/manifest.json", original);
  EXPECT_EQ(train(layout, with(kGraph, {"--artifact", (folder / "artifact").string()}), 1).steps.size(), 1u);
}

TEST(DamagedArtifacts, AreErrorsOnEveryRank) {
  const ScratchFolder folder;
  const Layout layout{.name = "pp2", .pp = 2};
  const fs::path artifact = folder / "artifact";
  const TrainConfig config = config_of(layout, with(kGraph, {"--artifact", artifact.string()}));
  const auto expect_all = [&](const std::string& text) {
    for (const std::string& error : refusals(config)) EXPECT_TRUE(has_text(error, text));
  };
  expect_all("it has no manifest.json; pass the folder that penstock compile has written");
  const auto write = [&] { write_artifact(config_of(layout, kGraph), artifact); };
  write();
  std::vector<fs::path> calls;
  for (const auto& entry : fs::directory_iterator(artifact))
    if (entry.path().extension() == ".call") calls.push_back(entry.path());
  ASSERT_EQ(calls.size(), 4u);
  // A rank reads the calls of its own stages: of four files, each belongs to one of two ranks.
  for (const fs::path& call : calls) {
    const std::vector<std::uint8_t> bytes = read_bytes(call);
    std::vector<std::uint8_t> damaged = bytes;
    damaged[damaged.size() / 2] ^= 0x10;
    write_bytes(call, damaged);
    expect_all("is not the file that the manifest lists");
    fs::remove(call);
    expect_all(call.filename().string());
    write_bytes(call, bytes);
  }
  const std::string manifest = text_of_file(artifact / "manifest.json");
  folder.write("artifact/manifest.json", manifest.substr(0, manifest.size() / 2));
  expect_all("manifest.json is damaged");
  write();
  EXPECT_EQ(train(layout, with(kGraph, {"--artifact", artifact.string()}), 1).steps.size(), 1u);
}

TEST(DamagedArtifacts, AreRefusedWhereTheyAreWritten) {
  const ScratchFolder folder;
  const TrainConfig config = config_of({.name = "one"}, kGraph);
  folder.write("file", "text");
  folder.write("texts/a.txt", "text");
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { write_artifact(config, folder / "file"); }),
                       "the folder cannot be made"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { write_artifact(config, folder / "texts"); }),
                       "has files that are no artifact"));
  // Another program's manifest is not touched.
  folder.write("other/manifest.json", "{\"version\": 1}");
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { write_artifact(config, folder / "other"); }),
                       "has files that are no artifact"));
  EXPECT_EQ(text_of_file(folder / "other" / "manifest.json"), "{\"version\": 1}");
  folder.write("both/manifest.json", "{");
  folder.write("both/notes.txt", "text");
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { write_artifact(config, folder / "both"); }),
                       "has files that are no artifact"));
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { write_artifact(config_of({.name = "one"}), folder / "none"); }),
               "training.compile"));
}

TEST(ArtifactConfigurations, NeedStagesThatAreGraphs) {
  const std::string text = message_of<ConfigError>([] {
    config_of({.name = "one"}, {"--artifact", "somewhere"});
  });
  EXPECT_TRUE(has_text(text, "training.artifact"));
  EXPECT_TRUE(has_text(text, "set training.compile to \"graph\""));
}

// The cache never fails a run.
TEST(BadCaches, AreWarnedAboutAndNotUsed) {
  const ScratchFolder folder;
  const Layout layout{.name = "pp2", .pp = 2};
  const Options options = with(kTransformer, kGraph);
  const TrainedJob captured = train(layout, options);
  const TrainedJob no_folder = train_cached(folder.write("file", "text"), layout, options);
  expect_same(no_folder, captured);
  EXPECT_EQ(no_folder.steps.at(0).first_captures, 4);
  const fs::path cache = folder / "cache";
  train_cached(cache, layout, options);
  for (const auto& entry : fs::directory_iterator(cache)) {
    std::vector<std::uint8_t> bytes = read_bytes(entry.path());
    bytes[bytes.size() / 2] ^= 0x10;
    write_bytes(entry.path(), bytes);
  }
  expect_same(train_cached(cache, layout, options), captured);
  const TrainedJob again = train_cached(cache, layout, options);  // the entries have been replaced
  expect_same(again, captured);
  expect_loaded(again, layout, "cache");
}

// Small configurations at random, stored and loaded in both ways.
TEST(KeptGraphsAtRandom, HaveTheBitsOfCapturedOnes) {
  const char* given = std::getenv("PENSTOCK_RANDOM_JOBS");
  const int count = given == nullptr ? 2 : std::atoi(given);
  for (int seed = 0; seed < count; ++seed) {
    std::mt19937 random(static_cast<std::uint32_t>(seed));
    const auto one_of = [&](const std::vector<std::string>& all) { return all[random() % all.size()]; };
    Layout layout{.name = "random"};
    layout.pp = 1 + static_cast<int>(random() % 2);
    if (layout.pp == 2) {
      layout.schedule = one_of({"1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"});
      layout.virtual_stages = layout.schedule == "Interleaved1F1B" || layout.schedule == "LoopedBFS" ? 2 : 1;
    }
    layout.microbatch_size = 1 + static_cast<int>(random() % 3);
    std::string pattern;
    for (int i = 0; i < 4; ++i) pattern += one_of({"A", "M", "E", "F"});
    Options options = hybrid_blocks();
    options.at(1) = pattern;
    options.at(3) = one_of({"true", "false"});  // attention_feed
    options = with(options,
                   {"--dropout", one_of({"0", "0.2"}), "--precision", one_of({"fp32", "bf16"}), "--tie_head",
                    one_of({"true", "false"}), "--depth_layers", one_of({"1", "0,2"}), "--compile", "graph"});
    std::string all;
    for (const std::string& each : options) all += each + " ";
    SCOPED_TRACE(layout.schedule + " pp " + std::to_string(layout.pp) + " " + all);
    const ScratchFolder folder;
    const TrainedJob captured = train(layout, options, 2);
    train_cached(folder / "cache", layout, options);
    {
      const CacheFolder cache(folder / "cache");
      const TrainedJob warm = train(layout, options, 2);
      expect_same(warm, captured);
      expect_loaded(warm, layout, "cache");
    }
    write_artifact(config_of(layout, options), folder / "artifact");
    const TrainedJob prepared =
        train(layout, with(options, {"--artifact", (folder / "artifact").string()}), 2);
    expect_same(prepared, captured);
    expect_loaded(prepared, layout, "artifact");
  }
}

}  // namespace kept_graphs_job_test
}  // namespace penstock::train
