// Configuration: sources of values, rejected values, and the texts generated from the table.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#endif

#include "penstock/errors.h"
#include "penstock/train/config/config_fields.h"
#include "penstock/train/config/configured_plan.h"
#include "penstock/train_config.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/scratch_folder.h"

namespace penstock::train {
namespace config_test {

using test::has_text;
using test::message_of;
using test::ScratchFolder;
using Arguments = std::vector<std::string>;

ResolvedConfig with(const Arguments& arguments) {
  return load_config({.file = std::nullopt, .arguments = arguments});
}

TEST(Fields, AreCompleteAndNamedOnce) {
  std::set<std::string> names;
  std::set<std::string> sections;
  for (const ConfigSection& section : config_sections()) sections.emplace(section.name);
  TrainConfig config;
  std::set<const void*> places;
  for (const ConfigField& field : config_fields()) {
    EXPECT_TRUE(names.insert(field.name()).second) << field.name();
    EXPECT_TRUE(sections.contains(std::string(field.section))) << field.name();
    EXPECT_TRUE(
        places.insert(std::visit([](auto* p) -> const void* { return p; }, field.place(config))).second)
        << field.name();
    EXPECT_GT(field.help.size(), 8U) << field.name();
    EXPECT_FALSE(field.help.ends_with(".")) << field.name();
    // Every default is allowed.
    ConfigSetting setting{&field, field.get(config), "default"};
    EXPECT_NO_THROW(check_setting(setting)) << field.name();
    const FieldData value = field.get(config);
    if (std::holds_alternative<std::int64_t>(value) || std::holds_alternative<double>(value)) {
      EXPECT_LT(field.low, field.high) << field.name();
    }
  }
}

TEST(Config, AutomaticSchedule) {
  const auto chosen = [](const std::vector<std::string>& arguments) {
    const ResolvedConfig resolved = with(arguments);
    return resolved.config.layout.schedule + " " + std::to_string(resolved.config.layout.virtual_stages);
  };
  EXPECT_EQ(chosen({}), "ZBVZeroBubble 2");
  EXPECT_EQ(chosen({"--schedule", "auto", "--virtual_stages", "2"}), "ZBVZeroBubble 2");
  EXPECT_EQ(chosen({"--dp", "2", "--shard", "2", "--tie_head", "true"}), "ZBVZeroBubble 2");
  EXPECT_EQ(chosen({"--pp", "1"}), "1F1B 1");
  EXPECT_EQ(chosen({"--pp", "4"}), "1F1B 1") << "four blocks are too few for eight stages";
  EXPECT_EQ(chosen({"--virtual_stages", "1"}), "1F1B 1");
  EXPECT_EQ(chosen({"--layers", "12", "--virtual_stages", "3"}), "Interleaved1F1B 3");
  EXPECT_EQ(chosen({"--pattern", "AA|AA"}), "1F1B 1");
  EXPECT_EQ(chosen({"--pattern", "A|A|A|A"}), "ZBVZeroBubble 2");
  EXPECT_EQ(chosen({"--schedule", "1F1B"}), "1F1B 1");
  EXPECT_EQ(with({}).origins.at("layout.schedule"), "derived");
}

TEST(Config, DefaultsAreComplete) {
  const ResolvedConfig resolved = with({});
  EXPECT_EQ(resolved.config.model.preset, "hybrid-tiny");
  EXPECT_EQ(resolved.config.model.pattern, "AEME");
  EXPECT_EQ(resolved.config.layout.schedule, "ZBVZeroBubble");
  EXPECT_EQ(resolved.config.data.structure, "cpp");
  EXPECT_EQ(resolved.config.layout.ranks, 2);
  EXPECT_EQ(resolved.config.layout.virtual_stages, 2);
  EXPECT_EQ(resolved.config.training.accumulation, 1);
  EXPECT_EQ(resolved.config.training.global_batch, 16);
  EXPECT_EQ(resolved.origins.at("layout.ranks"), "derived");
}

// Parameters as the model counts them.
std::int64_t parameters(const ModelConfig& m) {
  const std::int64_t head = m.width / m.heads;
  const std::int64_t block = 2 * m.width * m.width + 2 * m.width * head * m.key_value_heads +
                             3 * m.width * m.feed_width + 2 * m.width;
  return m.layers * block + m.vocabulary * m.width * (m.tie_head ? 1 : 2) + m.width;
}

TEST(Config, PresetsHaveTheirSizes) {
  const auto of = [](const char* name) { return with({"--preset", name}).config; };
  EXPECT_NEAR(static_cast<double>(parameters(of("tiny").model)), 1.6e6, 1e5);
  EXPECT_NEAR(static_cast<double>(parameters(of("small").model)), 24e6, 1e6);
  EXPECT_NEAR(static_cast<double>(parameters(of("gpt2-124m").model)), 124e6, 1e6);
  const TrainConfig gpt2 = of("GPT2-124M");
  EXPECT_EQ(gpt2.model.layers, 12);
  EXPECT_EQ(gpt2.model.width, 768);
  EXPECT_EQ(gpt2.model.heads, 12);
  EXPECT_EQ(gpt2.model.context, 1024);
  EXPECT_EQ(gpt2.model.preset, "gpt2-124m");
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { (void)of("smal"); }), "did you mean small?"));
}

TEST(Config, ArgumentsOfEveryForm) {
  const ResolvedConfig resolved = with({"--model.preset=small",
                                        "--layers",
                                        "10",
                                        "--lr",
                                        "5e-4",
                                        "--skip-bad-files",
                                        "--data",
                                        "src",
                                        "include",
                                        "--betas",
                                        "0.8,0.9",
                                        "--trace_steps",
                                        "1",
                                        "2",
                                        "--tie_head",
                                        "false",
                                        "--optimizer",
                                        "AdamW",
                                        "--decay",
                                        "LINEAR"});
  const TrainConfig& config = resolved.config;
  EXPECT_EQ(config.model.width, 512);
  EXPECT_EQ(config.model.layers, 10);
  EXPECT_EQ(config.training.lr, 5e-4);
  EXPECT_TRUE(config.data.skip_bad_files);
  EXPECT_EQ(config.data.sources, (std::vector<std::string>{"src", "include"}));
  EXPECT_EQ(config.training.betas, (std::vector<double>{0.8, 0.9}));
  EXPECT_EQ(config.output.trace_steps, (std::vector<std::int64_t>{1, 2}));
  EXPECT_FALSE(config.model.tie_head);
  EXPECT_EQ(config.training.optimizer, "adamw");
  EXPECT_EQ(config.training.decay, "linear");
  EXPECT_EQ(resolved.origins.at("model.width"), "preset small");
  EXPECT_EQ(resolved.origins.at("training.lr"), "--lr");
}

struct Bad {
  Arguments arguments;
  std::vector<std::string> says;
};

TEST(Config, BadArguments) {
  const std::vector<Bad> cases = {
      {{"--widht", "3"}, {"--widht", "unknown key", "did you mean width?"}},
      {{"--model.widht", "3"}, {"did you mean model.width?"}},
      {{"--training.width", "3"}, {"did you mean model.width?"}},
      {{"--qqqqqqqqqq", "3"}, {"penstock train --help lists all keys"}},
      {{"--width"}, {"--width: got nothing", "a whole number", "Width of the residual stream"}},
      {{"--width", "abc"}, {"model.width: got \"abc\"", "a whole number from 1 to 1048576"}},
      {{"--width", "3.5"}, {"got \"3.5\""}},
      {{"--width", "0"}, {"got 0", "from 1 to 1048576"}},
      {{"--width", "-4"}, {"got -4"}},
      {{"--width", "99999999999999999999999"}, {"model.width"}},
      {{"--width", "192", "--model.width", "192"}, {"given twice"}},
      {{"width", "3"}, {"\"width\"", "--key value"}},
      {{"--width", "192", "5"}, {"\"5\""}},
      {{"--"}, {"--key value"}},
      {{"--lr", "0"}, {"training.lr: got 0", "above 0"}},
      {{"--lr", "nan"}, {"got \"nan\""}},
      {{"--lr", "inf"}, {"got \"inf\""}},
      {{"--lr", ""}, {"got \"\""}},
      {{"--betas", "0.9"}, {"got 1 value,", "a list of 2 numbers"}},
      {{"--betas", "0.9", "1.0"}, {"got 1"}},
      {{"--tie_head", "maybe"}, {"true or false"}},
      {{"--optimizer", "adam"}, {"one of adamw, sgd", "did you mean adamw?"}},
      {{"--optimizer", "zzzzzzzz"}, {"one of adamw, sgd"}},
      {{"--dropout", "1"}, {"from 0 to 0.99"}},
  };
  for (const Bad& item : cases) {
    const std::string message = message_of<ConfigError>([&] { (void)with(item.arguments); });
    for (const std::string& part : item.says) EXPECT_TRUE(has_text(message, part)) << item.arguments.front();
  }
}

TEST(Config, InconsistentValuesNameTheRemedy) {
  const std::vector<Bad> cases = {
      {{"--ranks", "3"}, {"layout.ranks = 3 (--ranks)", "2 * 1 * 1 = 2", "set layout.ranks to 2"}},
      {{"--ranks", "8"}, {"set layout.dp to 4"}},
      {{"--preset", "tiny", "--width", "200"},
       {"model.width = 200 (--width) is not a multiple of model.heads = 6 (default)",
        "set model.width to 204"}},
      {{"--preset", "tiny", "--width", "6"}, {"even width", "set model.width to 12"}},
      {{"--preset", "tiny", "--key_value_heads", "4"}, {"model.heads = 6", "model.key_value_heads = 4"}},
      {{"--preset", "tiny", "--tp", "4"}, {"model.heads = 6", "layout.tp = 4"}},
      {{"--preset", "tiny", "--sequence_parallel", "true"},
       {"layout.sequence_parallel = true (--sequence_parallel)", "layout.tp = 1 (default)",
        "set layout.tp to 2 or more"}},
      {{"--preset", "tiny", "--tp", "2", "--sequence_parallel", "true", "--context", "33"},
       {"model.context = 33 (--context) is not a multiple of layout.tp = 2 (--tp)",
        "set layout.sequence_parallel to false"}},
      {{"--preset", "hybrid-tiny", "--pattern", "MM", "--pp", "1", "--heads", "3", "--width", "48",
        "--key_value_heads", "3", "--multi_token_depth", "1", "--multi_token_block", "A", "--tp", "2"},
       {"model.heads = 3 (--heads) is not a multiple of layout.tp = 2"}},
      {{"--preset", "hybrid-tiny", "--pattern", "AM", "--pp", "1", "--dp", "2", "--ep", "2",
        "--multi_token_depth", "1", "--multi_token_block", "F"},
       {"has no E blocks, and multi-token prediction has none"}},
      {{"--pp", "8"}, {"8 model stages", "model.layers = 4"}},
      {{"--pp", "70000"}, {"from 1 to 65536"}},
      {{"--pp", "60000", "--dp", "60000"}, {"at most 65536"}},
      {{"--schedule", "1F2B"}, {"layout.schedule", "1F1B"}},
      {{"--schedule", "ZBVZeroBubble", "--virtual-stages", "1"},
       {"needs 2 stages on each rank", "layout.virtual_stages to 2"}},
      {{"--schedule", "1F1B", "--microbatches", "1"}, {"layout.microbatches = 1 (--microbatches)", "1F1B"}},
      {{"--schedule", "DualPipe", "--microbatches", "5"}, {"layout.microbatches = 5"}},
      {{"--schedule", "no/such.csv"}, {"no/such.csv", "a file that can be read"}},
      {{"--global_batch", "20"}, {"training.global_batch = 20", "1 * 8 * 2 = 16", "16 or 32"}},
      {{"--global_batch", "4"}, {"set training.global_batch to 16"}},
      {{"--global_batch", "32", "--accumulation", "3"}, {"needs 2 runs", "training.accumulation = 3"}},
      {{"--dp", "65536", "--pp", "1", "--microbatches", "1048576", "--microbatch_size", "1048576"},
       {"at most 2^40"}},
      {{"--warmup_steps", "500"}, {"training.warmup_steps = 500", "training.steps = 240"}},
      {{"--loss_scale", "128"}, {"fp16"}},
      {{"--transport", "nccl", "--device", "cpu"}, {"layout.transport", "auto"}},
      {{"--data", "src", "--shards", "data"}, {"leave one of them out"}},
      {{"--validation_fraction", "0"}, {"validate_every to 0"}},
      {{"--pattern", "AAXA"}, {"A (attention), M (state space)"}},
      {{"--pattern", "AAXA"}, {"'X'"}},
      {{"--pattern", "|AA"}, {"a stage without blocks"}},
      {{"--pattern", "AA|"}, {"a stage without blocks"}},
      {{"--pattern", "A|A|A"}, {"has 3 stages", "make 2"}},
      {{"--pattern", "AA|A", "--layers", "4"}, {"has 3 blocks"}},
      {{"--preset", "small", "--context", "64", "--ranks", "7", "--global_batch", "3"},
       {"2 problems in the configuration", "layout.ranks", "training.global_batch"}},
  };
  for (const Bad& item : cases) {
    const std::string message = message_of<ConfigError>([&] { (void)with(item.arguments); });
    for (const std::string& part : item.says) EXPECT_TRUE(has_text(message, part)) << item.arguments.front();
  }
}

TEST(Config, WhatIsDerived) {
  EXPECT_EQ(with({"--global_batch", "64"}).config.training.accumulation, 4);
  EXPECT_EQ(with({"--dp", "2", "--accumulation", "3"}).config.training.global_batch, 96);
  EXPECT_EQ(with({"--dp", "2", "--tp", "2"}).config.layout.ranks, 8);
  EXPECT_EQ(with({"--schedule", "zbv"}).config.layout.virtual_stages, 2);
  EXPECT_EQ(with({"--schedule", "zbv"}).config.layout.schedule, "ZBVZeroBubble");
  EXPECT_EQ(with({"--schedule", "dualpipe", "--layers", "2"}).config.layout.virtual_stages,
            2);  // two copies of two parts
  EXPECT_EQ(with({"--preset", "tiny", "--key_value_heads", "0"}).config.model.key_value_heads, 6);
  EXPECT_EQ(with({"--preset", "tiny", "--feed_width", "0"}).config.model.feed_width, 512);
  EXPECT_EQ(with({"--feed_width", "0", "--width", "196", "--heads", "2"}).config.model.feed_width,
            544);  // 523, rounded up
  EXPECT_EQ(with({"--pattern", "AAA|AA"}).config.model.layers, 5);
  EXPECT_EQ(with({"--steps", "5"}).config.training.warmup_steps, 0);
  // The pattern of a preset is repeated; one that is given has its own number of layers.
  EXPECT_EQ(with({"--layers", "6"}).config.model.pattern, "AEMEAE");
  EXPECT_EQ(with({"--layers", "2", "--pp", "1"}).config.model.pattern, "AE");
  EXPECT_EQ(with({"--layers", "6"}).origins.at("model.pattern"), "derived");
}

TEST(Config, StructureOfTheData) {
  const auto structure = [](const Arguments& arguments) { return with(arguments).config.data.structure; };
  EXPECT_EQ(structure({}), "cpp") << "the model uses it, and the default sources are C++";
  EXPECT_EQ(with({}).origins.at("data.structure"), "derived");
  EXPECT_EQ(structure({"--preset", "tiny"}), "none");
  EXPECT_EQ(structure({"--structure_embedding", "false"}), "none");
  EXPECT_EQ(structure({"--structure_embedding", "false", "--relations", "2"}), "cpp");
  EXPECT_EQ(structure({"--structure_embedding", "false", "--tree_feed", "true"}), "cpp");
  EXPECT_EQ(structure({"--data", "text"}), "none") << "any text";
  EXPECT_EQ(structure({"--shards", "shards"}), "none");
  EXPECT_EQ(structure({"--data", "src", "--structure", "cpp"}), "cpp");
  EXPECT_EQ(structure({"--structure", "none"}), "none");
  EXPECT_EQ(structure({"--model.type", "mine"}), "none") << "a registered model is asked for it";
  EXPECT_EQ(structure({"--model.type", "mine", "--structure", "cpp"}), "cpp");
  const std::vector<Bad> cases = {
      {{"--structure", "python"}, {"one of auto, none, cpp"}},
      {{"--preset", "tiny", "--structure", "cpp"}, {"data.structure = \"cpp\" (--structure)", "no effect"}},
      {{"--structure_kinds", "15"}, {"model.structure_kinds = 15", "16 ids", "set model.structure_kinds"}},
      {{"--node_types", "2"}, {"model.node_types = 2", "16 ids"}},
      {{"--data", "x.bin", "--data.format", "uint16", "--structure", "cpp"}, {"needs text", "data.format"}},
  };
  for (const Bad& item : cases) {
    const std::string message = message_of<ConfigError>([&] { (void)with(item.arguments); });
    for (const std::string& part : item.says) EXPECT_TRUE(has_text(message, part)) << item.arguments.front();
  }
}

TEST(Config, ASchedulesOwnFile) {
  const ScratchFolder folder;
  const std::string path = folder.write("mine.csv", "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n").string();
  const TrainConfig config = with({"--schedule", path, "--microbatches", "2"}).config;
  EXPECT_EQ(config.layout.virtual_stages, 1);
  EXPECT_EQ(config.layout.schedule, path);
  const auto message = [&](const Arguments& arguments) {
    return message_of<ConfigError>([&] { (void)with(arguments); });
  };
  EXPECT_TRUE(has_text(message({"--schedule", path}), "set layout.microbatches to 2"));
  EXPECT_TRUE(
      has_text(message({"--schedule", path, "--microbatches", "2", "--pp", "1"}), "set layout.pp to 2"));
  EXPECT_TRUE(has_text(message({"--schedule", path, "--microbatches", "2", "--virtual_stages", "2"}),
                       "has 1 stage on each rank"));
  EXPECT_TRUE(has_text(message({"--schedule", folder.write("bad.csv", "0F0,0Q1\n").string()}), "bad.csv"));
  EXPECT_TRUE(has_text(message({"--schedule", folder.write("order.csv", "0B0,0F0\n").string(), "--pp", "1",
                                "--microbatches", "1"}),
                       "order.csv"));
}

// Every numeric key, from the command line and from a file, rejects non-finite values and trailing text.
TEST(Fields, NumbersAreFiniteWithoutTrailingText) {
  std::size_t numbers = 0;
  for (const ConfigField& field : config_fields()) {
    const FieldData value = field.get(TrainConfig{});
    const bool list = std::holds_alternative<std::vector<double>>(value) ||
                      std::holds_alternative<std::vector<std::int64_t>>(value);
    if (!list && !std::holds_alternative<std::int64_t>(value) && !std::holds_alternative<double>(value))
      continue;
    ++numbers;
    for (const char* bad : {"nan", "-nan", "inf", "-inf", "1e999", "3x", " 3", "+3", "0x3", ""}) {
      if (list && *bad == '\0') continue;  // a valid empty list
      const std::string message = message_of<ConfigError>(
          [&] { (void)with({"--" + field.name() + "=" + (list && field.count == 2 ? "0.5," : "") + bad}); });
      EXPECT_TRUE(has_text(message, field.name())) << bad;
      EXPECT_TRUE(has_text(message, "expected")) << bad;
    }
#ifdef PENSTOCK_HAVE_TOML
    for (const char* bad : {"nan", "inf", "-inf", "1e30000"}) {
      const std::string text = list ? std::string("[") + (field.count == 2 ? "0.5, " : "") + bad + "]" : bad;
      const std::string message = message_of<ConfigError>([&] {
        (void)parse_config(
            "[" + std::string(field.section) + "]\n" + std::string(field.key) + " = " + text + "\n",
            "train.toml");
      });
      EXPECT_TRUE(has_text(message, "train.toml:2")) << field.name() << " = " << bad;
    }
#endif
  }
  EXPECT_GE(numbers, 30u);
}

TEST(Fields, NamesOfOtherTrainersSuggestOurKeys) {
  const auto message = [](const std::string& flag) {
    return message_of<ConfigError>([&] { (void)with({flag, "3"}); });
  };
  EXPECT_TRUE(has_text(message("--learning_rate"), "did you mean training.lr?"));
  EXPECT_TRUE(has_text(message("--learning-rate"), "did you mean training.lr?"));
  EXPECT_TRUE(has_text(message("--training.learning_rate"), "did you mean training.lr?"));
  EXPECT_TRUE(has_text(message("--batch_size"),
                       "did you mean training.global_batch (samples per step) or layout.microbatch_size "
                       "(samples per microbatch)?"));
  EXPECT_TRUE(has_text(message("--block_size"), "did you mean model.context?"));
  EXPECT_TRUE(has_text(message("--n_layer"), "did you mean model.layers?"));
  EXPECT_TRUE(has_text(message("--max_iters"), "did you mean training.steps?"));
  EXPECT_TRUE(has_text(message("--microbatchs"), "did you mean microbatches?"));
  EXPECT_TRUE(has_text(message("--quux"), "penstock train --help lists all keys"));
  // All suggested keys exist.
  for (const char* name :
       {"learning_rate", "batch_size", "block_size", "vocab_size", "n_head", "d_model", "grad_clip",
        "warmup_iters", "out_dir", "save_every", "fsdp", "dtype", "resume_from"}) {
    const std::string key = key_for_synonym(name);
    EXPECT_EQ(find_field(key.substr(0, key.find(' ')), "test").name(), key.substr(0, key.find(' ')));
  }
}

TEST(Config, BinaryArgumentsAreNotEchoedRaw) {
  for (const Arguments& arguments : {Arguments{"\x1b[31m"},
                                     {"--\x1b[31m", "1"},
                                     {"--lr", "\x1b[31m\x01"},
                                     {"--decay", "\xff\xfe\x1b"},
                                     {"--preset", "\x1b]0;x\x07"},
                                     {"--lr", std::string(100000, 'x')}}) {
    const std::string message = message_of<ConfigError>([&] { (void)with(arguments); });
    EXPECT_TRUE(std::none_of(message.begin(), message.end(), [](char c) {
      return static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f;
    })) << message;
    EXPECT_LT(message.size(), 600u);
  }
}

TEST(Config, RemediesDoNotRepeatAValue) {
  EXPECT_TRUE(has_text(message_of<ConfigError>([] {
                         (void)with({"--shard", "2"});
                       }),
                       "set layout.dp to 2, or layout.shard to 1"));
  EXPECT_EQ(message_of<ConfigError>([] { (void)with({"--shard", "2"}); }).find("1 or 1"), std::string::npos);
  EXPECT_TRUE(has_text(message_of<ConfigError>([] {
                         (void)with({"--dp", "3", "--shard", "2"});
                       }),
                       "layout.shard to 1 or 3"));
}

TEST(Config, InterleavedSchedulesHaveTwoStagesARank) {
  const auto stages = [](const Arguments& arguments) { return with(arguments).config.layout.virtual_stages; };
  for (const char* kind : {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
                           "DualPipeV", "VHalf", "VMin", "DualPipe"})
    EXPECT_EQ(stages({"--schedule", kind}), 2) << kind;
  for (const char* kind : {"GPipe", "1F1B", "ZB2P"}) EXPECT_EQ(stages({"--schedule", kind}), 1) << kind;
  EXPECT_EQ(stages({"--schedule", "Interleaved1F1B", "--layers", "12", "--virtual_stages", "3"}), 3);
  EXPECT_EQ(with({"--schedule", "Interleaved1F1B"}).origins.at("layout.virtual_stages"), "derived");
  EXPECT_TRUE(has_text(message_of<ConfigError>([] {
                         (void)with({"--schedule", "Interleaved1F1B", "--pp", "4"});
                       }),
                       "lower layout.pp or layout.virtual_stages"));
}

TEST(Config, PartitionBalancesWhatItNames) {
  const auto ends = [](const Arguments& arguments) {
    const TrainConfig config = with(arguments).config;
    std::vector<std::int64_t> all;
    for (const models::StagePart& part :
         models::partition_model(configured_plan(config.model), 3, configured_partition(config)))
      all.push_back(part.end_block);
    return all;
  };
  Arguments arguments{"--preset", "hybrid-tiny", "--pattern", "AAEAAAEA", "--partition"};
  const auto by = [&](const char* value) {
    Arguments more = arguments;
    more.emplace_back(value);
    return ends(more);
  };
  EXPECT_EQ(by("count"), (std::vector<std::int64_t>{3, 6, 8}));
  EXPECT_EQ(by("weight"), (std::vector<std::int64_t>{3, 7, 8}));  // a stage ends with each E
  EXPECT_NE(by("cost"), by("weight"));
  EXPECT_EQ(ends({"--preset", "hybrid-tiny", "--pattern", "A|AEAAA|EA", "--schedule", "1F1B", "--pp", "3"}),
            (std::vector<std::int64_t>{1, 6, 8}));
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { by("weights"); }), "count, weight, cost"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] {
                         configured_plan(with({"--type", "mine"}).config.model);
                       }),
                       "model.type: got \"mine\", expected transformer, hybrid or auto"));
}

TEST(Config, KeysWithoutEffectAreRefusedOnTheCommandLine) {
  const auto message = [](const Arguments& arguments) {
    return message_of<ConfigError>([&] { (void)with(arguments); });
  };
  EXPECT_TRUE(has_text(message({"--momentum", "0.5"}),
                       "training.momentum = 0.5 (--momentum) has no effect with training.optimizer = "
                       "\"adamw\" (default); leave it out"));
  EXPECT_TRUE(has_text(message({"--optimizer", "sgd", "--betas", "0.9,0.99"}), "training.betas"));
  EXPECT_TRUE(has_text(message({"--optimizer", "sgd", "--epsilon", "1e-6"}), "training.epsilon"));
  EXPECT_TRUE(has_text(message({"--decay", "constant", "--min_lr_ratio", "0.5"}), "training.min_lr_ratio"));
  EXPECT_TRUE(has_text(message({"--shards", "x", "--cap_bytes", "1000"}), "data.cap_bytes"));
  EXPECT_TRUE(has_text(message({"--pp", "1", "--transport", "ucx"}), "layout.transport"));
  EXPECT_TRUE(has_text(message({"--pattern", "AA|AA", "--partition", "count"}), "layout.partition"));
  EXPECT_TRUE(has_text(message({"--sample_prompt="}), "output.sample_prompt = \"\""));
  EXPECT_NO_THROW((void)with({"--optimizer", "sgd", "--momentum", "0.5"}));
  EXPECT_NO_THROW((void)with({"--validate_every", "0", "--validate_batches", "3"}))
      << "switched off, not mistaken";
#ifdef PENSTOCK_HAVE_TOML
  EXPECT_NO_THROW((void)parse_config("[training]\nmomentum = 0.5\n", "run/config.toml"))
      << "the file of a run has all keys";
#endif
}

TEST(Config, PassesAreKnown) {
  const auto message = [](const std::vector<std::string>& arguments) {
    return message_of<ConfigError>([&] { (void)with(arguments); });
  };
  const std::string unknown =
      message({"--compile", "graph", "--schedule", "1F1B", "--disable_passes", "views", "algebriac"});
  EXPECT_TRUE(has_text(unknown, "training.disable_passes"));
  EXPECT_TRUE(has_text(unknown, "got \"algebriac\""));
  EXPECT_TRUE(has_text(unknown, "did you mean 'algebraic'?"));
  EXPECT_TRUE(has_text(message({"--disable_passes", "views"}), "set training.compile to \"graph\""));
  for (const char* flag : {"--compile_exact", "--compile_check"}) {
    EXPECT_TRUE(has_text(message({flag, "true"}), "set training.compile to \"fused\"")) << flag;
    EXPECT_TRUE(has_text(message({"--compile", "graph", "--schedule", "1F1B", flag, "true"}),
                         "set training.compile to \"fused\""))
        << flag;
  }
  EXPECT_EQ(with({"--compile", "graph", "--schedule", "1F1B", "--disable_passes", "views"})
                .config.training.disable_passes,
            std::vector<std::string>{"views"});
}

TEST(Config, ActivationBudgetsAreForGraphs) {
  const Arguments graph{"--compile", "graph", "--schedule", "1F1B"};
  const auto message = [](const Arguments& arguments) {
    return message_of<ConfigError>([&] { (void)with(arguments); });
  };
  const auto and_graph = [&](Arguments more) {
    more.insert(more.begin(), graph.begin(), graph.end());
    return more;
  };
  EXPECT_EQ(with(and_graph({"--activation_budget", "0.3"})).config.training.activation_budget, "0.3");
  EXPECT_EQ(with(and_graph({"--activation_budget", "1.5 GiB"})).config.training.activation_budget, "1.5 GiB");
  EXPECT_EQ(with(and_graph({"--activation_policy", "blocks.*.attention: save,*: recompute"}))
                .config.training.activation_policy,
            (std::vector<std::string>{"blocks.*.attention: save", "*: recompute"}));
  EXPECT_TRUE(
      has_text(message(and_graph({"--activation_budget", "2"})), "training.activation_budget = \"2\""));
  EXPECT_TRUE(
      has_text(message(and_graph({"--activation_policy", "blocks: sav"})), "did you mean \"blocks: save\"?"));
  EXPECT_TRUE(has_text(message({"--activation_budget", "0.5"}), "set training.compile to \"graph\""));
  // Two ways to recompute: the message says which to use.
  const std::string both = message({"--activation_budget", "0.5", "--recompute", "block"});
  EXPECT_TRUE(has_text(both, "use one of the two")) << both;
  EXPECT_TRUE(has_text(message(and_graph({"--activation_budget", "0.5", "--recompute", "block"})),
                       "use training.activation_budget in place of training.recompute"));
#ifdef PENSTOCK_HAVE_TOML
  const std::string file =
      "[layout]\nschedule = \"1F1B\"\n[training]\ncompile = \"graph\"\nactivation_budget = ";
  EXPECT_EQ(parse_config(file + "0.25\n", "a.toml").config.training.activation_budget, "0.25");
  EXPECT_EQ(parse_config(file + "0\n", "a.toml").config.training.activation_budget, "0");
  EXPECT_EQ(parse_config(file + "\"64 MiB\"\n", "a.toml").config.training.activation_budget, "64 MiB");
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { (void)parse_config(file + "true\n", "a.toml"); }),
                       "a number or a string"));
#endif
}

TEST(Fields, AKeyOfSeveralSectionsNeedsItsSection) {
  std::vector<ConfigField> fields(config_fields().begin(), config_fields().begin() + 3);
  fields.push_back(fields[2]);
  fields.back().section = "other";
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { (void)find_field("vocabulary", "--vocabulary", fields); }),
               "one of model.vocabulary, other.vocabulary"));
  EXPECT_EQ(find_field("other.vocabulary", "", fields).section, "other");
}

TEST(Page, IsUpToDate) {
  const char* source = std::getenv("PENSTOCK_SOURCE");
  ASSERT_NE(source, nullptr) << "run by ctest, or set PENSTOCK_SOURCE to the source folder";
  const std::string path = std::string(source) + "/docs/configuration.md";
  if (std::getenv("PENSTOCK_UPDATE_DOCS") != nullptr) std::ofstream(path) << configuration_page();
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(text == configuration_page())
      << path << " is out of date: run PENSTOCK_UPDATE_DOCS=1 ./test -R train_config_test and commit it";
  for (const ConfigField& field : config_fields())
    EXPECT_TRUE(has_text(text, "`" + std::string(field.key) + "`"));
}

#ifdef PENSTOCK_HAVE_TOML
TEST(ConfigFile, ValuesAndTheirPlaces) {
  const ResolvedConfig resolved = parse_config(
      "[model]\n"
      "preset = \"small\"\n"
      "width = 256\n"
      "rope_theta = 500000\n"
      "\n"
      "[data]\n"
      "sources = [\"a\", \"b\"]\n",
      "train.toml", {"--width", "512"});
  EXPECT_EQ(resolved.config.model.width, 512);
  EXPECT_EQ(resolved.config.model.layers, 8);
  EXPECT_EQ(resolved.config.model.rope_theta, 500000);
  EXPECT_EQ(resolved.config.data.sources, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(resolved.origins.at("model.width"), "--width");
  EXPECT_EQ(resolved.origins.at("model.rope_theta"), "train.toml:4");
  EXPECT_EQ(resolved.origins.at("model.layers"), "preset small");
}

TEST(ConfigFile, ADecimalPointIsShown) {
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([] { (void)parse_config("[training]\nsteps = 3.0\n", "train.toml"); }),
               "training.steps: got 3.0, expected a whole number"));
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([] { (void)parse_config("[layout]\npp = 2e0\n", "train.toml"); }),
               "layout.pp: got 2.0, expected a whole number"));
}

TEST(ConfigFile, BinaryFilesAreNotEchoedRaw) {
  for (const std::string text :
       {"\x7f"
        "ELF\x02\x01\x01",
        "[model]\nwidth = \"\x1b[31m\"\n", "\x1b[31m = 3\n", "[\"\\u001b[31m\"]\nx = 1\n",
        "[model]\n\"\\u001b\" = 1\n", "[model]\npreset = \"\\u001b[31m\"\n"}) {
    const std::string message = message_of<ConfigError>([&] { (void)parse_config(text, "train.toml"); });
    EXPECT_TRUE(std::none_of(message.begin(), message.end(), [](char c) {
      return (static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == 0x7f;
    })) << message;
  }
}

TEST(ConfigFile, BadFiles) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {"[model]\n\nwidht = 3\n", {"train.toml:3", "did you mean model.width?"}},
      {"[modle]\nwidth = 3\n", {"train.toml:1", "unknown section", "[model]"}},
      {"[zzzzzzzzzzzzzz]\n", {"unknown section"}},
      {"[layout]\nlr = 3\n", {"train.toml:2", "did you mean training.lr?"}},
      {"width = 3\n", {"train.toml:1", "outside any section", "under [model]"}},
      {"[model]\nwidth = \"3\"\n", {"train.toml:2: model.width", "the string \"3\"", "a whole number"}},
      {"[model]\nwidth = 3.0\n", {"a whole number"}},
      {"[model]\nwidth = true\n", {"got true"}},
      {"[model]\nwidth = 0\n", {"train.toml:2: model.width: got 0"}},
      {"[model]\nwidth = 1979-05-27\n", {"a date"}},
      {"[model]\nwidth = [1]\n", {"a list"}},
      {"[model]\nwidth = {a = 1}\n", {"a section"}},
      {"[training]\nbetas = [0.9, \"x\"]\n", {"training.betas"}},
      {"[training]\nbetas = [0.9]\n", {"got 1 value,"}},
      {"[training]\nlr = nan\n", {"training.lr: got nan"}},
      {"[model\n", {"train.toml:1"}},
      {"[model]\nwidth = 4\nwidth = 4\n", {"train.toml:3"}},
      {"[model]\npreset = \"tniy\"\n", {"train.toml:2", "did you mean tiny?"}},
      {"[[model]]\nwidth = 4\n", {"train.toml:1"}},
      {"\xff\xfe", {"train.toml"}},
      {"[layout]\nranks = 3\n", {"layout.ranks = 3 (train.toml:2)"}},
  };
  for (const auto& [text, says] : cases) {
    const std::string message =
        message_of<ConfigError>([&text = text] { (void)parse_config(text, "train.toml"); });
    for (const std::string& part : says) EXPECT_TRUE(has_text(message, part)) << text;
  }
}

TEST(ConfigFile, FilesOnDisk) {
  const ScratchFolder folder;
  const auto path = folder.write("train.toml", "[layout]\npp = 1\n");
  EXPECT_EQ(load_config({.file = path, .arguments = {}}).config.layout.pp, 1);
  EXPECT_TRUE(has_text(
      message_of<ConfigError>([&] { (void)load_config({.file = folder / "no.toml", .arguments = {}}); }),
      "no.toml"));
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { (void)load_config({.file = folder.path(), .arguments = {}}); }),
               "directory"));
}

TEST(ConfigFile, WhatIsWrittenReadsBackTheSame) {
  for (const std::string& preset : preset_names()) {
    const ResolvedConfig resolved = with({"--preset", preset, "--dp", "2", "--sample_prompt",
                                          "a \"b\" \\ \n\t\x01 \xC3\xA4", "--data", "x y"});
    const std::string text = to_toml(resolved);
    EXPECT_EQ(parse_config(text, "config.toml").config, resolved.config) << text;
    for (const ConfigField& field : config_fields())
      EXPECT_TRUE(has_text(text, "# " + std::string(field.help)));
    EXPECT_TRUE(has_text(text, "dp = 2  # --dp\n"));
  }
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK
RC_GTEST_PROP(ConfigProperty, TomlRoundTrip, ()) {
  Arguments arguments;
  const auto maybe = [&](const char* name, const std::string& value) {
    if (!*rc::gen::arbitrary<bool>()) return;
    arguments.push_back(std::string("--") + name);
    arguments.push_back(value);
  };
  const auto number = [](int low, int high) { return std::to_string(*rc::gen::inRange(low, high)); };
  const auto any = [] {  // an arbitrary positive double, as text that reads back the same
    return to_toml(
        FieldData(static_cast<double>(*rc::gen::inRange<std::int64_t>(1, std::int64_t{1} << 53)) * 0x1p-53));
  };
  maybe("preset", *rc::gen::elementOf(preset_names()));
  maybe("dp", number(1, 9));
  maybe("microbatches", number(2, 40));
  maybe("accumulation", number(1, 9));
  maybe("lr", any());
  maybe("epsilon", any());
  maybe("time_limit_s", any());
  maybe("betas", any() + "," + any());
  maybe("trace_steps", number(0, 1000) + "," + number(0, 1000));
  maybe("sample_prompt", *rc::gen::container<std::string>(rc::gen::inRange<char>(1, 127)));
  // A value that begins with two dashes would be a key.
  RC_PRE(std::none_of(arguments.begin(), arguments.end(), [](const std::string& a) { return a == "--"; }));
  ResolvedConfig resolved;
  try {
    resolved = with(arguments);
  } catch (const ConfigError&) {
    RC_DISCARD("does not fit");
  }
  RC_ASSERT(parse_config(to_toml(resolved), "config.toml").config == resolved.config);
}

// Any text results in a config or a ConfigError.
RC_GTEST_PROP(ConfigProperty, AnyTextIsReadOrRefused, ()) {
  std::string text = to_toml(with({}));
  const int edits = *rc::gen::inRange(1, 6);
  for (int i = 0; i < edits; ++i) {
    const auto at = *rc::gen::inRange<std::size_t>(0, text.size());
    text[at] = *rc::gen::arbitrary<char>();
  }
  try {
    (void)parse_config(text, "train.toml");
  } catch (const ConfigError&) {
  }
}
#endif
#else
TEST(ConfigFile, WithoutTheLibraryItSaysSo) {
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { (void)parse_config("", "train.toml"); }), "toml++"));
}
#endif

// The cap applies to the default sources only: given sources are used completely unless data.cap_bytes is
// set.
TEST(Config, NamedSourcesHaveNoCap) {
  EXPECT_EQ(parse_config("", "t", {}).config.data.cap_bytes, 16 << 20);
  for (const char* preset : {"tiny", "small"}) {
    const ResolvedConfig resolved = parse_config("", "t", {"--preset", preset, "--data", "input.txt"});
    EXPECT_EQ(resolved.config.data.cap_bytes, 0) << preset;
    EXPECT_EQ(resolved.origins.at("data.cap_bytes"), "derived") << preset;
  }
  EXPECT_EQ(parse_config("", "t", {"--data", "input.txt", "--cap_bytes", "1000"}).config.data.cap_bytes,
            1000);
}

TEST(Config, FormatsOfData) {
  EXPECT_EQ(parse_config("", "t", {"--data", "train.bin", "--data.format", "UINT16"}).config.data.format,
            "uint16");
  EXPECT_TRUE(has_text(message_of<ConfigError>([] {
                         parse_config("", "t", {"--data.format", "uint16"});
                       }),
                       "needs files"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] {
                         parse_config("", "t", {"--shards", "x", "--data.format", "uint16"});
                       }),
                       "leave data.format out"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] {
                         parse_config("", "t", {"--shards", "x", "--end_of_document", "1"});
                       }),
                       "leave data.end_of_document out"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] {
                         parse_config("", "t", {"--data", "x", "--data.format", "uint61"});
                       }),
                       "did you mean uint16?"));
}

}  // namespace config_test
}  // namespace penstock::train
