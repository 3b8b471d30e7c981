#include "penstock/train/config/config_fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock::train {

namespace {

constexpr double kMany = 1e15;  // exact in a double and far above any real count
constexpr double kHuge = 1e30;

// &TrainConfig::model, &ModelConfig::width -> pointer to the member of a config
template <class Section, class Value>
std::function<FieldPlace(TrainConfig&)> at(Section TrainConfig::*section, Value Section::*value) {
  return [=](TrainConfig& config) -> FieldPlace { return &(config.*section.*value); };
}

std::vector<ConfigField> make_fields() {
  using T = TrainConfig;
  using M = ModelConfig;
  using L = LayoutConfig;
  using R = TrainingConfig;
  using D = DataConfig;
  using C = CheckpointConfig;
  using O = OutputConfig;
  using U = LaunchConfig;
  return {
      {"model",
       "preset",
       "Named set of values; all other settings override it. Without one, a model.type other than auto and "
       "hybrid has the values of tiny",
       at(&T::model, &M::preset),
       0,
       0,
       false,
       {}},
      {"model", "type",
       "Which model: auto, transformer, hybrid, or one that the program registered; auto: transformer if it "
       "can have all settings, else hybrid",
       at(&T::model, &M::type)},
      {"model", "vocabulary", "Vocabulary size; byte tokens need 257", at(&T::model, &M::vocabulary), 2,
       4294967296.0},
      {"model", "width", "Width of the residual stream; must be a multiple of heads",
       at(&T::model, &M::width), 1, 1 << 20},
      {"model", "layers", "Number of blocks in the model", at(&T::model, &M::layers), 1, 1 << 16},
      {"model", "heads", "Number of attention heads", at(&T::model, &M::heads), 1, 1 << 16},
      {"model", "key_value_heads",
       "Number of key/value heads, each shared by heads / key_value_heads query heads; 0: same as heads",
       at(&T::model, &M::key_value_heads), 0, 1 << 16},
      {"model", "feed_width",
       "Inner width of the feed-forward layers; 0: 8/3 of the width, rounded up to a multiple of 32",
       at(&T::model, &M::feed_width), 0, 1 << 22},
      {"model", "context", "Tokens per sample (sequence length)", at(&T::model, &M::context), 1, 1 << 24},
      {"model", "rope_theta", "Base of the rotary position embedding", at(&T::model, &M::rope_theta), 1,
       1e12},
      {"model", "norm_epsilon", "Epsilon of the normalization layers", at(&T::model, &M::norm_epsilon), 0, 1,
       true},
      {"model", "tie_head", "Share the embedding weight with the output layer", at(&T::model, &M::tie_head)},
      {"model", "dropout", "Dropout probability during training", at(&T::model, &M::dropout), 0, 0.99},
      {"model", "pattern",
       "One letter per block (A: attention, M: state space, E: experts, F: feed-forward), with | where a "
       "pipeline stage ends; empty: A for each layer",
       at(&T::model, &M::pattern)},
      {"model", "attention_feed", "An A has a feed-forward part of its own after its attention",
       at(&T::model, &M::attention_feed)},
      {"model",
       "norm",
       "Normalization of the blocks",
       at(&T::model, &M::norm),
       0,
       0,
       false,
       {"rms_norm", "dynamic_tanh"}},
      {"model", "embed_scale", "Multiply embeddings by the square root of the width",
       at(&T::model, &M::embed_scale)},
      {"model", "windows",
       "Tokens that an attention block sees, itself included; 0: all; empty: all; one number: for every "
       "block; several: repeated over the blocks",
       at(&T::model, &M::windows), 0, 1 << 24},
      {"model", "nope_layers", "Blocks, counted from 0, whose attention has no rotary positions",
       at(&T::model, &M::nope_layers), 0, 1 << 16},
      {"model", "bos_token", "Documents begin at this token if the data has none; 0: no",
       at(&T::model, &M::bos_token), 0, 4294967296.0},
      {"model", "state_size", "M: elements of the state for each element of a head",
       at(&T::model, &M::state_size), 1, 1 << 16},
      {"model", "state_head_width", "M: elements of a head", at(&T::model, &M::state_head_width), 1, 1 << 16},
      {"model", "state_expand", "M: inner width as a multiple of the width", at(&T::model, &M::state_expand),
       1, 64},
      {"model", "state_groups", "M: groups of heads that share keys and queries",
       at(&T::model, &M::state_groups), 1, 1 << 16},
      {"model", "state_kernel", "M: taps of the convolution", at(&T::model, &M::state_kernel), 1, 64},
      {"model", "state_chunk", "M: tokens that are computed at once", at(&T::model, &M::state_chunk), 1,
       1 << 16},
      {"model", "experts", "E: number of experts", at(&T::model, &M::experts), 1, 1 << 16},
      {"model", "top_k", "E: experts per token", at(&T::model, &M::top_k), 1, 1 << 16},
      {"model", "expert_width", "E: inner width of an expert; 0: same as feed_width",
       at(&T::model, &M::expert_width), 0, 1 << 22},
      {"model",
       "router_scores",
       "E: scores of the router, over all experts or of each on its own",
       at(&T::model, &M::router_scores),
       0,
       0,
       false,
       {"softmax", "sigmoid"}},
      {"model", "router_normalize", "E: the weights of a token's experts sum to 1",
       at(&T::model, &M::router_normalize)},
      {"model", "shared_expert_width", "E: inner width of an expert that serves every token; 0: none",
       at(&T::model, &M::shared_expert_width), 0, 1 << 22},
      {"model", "capacity_factor", "E: limit of an expert / its even share; 0: no token is dropped",
       at(&T::model, &M::capacity_factor), 0, 1e6},
      {"model", "balance_weight", "E: weight of the loss that balances the experts",
       at(&T::model, &M::balance_weight), 0, 1e3},
      {"model",
       "balance_scope",
       "E: whose choices the balance loss counts: of all data-parallel ranks in a microbatch, or of each "
       "rank "
       "alone",
       at(&T::model, &M::balance_scope),
       0,
       0,
       false,
       {"microbatch", "replica"}},
      {"model", "router_z_weight", "E: weight of the loss that keeps router logits small",
       at(&T::model, &M::router_z_weight), 0, 1e3},
      {"model", "router_bias_rate",
       "E: step by which a bias of each expert changes after a training step, towards equal loads; 0: no "
       "bias",
       at(&T::model, &M::router_bias_rate), 0, 0.99},
      {"model", "depth_layers",
       "Mixture of depths: blocks, counted from 0, that only some tokens of a row go through",
       at(&T::model, &M::depth_layers), 0, 1 << 16},
      {"model", "depth_capacity", "Mixture of depths: fraction of the tokens that go through a block",
       at(&T::model, &M::depth_capacity), 0, 1, true},
      {"model",
       "depth_kind",
       "Mixture of depths: plain, or gamma for a learnt scale of what a block adds",
       at(&T::model, &M::depth_kind),
       0,
       0,
       false,
       {"plain", "gamma"}},
      {"model", "depth_gamma", "Mixture of depths: initial value of the scale of gamma",
       at(&T::model, &M::depth_gamma), 0, 1e3, true},
      {"model", "depth_weight",
       "Mixture of depths: weight of the loss that makes the choice of tokens predictable for generation",
       at(&T::model, &M::depth_weight), 0, 1e3},
      {"model", "multi_token_depth",
       "Multi-token prediction: tokens after the next one that training predicts, too; 0: none",
       at(&T::model, &M::multi_token_depth), 0, 64},
      {"model", "multi_token_block",
       "Multi-token prediction: letter of the block of each depth; empty: that of the last block",
       at(&T::model, &M::multi_token_block)},
      {"model", "multi_token_weight", "Multi-token prediction: weight of its loss",
       at(&T::model, &M::multi_token_weight), 0, 1e3},
      {"model", "ngram_orders",
       "Add hashed n-grams to the embedding: a table for each of these n, each from 2 to 16; empty: none",
       at(&T::model, &M::ngram_orders), 2, 16},
      {"model", "ngram_buckets", "Rows of each table of n-grams", at(&T::model, &M::ngram_buckets), 1,
       2147483647.0},
      {"model", "structure_embedding",
       "Add five tables of places in the syntax tree to the embedding; needs metadata",
       at(&T::model, &M::structure_embedding)},
      {"model", "structure_kinds", "structure_embedding: kinds of structure that a token is part of",
       at(&T::model, &M::structure_kinds), 1, 1 << 24},
      {"model", "dependency_levels",
       "structure_embedding: levels of the graph of dependencies; higher ones count as the last",
       at(&T::model, &M::dependency_levels), 1, 1 << 24},
      {"model", "syntax_depths",
       "structure_embedding: depths in the syntax tree; higher ones count as the last",
       at(&T::model, &M::syntax_depths), 1, 1 << 24},
      {"model", "sibling_indices",
       "structure_embedding: places among the children of a node; higher ones count as the last",
       at(&T::model, &M::sibling_indices), 1, 1 << 24},
      {"model", "node_types", "structure_embedding: types of nodes of the syntax tree",
       at(&T::model, &M::node_types), 1, 1 << 24},
      {"model", "platforms",
       "Number of platforms, each with a row that is added to the embedding; 0: none; needs metadata",
       at(&T::model, &M::platforms), 0, 1 << 24},
      {"model",
       "embed_norm",
       "Normalization of the embedding, after all that is added to it",
       at(&T::model, &M::embed_norm),
       0,
       0,
       false,
       {"none", "rms_norm", "dynamic_tanh"}},
      {"model", "relations",
       "Kinds of relations between tokens, each with a learnt bias of attention; 0: none; needs metadata",
       at(&T::model, &M::relations), 0, 1 << 16},
      {"model", "tree_feed",
       "Feed-forward parts mix every token with its parent in the syntax tree; needs metadata",
       at(&T::model, &M::tree_feed)},

      {"layout", "ranks", "Number of processes; 0: pp * dp * tp", at(&T::layout, &L::ranks), 0, 65536},
      {"layout", "pp", "Pipeline-parallel ranks", at(&T::layout, &L::pp), 1, 65536},
      {"layout", "virtual_stages",
       "Stages per pipeline rank; 0: the number that the schedule requires, 2 for interleaved schedules",
       at(&T::layout, &L::virtual_stages), 0, 65536},
      {"layout", "dp", "Data-parallel ranks; each processes its share of every microbatch",
       at(&T::layout, &L::dp), 1, 65536},
      {"layout", "shard",
       "Data-parallel ranks over which parameters, gradients and optimizer state are sharded (fully_shard); "
       "1: no sharding, dp: full sharding, in between: replicated groups of sharded ranks",
       at(&T::layout, &L::shard), 1, 65536},
      {"layout", "ep",
       "Expert-parallel ranks: data-parallel ranks over which the experts of E blocks are divided; divides "
       "dp, "
       "model.experts and, unless it is 1, shard",
       at(&T::layout, &L::ep), 1, 65536},
      {"layout", "tp", "Tensor-parallel ranks; they split each layer", at(&T::layout, &L::tp), 1, 65536},
      {"layout", "sequence_parallel",
       "Tensor-parallel ranks divide the tokens of hidden states between the parts of layers that they "
       "split: less memory and work for norms, dropout and sums; needs tp > 1, which must divide "
       "model.context",
       at(&T::layout, &L::sequence_parallel)},
      {"layout", "schedule",
       "Pipeline schedule (penstock schedule --help lists the kinds), or the path of a CSV file; auto: "
       "ZBVZeroBubble if there are enough blocks for two stages per rank, else 1F1B or Interleaved1F1B",
       at(&T::layout, &L::schedule)},
      {"layout", "microbatches", "Microbatches per run of the schedule", at(&T::layout, &L::microbatches), 1,
       1 << 20},
      {"layout", "microbatch_size", "Samples per microbatch", at(&T::layout, &L::microbatch_size), 1,
       1 << 20},
      {"layout",
       "partition",
       "What is balanced over the stages: the number of blocks (count), their parameters by a greedy rule "
       "(weight), or their cost (cost): the slowest stage is as fast as possible; penstock partition shows "
       "it",
       at(&T::layout, &L::partition),
       0,
       0,
       false,
       {"count", "weight", "cost"}},
      {"layout",
       "transport",
       "Transport for tensors between stages; auto: nccl for cuda, ucx within one machine if available, else "
       "gloo. nccl works with cuda only, gloo and ucx with the CPU only",
       at(&T::layout, &L::transport),
       0,
       0,
       false,
       {"auto", "gloo", "ucx", "nccl"}},
      {"layout",
       "border_dtype",
       "Dtype of activations and gradients between pipeline ranks; bf16 and fp8 (8 bits, with a scale for "
       "each 128 values) send less and round; metrics.jsonl reports the error as border_error",
       at(&T::layout, &L::border_dtype),
       0,
       0,
       false,
       {"same", "bf16", "fp8"}},
      {"layout",
       "overlap_experts",
       "auto: where a schedule pairs a forward with a backward (DualPipe, DualPipeV), one computes while the "
       "other exchanges rows of experts (ep > 1); off: one after the other. Results have the same bits",
       at(&T::layout, &L::overlap_experts),
       0,
       0,
       false,
       {"auto", "off"}},
      {"layout",
       "device",
       "Device that the model runs on; auto: cuda if there is a GPU for each rank, else cpu",
       at(&T::layout, &L::device),
       0,
       0,
       false,
       {"auto", "cpu", "cuda"}},

      {"training", "steps", "Total optimizer steps of the run", at(&T::training, &R::steps), 1, kMany},
      {"training", "global_batch",
       "Samples per step over all ranks; 0: dp * microbatches * microbatch_size * accumulation",
       at(&T::training, &R::global_batch), 0, kMany},
      {"training", "accumulation",
       "Runs of the schedule per step, whose gradients are accumulated; 0: derived from global_batch, else 1",
       at(&T::training, &R::accumulation), 0, 1 << 20},
      {"training", "optimizer", "Optimizer", at(&T::training, &R::optimizer), 0, 0, false, {"adamw", "sgd"}},
      {"training", "lr", "Peak learning rate", at(&T::training, &R::lr), 0, 1e3, true},
      {"training", "warmup_steps", "Steps over which the learning rate increases from 0 to lr",
       at(&T::training, &R::warmup_steps), 0, kMany},
      {"training",
       "decay",
       "Learning rate decay after the warm-up",
       at(&T::training, &R::decay),
       0,
       0,
       false,
       {"cosine", "linear", "constant"}},
      {"training", "min_lr_ratio", "Final learning rate as a fraction of lr",
       at(&T::training, &R::min_lr_ratio), 0, 1},
      {"training", "weight_decay", "Decoupled weight decay", at(&T::training, &R::weight_decay), 0, 1e3},
      {"training",
       "betas",
       "AdamW decay rates of the running averages of gradients and squared gradients",
       at(&T::training, &R::betas),
       0,
       0.999999999,
       false,
       {},
       2},
      {"training", "epsilon", "Added to AdamW's denominator", at(&T::training, &R::epsilon), 0, 1, true},
      {"training", "momentum", "SGD momentum", at(&T::training, &R::momentum), 0, 0.999999999},
      {"training", "clip_norm", "Maximum norm of all gradients together; 0: no clipping",
       at(&T::training, &R::clip_norm), 0, kHuge},
      {"training",
       "precision",
       "Compute precision; parameters stay in fp32",
       at(&T::training, &R::precision),
       0,
       0,
       false,
       {"fp32", "bf16", "fp16"}},
      {"training", "loss_scale", "Loss scale for fp16; 0: dynamic", at(&T::training, &R::loss_scale), 0,
       kHuge},
      {"training", "recompute",
       "Activations that are recomputed in the backward instead of kept, with the same bits: none; block: of "
       "every block; attention: of A blocks; experts: of E blocks; letters:ME: of blocks with these letters; "
       "pattern:.R.R: a mark for each block, where . keeps and R or the letter of the block recomputes",
       at(&T::training, &R::recompute)},
      {"training", "recompute_stages",
       "Recompute in these stages only, counted from 0 over the whole model; empty: in all",
       at(&T::training, &R::recompute_stages), 0, 1 << 20},
      {"training", "recompute_microbatches",
       "Recompute for these microbatches of a run of the schedule only, counted from 0; empty: for all",
       at(&T::training, &R::recompute_microbatches), 0, 1 << 20},
      {"training",
       "compile",
       "How stages run forward and backward: off (operator by operator), graph (captured once, then replayed "
       "with the same bits) or fused (captured, with generated code for groups of operators; "
       "docs/fused.md)",
       at(&T::training, &R::compile),
       0,
       0,
       false,
       {"off", "graph", "fused"}},
      {"training", "compile_exact",
       "With compile = fused: generate code only where it has the bits of the operators",
       at(&T::training, &R::compile_exact)},
      {"training", "compile_check",
       "With compile = fused: compare each new kernel with the operators once, in its first call; if they "
       "differ, the operators run instead, with a warning",
       at(&T::training, &R::compile_check)},
      {"training", "artifact",
       "Folder with the graphs of the stages that penstock compile has written for this configuration: "
       "nothing "
       "is captured; empty: graphs are loaded from PENSTOCK_CACHE, if set, else captured",
       at(&T::training, &R::artifact)},
      {"training",
       "activation_budget",
       "What captured graphs keep for the backward of a microbatch, per stage: 1 (all that it uses) to 0 (as "
       "little as possible) of that, or bytes (\"1.5 GiB\"); the rest is recomputed with the same bits",
       at(&T::training, &R::activation_budget),
       0,
       0,
       false,
       {},
       0,
       /*takes_numbers=*/true},
      {"training", "activation_policy",
       "Overrides of activation_budget by module: \"blocks.*.attention: save\", \"*: recompute\"; the first "
       "that matches decides (docs/memory.md)",
       at(&T::training, &R::activation_policy)},
      {"training", "disable_passes",
       "Passes that do not change the captured graphs (docs/capture.md lists their names); empty: all run",
       at(&T::training, &R::disable_passes)},
      {"training", "seed", "Seed for initial parameters, dropout and data order", at(&T::training, &R::seed),
       0, kMany},
      {"training", "validate_every", "Steps between validations; 0: no validation",
       at(&T::training, &R::validate_every), 0, kMany},
      {"training", "validate_batches", "Global batches per validation",
       at(&T::training, &R::validate_batches), 1, kMany},
      {"training", "time_limit_s", "Seconds after which the run saves a checkpoint and ends; 0: no limit",
       at(&T::training, &R::time_limit_s), 0, kHuge},

      {"data", "sources",
       "Files, folders and patterns (*.txt) of text or token files; empty and no shards: the C++ headers of "
       "this machine",
       at(&T::data, &D::sources)},
      {"data", "shards", "Folder of token shards (made by penstock data make), instead of sources",
       at(&T::data, &D::shards)},
      {"data",
       "format",
       "Format of the sources; auto: token files if they begin with an llm.c header, else text; uint16: "
       "16-bit tokens without a header (nanoGPT)",
       at(&T::data, &D::format),
       0,
       0,
       false,
       {"auto", "text", "uint16"}},
      {"data", "end_of_document",
       "Token that separates documents in token files; -1: 50256 (GPT-2) or 128000 (Llama 3) according to "
       "the llm.c header, none without a header",
       at(&T::data, &D::end_of_document), -1, 4294967295.0},
      {"data", "extensions",
       "Use only files with these extensions; empty: all files of the given sources, C++ files for the "
       "default sources",
       at(&T::data, &D::extensions)},
      {"data", "validation_fraction",
       "Fraction of the text held out for validation: whole files, or the end of each file if there are few",
       at(&T::data, &D::validation_fraction), 0, 0.9},
      {"data", "cap_bytes", "Maximum bytes of text; 0: no limit, the default if sources are given",
       at(&T::data, &D::cap_bytes), 0, kMany},
      {"data", "document_mask",
       "Mask attention between documents; false: tokens also attend to earlier documents of the sample, "
       "which is faster on GPUs",
       at(&T::data, &D::document_mask)},
      {"data",
       "structure",
       "Metadata about the tokens for models that use it (structure_embedding, tree_feed, relations); cpp: "
       "the "
       "structure of C++ text, found by a lexer; auto: cpp for the C++ headers of this machine, else none",
       at(&T::data, &D::structure),
       0,
       0,
       false,
       {"auto", "none", "cpp"}},
      {"data", "skip_bad_files", "Skip unreadable, empty and binary files instead of failing",
       at(&T::data, &D::skip_bad_files)},

      {"checkpoint", "folder", "Folder for checkpoints; empty: checkpoints/ in the run folder",
       at(&T::checkpoint, &C::folder)},
      {"checkpoint", "every", "Steps between checkpoints; 0: only at the end", at(&T::checkpoint, &C::every),
       0, kMany},
      {"checkpoint", "keep", "Number of checkpoints to keep", at(&T::checkpoint, &C::keep), 1, kMany},
      {"checkpoint", "resume",
       "What a new run starts from; auto: the newest checkpoint in its folder, if any; never: no checkpoint; "
       "or the path of a checkpoint. A run that has checkpoints always continues from its newest one",
       at(&T::checkpoint, &C::resume)},
      {"checkpoint", "fallback", "Use the previous checkpoint if the newest is damaged",
       at(&T::checkpoint, &C::fallback)},
      {"checkpoint",
       "on_failure",
       "What to do if a checkpoint cannot be written; auto: continue and retry if there is an older "
       "checkpoint, else stop",
       at(&T::checkpoint, &C::on_failure),
       0,
       0,
       false,
       {"auto", "continue", "stop"}},

      {"output", "run_folder", "Folder for all output of the run; empty: a new folder under runs/",
       at(&T::output, &O::run_folder)},
      {"output", "metrics_every", "Steps between records in metrics.jsonl", at(&T::output, &O::metrics_every),
       1, kMany},
      {"output", "trace_steps", "Steps to record a timeline of", at(&T::output, &O::trace_steps), 0, kMany},
      {"output",
       "progress",
       "Progress display; auto: a bar on a terminal, else lines",
       at(&T::output, &O::progress),
       0,
       0,
       false,
       {"auto", "bar", "lines", "none"}},
      {"output", "sample_prompt", "Prompt of the text sample at the end of the run; at least one byte",
       at(&T::output, &O::sample_prompt)},
      {"output", "sample_tokens", "Tokens in the sample; 0: no sample", at(&T::output, &O::sample_tokens), 0,
       1 << 24},

      {"launch", "grace_s",
       "Seconds that the other ranks have to exit after one has failed, before they are stopped",
       at(&T::launch, &U::grace_s), 0, 86400},
      {"launch", "stop_grace_s",
       "Seconds that the ranks have after SIGTERM or Ctrl-C to finish the step and save a checkpoint, before "
       "they are killed",
       at(&T::launch, &U::stop_grace_s), 0, 86400},
      {"launch", "timeout_s",
       "Seconds that a rank waits for the others in rendezvous and in each operation before it fails; 0: "
       "PENSTOCK_TIMEOUT_S, else 300",
       at(&T::launch, &U::timeout_s), 0, 1e6},
  };
}

[[noreturn]] void refuse(const ConfigField& field, const std::string& origin, const std::string& actual) {
  const std::string range = field.range_text();
  const std::string expected =
      range.empty() ? field.type_text() : fmt::format("{} {}", field.type_text(), range);
  throw ConfigError(describe(fmt::format("{}: {}", origin, field.name()), actual, expected,
                             fmt::format("it means: {}", field.help)));
}

std::string toml_quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\u{:04X}", byte);
    } else {
      out += c;
    }
  }
  return out + '"';
}

struct TomlText {
  std::string operator()(std::int64_t number) const { return fmt::format("{}", number); }
  std::string operator()(double number) const {
    std::string text = fmt::format("{}", number);
    if (text.find_first_of(".en") == std::string::npos)
      text += ".0";  // else TOML reads an integer; nan and inf stay
    return text;
  }
  std::string operator()(bool flag) const { return flag ? "true" : "false"; }
  std::string operator()(const std::string& text) const { return toml_quoted(text); }
  template <class T>
  std::string operator()(const std::vector<T>& list) const {
    std::vector<std::string> items;
    for (const T& item : list) items.push_back((*this)(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }
};

}  // namespace

const std::vector<ConfigField>& config_fields() {
  static const std::vector<ConfigField> kFields = make_fields();
  return kFields;
}

const std::vector<ConfigSection>& config_sections() {
  static const std::vector<ConfigSection> kSections = {
      {"model", "The model"},
      {"layout", "How the model and the batch are distributed over ranks"},
      {"training", "Steps, optimizer, precision, validation"},
      {"data", "Training data"},
      {"checkpoint", "Saving checkpoints, and what a run starts from"},
      {"output", "Output of the run"},
      {"launch", "Timeouts of the ranks that penstock train starts"},
  };
  return kSections;
}

FieldData ConfigField::get(const TrainConfig& config) const {
  // Only reads through the pointer.
  return std::visit([](auto* value) -> FieldData { return *value; }, place(const_cast<TrainConfig&>(config)));
}

void ConfigField::set(TrainConfig& config, const FieldData& value) const {
  std::visit(
      [&](auto* to) {
        using Value = std::remove_pointer_t<decltype(to)>;
        PENSTOCK_INVARIANT(std::holds_alternative<Value>(value), "the value has the type of its field");
        *to = std::get<Value>(value);
      },
      place(config));
}

bool ConfigField::is_list() const {
  const FieldData value = get(TrainConfig{});
  return std::holds_alternative<std::vector<std::string>>(value) ||
         std::holds_alternative<std::vector<std::int64_t>>(value) ||
         std::holds_alternative<std::vector<double>>(value);
}

bool ConfigField::is_flag() const { return std::holds_alternative<bool>(get(TrainConfig{})); }

std::string ConfigField::type_text() const {
  struct Visitor {
    std::string operator()(std::int64_t) const { return "a whole number"; }
    std::string operator()(double) const { return "a number"; }
    std::string operator()(bool) const { return "true or false"; }
    std::string operator()(const std::string&) const { return "a string"; }
    std::string operator()(const std::vector<std::string>&) const { return "a list of strings"; }
    std::string operator()(const std::vector<std::int64_t>&) const { return "a list of whole numbers"; }
    std::string operator()(const std::vector<double>&) const { return "a list of numbers"; }
  };
  std::string text = std::visit(Visitor{}, get(TrainConfig{}));
  if (count > 0) text = fmt::format("a list of {} numbers", count);
  if (takes_numbers) text = "a number or " + text;
  return text;
}

std::string ConfigField::range_text() const {
  if (!choices.empty()) return fmt::format("out of {}", fmt::join(choices, ", "));
  if (low == 0 && high == 0) return "";
  return NumberRange{low, high, above_low}.text();
}

const ConfigField& find_field(std::string_view name, std::string_view where,
                              std::span<const ConfigField> fields) {
  const bool full = name.find('.') != std::string_view::npos;
  std::vector<const ConfigField*> found;
  std::vector<std::string> names;  // candidates for a suggestion
  for (const ConfigField& field : fields) {
    if (full ? field.name() == name : field.key == name) found.push_back(&field);
    names.push_back(full ? field.name() : std::string(field.key));
  }
  if (found.size() == 1) return *found.front();
  if (found.size() > 1) {
    std::vector<std::string> full_names;
    for (const ConfigField* field : found) full_names.push_back(field->name());
    throw ConfigError(describe(fmt::format("{}: key", where),
                               fmt::format("{}, which is in several sections", quote(name)),
                               fmt::format("one of {}", fmt::join(full_names, ", "))));
  }
  std::string meant;
  if (full) {  // prefer the right key in the wrong section over a similar name
    const std::string_view key = name.substr(name.rfind('.') + 1);
    for (const ConfigField& field : fields) {
      if (field.key == key) meant = field.name();
    }
  }
  if (meant.empty()) meant = key_for_synonym(full ? name.substr(name.rfind('.') + 1) : name);
  if (meant.empty()) meant = nearest_name(name, names);
  throw ConfigError(describe(
      fmt::format("{}: unknown key", where), quote(name), "",
      meant.empty() ? "penstock train --help lists all keys" : fmt::format("did you mean {}?", meant)));
}

ConfigSetting parse_setting(const ConfigField& field, const std::vector<std::string>& words,
                            const std::string& origin) {
  std::vector<std::string> items;
  if (field.is_list()) {
    for (const std::string& word : words) {
      for (std::size_t begin = 0; begin <= word.size();) {
        const std::size_t end = std::min(word.find(',', begin), word.size());
        if (end > begin) items.push_back(word.substr(begin, end - begin));
        begin = end + 1;
      }
    }
  } else if (words.size() != 1) {
    refuse(field, origin, words.empty() ? "nothing" : count_of(words.size(), "value"));
  }
  const auto number = [&]<class T>(const std::string& text, T) {
    std::optional<T> value;
    if constexpr (std::is_same_v<T, double>)
      value = parse_number(text);
    else
      value = parse_integer(text);
    if (!value) refuse(field, origin, quote(text));
    return *value;
  };
  FieldData value = field.get(TrainConfig{});
  std::visit(
      [&](auto& to) {
        using Value = std::remove_reference_t<decltype(to)>;
        if constexpr (std::is_same_v<Value, bool>) {
          const std::string word = to_lower(words.front());
          if (word != "true" && word != "false") refuse(field, origin, quote(words.front()));
          to = word == "true";
        } else if constexpr (std::is_arithmetic_v<Value>) {
          to = number(words.front(), Value{});
        } else if constexpr (std::is_same_v<Value, std::string>) {
          to = words.front();
        } else if constexpr (std::is_same_v<Value, std::vector<std::string>>) {
          to = items;
        } else {
          to.clear();
          for (const std::string& item : items) to.push_back(number(item, typename Value::value_type{}));
        }
      },
      value);
  ConfigSetting setting{&field, std::move(value), origin};
  check_setting(setting);
  return setting;
}

void check_setting(ConfigSetting& setting) {
  const ConfigField& field = *setting.field;
  const auto check_number = [&](auto value) {
    const auto number = static_cast<double>(value);
    const bool fits = NumberRange{field.low, field.high, field.above_low}.contains(number);  // false for NaN
    if (!fits) refuse(field, setting.origin, to_toml(FieldData(value)));
  };
  std::visit(
      [&](auto& value) {
        using Value = std::remove_reference_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, std::string>) {
          if (field.choices.empty()) return;
          const std::string lower = to_lower(value);
          if (std::find(field.choices.begin(), field.choices.end(), lower) == field.choices.end()) {
            const std::string nearest = nearest_name(lower, field.choices);
            throw ConfigError(describe(fmt::format("{}: {}", setting.origin, field.name()), quote(value),
                                       fmt::format("one of {}", fmt::join(field.choices, ", ")),
                                       nearest.empty() ? "" : fmt::format("did you mean {}?", nearest)));
          }
          value = lower;
        } else if constexpr (std::is_same_v<Value, std::int64_t> || std::is_same_v<Value, double>) {
          check_number(value);
        } else if constexpr (std::is_same_v<Value, std::vector<std::int64_t>> ||
                             std::is_same_v<Value, std::vector<double>>) {
          if (field.count > 0 && value.size() != field.count)
            refuse(field, setting.origin, count_of(value.size(), "value"));
          for (const auto item : value) check_number(item);
        }
      },
      setting.value);
}

std::string to_toml(const FieldData& value) { return std::visit(TomlText{}, value); }

}  // namespace penstock::train
