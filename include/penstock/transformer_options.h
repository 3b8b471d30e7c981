// The options of a decoder-only transformer, and what follows from them without tensors: the shapes of its
// parameters and its cost.
//
//   models::TransformerOptions options{.vocabulary = 256, .width = 128, .layers = 4, .heads = 4};
//   options.check();
//   std::int64_t parameters = models::parameter_count(options);
//   double flops = models::training_flops_per_token(options, options.context);
//
// A block is x + attention(norm(x)), then x + feed(norm(x)). Norms are RMSNorm, positions are rotary (RoPE),
// the feed-forward part is SwiGLU, and there are no biases. Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace penstock::models {

// Sizes and constants of a model.
struct TransformerOptions {
  std::int64_t vocabulary = 256;     // number of different tokens
  std::int64_t width = 128;          // elements of a hidden state; a multiple of `heads`
  std::int64_t layers = 4;           // number of blocks
  std::int64_t heads = 4;            // query heads
  std::int64_t key_value_heads = 0;  // 0: same as heads; fewer: each serves a group of query heads
  std::int64_t feed_width = 0;       // 0: two thirds of 4 * width, rounded up to a multiple of 32
  std::int64_t context = 256;        // the longest sequence
  double rope_theta = 10000;         // base of the rotary frequencies
  double norm_epsilon = 1e-5;        // added to the mean square in norms
  bool tie_head = false;             // the head uses the weight of the embedding
  double dropout = 0;                // on the embedding and each half of a block, in training mode

  // Compares all fields as they are; resolve both sides first if zeros and their defaults are to be equal.
  bool operator==(const TransformerOptions&) const = default;

  // Returns the options with zeros replaced by their defaults. Throws ConfigError that names the invalid
  // field and the remedy.
  TransformerOptions resolved() const;
  // Throws like resolved().
  void check() const { resolved(); }
  // Elements of one head.
  std::int64_t head_width() const { return width / heads; }
};

// One parameter of the model.
struct ParameterShape {
  std::string name;                 // in the whole model, as in TransformerStage::named_parameters()
  std::vector<std::int64_t> shape;  // of the whole parameter, however it is sharded
};

// Returns the parameters of the whole model in model order. A tied head has none.
std::vector<ParameterShape> parameter_shapes(const TransformerOptions& options);

// Returns the number of elements of all parameters. A tied weight counts once.
std::int64_t parameter_count(const TransformerOptions& options);
// Returns the number of elements of the parameters of one block.
std::int64_t block_parameter_count(const TransformerOptions& options);

// Returns the floating-point operations of the matrix products of one block per token in one forward, for
// sequences of `length`: two per multiply-add. Attention counts every pair of tokens although half of them
// are masked, as is usual for utilization.
double block_flops_per_token(const TransformerOptions& options, std::int64_t length);
// Returns the same for the head. The embedding is a lookup and is not counted.
double head_flops_per_token(const TransformerOptions& options);
// Returns the operations of the whole model per token, forward and backward: three times the forward.
double training_flops_per_token(const TransformerOptions& options, std::int64_t length);

// ---- partition into stages ----
//
// Assigns the blocks of a transformer to pipeline stages: by number of blocks, by cost, or by a pattern.
//
//   models::TransformerOptions options{.vocabulary = 256, .layers = 5};
//   auto even = models::partition_model(options, 4);
//   auto balanced = models::partition_model(options, 4, {.balance = models::Balance::Cost});
//   auto by_hand = models::partition_model(options, 3, {.pattern = "AA|AA|A"});
//   std::string text = models::describe_parts(balanced, options);
//
// The embedding is on the first stage, the final norm and the head are on the last one. When balanced by
// cost, these two may have no blocks: the head of a large vocabulary can cost as much as several blocks.
// Plain values, independent of LibTorch.

// The part of a model that one stage holds.
struct StagePart {
  int index = 0;                 // of the stage
  int count = 1;                 // number of stages
  std::int64_t first_block = 0;  // index in the whole model
  std::int64_t end_block = 0;    // one past the last block

  bool has_embed() const { return index == 0; }                    // whether the embedding is here
  bool has_head() const { return index == count - 1; }             // whether final norm and head are here
  std::int64_t blocks() const { return end_block - first_block; }  // number of blocks
  bool operator==(const StagePart&) const = default;               // compares all fields
};

// Returns the whole model as one part.
StagePart whole_model(const TransformerOptions& options);

// Time of the parts of a model per token, forward and backward, in any unit.
struct PartCosts {
  std::vector<double> blocks;  // one entry for each block, or one for all
  double embed = 0;            // embedding
  double head = 0;             // head, including the final norm and the loss
};

// Estimates costs from operation counts, for use without measurements: a matrix product by its operations,
// an element that is read and written as ten operations.
PartCosts estimated_costs(const TransformerOptions& options, std::int64_t length);

// What partition_model makes even.
enum class Balance {
  Count,  // the number of blocks; the first stages get one more
  Cost    // the time of the slowest stage, including embedding and head
};

// How to partition.
struct PartitionOptions {
  Balance balance = Balance::Count;     // used if the pattern has no cuts
  std::string pattern = {};             // one A per block, '|' between stages; empty: no cuts
  std::optional<PartCosts> costs = {};  // for Balance::Cost; default: estimated_costs()
};

// Returns the parts of all stages, in stage order. Throws ConfigError for a pattern with another number of
// blocks or stages, ValueError for more stages than are possible and for the wrong number of costs.
std::vector<StagePart> partition_model(const TransformerOptions& options, int stages,
                                       const PartitionOptions& how = {});

// Returns the stages that hold the parameter of this name: two for the embedding of a tied head over several
// stages, whose gradients must be summed and which counts once in norms. Throws ValueError if the model has
// no such parameter.
std::vector<int> stages_of_parameter(const std::vector<StagePart>& parts, const TransformerOptions& options,
                                     const std::string& name);

// What a stage holds, for capacity planning.
struct PartReport {
  int stage = 0;                                         // index
  std::int64_t first_block = 0;                          // index in the whole model
  std::int64_t last_block = -1;                          // inclusive; first_block - 1 if there are no blocks
  std::int64_t blocks = 0;                               // number of blocks
  std::int64_t block_parameters = 0;                     // elements of the blocks' parameters
  std::int64_t parameters = 0;                           // with embedding, norm and head
  double gib = 0;                                        // of the parameters, at 2 bytes each
  std::map<std::string, std::int64_t> block_kinds = {};  // number of blocks of each kind: {"attention": 3}
  bool operator==(const PartReport&) const = default;    // compares all fields
};

// Returns one report per part. Both copies of a tied weight count.
std::vector<PartReport> report_parts(const std::vector<StagePart>& parts, const TransformerOptions& options);
// Returns the reports of partition_model(options, stages, how), by default balanced by cost. Throws like it.
std::vector<PartReport> report_parts(const TransformerOptions& options, int stages,
                                     const PartitionOptions& how = {.balance = Balance::Cost});

// Returns one line per stage:
// "stage 0: embed, blocks 0-2, 1.200 M parameters, 2.3 MiB at 2 bytes each, 3 attention".
std::string describe_parts(const std::vector<StagePart>& parts, const TransformerOptions& options);
// Returns the same lines, but one for several equal stages:
// "stages 1-998: 2 blocks each, 2-1997; each 0.787 M parameters, ...".
std::vector<std::string> summarize_parts(const std::vector<StagePart>& parts,
                                         const TransformerOptions& options);

}  // namespace penstock::models
