#include "penstock/checkpoint/files/write.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <system_error>
#include <utility>

#include "penstock/base/checksum.h"
#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/base/log.h"
#include "penstock/checkpoint/files/blocks.h"
#include "penstock/checkpoint/files/folder.h"
#include "penstock/checkpoint/files/index.h"
#include "penstock/checkpoint_types.h"
#include "penstock/comm/message/message.h"
#include "penstock/errors.h"

namespace penstock::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr comm::MessageKind kMade{"CKPM"};
constexpr comm::MessageKind kChecksums{"CKPC"};
constexpr const char* kToken = ".token";
constexpr const char* kState = "state.json";

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Writing {
 public:
  Writing(RankAgreement& agreement, const fs::path& folder, std::int64_t step, const SavePlan& plan,
          const std::vector<HostPart>& parts, const std::string& state, const WriteOptions& options)
      : agreement_(agreement),
        folder_(folder),
        draft_(writing_path(folder, step)),
        step_(step),
        plan_(plan),
        parts_(parts),
        state_(state),
        options_(options),
        files_(plan_files(plan.tensors, options.max_file_bytes)) {}

  void run() {
    try {
      make_folder();
      agreement_.agree("write the parts", [&] { write_parts(); });
      const Index index = take_checksums();
      agreement_.agree("finish", [&] {
        if (agreement_.rank() == 0) finish(index);
      });
    } catch (...) {
      // The ranks have agreed, or this one has given up: in either case the folder is useless.
      if (agreement_.rank() == 0 && !committed_) remove_draft();
      throw;
    }
    if (agreement_.rank() == 0) remove_outdated();
  }

 private:
  void done(WritePhase phase) const {
    if (options_.at_phase) options_.at_phase(phase, agreement_.rank());
  }

  void make_folder() {
    const Bytes made = agreement_.agree(
        "create the folder", [&] { return agreement_.rank() == 0 ? make_files() : Bytes{}; },
        [](const std::vector<Bytes>& results) { return results.front(); });
    comm::MessageReader reader(made, kMade, {1, 1}, kMaxMessageBytes);
    reader.read(token_).read(state_bytes_);
    reader.expect_end();
  }

  Bytes make_files() const {
    if (!nlohmann::json::accept(state_))
      throw ValueError(describe("state of the checkpoint", "text that is not JSON", "JSON"));
    std::error_code error;
    fs::create_directories(folder_, error);
    if (error) throw_file_error("create", folder_, error.value());
    remove_tree(draft_, error);  // left by a failed save of the same step
    if (error) throw_file_error("remove", draft_, error.value());
    fs::create_directory(draft_, error);
    if (error) throw_file_error("create", draft_, error.value());
    for (const PlannedFile& planned : files_) {
      OutputFile file(draft_ / planned.name, OutputFile::Mode::Create, options_.fault);
      file.reserve(planned.bytes());
      file.write(
          0, {reinterpret_cast<const std::uint8_t*>(planned.first_bytes.data()), planned.first_bytes.size()});
    }
    write_file(draft_ / kState, state_, options_.fault);
    // A value that a folder of another host cannot contain by chance.
    std::random_device random;
    const std::string token = fmt::format("{:08x}{:08x}{:08x}", random(), random(), random());
    write_file(draft_ / kToken, token);
    done(WritePhase::FolderMade);
    return comm::MessageWriter(kMade, 1, kMaxMessageBytes)
        .write(token)
        .write(static_cast<std::uint64_t>(state_.size()))
        .finish();
  }

  void write_parts() const {
    if (read_text(draft_ / kToken) != token_)
      throw CheckpointError(
          fmt::format("{} is not the folder that rank 0 created; all ranks must see the same folder: use one "
                      "on a shared file system",
                      draft_.string()));
    struct Place {
      std::size_t file;
      const TensorEntry* entry;
    };
    std::map<std::pair<Section, std::string_view>, Place> places;
    for (std::size_t i = 0; i < files_.size(); ++i)
      for (const TensorEntry& entry : files_[i].header.entries)
        places[{files_[i].section, entry.name}] = {i, &entry};
    const auto& writes = plan_.writes.at(static_cast<std::size_t>(agreement_.rank()));
    std::vector<std::unique_ptr<OutputFile>> open(files_.size());
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      if (writes.at(i) == 0) continue;
      const HostPart& part = parts_[i];
      const Place& place = places.at({part.tensor.section, part.tensor.name});
      if (!open[place.file])
        open[place.file] = std::make_unique<OutputFile>(draft_ / files_[place.file].name,
                                                        OutputFile::Mode::Existing, options_.fault);
      const std::uint64_t begin = files_[place.file].first_bytes.size() + place.entry->begin;
      for_each_run(part.tensor.slice, item_bytes(part.tensor.dtype), [&](ByteRun run) {
        open[place.file]->write(begin + run.global, {part.bytes + run.local, run.bytes});
      });
    }
    for (const auto& file : open)
      if (file) file->sync();
    done(WritePhase::PartsWritten);
  }

  // Rank 0 returns the index; the others return one without checksums.
  Index take_checksums() {
    Index index;
    index.step = step_;
    index.block_bytes = options_.block_bytes;
    std::vector<SizedFile> sized;
    for (const PlannedFile& file : files_) {
      sized.push_back({file.name, file.bytes()});
      index.files.push_back({file.name, std::string(to_text(file.section)), file.bytes(), {}});
    }
    sized.push_back({kState, state_bytes_});
    index.files.push_back({kState, "state", state_bytes_, {}});
    const auto work = [&] {
      std::vector<std::uint64_t> sums;
      read_blocks(
          draft_, sized, options_.block_bytes, agreement_.rank(), agreement_.size(),
          [&](const BlockRead& read) {
            if (!read.error.empty() || read.bytes.size() != read.end - read.begin)
              throw CheckpointError(fmt::format("cannot read bytes {}-{} of {} back: {}", read.begin,
                                                read.end, (draft_ / sized[read.file].name).string(),
                                                read.error.empty() ? "the file ends early" : read.error));
            sums.push_back(xxh3_checksum64(read.bytes, "checkpoints"));
          });
      done(WritePhase::Checked);
      return comm::MessageWriter(kChecksums, 1, kMaxMessageBytes).write(sums).finish();
    };
    const auto judge = [&](const std::vector<Bytes>& results) {
      std::vector<std::uint64_t> all;
      for (const Bytes& bytes : results) {
        comm::MessageReader reader(bytes, kChecksums, {1, 1}, kMaxMessageBytes);
        const auto sums = reader.read<std::vector<std::uint64_t>>();
        reader.expect_end();
        all.insert(all.end(), sums.begin(), sums.end());
      }
      std::size_t next = 0;
      for (IndexedFile& file : index.files)
        for (std::uint64_t block = 0; block < block_count(file.bytes, options_.block_bytes); ++block)
          file.checksums.push_back(all.at(next++));
      PENSTOCK_INVARIANT(next == all.size(), "the ranks took every block's checksum once");
      return Bytes{};
    };
    agreement_.agree("take checksums", work, judge);
    return index;
  }

  void finish(const Index& index) {
    // Every rank has flushed what it wrote; only rank 0's headers, state and index remain.
    write_file(draft_ / "index.json", to_text(index), options_.fault);
    for (const IndexedFile& file : index.files) sync_file(draft_ / file.name);
    sync_file(draft_ / "index.json");
    std::error_code error;
    if (!fs::remove(draft_ / kToken, error)) throw_file_error("remove", draft_ / kToken, error.value());
    sync_folder(draft_);
    done(WritePhase::IndexWritten);
    commit(folder_, step_);
    committed_ = true;
    done(WritePhase::Renamed);
  }

  // A failure to delete an old checkpoint only costs space; the new one stays valid.
  void remove_outdated() const {
    try {
      for (const FoundCheckpoint& old : outdated(find_checkpoints(folder_), step_, options_.keep_last))
        remove_checkpoint(folder_, old.step);
    } catch (const CheckpointError& error) {
      log().warn("checkpoint: an old checkpoint could not be removed: {}", error.what());
    }
    done(WritePhase::OldRemoved);
  }

  void remove_draft() const {
    std::error_code error;
    if (!fs::exists(draft_, error)) return;
    remove_tree(draft_, error);
    if (error)
      log().warn("checkpoint: cannot remove {}: {}; it is removed at the next start", draft_.string(),
                 error.message());
  }

  RankAgreement& agreement_;
  const fs::path folder_, draft_;
  const std::int64_t step_;
  const SavePlan& plan_;
  const std::vector<HostPart>& parts_;
  const std::string& state_;
  const WriteOptions& options_;
  const std::vector<PlannedFile> files_;
  std::string token_;
  std::uint64_t state_bytes_ = 0;
  bool committed_ = false;
};

}  // namespace

void write_checkpoint(RankAgreement& agreement, const fs::path& folder, std::int64_t step,
                      const SavePlan& plan, const std::vector<HostPart>& parts, const std::string& state_json,
                      const WriteOptions& options) {
  if (options.block_bytes == 0) throw ValueError(describe("checkpoint block_bytes", "0", "at least 1"));
  Writing(agreement, folder, step, plan, parts, state_json, options).run();
}

}  // namespace penstock::checkpoint
