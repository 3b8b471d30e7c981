// The structure of the tokens of a batch (token_structure.h) as metadata of a hybrid model.
//
//   const StructureNeeds needs = structure_needs(config, parts_of_this_rank);
//   batch.metadata = structure_metadata(needs, rows, device);    // keyword arguments of the stages
//
// Every rank reads the text itself and has the tokens of all microbatches, so that nothing is sent: metadata
// is cut into microbatches with the tokens. A rank makes only what its own stages use.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "penstock/model_plan.h"
#include "penstock/pytree.h"
#include "penstock/train/data/token_structure.h"
#include "penstock/train_config.h"

namespace penstock::train {

// What the stages of a rank use.
struct StructureNeeds {
  bool ids = false;            // the five tensors of the structure embedding
  bool parents = false;        // of tree feed-forwards
  std::int64_t relations = 0;  // kinds of relations between tokens
  bool any() const { return ids || parents || relations > 0; }
};

// Returns whether the model uses structure and the data have it.
bool trains_on_structure(const TrainConfig& config);

// `parts`: the stages of the rank. A model that a program registered is given everything that is configured.
StructureNeeds structure_needs(const TrainConfig& config, const std::vector<models::StagePart>& parts);

// Relations from a token i to a token j that is not after it. A model with fewer relations has the first of
// them; further ones never apply.
//   0  same statement or element: the bracket and the place in it are the same
//   1  same bracket
//   2  j is a bracket around i
//   3  same name: what has been read of the identifiers at i and j is the same
inline constexpr std::int64_t kStructureRelations = 4;

// Rows of tokens with their structure, one after the other.
struct StructureRows {
  std::span<const TokenStructure> tokens;
  std::span<const std::int64_t> documents;  // equal numbers within a row: the same document
  std::int64_t rows = 0;
  std::int64_t length = 0;
};

// Returns keyword arguments for HybridMetadata, None if nothing is needed. Ids and parents are Int [rows,
// length], relations Bool [rows, relations, length, length]. Throws ValueError for other numbers of tokens.
Tree structure_metadata(const StructureNeeds& needs, const StructureRows& rows, at::Device device);

// Bytes of the tensors of structure_metadata().
std::int64_t structure_bytes(const StructureNeeds& needs, std::int64_t rows, std::int64_t length);

}  // namespace penstock::train
