// Loads a checkpoint into tensors of any layout.
//
//   WorldAgreement agreement(world);
//   auto opened = open_latest(agreement, folder);
//   load_into(agreement, opened->checkpoint, Section::Model, parts);
//
// Each rank reads only what its parts need, from the mapped files. All mismatches are reported in one error,
// the same on every rank, before any tensor has changed.
#pragma once

#include <string>
#include <vector>

#include "penstock/checkpoint/files/rank_agreement.h"
#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/tensor_part.h"

namespace penstock::checkpoint {

struct LoadPolicy {
  bool allow_cast = false;     // values of another dtype are converted
  bool allow_missing = false;  // tensors that the checkpoint does not have keep their values
  bool allow_extra = false;    // tensors that no rank requests are ignored
};

// Differences that were allowed and occurred; the same on every rank.
struct LoadReport {
  std::vector<std::string> missing, extra, cast;
};

// [collective] Every rank must call it, even without parts: only all of them together know which tensors
// nobody requests. Throws a CheckpointError listing all tensors that are missing, extra, or of another shape
// or dtype.
LoadReport load_into(RankAgreement& agreement, const Checkpoint& checkpoint, Section section,
                     const std::vector<TensorPart>& parts, const LoadPolicy& options = {});

}  // namespace penstock::checkpoint
