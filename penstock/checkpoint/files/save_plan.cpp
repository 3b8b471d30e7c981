#include "penstock/checkpoint/files/save_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/checkpoint_types.h"
#include "penstock/comm/message/message.h"
#include "penstock/errors.h"

// In the namespace of the struct, where argument-dependent lookup finds them.
namespace penstock {

static void encode(comm::MessageWriter& writer, const ShardBox& box) {
  writer.write(box.offset).write(box.shape).write(box.local_offset);
}
static void decode(comm::MessageReader& reader, ShardBox& box) {
  reader.read(box.offset).read(box.shape).read(box.local_offset);
}

}  // namespace penstock

namespace penstock::checkpoint {

namespace {

constexpr comm::MessageKind kAnnouncement{"CKPA"};
constexpr comm::MessageKind kPlan{"CKPP"};
constexpr std::size_t kProblemsShown = 20;

template <class Enum>
void read_enum(comm::MessageReader& reader, Enum& value, std::uint8_t count, std::string_view what) {
  const std::size_t offset = reader.offset();
  const auto number = reader.read<std::uint8_t>();
  if (number >= count) reader.refuse(offset, what, fmt::format("{}", number), fmt::format("below {}", count));
  value = static_cast<Enum>(number);
}

constexpr std::uint8_t kDtypeCount = static_cast<std::uint8_t>(Dtype::U64) + 1;

}  // namespace

static void encode(comm::MessageWriter& writer, const AnnouncedTensor& tensor) {
  writer.write(static_cast<std::uint8_t>(tensor.section))
      .write(tensor.name)
      .write(static_cast<std::uint8_t>(tensor.dtype));
  writer.write(tensor.slice.global_shape).write(tensor.slice.local_shape).write(tensor.slice.boxes);
}
static void decode(comm::MessageReader& reader, AnnouncedTensor& tensor) {
  read_enum(reader, tensor.section, 2, "section");
  reader.read(tensor.name);
  read_enum(reader, tensor.dtype, kDtypeCount, "dtype");
  reader.read(tensor.slice.global_shape).read(tensor.slice.local_shape).read(tensor.slice.boxes);
}
static void encode(comm::MessageWriter& writer, const GlobalTensor& tensor) {
  writer.write(static_cast<std::uint8_t>(tensor.section))
      .write(tensor.name)
      .write(static_cast<std::uint8_t>(tensor.dtype))
      .write(tensor.shape);
}
static void decode(comm::MessageReader& reader, GlobalTensor& tensor) {
  read_enum(reader, tensor.section, 2, "section");
  reader.read(tensor.name);
  read_enum(reader, tensor.dtype, kDtypeCount, "dtype");
  reader.read(tensor.shape);
}

std::string_view to_text(Section section) { return section == Section::Model ? "model" : "optimizer"; }

SavePlan make_save_plan(const std::vector<std::vector<AnnouncedTensor>>& ranks) {
  struct Holder {
    std::size_t rank, place;
    const AnnouncedTensor* tensor;
  };
  std::map<std::pair<Section, std::string>, std::vector<Holder>> holders;
  SavePlan plan;
  std::vector<std::string> problems;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    plan.writes.emplace_back(ranks[rank].size(), std::uint8_t{0});
    for (std::size_t place = 0; place < ranks[rank].size(); ++place) {
      const AnnouncedTensor& tensor = ranks[rank][place];
      auto& list = holders[{tensor.section, tensor.name}];
      if (!list.empty() && list.back().rank == rank)
        problems.push_back(fmt::format("{}: occurs twice on rank {}", tensor.name, rank));
      if (const std::string problem = validation_error(tensor.slice); !problem.empty())
        problems.push_back(fmt::format("{}: rank {} has {}", tensor.name, rank, problem));
      list.push_back({rank, place, &tensor});
    }
  }
  if (problems.empty())
    for (const auto& [key, list] : holders) {
      const AnnouncedTensor& first = *list.front().tensor;
      const auto text = [](const AnnouncedTensor& tensor) {
        return tensor_text(tensor.dtype, tensor.slice.global_shape);
      };
      bool same = true;
      for (const Holder& holder : list)
        if (same && (holder.tensor->dtype != first.dtype ||
                     holder.tensor->slice.global_shape != first.slice.global_shape)) {
          problems.push_back(fmt::format("{}: {} on rank {}, but {} on rank {}", first.name, text(first),
                                         list.front().rank, text(*holder.tensor), holder.rank));
          same = false;
        }
      if (!same) continue;
      // Ranks that hold the same elements are replicas; the first one writes.
      std::vector<const Holder*> writers;
      for (const Holder& holder : list) {
        const auto equal = [&](const Holder* other) {
          if (other->tensor->slice.boxes.size() != holder.tensor->slice.boxes.size()) return false;
          for (std::size_t i = 0; i < holder.tensor->slice.boxes.size(); ++i) {
            const ShardBox &a = other->tensor->slice.boxes[i], &b = holder.tensor->slice.boxes[i];
            if (a.offset != b.offset || a.shape != b.shape) return false;
          }
          return true;
        };
        if (holder.tensor->slice.boxes.empty() || std::any_of(writers.begin(), writers.end(), equal))
          continue;
        writers.push_back(&holder);
        plan.writes[holder.rank][holder.place] = 1;
      }
      std::uint64_t held = 0;
      for (const Holder* writer : writers) held += static_cast<std::uint64_t>(writer->tensor->slice.held());
      const std::uint64_t wanted =
          tensor_bytes(first.dtype, first.slice.global_shape) / item_bytes(first.dtype);
      std::string cut;
      for (std::size_t i = 0; i < writers.size() && cut.empty(); ++i)
        for (std::size_t j = 0; j < i && cut.empty(); ++j)
          for (const ShardBox& a : writers[i]->tensor->slice.boxes)
            if (std::any_of(writers[j]->tensor->slice.boxes.begin(), writers[j]->tensor->slice.boxes.end(),
                            [&](const ShardBox& b) { return overlap(a, b); }))
              cut = fmt::format("ranks {} and {} hold parts that overlap but are not equal", writers[j]->rank,
                                writers[i]->rank);
      if (!cut.empty())
        problems.push_back(fmt::format("{}: {}; use the same layout on all ranks", first.name, cut));
      else if (held != wanted)
        problems.push_back(
            fmt::format("{}: the ranks hold {} of {} elements; every rank that holds a part must save it",
                        first.name, held, wanted));
      plan.tensors.push_back({key.first, key.second, first.dtype, first.slice.global_shape});
    }
  if (!problems.empty()) {
    std::string text =
        fmt::format("the parts do not form a complete checkpoint ({} problem{}):", problems.size(),
                    problems.size() > 1 ? "s" : "");
    for (std::size_t i = 0; i < std::min(problems.size(), kProblemsShown); ++i) text += "\n  " + problems[i];
    if (problems.size() > kProblemsShown)
      text += fmt::format("\n  and {} more", problems.size() - kProblemsShown);
    throw CheckpointError(text);
  }
  return plan;
}

SavePlan agree_on_plan(RankAgreement& agreement, std::int64_t step,
                       const std::function<std::vector<AnnouncedTensor>()>& own) {
  const Bytes verdict = agreement.agree(
      "plan",
      [&] {
        return comm::MessageWriter(kAnnouncement, 1, kMaxMessageBytes).write(step).write(own()).finish();
      },
      [step](const std::vector<Bytes>& results) {
        std::vector<std::vector<AnnouncedTensor>> ranks;
        for (const Bytes& bytes : results) {
          comm::MessageReader reader(bytes, kAnnouncement, {1, 1}, kMaxMessageBytes);
          if (const auto other = reader.read<std::int64_t>(); other != step)
            throw CheckpointError(
                fmt::format("checkpoint: rank 0 saves step {}, but rank {} saves step {}; all ranks must "
                            "save the same step",
                            step, ranks.size(), other));
          ranks.push_back(reader.read<std::vector<AnnouncedTensor>>());
          reader.expect_end();
        }
        const SavePlan plan = make_save_plan(ranks);
        return comm::MessageWriter(kPlan, 1, kMaxMessageBytes)
            .write(plan.tensors)
            .write(plan.writes)
            .finish();
      });
  comm::MessageReader reader(verdict, kPlan, {1, 1}, kMaxMessageBytes);
  SavePlan plan;
  reader.read(plan.tensors).read(plan.writes);
  reader.expect_end();
  PENSTOCK_INVARIANT(plan.writes.size() == static_cast<std::size_t>(agreement.size()),
                     "the plan has a list for every rank");
  return plan;
}

std::vector<PlannedFile> plan_files(const std::vector<GlobalTensor>& tensors, std::uint64_t max_file_bytes) {
  std::vector<PlannedFile> files;
  for (const Section section : {Section::Model, Section::Optimizer}) {
    std::vector<const GlobalTensor*> own;
    for (const GlobalTensor& tensor : tensors)
      if (tensor.section == section) own.push_back(&tensor);
    std::sort(own.begin(), own.end(),
              [](const GlobalTensor* a, const GlobalTensor* b) { return a->name < b->name; });
    std::vector<std::vector<TensorEntry>> parts(1);
    std::uint64_t filled = 0;
    for (const GlobalTensor* tensor : own) {
      const std::uint64_t bytes = tensor_bytes(tensor->dtype, tensor->shape);
      if (!parts.back().empty() && (bytes > max_file_bytes || filled > max_file_bytes - bytes)) {
        parts.emplace_back();
        filled = 0;
      }
      parts.back().push_back({tensor->name, tensor->dtype, tensor->shape});
      filled += bytes;
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      PlannedFile file;
      file.name = parts.size() == 1
                      ? fmt::format("{}.safetensors", to_text(section))
                      : fmt::format("{}-{:05}-of-{:05}.safetensors", to_text(section), i + 1, parts.size());
      file.section = section;
      file.header = lay_out(std::move(parts[i]));
      file.header.metadata = {{"format", "pt"}};  // expected by Python readers of model files
      file.first_bytes = header_bytes(file.header);
      file.header.data_begin = file.first_bytes.size();
      files.push_back(std::move(file));
    }
  }
  return files;
}

}  // namespace penstock::checkpoint
