// What a model is without tensors: its blocks, parameters and costs, and its partition into the stages of a
// pipeline, by number of blocks, by parameters, by cost, at given blocks, or by a pattern.
//
//   models::TransformerOptions options{.vocabulary = 256, .layers = 5};
//   models::ModelPlan plan = options.plan();
//   auto even = models::partition_model(plan, 4);
//   auto balanced = models::partition_model(plan, 4, {.balance = models::Balance::Cost});
//   auto by_hand = models::partition_model(plan, 3, {.pattern = "AA|AA|A"});
//   std::string text = models::describe_parts(balanced, plan);
//
// The embedding is on the first stage, the final norm and the head are on the last one. When balanced by
// cost, these two may have no blocks: the head of a large vocabulary can cost as much as several blocks.
// Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace penstock::models {

// One parameter of a model.
struct ParameterShape {
  std::string name;                 // in the whole model, as named_parameters() of a stage reports it
  std::vector<std::int64_t> shape;  // of the whole parameter, however it is sharded
  bool per_expert = false;          // dim 0 counts experts, which layout.ep divides
};

// One block of a model.
struct BlockPlan {
  char letter = 'A';                            // in patterns
  std::string kind = "attention";               // in reports; blocks of one kind cost the same
  std::vector<ParameterShape> parameters = {};  // with their names in the whole model
  std::int64_t inactive_parameters = 0;         // elements that a token does not use: experts not chosen
  double flops_per_token = 0;                   // of the matrix products of a forward: two per multiply-add
  double moved_per_token = 0;                   // elements read and written besides the products
};

// A parameter that several blocks use, such as a table of biases: each stage with one of them has a copy.
struct SharedParameter {
  ParameterShape parameter;               // with its name in the whole model
  std::vector<std::int64_t> blocks = {};  // those that use it, ascending
};

// A term of the training loss besides that of the tokens: an auxiliary loss.
struct AuxiliaryTerm {
  std::string name;   // "balance"
  double weight = 0;  // by which it is multiplied
};

// A model, described by its parts.
struct ModelPlan {
  std::int64_t vocabulary = 0;                // number of different tokens
  std::int64_t width = 0;                     // elements of a hidden state
  std::int64_t context = 0;                   // the longest sequence; costs are for sequences of this length
  std::vector<ParameterShape> embed = {};     // parameters on the first stage
  std::vector<BlockPlan> blocks = {};         // in model order
  std::vector<ParameterShape> head = {};      // parameters on the last stage
  std::vector<std::string> tied = {};         // parameters of `embed` that the last stage uses, too
  std::int64_t head_inactive_parameters = 0;  // as in BlockPlan, of `head`
  double head_flops_per_token = 0;            // as in BlockPlan
  double head_moved_per_token = 0;            // as in BlockPlan

  // Parameters that belong to no single block.
  std::vector<SharedParameter> shared = {};
  // Elements of `embed` that a token does not use. The embedding of tokens itself counts as used.
  std::int64_t inactive_embed_parameters = 0;
  // As in BlockPlan, for what is added to the embedding of tokens.
  double embed_moved_per_token = 0;
  // The letters of the blocks of multi-token prediction, which belong to the head, one for each depth.
  std::string multi_token_letters = {};
  // The auxiliary losses that stages report, in the order in which they are shown.
  std::vector<AuxiliaryTerm> auxiliary = {};
};

// Returns the parameters of the whole model in model order. A tied or shared parameter is listed once.
std::vector<ParameterShape> parameter_shapes(const ModelPlan& plan);
// Returns the number of elements of all parameters. A tied or shared parameter counts once.
std::int64_t parameter_count(const ModelPlan& plan);
// Returns the number of elements that one token uses: without the experts that it is not sent to, and without
// the other rows of tables that are added to the embedding of tokens.
std::int64_t active_parameter_count(const ModelPlan& plan);
// Returns the floating-point operations of the matrix products per token, forward and backward: three times
// the forward.
double training_flops_per_token(const ModelPlan& plan);

// ---- partition into stages ----

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
StagePart whole_model(const ModelPlan& plan);

// Time of the parts of a model per token, forward and backward, in any unit.
struct PartCosts {
  std::vector<double> blocks;  // one entry for each block, or one for all
  double embed = 0;            // embedding
  double head = 0;             // head, including the final norm and the loss
};

// Estimates costs from operation counts, for use without measurements: a matrix product by its operations,
// an element that is read and written as ten operations.
PartCosts estimated_costs(const ModelPlan& plan);

// What partition_model makes even.
enum class Balance {
  Count,   // the number of blocks; the first stages get one more
  Weight,  // the parameters of the blocks, by a greedy rule: plan::partition_by_weight()
  Cost     // the time of the slowest stage, including embedding and head
};

// How to partition.
struct PartitionOptions {
  Balance balance = Balance::Count;     // used if the pattern has no cuts
  std::string pattern = {};             // one letter per block, '|' between stages; empty: no cuts
  std::optional<PartCosts> costs = {};  // for Balance::Cost; default: estimated_costs()
  std::vector<int> cuts = {};           // the first blocks of stages 1, 2, ...; empty: none. Not with a
                                        // pattern that has cuts
};

// Returns the number of elements of the parameters of each block: what Balance::Weight divides.
std::vector<double> block_weights(const ModelPlan& plan);

// Returns the parts of all stages, in stage order. Cuts override the balance. Throws ConfigError for a
// pattern with other blocks or another number of stages, for cuts that are not increasing blocks of the model
// or give another number of stages, ValueError for more stages than are possible and for the wrong number of
// costs.
std::vector<StagePart> partition_model(const ModelPlan& plan, int stages, const PartitionOptions& how = {});

// Returns the stages that hold the parameter of this name: several for a tied or shared parameter, whose
// gradients must be summed and which counts once in norms. Throws ValueError if the model has no such
// parameter.
std::vector<int> stages_of_parameter(const std::vector<StagePart>& parts, const ModelPlan& plan,
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

// Returns one report per part. All copies of a tied or shared parameter count.
std::vector<PartReport> report_parts(const std::vector<StagePart>& parts, const ModelPlan& plan);
// Returns the reports of partition_model(plan, stages, how), by default balanced by cost. Throws like it.
std::vector<PartReport> report_parts(const ModelPlan& plan, int stages,
                                     const PartitionOptions& how = {.balance = Balance::Cost});

// Returns one line per stage:
// "stage 0: embed, blocks 0-2, 1.200 M parameters, 2.3 MiB at 2 bytes each, 3 attention".
std::string describe_parts(const std::vector<StagePart>& parts, const ModelPlan& plan);
// Returns the same lines, but one for several equal stages:
// "stages 1-998: 2 blocks each, 2-1997; each 0.787 M parameters, ...".
std::vector<std::string> summarize_parts(const std::vector<StagePart>& parts, const ModelPlan& plan);

}  // namespace penstock::models
