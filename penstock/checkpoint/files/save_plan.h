// What a checkpoint will contain and who writes which part of it, agreed on by all ranks before a byte is written.
//
// Every rank announces the tensors of which it holds something. Rank 0 joins the announcements into one list (name, dtype,
// shape), checks that they fit together and that every element is held by somebody, and gives each piece to the first rank
// that holds it. The files follow from the list alone: equal models give equal files, whatever ranks hold them.
// Knows nothing of Torch. Values.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/checkpoint/files/meeting.h"
#include "penstock/checkpoint/files/safetensors.h"
#include "penstock/checkpoint/files/slice.h"

namespace penstock::checkpoint {

// The two lists of tensors in a checkpoint. Each has files and names of its own.
enum class Section : std::uint8_t { Model = 0, Optimizer = 1 };
std::string_view to_text(Section section);  // "model", "optimizer"

// A tensor as one rank has it.
struct AnnouncedTensor {
  Section section = Section::Model;
  std::string name;
  Dtype dtype = Dtype::F32;
  Slice slice;
};

// A tensor as a whole.
struct GlobalTensor {
  Section section = Section::Model;
  std::string name;
  Dtype dtype = Dtype::F32;
  std::vector<std::int64_t> shape;
};

struct SavePlan {
  std::vector<GlobalTensor> tensors;             // by section and name
  std::vector<std::vector<std::uint8_t>> writes;  // per rank and announced tensor: 1 when that rank writes what it holds
};

// Rank 0's part. Throws CheckpointError with every problem found: a tensor of two shapes or dtypes, elements that nobody holds or
// that are cut in two ways, a name twice on a rank.
SavePlan make_save_plan(const std::vector<std::vector<AnnouncedTensor>>& ranks);

// [collective] The plan on every rank. What `own` throws is an error on all of them, and so are ranks that save different steps.
SavePlan agree_on_plan(Meeting& meeting, std::int64_t step, const std::function<std::vector<AnnouncedTensor>()>& own);

// One file of tensors: "model.safetensors", or "model-00002-of-00003.safetensors" where there are several.
struct PlannedFile {
  std::string name;
  Section section = Section::Model;
  Header header;
  std::string first_bytes;  // length and header

  std::uint64_t bytes() const { return first_bytes.size() + header.data_bytes(); }
};

// Tensors go into files in the order of their names; a file is full when the next one would take it beyond `max_file_bytes` of
// data. A tensor that is larger has a file of its own. A section without tensors has one empty file.
std::vector<PlannedFile> plan_files(const std::vector<GlobalTensor>& tensors, std::uint64_t max_file_bytes);

}  // namespace penstock::checkpoint
