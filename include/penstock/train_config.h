// The configuration of `penstock train`: a value with all settings, loaded from a TOML file and command-line
// arguments.
//
//   train::ConfigSources sources;
//   sources.file = "train.toml";
//   sources.arguments = {"--layout.pp", "2", "--lr", "3e-4"};
//   train::ResolvedConfig resolved = train::load_config(sources);
//   std::cout << train::to_toml(resolved);                         // all values, with comments
//
// A value comes from the arguments, else from the file, else from the preset (`model.preset`), else from its
// default. Loading then derives key_value_heads, feed_width, ranks, virtual_stages, global_batch and
// accumulation if they are 0, a schedule that is auto, layers from a pattern, and a shorter default warm-up
// for a short run, and checks everything: a ResolvedConfig is consistent. Other automatic values (device,
// transport, folders) are chosen when the run starts. Settings with a fixed set of choices hold one of the
// listed names, in lower case. docs/configuration.md lists all keys with their defaults and ranges.
//
// Every error is a ConfigError that says where the value came from (file and line, flag or preset) and what
// to change.
//
// Does not depend on LibTorch. Thread safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::train {

// Section [model]: the model.
struct ModelConfig {
  // Named set of values; all other settings override it. Without one, a type other than auto and hybrid has
  // the values of tiny.
  std::string preset = "hybrid-tiny";
  // Which model: auto, transformer, hybrid, or one that the program registered; auto: transformer if it can
  // have all settings, else hybrid.
  std::string type = "auto";
  std::int64_t vocabulary = 257;  // vocabulary size; byte tokens need 257
  std::int64_t width = 192;       // width of the residual stream; must be a multiple of heads
  std::int64_t layers = 4;        // number of blocks in the model
  std::int64_t heads = 6;         // number of attention heads
  // Number of key/value heads, each shared by heads / key_value_heads query heads; 0: same as heads.
  std::int64_t key_value_heads = 2;
  // Inner width of the feed-forward layers; 0: 8/3 of the width, rounded up to a multiple of 32.
  std::int64_t feed_width = 512;
  std::int64_t context = 256;  // tokens per sample (sequence length)
  double rope_theta = 10000;   // base of the rotary position embedding
  double norm_epsilon = 1e-5;  // epsilon of the normalization layers
  bool tie_head = true;        // share the embedding weight with the output layer
  double dropout = 0;          // dropout probability during training
  // One letter per block (A: attention, M: state space, E: experts, F: feed-forward), with | where a pipeline
  // stage ends; empty: A for each layer.
  std::string pattern;
  bool attention_feed = true;             // an A has a feed-forward part of its own after its attention
  std::string norm = "rms_norm";          // normalization of the blocks: rms_norm or dynamic_tanh
  bool embed_scale = false;               // multiply embeddings by the square root of the width
  std::vector<std::int64_t> windows;      // tokens an attention block sees; 0: all; repeated over the blocks
  std::vector<std::int64_t> nope_layers;  // blocks, counted from 0, whose attention has no rotary positions
  std::int64_t bos_token = 0;             // documents begin at this token if the data has none; 0: no
  std::int64_t state_size = 128;          // M: elements of the state for each element of a head
  std::int64_t state_head_width = 64;     // M: elements of a head
  std::int64_t state_expand = 2;          // M: inner width as a multiple of the width
  std::int64_t state_groups = 1;          // M: groups of heads that share keys and queries
  std::int64_t state_kernel = 4;          // M: taps of the convolution
  std::int64_t state_chunk = 128;         // M: tokens that are computed at once
  std::int64_t experts = 8;               // E: number of experts
  std::int64_t top_k = 2;                 // E: experts per token
  std::int64_t expert_width = 0;          // E: inner width of an expert; 0: same as feed_width
  std::string router_scores = "softmax";  // E: softmax over the experts, or sigmoid of each
  bool router_normalize = true;           // E: the weights of a token's experts sum to 1
  std::int64_t shared_expert_width = 0;   // E: inner width of an expert that serves every token; 0: none
  double capacity_factor = 0;             // E: limit of an expert / its even share; 0: no token is dropped
  double balance_weight = 0.01;           // E: weight of the loss that balances the experts
  // E: whose choices the balance loss counts: of all data-parallel ranks in a microbatch (microbatch), or of
  // each rank alone (replica).
  std::string balance_scope = "microbatch";
  double router_z_weight = 0.001;  // E: weight of the loss that keeps router logits small
  double router_bias_rate = 0;     // E: step of a bias that balances the experts; 0: no bias
  // Mixture of depths: blocks, counted from 0, that only some tokens go through.
  std::vector<std::int64_t> depth_layers;
  double depth_capacity = 0.5;       // fraction of the tokens of a row that go through such a block
  std::string depth_kind = "plain";  // plain, or gamma: with a learnt scale of what such a block adds
  double depth_gamma = 0.1;          // initial value of that scale
  double depth_weight = 0.01;        // weight of the loss that makes the choice of tokens predictable
  // Multi-token prediction: tokens after the next one that the model predicts in training; 0: none.
  std::int64_t multi_token_depth = 0;
  std::string multi_token_block;    // letter of its blocks; empty: that of the model's last block
  double multi_token_weight = 0.3;  // weight of its loss

  // ---- added to the embedding; what needs metadata adds nothing to data that has none ----
  std::vector<std::int64_t> ngram_orders;  // a table of hashed n-grams for each of these n; empty: none
  std::int64_t ngram_buckets = 65536;      // rows of each table of n-grams
  bool structure_embedding = false;        // five tables of places in the syntax tree; needs metadata
  std::int64_t structure_kinds = 16;       // structure_embedding: kinds of structure a token is part of
  std::int64_t dependency_levels = 32;     // structure_embedding: levels of the graph of dependencies
  std::int64_t syntax_depths = 64;         // structure_embedding: depths in the syntax tree
  std::int64_t sibling_indices = 64;       // structure_embedding: places among the children of a node
  std::int64_t node_types = 256;           // structure_embedding: types of nodes of the syntax tree
  std::int64_t platforms = 0;              // platforms, each with a row; 0: none; needs metadata
  std::string embed_norm = "none";         // norm of the sum: none, rms_norm or dynamic_tanh

  // Kinds of relations between tokens, each with a learnt bias of attention; 0: none; needs metadata.
  std::int64_t relations = 0;
  // Feed-forward parts mix every token with its parent in the syntax tree; needs metadata.
  bool tree_feed = false;

  // Compares all members.
  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

// Section [layout]: how the model and the batch are distributed over ranks.
struct LayoutConfig {
  std::int64_t ranks = 0;  // number of processes; 0: pp * dp * tp
  std::int64_t pp = 2;     // pipeline-parallel ranks
  // Stages per pipeline rank; 0: the number that the schedule requires, 2 for interleaved schedules.
  std::int64_t virtual_stages = 0;
  std::int64_t dp = 1;  // data-parallel ranks; each processes its share of every microbatch
  // Data-parallel ranks over which parameters, gradients and optimizer state are sharded (fully_shard); 1: no
  // sharding, dp: full sharding, in between: replicated groups of sharded ranks. Divides dp.
  std::int64_t shard = 1;
  // Expert-parallel ranks: consecutive data-parallel ranks over which the experts of E blocks are divided.
  // Divides dp, model.experts and, unless it is 1, shard.
  std::int64_t ep = 1;
  std::int64_t tp = 1;  // tensor-parallel ranks; they split each layer
  // Tensor-parallel ranks divide the tokens of hidden states between the parts of layers that they split:
  // less memory and work for norms, dropout and sums. Needs tp > 1, which must divide model.context.
  bool sequence_parallel = false;
  // Pipeline schedule (penstock schedule --help lists the kinds), or the path of a CSV file; auto:
  // ZBVZeroBubble if there are enough blocks for two stages per rank, else 1F1B or Interleaved1F1B.
  // After loading, a kind has its canonical name, also in place of auto.
  std::string schedule = "auto";
  std::int64_t microbatches = 8;     // microbatches per run of the schedule
  std::int64_t microbatch_size = 2;  // samples per microbatch
  // What is balanced over the stages: the number of blocks (count), their parameters by a greedy rule
  // (weight), or their cost (cost): the slowest stage is as fast as possible; penstock partition shows it.
  std::string partition = "cost";
  // Transport for tensors between stages: auto, gloo, ucx or nccl; auto: nccl for cuda, ucx within one
  // machine if available, else gloo. nccl works with cuda only, gloo and ucx with the CPU only.
  std::string transport = "auto";
  // Dtype of activations and gradients between pipeline ranks: same, bf16 or fp8 (8 bits, with a scale for
  // each 128 values).
  std::string border_dtype = "same";
  // Schedules with units that pair a forward with a backward (DualPipe, DualPipeV), ep > 1: whether one
  // computes while the other exchanges rows of experts: auto (yes) or off. Results have the same bits.
  std::string overlap_experts = "auto";
  // Device that the model runs on: auto, cpu or cuda; auto: cuda if there is a GPU for each rank, else cpu.
  std::string device = "auto";
  // Compares all members.
  friend bool operator==(const LayoutConfig&, const LayoutConfig&) = default;
};

// Section [training]: steps, optimizer, precision, validation.
struct TrainingConfig {
  std::int64_t steps = 120;  // total optimizer steps of the run
  // Samples per step over all ranks; 0: dp * microbatches * microbatch_size * accumulation.
  std::int64_t global_batch = 0;
  // Runs of the schedule per step, whose gradients are accumulated; 0: derived from global_batch, else 1.
  std::int64_t accumulation = 0;
  std::string optimizer = "adamw";  // adamw or sgd
  double lr = 2e-3;                 // peak learning rate
  std::int64_t warmup_steps = 20;   // steps over which the learning rate increases from 0 to lr
  std::string decay = "cosine";     // learning rate decay after the warm-up: cosine, linear or constant
  double min_lr_ratio = 0.1;        // final learning rate as a fraction of lr
  double weight_decay = 0.1;        // decoupled weight decay
  // AdamW decay rates of the running averages of gradients and squared gradients.
  std::vector<double> betas = {0.9, 0.95};
  double epsilon = 1e-8;           // added to AdamW's denominator
  double momentum = 0.9;           // SGD momentum
  double clip_norm = 1;            // maximum norm of all gradients together; 0: no clipping
  std::string precision = "fp32";  // compute precision: fp32, bf16 or fp16; parameters stay in fp32
  double loss_scale = 0;           // loss scale for fp16; 0: dynamic
  // Activations recomputed in the backward instead of kept: none, block (of every block), attention (A
  // blocks), experts (E blocks), letters:ME, or pattern:.R.R with a mark for each block (. keeps, R or the
  // letter of the block recomputes).
  std::string recompute = "none";
  std::vector<std::int64_t> recompute_stages;        // recompute in these stages only; empty: in all
  std::vector<std::int64_t> recompute_microbatches;  // recompute for these microbatches only; empty: for all
  // How stages run their forward and backward: off (operator by operator), graph (captured once, then
  // replayed, with the same bits) or fused (the same, with generated code for groups of operators).
  std::string compile = "off";
  // With compile = fused: whether only code is generated that has the bits of the operators, and whether each
  // new kernel is compared with the operators once, in its first call.
  bool compile_exact = false;
  bool compile_check = false;  // see compile_exact
  // Folder that penstock compile has written for this configuration: its graphs are used, and nothing is
  // captured; empty: graphs are loaded from the cache if PENSTOCK_CACHE names a folder, else captured.
  std::string artifact;
  // What captured graphs keep for the backward of a microbatch, per stage: "1" all that it uses, "0" as
  // little as possible, a fraction between, or bytes ("1.5 GiB"). The rest is recomputed, with the same bits.
  std::string activation_budget = "1";
  // Overrides of that by module: "blocks.*.attention: save", "*: recompute"; the first that matches decides.
  std::vector<std::string> activation_policy;
  // Passes that do not change the captured graphs (graph_pass.h; docs/capture.md lists them); empty: all run.
  std::vector<std::string> disable_passes;
  std::int64_t seed = 1;              // seed for initial parameters, dropout and data order
  std::int64_t validate_every = 40;   // steps between validations; 0: no validation
  std::int64_t validate_batches = 4;  // global batches per validation
  double time_limit_s = 0;            // seconds after which the run saves a checkpoint and ends; 0: no limit
  // Compares all members.
  friend bool operator==(const TrainingConfig&, const TrainingConfig&) = default;
};

// Section [data]: training data.
struct DataConfig {
  // Files, folders and patterns (*.txt) of text or token files; empty and no shards: the C++ headers of this
  // machine.
  std::vector<std::string> sources;
  std::string shards;  // folder of token shards (made by penstock data make), instead of sources
  // Format of the sources: auto, text or uint16; auto: token files if they begin with an llm.c header, else
  // text; uint16: 16-bit tokens without a header (nanoGPT).
  std::string format = "auto";
  // Token that separates documents in token files; -1: 50256 (GPT-2) or 128000 (Llama 3) according to the
  // llm.c header, none without a header.
  std::int64_t end_of_document = -1;
  // Use only files with these extensions; empty: all files of the given sources, C++ files for the default
  // sources.
  std::vector<std::string> extensions;
  // Fraction of the text held out for validation: whole files, or the end of each file if there are few.
  double validation_fraction = 0.05;
  std::int64_t cap_bytes = 16 << 20;  // maximum bytes of text; 0: no limit, the default if sources are given
  // Mask attention between documents; false: tokens also attend to earlier documents of the sample, which is
  // faster on GPUs.
  bool document_mask = true;
  // Metadata about the tokens for models that use it: auto, none or cpp; cpp: the structure of C++ text,
  // found by a lexer; auto: cpp for the C++ headers of this machine if the model uses structure, else none.
  // After loading it is none or cpp.
  std::string structure = "auto";
  bool skip_bad_files = false;  // skip unreadable, empty and binary files instead of failing
  // Compares all members.
  friend bool operator==(const DataConfig&, const DataConfig&) = default;
};

// Section [checkpoint]: saving checkpoints, and what a run starts from.
struct CheckpointConfig {
  std::string folder;        // folder for checkpoints; empty: checkpoints/ in the run folder
  std::int64_t every = 100;  // steps between checkpoints; 0: only at the end
  std::int64_t keep = 3;     // number of checkpoints to keep
  // What a new run starts from; auto: the newest checkpoint in its folder, if any; never: no checkpoint; or
  // the path of a checkpoint. A run that has checkpoints always continues from its newest one.
  std::string resume = "auto";
  bool fallback = true;  // use the previous checkpoint if the newest is damaged
  // What to do if a checkpoint cannot be written: auto, continue or stop; auto: continue and retry if there
  // is an older checkpoint, else stop.
  std::string on_failure = "auto";
  // Compares all members.
  friend bool operator==(const CheckpointConfig&, const CheckpointConfig&) = default;
};

// Section [output]: output of the run.
struct OutputConfig {
  std::string run_folder;                        // folder for all output; empty: a new folder under runs/
  std::int64_t metrics_every = 1;                // steps between records in metrics.jsonl
  std::vector<std::int64_t> trace_steps = {10};  // steps to record a timeline of
  // Progress display: auto, bar, lines or none; auto: a bar on a terminal, else lines.
  std::string progress = "auto";
  // Prompt of the text sample at the end of the run; at least one byte.
  std::string sample_prompt = "#include <";
  std::int64_t sample_tokens = 200;  // tokens in the sample; 0: no sample
  // Compares all members.
  friend bool operator==(const OutputConfig&, const OutputConfig&) = default;
};

// Section [launch]: timeouts of the ranks that penstock train starts.
struct LaunchConfig {
  // Seconds that the other ranks have to exit after one has failed, before they are stopped.
  double grace_s = 5;
  // Seconds that the ranks have after SIGTERM or Ctrl-C to finish the step and save a checkpoint, before they
  // are killed.
  double stop_grace_s = 60;
  // Seconds that a rank waits for the others in rendezvous and in each operation before it fails; 0:
  // PENSTOCK_TIMEOUT_S, else 300.
  double timeout_s = 0;
  // Compares all members.
  friend bool operator==(const LaunchConfig&, const LaunchConfig&) = default;
};

// All settings, by section.
struct TrainConfig {
  ModelConfig model;            // section [model]
  LayoutConfig layout;          // section [layout]
  TrainingConfig training;      // section [training]
  DataConfig data;              // section [data]
  CheckpointConfig checkpoint;  // section [checkpoint]
  OutputConfig output;          // section [output]
  LaunchConfig launch;          // section [launch]
  // Compares all sections.
  friend bool operator==(const TrainConfig&, const TrainConfig&) = default;
};

// A complete and consistent configuration.
struct ResolvedConfig {
  TrainConfig config;  // the values
  // Where each value came from: "layout.pp" -> "train.toml:7", "--pp", "preset small" or "derived". Values
  // that are still the default have no entry.
  std::map<std::string, std::string> origins;
};

// Where load_config reads values.
struct ConfigSources {
  std::optional<std::filesystem::path> file;  // TOML file; none: no file
  // "--section.key value", "--section.key=value", or "--key value" if only one section has the key; '-' and
  // '_' are equivalent in names, and "--data" is short for "--data.sources". Lists take several values, or
  // one with commas; a flag without a value is true. Each key may be given once. Anything else is an error.
  std::vector<std::string> arguments;
};

// Loads a configuration. Throws ConfigError for a file that cannot be read, malformed text, an unknown key, a
// value out of range and values that contradict each other.
ResolvedConfig load_config(const ConfigSources& sources);
// Loads a configuration from TOML text; messages use `name` as the name of the file. Throws ConfigError like
// load_config.
ResolvedConfig parse_config(std::string_view toml, std::string_view name,
                            const std::vector<std::string>& arguments = {});

// Returns the whole configuration as TOML, with comments: meaning, allowed values, and where each value came
// from. Loading it results in the same configuration.
std::string to_toml(const ResolvedConfig& resolved);
// Returns the text of docs/configuration.md.
std::string configuration_page();

// Returns all keys by section, with their defaults and meanings, for the help of commands.
std::string configuration_help();
// Returns all keys, "model.preset" and so on.
std::vector<std::string> config_keys();

// Returns the names of the presets.
std::vector<std::string> preset_names();

}  // namespace penstock::train
