// Checks of what this machine cannot do, before it is tried.
#include <gtest/gtest.h>

#include <string>

#include "penstock/errors.h"
#include "penstock/train/job/host_check.h"
#include "penstock/train/job/process_memory.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::train {
namespace host_check_test {

using test::has_text;
using test::message_of;

constexpr double kGibibyte = 1024.0 * 1024 * 1024;

TrainConfig config_of(const std::vector<std::string>& arguments) {
  return load_config({.file = {}, .arguments = arguments}).config;
}

TEST(HostCheck, NeedsAreLowerBoundsOfWhatIsPredicted) {
  // Preset small: 24 million parameters; parameters, gradients and two states of AdamW are 0.36 GiB.
  const TrainConfig small = config_of({"--preset", "small", "--pp", "1"});
  const MinimumMemory need = minimum_memory(small, 1);
  EXPECT_GT(need.bytes(), 0.3 * kGibibyte);
  EXPECT_LT(need.bytes(), 0.6 * kGibibyte);
  // Replicas have copies, shards have parts.
  const double two = minimum_memory(config_of({"--preset", "small", "--pp", "1", "--dp", "2"}), 2).bytes(),
               sharded = minimum_memory(
                             config_of({"--preset", "small", "--pp", "1", "--dp", "2", "--shard", "2"}), 2)
                             .bytes();
  EXPECT_GT(two, 1.7 * need.bytes());
  EXPECT_LT(sharded, 1.1 * need.bytes());
  EXPECT_LT(minimum_memory_of_parts(small).bytes(), 0.2 * kGibibyte);
  EXPECT_LT(minimum_memory_of_capture(small).bytes(), 0.2 * kGibibyte);
  // One stage, which is smaller if there are more of them.
  const auto of_stage = [](const char* stages) {
    return minimum_memory_of_stage(config_of({"--preset", "small", "--model.vocabulary", "512", "--schedule",
                                              "1F1B", "--pp", stages}))
        .bytes();
  };
  EXPECT_LT(minimum_memory_of_stage(small).bytes(), minimum_memory_of_capture(small).bytes());
  EXPECT_EQ(of_stage("1"), 2 * of_stage("2"));
}

// Blocks of other kinds than attention, and experts over ranks.
TEST(HostCheck, HybridModels) {
  const auto need = [](std::vector<std::string> arguments, std::int64_t ranks) {
    arguments.insert(arguments.end(), {"--pp", "1", "--microbatch_size", "1", "--schedule", "1F1B"});
    return minimum_memory(config_of(arguments), ranks).bytes() / kGibibyte;
  };
  // Parameters, gradients and two states of AdamW: 16 bytes for each of 2,811 million.
  EXPECT_NEAR(need({"--preset", "hybrid-52"}, 1), 41.9, 1.5);
  EXPECT_NEAR(need({"--preset", "hybrid-52", "--dp", "4"}, 4), 4 * 41.9, 4);
  EXPECT_LT(need({"--preset", "hybrid-52", "--dp", "4", "--ep", "4"}, 4), 60);
  // A state-space model has no pairs of tokens.
  EXPECT_LT(need({"--pattern", "MMMM", "--attention_feed", "false", "--context", "1048576"}, 1), 8);
  EXPECT_LT(
      need({"--pattern", "MAMA", "--windows", "512", "--attention_feed", "false", "--context", "1048576"}, 1),
      8);
}

TEST(HostCheck, TooLittleMemoryNamesTheLargestNeed) {
  const TrainConfig config = config_of({"--pp", "1", "--context", "16777216"});
  EXPECT_NO_THROW(require_memory(minimum_memory(config_of({}), 2), machine_memory_bytes()));
  EXPECT_NO_THROW(require_memory(minimum_memory(config, 1), 0));  // unknown memory
  const std::string text =
      message_of<ConfigError>([&] { require_memory(minimum_memory(config, 1), 8LL << 30); });
  EXPECT_TRUE(has_text(text, "memory: got a need of at least "));
  EXPECT_TRUE(has_text(text, "of model.context = 16777216, expected at most the 8.0 GiB of this machine"));
  EXPECT_TRUE(has_text(text, "lower model.context"));
  // Products of the largest sizes overflow 64 bits.
  const TrainConfig huge = config_of({"--preset",          "tiny",       "--pp",           "1",
                                      "--width",           "1048576",    "--heads",        "65536",
                                      "--key_value_heads", "65536",      "--layers",       "65536",
                                      "--vocabulary",      "4294967296", "--context",      "16777216",
                                      "--microbatch_size", "1048576",    "--microbatches", "1"});
  for (const MinimumMemory& need : {minimum_memory(huge, 1), minimum_memory_of_parts(huge),
                                    minimum_memory_of_capture(huge), minimum_memory_of_stage(huge)})
    EXPECT_TRUE(has_text(message_of<ConfigError>([&] { require_memory(need, 8LL << 30); }), "TiB"));
}

TEST(HostCheck, ThisMachineHasMemory) {
  EXPECT_GT(machine_memory_bytes(), 1 << 28);
  EXPECT_GT(machine_memory_bytes(), resident_bytes());
}

// A bidirectional schedule has the model twice.
TEST(HostCheck, DualPipeNeedsTwiceTheParameters) {
  const auto need = [](const char* schedule) {
    return minimum_memory(
               config_of({"--preset", "small", "--pp", "2", "--schedule", schedule, "--microbatches", "4"}),
               2)
        .parts.at(0)
        .bytes;
  };
  EXPECT_EQ(need("DualPipe"), 2 * need("DualPipeV"));
}

}  // namespace host_check_test
}  // namespace penstock::train
