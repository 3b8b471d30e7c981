// The configuration of a training run: everything that `penstock train` accepts, in one value.
//
//   train::ConfigSources sources;
//   sources.file = "train.toml";
//   sources.arguments = {"--layout.pp", "2", "--lr", "3e-4"};
//   const train::ResolvedConfig resolved = train::load_config(sources);
//   std::int64_t stages = resolved.config.layout.pp;
//
// A value comes from the command line, else from the file, else from the preset (`model.preset`), else from
// its default. Loading replaces zeros and empty strings that mean "choose a suitable value", and checks the
// result: a ResolvedConfig is consistent. docs/configuration.md lists limits and choices of all fields.
// Choices (`optimizer`, ...) are in lower case.
//
// Every error is a ConfigError that says where the value came from (file and line, flag or preset) and what
// to change. Independent of LibTorch. Thread safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::train {

// The transformer.
struct ModelConfig {
  std::string preset = "tiny";       // a set of values that all other settings override (preset_names())
  std::int64_t vocabulary = 257;     // number of different tokens; byte tokens need 257
  std::int64_t width = 192;          // of the residual stream; a multiple of heads
  std::int64_t layers = 4;           // number of blocks
  std::int64_t heads = 6;            // attention heads
  std::int64_t key_value_heads = 2;  // 0: as many as heads
  std::int64_t feed_width = 512;     // 0: 8/3 of the width, rounded up to a multiple of 32
  std::int64_t context = 256;        // tokens per sample
  double rope_theta = 10000;         // base of the rotary position embedding
  double norm_epsilon = 1e-5;        // of the normalization layers
  bool tie_head = true;              // the output layer uses the weight of the embedding
  double dropout = 0;                // probability, during training
  std::string pattern;               // A per block, '|' between stages; empty: A for each layer
  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;  // compares all fields
};

// How the model and the batch are distributed over ranks.
struct LayoutConfig {
  std::int64_t ranks = 0;            // number of processes; 0: pp * dp * tp
  std::int64_t pp = 2;               // pipeline-parallel ranks
  std::int64_t virtual_stages = 0;   // per rank; 0: what the schedule requires, 2 for interleaved ones
  std::int64_t dp = 1;               // data-parallel ranks
  std::int64_t shard = 1;            // data-parallel ranks that share the parameters; divides dp
  std::int64_t tp = 1;               // tensor-parallel ranks
  std::string schedule = "auto";     // a kind (loading sets the canonical name), or the path of a CSV file
  std::int64_t microbatches = 8;     // per run of the schedule
  std::int64_t microbatch_size = 2;  // samples
  std::string partition = "cost";    // what stages are balanced by: count or cost
  std::string transport = "auto";    // between stages: auto, gloo, ucx or nccl
  std::string device = "auto";       // auto, cpu or cuda
  friend bool operator==(const LayoutConfig&, const LayoutConfig&) = default;  // compares all fields
};

// Steps, optimizer, precision, validation.
struct TrainingConfig {
  std::int64_t steps = 120;           // of the whole run
  std::int64_t global_batch = 0;      // samples; 0: dp * microbatches * microbatch_size * accumulation
  std::int64_t accumulation = 0;      // schedule runs per step; 0: what global_batch needs, else 1
  std::string optimizer = "adamw";    // adamw or sgd
  double lr = 2e-3;                   // peak learning rate
  std::int64_t warmup_steps = 20;     // steps in which the learning rate rises from 0 to lr
  std::string decay = "cosine";       // after the warm-up: cosine, linear or constant
  double min_lr_ratio = 0.1;          // final learning rate as a fraction of lr
  double weight_decay = 0.1;          // decoupled
  std::vector<double> betas = {0.9, 0.95};  // AdamW: decay rates of the two running averages
  double epsilon = 1e-8;              // AdamW: added to the denominator
  double momentum = 0.9;              // SGD
  double clip_norm = 1;               // maximum norm of all gradients; 0: no clipping
  std::string precision = "fp32";     // of computation: fp32, bf16 or fp16; parameters stay in fp32
  double loss_scale = 0;              // fp16 only; 0: found and adapted while training
  std::int64_t seed = 1;              // of initial parameters, dropout and data order
  std::int64_t validate_every = 40;   // steps; 0: never
  std::int64_t validate_batches = 4;  // global batches per validation
  double time_limit_s = 0;            // seconds after which the run saves and ends; 0: no limit
  friend bool operator==(const TrainingConfig&, const TrainingConfig&) = default;  // compares all fields
};

// Training data.
struct DataConfig {
  std::vector<std::string> sources;    // files, folders, patterns; empty, no shards: C++ headers
  std::string shards;                  // folder of token shards, instead of sources
  std::string format = "auto";         // of the sources: auto, text or uint16
  std::int64_t end_of_document = -1;   // token of token files; -1: that of their format, if it has one
  std::vector<std::string> extensions;  // use only files with these; empty: all
  double validation_fraction = 0.05;   // share of the text held out for validation
  std::int64_t cap_bytes = 16 << 20;   // maximum of text; 0: no limit, the default if sources are given
  bool document_mask = true;           // tokens attend only to their own document
  bool skip_bad_files = false;         // skip unreadable, empty and binary files instead of failing
  friend bool operator==(const DataConfig&, const DataConfig&) = default;  // compares all fields
};

// Saving checkpoints, and what a run starts from.
struct CheckpointConfig {
  std::string folder;               // empty: "checkpoints" in the run folder
  std::int64_t every = 100;         // steps; 0: only at the end
  std::int64_t keep = 3;            // number of checkpoints
  std::string resume = "auto";      // auto, never, or the path of a checkpoint
  bool fallback = true;             // use the previous checkpoint if the newest is damaged
  std::string on_failure = "auto";  // if one cannot be written: auto, continue or stop
  friend bool operator==(const CheckpointConfig&, const CheckpointConfig&) = default;  // compares all fields
};

// Output of the run.
struct OutputConfig {
  std::string run_folder;                       // empty: a new one under runs/
  std::int64_t metrics_every = 1;               // steps between records in metrics.jsonl
  std::vector<std::int64_t> trace_steps = {10};  // steps to record a timeline of
  std::string progress = "auto";                // auto, bar, lines or none
  std::string sample_prompt = "#include <";     // of the text sample at the end
  std::int64_t sample_tokens = 200;             // in the sample; 0: no sample
  friend bool operator==(const OutputConfig&, const OutputConfig&) = default;  // compares all fields
};

// Timeouts of the ranks that `penstock train` starts, in seconds.
struct LaunchConfig {
  double grace_s = 5;        // for the other ranks to exit after one has failed
  double stop_grace_s = 60;  // for all ranks to save and exit after SIGTERM or Ctrl-C
  double timeout_s = 0;      // of rendezvous and each operation; 0: PENSTOCK_TIMEOUT_S, else 300
  friend bool operator==(const LaunchConfig&, const LaunchConfig&) = default;  // compares all fields
};

// A whole configuration.
struct TrainConfig {
  ModelConfig model;            // section [model]
  LayoutConfig layout;          // section [layout]
  TrainingConfig training;      // section [training]
  DataConfig data;              // section [data]
  CheckpointConfig checkpoint;  // section [checkpoint]
  OutputConfig output;          // section [output]
  LaunchConfig launch;          // section [launch]
  friend bool operator==(const TrainConfig&, const TrainConfig&) = default;  // compares all fields
};

// A configuration that is complete and checked.
struct ResolvedConfig {
  TrainConfig config;  // with derived values filled in
  // Where values came from: "layout.pp" -> "train.toml:7", "--pp", "preset small" or "derived". Fields that
  // have their defaults are not listed.
  std::map<std::string, std::string> origins;
};

// Where a configuration is read from.
struct ConfigSources {
  std::optional<std::filesystem::path> file;  // TOML
  // "--section.key value", "--section.key=value", or "--key value" if only one section has the key; '-' and
  // '_' are equivalent in names. Lists take several values, or one with commas; a flag alone is true.
  // Anything else is an error.
  std::vector<std::string> arguments;
};

// Reads, completes and checks a configuration. Throws ConfigError.
ResolvedConfig load_config(const ConfigSources& sources);
// The same from TOML text; `name` stands for the file in messages.
ResolvedConfig parse_config(std::string_view toml, std::string_view name,
                            const std::vector<std::string>& arguments = {});

// Returns the configuration as TOML with comments: meaning, allowed values, and the origin of each value.
// Parsing it returns the same configuration.
std::string to_toml(const ResolvedConfig& resolved);
// Returns the contents of docs/configuration.md.
std::string configuration_page();

// Returns all keys by section with their defaults and meanings, for the help of commands.
std::string configuration_help();
// Returns all keys: "model.preset", ...
std::vector<std::string> config_keys();

// Returns the values that model.preset accepts.
std::vector<std::string> preset_names();

}  // namespace penstock::train
