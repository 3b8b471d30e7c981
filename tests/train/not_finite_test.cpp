// NaN and infinities stop a run, and the message says where they began: the same on every rank.
#include "penstock/observer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/folder.h"
#include "penstock/checkpoint/files/reader.h"
#include "penstock/train/job/find_not_finite.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/trainer_access.h"
#include "penstock/trainer.h"
#include "tests/has_text.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace not_finite_test {

using namespace std::chrono_literals;
using test::config_of;
using test::has_text;
using test::Layout;
using test::ScratchFolder;
using test::small_data;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Change = std::function<void(TrainingJob& job)>;

void change_parameter(TrainingJob& job, const std::string& name,
                      const std::function<void(at::Tensor&)>& change) {
  const at::NoGradGuard no_grad;
  for (const optim::NamedParameter& parameter : job.model().parameters()) {
    at::Tensor values = parameter.tensor.detach();
    if (parameter.name == name) change(values);
  }
}

// Runs one good step, then `change` on every rank, then a step that fails. Returns the error, which must be
// the same on all ranks.
std::string failure(const TrainConfig& config, const Change& change) {
  std::set<std::string> said;
  std::mutex mutex;
  int threw = 0;
  comm::run_ranks(static_cast<int>(config.layout.ranks), 60s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    job.train_step();
    change(job);
    try {
      job.train_step();
    } catch (const NotFiniteError& error) {
      const std::lock_guard lock(mutex);
      said.insert(error.what());
      ++threw;
    }
    EXPECT_EQ(job.steps_done(), 1);
  });
  EXPECT_EQ(threw, config.layout.ranks);
  EXPECT_EQ(said.size(), 1u);
  return said.empty() ? std::string() : *said.begin();
}

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> kLayouts = {
      {.name = "one"},
      {.name = "pp2", .pp = 2},
      {.name = "V", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"},
      {.name = "dp2", .dp = 2}};
  return kLayouts;
}

int stage_of_block(const Layout& layout, int block) { return block * layout.pp * layout.virtual_stages / 4; }

TEST(NotFinite, ABadParameterIsNamed) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const std::string said = failure(config_of(layout, {"--partition", "count"}), [](TrainingJob& job) {
      change_parameter(job, "blocks.2.feed.up.weight", [](at::Tensor& values) { values[3][1] = kNan; });
      change_parameter(job, "blocks.3.feed.up.weight", [](at::Tensor& values) { values.fill_(kNan); });
    });
    EXPECT_TRUE(has_text(said, "step 2: loss nan"));
    EXPECT_TRUE(has_text(said, "parameter blocks.2.feed.up.weight has 1 of 512 values"));
    EXPECT_TRUE(has_text(said, "stage " + std::to_string(stage_of_block(layout, 2))));
    EXPECT_TRUE(has_text(said, "resume"));
  }
}

// The tokens of a microbatch of the second step, of all replicas.
std::set<std::int64_t> tokens_of(const TrainConfig& config, std::int64_t microbatch) {
  const TrainingData data = small_data().open(config);
  const std::int64_t rows = config.layout.microbatch_size * config.layout.dp, context = config.model.context;
  Batch batch;
  data.training->fill(static_cast<std::uint64_t>(config.training.global_batch + microbatch * rows), rows,
                      batch);
  EXPECT_EQ(static_cast<std::int64_t>(batch.tokens.size()), rows * context);
  return {batch.tokens.begin(), batch.tokens.end()};
}

// The products of a feed-forward layer overflow only for a certain token.
TEST(NotFinite, AnOverflowThatDependsOnTheDataIsNamedByOperatorAndMicrobatch) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const TrainConfig config = config_of(layout, {"--partition", "count", "--tie_head", "false"});
    std::set<std::int64_t> earlier;
    std::optional<std::int64_t> token;
    std::int64_t microbatch = 0;
    for (; microbatch < config.layout.microbatches && !token; ++microbatch) {
      for (const std::int64_t each : tokens_of(config, microbatch))
        if (microbatch > 0 && !earlier.contains(each) && !token) token = each;
      earlier.merge(tokens_of(config, microbatch));
    }
    ASSERT_TRUE(token);
    --microbatch;
    const std::string said = failure(config, [&](TrainingJob& job) {
      // Zeros pass through every block as zeros.
      change_parameter(job, "embed.weight", [&](at::Tensor& values) {
        const at::Tensor row = values[*token].clone();
        values.zero_();
        values[*token] = row;
      });
      for (const char* name : {"blocks.1.feed.gate.weight", "blocks.1.feed.up.weight"})
        change_parameter(job, name, [](at::Tensor& values) { values.mul_(1e25); });
    });
    EXPECT_TRUE(has_text(said, "microbatch " + std::to_string(microbatch) + " of 4"));
    EXPECT_TRUE(has_text(said, "aten::mul"));
    EXPECT_TRUE(has_text(
        said, "in stage " + std::to_string(stage_of_block(layout, 1)) + ", block 1, after blocks.1.feed."));
  }
}

TEST(NotFinite, AGradientAloneIsNamed) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const std::string said = failure(config_of(layout), [](TrainingJob& job) {
      job.set_gradient_hook([](const std::vector<optim::NamedParameter>& parameters) {
        for (const optim::NamedParameter& parameter : parameters)
          if (parameter.name == "blocks.1.attention.key.weight" || parameter.name == "norm.weight")
            parameter.tensor.grad().fill_(std::numeric_limits<double>::infinity());
      });
    });
    EXPECT_TRUE(has_text(said, "gradient norm"));
    EXPECT_TRUE(has_text(said, "the gradient of blocks.1.attention.key.weight has 256 of 256 values"));
  }
}

TEST(NotFinite, TensorParallelRanksAgree) {
  const TrainConfig config = config_of({.name = "tp2", .tp = 2});
  const std::string forward = failure(config, [](TrainingJob& job) {
    for (const char* name : {"blocks.1.feed.gate.weight", "blocks.1.feed.up.weight"})
      change_parameter(job, name, [](at::Tensor& values) { values.mul_(1e25); });
  });
  EXPECT_TRUE(has_text(forward, "microbatch 0 of 4: aten::mul"));
  EXPECT_TRUE(has_text(forward, "in stage 0, block 1, after blocks.1.feed."));
  const std::string backward = failure(config, [](TrainingJob& job) {
    job.set_gradient_hook([](const std::vector<optim::NamedParameter>& parameters) {
      for (const optim::NamedParameter& parameter : parameters)
        if (parameter.name == "blocks.1.attention.key.weight") parameter.tensor.grad().fill_(kNan);
    });
  });
  EXPECT_TRUE(has_text(backward, "the gradient of blocks.1.attention.key.weight has "));
}

// DualPipe has the model twice: the stages of its second copy have further numbers, and are not the loss.
TEST(NotFinite, StagesOfBothCopiesOfDualPipeAreNamed) {
  const Layout layout{.name = "DualPipe", .pp = 2, .virtual_stages = 2, .schedule = "DualPipe"};
  const auto overflow_in = [&](bool second_copy, const std::string& block) {
    return failure(config_of(layout, {"--partition", "count"}), [&](TrainingJob& job) {
      const at::NoGradGuard no_grad;
      for (const optim::NamedParameter& parameter : job.model().parameters()) {
        const bool chosen = parameter.name == "blocks." + block + ".feed.gate.weight" ||
                            parameter.name == "blocks." + block + ".feed.up.weight";
        if (chosen && job.model().is_second_copy(parameter) == second_copy)
          parameter.tensor.detach().mul_(1e25);
      }
    });
  };
  for (const bool second_copy : {false, true}) {
    for (const int part : {0, 1}) {
      const std::string block = part == 0 ? "1" : "3", stage = std::to_string(part + (second_copy ? 2 : 0));
      const std::string said = overflow_in(second_copy, block);
      EXPECT_TRUE(has_text(said, "microbatch " + std::string(second_copy ? "2" : "0") + " of 4")) << said;
      EXPECT_TRUE(
          has_text(said, "in stage " + stage + ", block " + block + ", after blocks." + block + ".feed."))
          << said;
    }
  }
}

TEST(NotFinite, TheRunOfAnAccumulatedStepIsNamed) {
  const Layout layout{.name = "two runs", .pp = 2, .accumulation = 2};
  const std::string said = failure(config_of(layout, {"--partition", "count"}), [](TrainingJob& job) {
    for (const char* name : {"blocks.3.feed.gate.weight", "blocks.3.feed.up.weight"})
      change_parameter(job, name, [](at::Tensor& values) { values.mul_(1e25); });
  });
  EXPECT_TRUE(has_text(said, "microbatch 0 of 4 in run 0 of 2"));
  EXPECT_TRUE(has_text(said, "in stage 1, block 3"));
}

// Masks write minus infinities on purpose; nothing is reported for a good forward.
TEST(NotFinite, AWatchFindsNothingInAGoodForward) {
  const TrainConfig config = config_of({.name = "one"});
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    OperatorWatch watch(job.layout(), job.model());
    watch.begin_run(0);
    const ModeGuard guard(watch);
    job.validate();
    EXPECT_FALSE(watch.found());
  });
}

TEST(NotFinite, TheLastCheckpointStays) {
  const ScratchFolder scratch;
  for (int file = 0; file < 8; ++file)
    scratch.write("text/" + std::to_string(file) + ".h", std::string(400, static_cast<char>('a' + file)));
  TrainConfig config = config_of({.name = "pp2", .pp = 2}, {"--checkpoint.every", "1", "--validate_every",
                                                            "0", "--validation_fraction", "0"});
  config.data.sources = {(scratch / "text").string()};
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Trainer trainer(world, config, scratch / "run");
    TrainerAccess::job(trainer).set_gradient_hook([&](const std::vector<optim::NamedParameter>& parameters) {
      if (TrainerAccess::job(trainer).steps_done() == 2) parameters.front().tensor.grad().fill_(kNan);
    });
    EXPECT_THROW(trainer.run(), NotFiniteError);
  });
  const auto found = checkpoint::find_checkpoints(scratch / "run" / "checkpoints");
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found.back().step, 2);
  checkpoint::SingleRankAgreement alone;
  EXPECT_TRUE(checkpoint::find_damage(alone, found.back().path).empty());
}

}  // namespace not_finite_test
}  // namespace penstock::train
