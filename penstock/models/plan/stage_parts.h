// Assigns the blocks of a model to stages: by a pattern with cuts, by number of blocks, or by cost.
//
//   auto parts = partition_model(options, 4);                               // even by number of blocks
//   auto parts = partition_model(options, 4, {.balance = Balance::Cost});   // includes embedding and head
//   auto parts = partition_model(options, 3, {.pattern = "AA|AA|A"});
//   for (const StagePart& part : parts) ... TransformerStage(options, part);
//
// The embedding is on the first stage, the final norm and the head are on the last one. When balanced by
// cost, these two may have no blocks: the head of a large vocabulary can cost as much as several blocks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "penstock/models/plan/options.h"

namespace penstock::models {

struct StagePart {
  int index = 0;
  int count = 1;
  std::int64_t first_block = 0;
  std::int64_t end_block = 0;  // one past the last
  bool has_embed() const { return index == 0; }
  bool has_head() const { return index == count - 1; }
  std::int64_t blocks() const { return end_block - first_block; }
  bool operator==(const StagePart&) const = default;
};

// The whole model as one part.
StagePart whole_model(const TransformerOptions& options);

// Time of the parts per token, forward and backward, in any unit.
struct PartCosts {
  std::vector<double> blocks;  // one entry for each block, or one for all
  double embed = 0;
  double head = 0;             // with the final norm and the loss
};
// Estimates costs from operation counts, if there are no measurements: a matrix product by its operations, an
// element that is read and written as ten operations.
PartCosts estimated_costs(const TransformerOptions& options, std::int64_t length);

enum class Balance { Count, Cost };

struct PartitionOptions {
  Balance balance = Balance::Count;
  std::string pattern = {};                  // empty: one A per layer; cuts override the balance
  std::optional<PartCosts> costs = {};       // for Balance::Cost; default: estimated for sequences of the context's length
};

// Throws ConfigError for a pattern with another number of blocks or stages, ValueError for more stages than
// are possible.
std::vector<StagePart> partition_model(const TransformerOptions& options, int stages, const PartitionOptions& how = {});

// Returns the stages that hold the parameter of this name: two for the embedding of a tied head over several
// stages, whose gradients must be summed and which counts once in norms. Throws ValueError if the model has
// no such parameter.
std::vector<int> stages_of_parameter(const std::vector<StagePart>& parts, const TransformerOptions& options, const std::string& name);

// The same for many names; construction takes time and memory linear in the number of layers.
class ParameterStages {
 public:
  ParameterStages(const std::vector<StagePart>& parts, const TransformerOptions& options);
  // In stage order. Throws like stages_of_parameter. The reference is valid as long as this object.
  const std::vector<int>& of(const std::string& name) const;

 private:
  std::vector<std::vector<int>> of_block_;
  std::vector<int> of_embed_, of_head_;
  std::set<std::string> in_block_, in_none_;  // names
};

// What a stage holds, for capacity planning.
struct PartReport {
  int stage = 0;
  std::int64_t first_block = 0;
  std::int64_t last_block = -1;                   // inclusive; first_block - 1 if there are no blocks
  std::int64_t blocks = 0;
  std::int64_t block_parameters = 0;              // of the blocks only
  std::int64_t parameters = 0;                    // with embedding, norm, head; both copies of a tied weight
  double gib = 0;                                 // of the parameters, at 2 bytes each
  std::map<std::string, std::int64_t> block_kinds = {};  // number of blocks of each kind: {"attention": 3}
  bool operator==(const PartReport&) const = default;
};

std::vector<PartReport> report_parts(const std::vector<StagePart>& parts, const TransformerOptions& options);
// For the partition by cost, unless `how` says otherwise. Throws like partition_model.
std::vector<PartReport> report_parts(const TransformerOptions& options, int stages, const PartitionOptions& how = {.balance = Balance::Cost});

// One line per stage: "stage 0: embed, blocks 0-2, 1.200 M parameters, 2.3 MiB at 2 bytes each, 3 attention".
std::string describe_parts(const std::vector<StagePart>& parts, const TransformerOptions& options);
// The same with one line for equal neighbours: "stages 1-998: 2 blocks each, 2-1997; each 0.787 M parameters,
// ...".
std::vector<std::string> summarize_parts(const std::vector<StagePart>& parts, const TransformerOptions& options);

}  // namespace penstock::models
