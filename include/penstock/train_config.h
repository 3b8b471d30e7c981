// Everything that `penstock train` can be told, in one value.
//
//   ConfigSources sources;
//   sources.file = "train.toml";
//   sources.arguments = {"--layout.pp", "2", "--lr", "3e-4"};
//   const ResolvedConfig resolved = load_config(sources);
//   resolved.config.layout.pp == 2
//
// A value comes from the command line, else from the file, else from the preset (`model.preset`), else from its default.
// What is 0 or empty to mean "whatever fits" is filled in by loading, and the whole is checked: a ResolvedConfig is
// consistent. Each field has one line in the table of config_fields.h, which parsing, checking, writing and
// docs/configuration.md all follow. Choices (`optimizer`, ...) hold one of the names that the table lists, lower case.
//
// Every error is a ConfigError that says where the value came from (file and line, flag or preset) and what to change.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::train {

struct ModelConfig {
  std::string preset = "tiny";
  std::int64_t vocabulary = 257;
  std::int64_t width = 192;
  std::int64_t layers = 4;
  std::int64_t heads = 6;
  std::int64_t key_value_heads = 2;  // 0: as many as heads
  std::int64_t feed_width = 512;     // 0: 8/3 of the width, rounded up to a multiple of 32
  std::int64_t context = 256;
  double rope_theta = 10000;
  double norm_epsilon = 1e-5;
  bool tie_head = true;
  double dropout = 0;
  std::string pattern;  // empty: A for each layer
  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

struct LayoutConfig {
  std::int64_t ranks = 0;  // 0: pp * dp * tp
  std::int64_t pp = 2;
  std::int64_t virtual_stages = 0;  // 0: what the schedule demands, 2 for interleaved ones
  std::int64_t dp = 1;
  std::int64_t shard = 1;  // divides dp: so many data-parallel ranks share the parameters, each holds a part
  std::int64_t tp = 1;
  std::string schedule = "auto";  // a kind (canonical name after loading, also in place of auto), or the path of a CSV file
  std::int64_t microbatches = 8;
  std::int64_t microbatch_size = 2;
  std::string partition = "cost";
  std::string transport = "auto";
  std::string device = "auto";
  friend bool operator==(const LayoutConfig&, const LayoutConfig&) = default;
};

struct TrainingConfig {
  std::int64_t steps = 120;
  std::int64_t global_batch = 0;  // samples of a step; 0: dp * microbatches * microbatch_size * accumulation
  std::int64_t accumulation = 0;  // schedule runs of a step; 0: what global_batch needs, else 1
  std::string optimizer = "adamw";
  double lr = 2e-3;
  std::int64_t warmup_steps = 20;
  std::string decay = "cosine";
  double min_lr_ratio = 0.1;
  double weight_decay = 0.1;
  std::vector<double> betas = {0.9, 0.95};
  double epsilon = 1e-8;
  double momentum = 0.9;
  double clip_norm = 1;  // 0: none
  std::string precision = "fp32";
  double loss_scale = 0;  // fp16 only; 0: found and adapted while training
  std::int64_t seed = 1;
  std::int64_t validate_every = 40;  // 0: never
  std::int64_t validate_batches = 4;
  double time_limit_s = 0;  // 0: none
  friend bool operator==(const TrainingConfig&, const TrainingConfig&) = default;
};

struct DataConfig {
  std::vector<std::string> sources;  // empty (and no shards): the C++ headers of this machine
  std::string shards;
  std::string format = "auto";
  std::int64_t end_of_document = -1;  // token of token files; -1: that of their format, if it has one
  std::vector<std::string> extensions;
  double validation_fraction = 0.05;
  std::int64_t cap_bytes = 16 << 20;  // 0: none; sources that are named have none unless it is given
  bool document_mask = true;
  bool skip_bad_files = false;
  friend bool operator==(const DataConfig&, const DataConfig&) = default;
};

struct CheckpointConfig {
  std::string folder;      // empty: "checkpoints" in the run folder
  std::int64_t every = 100;  // steps; 0: only at the end
  std::int64_t keep = 3;
  std::string resume = "auto";  // auto, never, or the path of a checkpoint
  bool fallback = true;
  std::string on_failure = "auto";  // auto, continue or stop
  friend bool operator==(const CheckpointConfig&, const CheckpointConfig&) = default;
};

struct OutputConfig {
  std::string run_folder;  // empty: a new one under runs/
  std::int64_t metrics_every = 1;
  std::vector<std::int64_t> trace_steps = {10};
  std::string progress = "auto";
  std::string sample_prompt = "#include <";
  std::int64_t sample_tokens = 200;
  friend bool operator==(const OutputConfig&, const OutputConfig&) = default;
};

struct LaunchConfig {
  double grace_s = 5;
  double stop_grace_s = 60;
  double timeout_s = 0;  // 0: PENSTOCK_TIMEOUT_S, else 300
  friend bool operator==(const LaunchConfig&, const LaunchConfig&) = default;
};

struct TrainConfig {
  ModelConfig model;
  LayoutConfig layout;
  TrainingConfig training;
  DataConfig data;
  CheckpointConfig checkpoint;
  OutputConfig output;
  LaunchConfig launch;
  friend bool operator==(const TrainConfig&, const TrainConfig&) = default;
};

struct ResolvedConfig {
  TrainConfig config;
  // "layout.pp" -> "train.toml:7", "--pp", "preset small" or "derived"; a field that has its default is not in it.
  std::map<std::string, std::string> origins;
};

struct ConfigSources {
  std::optional<std::filesystem::path> file;
  // "--section.key value", "--section.key=value", or "--key value" where only one section has the key; '-' and '_' are the
  // same in names. Lists take several values, or one with commas; a flag alone is true. Anything else is an error.
  std::vector<std::string> arguments;
};

ResolvedConfig load_config(const ConfigSources& sources);
// The same from TOML text; `name` stands for the file in messages.
ResolvedConfig parse_config(std::string_view toml, std::string_view name,
                            const std::vector<std::string>& arguments = {});

// The whole as TOML with comments: help, allowed values, and where each value came from. Reads back as the same config.
std::string to_toml(const ResolvedConfig& resolved);
// The page docs/configuration.md.
std::string configuration_page();

// All keys by section with their defaults and meanings, for the help of commands.
std::string configuration_help();
// "model.preset", ...
std::vector<std::string> config_keys();

std::vector<std::string> preset_names();

}  // namespace penstock::train
