// Which blocks of a model a stage has: by a pattern with cuts, by their number or by what they cost.
//
//   auto parts = partition_model(options, 4);                                   // as even as can be, by number of blocks
//   auto parts = partition_model(options, 4, {.balance = Balance::Cost});       // embedding and head count, too
//   auto parts = partition_model(options, 3, {.pattern = "AA|AA|A"});
//   for (const StagePart& part : parts) ... TransformerStage(options, part);
//
// The embedding is on the first stage, the last norm and the head are on the last one. By cost these two may have no blocks: the head
// of a large vocabulary can be as much as several blocks.
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
  std::int64_t end_block = 0;  // one behind the last
  bool has_embed() const { return index == 0; }
  bool has_head() const { return index == count - 1; }
  std::int64_t blocks() const { return end_block - first_block; }
  bool operator==(const StagePart&) const = default;
};

// The model in one piece.
StagePart whole_model(const TransformerOptions& options);

// Time of the parts for one token, forward and backward, in any unit.
struct PartCosts {
  std::vector<double> blocks;  // one entry for each block, or one for all
  double embed = 0;
  double head = 0;             // with the last norm and the loss
};
// From the operations counted, for want of measurements: matrix products as they are, an element that is read and written as ten.
PartCosts estimated_costs(const TransformerOptions& options, std::int64_t length);

enum class Balance { Count, Cost };

struct PartitionOptions {
  Balance balance = Balance::Count;
  std::string pattern = {};                  // empty: as many A as there are layers; cuts go before the balance
  std::optional<PartCosts> costs = {};       // for Balance::Cost; default: estimated for sequences of the context's length
};

// Throws ConfigError for a pattern of another number of blocks or stages, ValueError for more stages than there can be.
std::vector<StagePart> partition_model(const TransformerOptions& options, int stages, const PartitionOptions& how = {});

// The stages that hold the parameter of this name: two for the embedding of a tied head over several stages, whose gradients are to be
// summed and which counts once in norms. Throws ValueError for a name that the model does not have.
std::vector<int> stages_of_parameter(const std::vector<StagePart>& parts, const TransformerOptions& options, const std::string& name);

// The same for many names: time and memory linear in the layers, once.
class ParameterStages {
 public:
  ParameterStages(const std::vector<StagePart>& parts, const TransformerOptions& options);
  // In the order of the stages. Throws like stages_of_parameter. Valid as long as this object is.
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
  std::int64_t last_block = -1;                   // inclusive; before the first where there are no blocks
  std::int64_t blocks = 0;
  std::int64_t block_parameters = 0;              // of the blocks alone
  std::int64_t parameters = 0;                    // with embedding, last norm and head; both copies of a tied weight count
  double gib = 0;                                 // of the parameters, at 2 bytes each
  std::map<std::string, std::int64_t> block_kinds = {};  // how many there are of each, by the name of the kind: {"attention": 3}
  bool operator==(const PartReport&) const = default;
};

std::vector<PartReport> report_parts(const std::vector<StagePart>& parts, const TransformerOptions& options);
// Of the partition by cost, unless `how` says otherwise. Throws as partition_model does.
std::vector<PartReport> report_parts(const TransformerOptions& options, int stages, const PartitionOptions& how = {.balance = Balance::Cost});

// "stage 0: embed, blocks 0-2, 1.200 M parameters, 2.3 MiB at 2 bytes each, 3 attention" for each, a line each.
std::string describe_parts(const std::vector<StagePart>& parts, const TransformerOptions& options);
// The same with one line for neighbours that are alike: "stages 1-998: 2 blocks each, 2-1997; each 0.787 M parameters, ...".
std::vector<std::string> summarize_parts(const std::vector<StagePart>& parts, const TransformerOptions& options);

}  // namespace penstock::models
