#include "penstock/checkpoint.h"

#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/load.h"
#include "penstock/checkpoint/tensors/tensor_part.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint/tensors/writer.h"

namespace penstock::checkpoint {

namespace {

WriterOptions writer_options(const CheckpointOptions& options) {
  WriterOptions writer;
  writer.files.keep_last = options.keep_last;
  writer.files.max_file_bytes = options.max_file_bytes;
  writer.timeout = options.timeout;
  return writer;
}

std::vector<TensorPart> parts_of(const NamedTensors& tensors) {
  std::vector<TensorPart> parts;
  parts.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) parts.push_back(tensor_part(name, tensor));
  return parts;
}

// [collective] A tensor that cannot be saved or loaded is an error on every rank.
CheckpointContents contents_of(RankAgreement& agreement, const CheckpointData& data) {
  CheckpointContents contents;
  contents.state_json = data.state_json;
  agreement.agree("collect the tensors", [&] {
    contents.model = parts_of(data.model);
    contents.optimizer = parts_of(data.optimizer);
  });
  return contents;
}

void append(std::vector<std::string>& all, std::vector<std::string> more) {
  all.insert(all.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

}  // namespace

struct AsyncCheckpointer::Impl {
  Impl(const comm::World& world, std::filesystem::path folder, const CheckpointOptions& options)
      : agreement(world), writer(world, std::move(folder), writer_options(options)) {}

  WorldAgreement agreement;
  CheckpointWriter writer;
};

AsyncCheckpointer::AsyncCheckpointer(const comm::World& world, std::filesystem::path folder,
                                     const CheckpointOptions& options)
    : impl_(std::make_unique<Impl>(world, std::move(folder), options)) {}

AsyncCheckpointer::~AsyncCheckpointer() = default;

void AsyncCheckpointer::save(std::int64_t step, const CheckpointData& data) {
  impl_->writer.save(step, contents_of(impl_->agreement, data));
}

void AsyncCheckpointer::wait() { impl_->writer.wait(); }

std::vector<SaveOutcome> AsyncCheckpointer::ended() { return impl_->writer.ended(); }

const std::filesystem::path& AsyncCheckpointer::folder() const { return impl_->writer.folder(); }

void save_checkpoint(const comm::World& world, const std::filesystem::path& folder, std::int64_t step,
                     const CheckpointData& data, const CheckpointOptions& options) {
  AsyncCheckpointer checkpointer(world, folder, options);
  checkpointer.save(step, data);
  checkpointer.wait();
}

std::optional<LoadedCheckpoint> load_checkpoint(const comm::World& world, const std::filesystem::path& folder,
                                                const CheckpointData& data, const LoadOptions& options) {
  WorldAgreement agreement(world);
  const CheckpointContents contents = contents_of(agreement, data);
  const auto opened =
      open_latest(agreement, folder, {.verify = options.verify, .allow_fallback = options.allow_fallback});
  if (!opened) return std::nullopt;
  const Checkpoint& checkpoint = opened->checkpoint;
  LoadedCheckpoint loaded{.step = checkpoint.step(),
                          .path = checkpoint.path(),
                          .state_json = checkpoint.state_json(),
                          .skipped = opened->skipped,
                          .missing = {},
                          .extra = {},
                          .cast = {}};
  const LoadPolicy policy{.allow_cast = options.allow_cast,
                          .allow_missing = options.allow_missing,
                          .allow_extra = options.allow_extra};
  for (const auto& [section, parts] :
       {std::pair(Section::Model, &contents.model), std::pair(Section::Optimizer, &contents.optimizer)}) {
    LoadReport report = load_into(agreement, checkpoint, section, *parts, policy);
    append(loaded.missing, std::move(report.missing));
    append(loaded.extra, std::move(report.extra));
    append(loaded.cast, std::move(report.cast));
  }
  return loaded;
}

}  // namespace penstock::checkpoint
