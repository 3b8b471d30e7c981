// What a checkpoint will contain and which rank writes which part, agreed on by all ranks before anything is
// written.
//
// Every rank announces the tensors of which it holds a part. Rank 0 merges the announcements into one list
// (name, dtype, shape), checks that they are consistent and that every element is held by some rank, and
// assigns each piece to the first rank that holds it. The files depend on the list alone: equal models give
// equal files, whichever ranks hold them. Independent of Torch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/checkpoint/files/rank_agreement.h"
#include "penstock/checkpoint/files/safetensors.h"
#include "penstock/checkpoint/files/slice.h"

namespace penstock::checkpoint {

// The two lists of tensors in a checkpoint. Each has its own files and names.
enum class Section : std::uint8_t { Model = 0, Optimizer = 1 };
std::string_view to_text(Section section);  // "model", "optimizer"

// A tensor as held by one rank.
struct AnnouncedTensor {
  Section section = Section::Model;
  std::string name;
  Dtype dtype = Dtype::F32;
  Slice slice;
};

// A whole tensor.
struct GlobalTensor {
  Section section = Section::Model;
  std::string name;
  Dtype dtype = Dtype::F32;
  std::vector<std::int64_t> shape;
};

struct SavePlan {
  std::vector<GlobalTensor> tensors;              // by section and name
  std::vector<std::vector<std::uint8_t>> writes;  // per rank and announced tensor: 1 if the rank writes it
};

// Runs on rank 0. Throws a CheckpointError that lists every problem: a tensor with two shapes or dtypes,
// elements that no rank holds, parts that overlap without being equal, a name twice on a rank.
SavePlan make_save_plan(const std::vector<std::vector<AnnouncedTensor>>& ranks);

// [collective] Returns the plan on every rank. If `own` throws, or if ranks save different steps, all ranks
// throw.
SavePlan agree_on_plan(RankAgreement& agreement, std::int64_t step,
                       const std::function<std::vector<AnnouncedTensor>()>& own);

// One file of tensors: "model.safetensors", or "model-00002-of-00003.safetensors" if there are several.
struct PlannedFile {
  std::string name;
  Section section = Section::Model;
  Header header;
  std::string first_bytes;  // length and header

  std::uint64_t bytes() const { return first_bytes.size() + header.data_bytes(); }
};

// Assigns tensors to files in order of their names; a file is full when the next tensor would exceed
// `max_file_bytes` of data. A larger tensor gets its own file. A section without tensors has one empty file.
std::vector<PlannedFile> plan_files(const std::vector<GlobalTensor>& tensors, std::uint64_t max_file_bytes);

}  // namespace penstock::checkpoint
