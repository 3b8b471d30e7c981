// Ranks as threads that write and read checkpoints of plain bytes, without Torch.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "penstock/base/files.h"
#include "penstock/checkpoint/files/rank_agreement.h"
#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/files/write.h"
#include "penstock/mesh/local_shard.h"

namespace penstock::checkpoint::test {

using Numbers = std::vector<std::int64_t>;
namespace fs = std::filesystem;

// A folder that is removed with the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "penstock_checkpoint_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() { remove_tree(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

class Statuses {
 public:
  void post(int rank, const std::string& status) {
    std::lock_guard lock(mutex_);
    statuses_[rank] = status;
  }
  std::optional<std::string> status_of(int rank) {
    std::lock_guard lock(mutex_);
    const auto found = statuses_.find(rank);
    return found == statuses_.end() ? std::nullopt : std::optional(found->second);
  }

  // From now on the rank is gone.
  void end(int rank, const std::string& why) {
    std::lock_guard lock(mutex_);
    gone_[rank] = why;
  }
  std::optional<std::string> why_gone(int rank) {
    std::lock_guard lock(mutex_);
    const auto found = gone_.find(rank);
    return found == gone_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  std::mutex mutex_;
  std::map<int, std::string> statuses_, gone_;
};

class ThreadBoard final : public StatusBoard {
 public:
  ThreadBoard(Statuses& statuses, int rank, int size) : statuses_(statuses), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void post(const std::string& status) override { statuses_.post(rank_, status); }
  std::optional<std::string> status_of(int rank) override { return statuses_.status_of(rank); }
  std::optional<std::string> why_gone(int rank) override { return statuses_.why_gone(rank); }

 private:
  Statuses& statuses_;
  int rank_, size_;
};

// The message of the exception on each rank; "" for none.
inline std::vector<std::string> errors_on_ranks(int size, const std::function<void(RankAgreement&)>& body,
                                                std::chrono::milliseconds limit = std::chrono::seconds(30)) {
  Statuses statuses;
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      ThreadBoard board(statuses, rank, size);
      StatusBoardAgreement agreement(board);
      agreement.begin_round(std::chrono::steady_clock::now() + limit);
      try {
        body(agreement);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// The distribution of a model over the ranks of a mesh.
struct Spread {
  Numbers mesh;
  // One per tensor of sample_tensors(), in order.
  std::vector<Placements> placements;
};

struct SampleTensor {
  Section section;
  std::string name;
  Dtype dtype;
  Numbers shape;
};

inline const std::vector<SampleTensor>& sample_tensors() {
  static const std::vector<SampleTensor> all{
      {Section::Model, "blocks.0.weight", Dtype::F32, {6, 10}},
      {Section::Model, "blocks.1.weight", Dtype::BF16, {7, 3, 4}},
      {Section::Model, "norm.weight", Dtype::F32, {10}},
      {Section::Model, "scalar", Dtype::I64, {}},
      {Section::Model, "empty", Dtype::F32, {0, 4}},
      {Section::Optimizer, "blocks.0.weight.m", Dtype::F32, {6, 10}},
      {Section::Optimizer, "step", Dtype::F64, {1}},
  };
  return all;
}

// The bytes of a whole tensor: different at every position, and reproducible.
inline std::vector<std::uint8_t> sample_bytes(const SampleTensor& tensor, unsigned seed = 0) {
  std::vector<std::uint8_t> bytes(tensor_bytes(tensor.dtype, tensor.shape));
  std::uint32_t state = seed * 7919 + 17;
  for (const char c : tensor.name) state = state * 31 + static_cast<unsigned char>(c);
  for (std::uint8_t& byte : bytes)
    byte = static_cast<std::uint8_t>((state = state * 1664525 + 1013904223) >> 24);
  return bytes;
}

inline int ranks_of(const Numbers& mesh) {
  return static_cast<int>(std::accumulate(mesh.begin(), mesh.end(), std::int64_t{1}, std::multiplies<>()));
}

inline Numbers coordinate_of(int rank, const Numbers& mesh) {
  Numbers coordinate(mesh.size());
  for (std::size_t axis = mesh.size(); axis-- > 0; rank /= static_cast<int>(mesh[axis]))
    coordinate[axis] = rank % mesh[axis];
  return coordinate;
}

inline Slice slice_of(const SampleTensor& tensor, const Numbers& mesh, int rank,
                      const Placements& placements) {
  const Numbers coordinate = coordinate_of(rank, mesh);
  return {tensor.shape, local_shape_and_offset(tensor.shape, mesh, coordinate, placements).shape,
          local_boxes(tensor.shape, mesh, coordinate, placements)};
}

// Extracts a part of a whole tensor's bytes element by element, independently of for_each_run.
inline std::vector<std::uint8_t> cut_bytes(const std::vector<std::uint8_t>& whole, const Slice& slice,
                                           std::uint64_t item) {
  std::vector<std::uint8_t> part(static_cast<std::size_t>(slice.held()) * item);
  for (const ShardBox& box : slice.boxes) {
    std::int64_t count = 1;
    for (const std::int64_t size : box.shape) count *= size;
    for (std::int64_t n = 0; n < count; ++n) {
      std::int64_t rest = n, global = 0, local = 0, global_stride = 1, local_stride = 1;
      for (std::size_t dim = box.shape.size(); dim-- > 0;) {
        const std::int64_t at = rest % box.shape[dim];
        rest /= box.shape[dim];
        global += (box.offset[dim] + at) * global_stride;
        local += (box.local_offset[dim] + at) * local_stride;
        global_stride *= slice.global_shape[dim];
        local_stride *= slice.local_shape[dim];
      }
      for (std::uint64_t b = 0; b < item; ++b)
        part[static_cast<std::size_t>(local) * item + b] = whole[static_cast<std::size_t>(global) * item + b];
    }
  }
  return part;
}

// A rank's parts, and their memory.
struct OwnedParts {
  std::vector<HostPart> parts;
  std::vector<std::vector<std::uint8_t>> memory;
};

inline OwnedParts parts_of(const Spread& spread, int rank, unsigned seed = 0) {
  OwnedParts own;
  const auto& tensors = sample_tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Slice slice = slice_of(tensors[i], spread.mesh, rank, spread.placements[i]);
    own.memory.push_back(cut_bytes(sample_bytes(tensors[i], seed), slice, item_bytes(tensors[i].dtype)));
    own.parts.push_back({{tensors[i].section, tensors[i].name, tensors[i].dtype, std::move(slice)}, nullptr});
  }
  for (std::size_t i = 0; i < own.parts.size(); ++i) own.parts[i].bytes = own.memory[i].data();
  return own;
}

inline WriteOptions small_blocks() {
  WriteOptions options;
  options.block_bytes = 256;
  return options;
}

inline void save(RankAgreement& agreement, const fs::path& folder, std::int64_t step, const Spread& spread,
                 const WriteOptions& options = small_blocks(), unsigned seed = 0) {
  const OwnedParts own = parts_of(spread, agreement.rank(), seed);
  const SavePlan plan = agree_on_plan(agreement, step, [&] {
    std::vector<AnnouncedTensor> announced;
    for (const HostPart& part : own.parts) announced.push_back(part.tensor);
    return announced;
  });
  write_checkpoint(agreement, folder, step, plan, own.parts, R"({"step": )" + std::to_string(step) + "}",
                   options);
}

// Saves everything on one rank.
inline Spread alone() {
  return {{1}, std::vector<Placements>(sample_tensors().size(), Placements{Replicate{}})};
}

inline void save_alone(const fs::path& folder, std::int64_t step,
                       const WriteOptions& options = small_blocks(), unsigned seed = 0) {
  SingleRankAgreement agreement;
  save(agreement, folder, step, alone(), options, seed);
}

inline std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

// Flips bits of one byte in place: rewriting the whole file would wait for the disk.
inline void flip(const fs::path& path, std::size_t at, char bits) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(static_cast<char>(file.get()) ^ bits);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(byte);
}

// Names and contents of a folder.
inline std::map<std::string, std::string> contents_of(const fs::path& folder) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : fs::directory_iterator(folder))
    contents[entry.path().filename().string()] = entry.is_directory() ? "(folder)" : read_text(entry.path());
  return contents;
}

// Returns whether every tensor of a checkpoint has the sample's values.
inline bool is_sample(const Checkpoint& checkpoint, unsigned seed = 0) {
  for (const SampleTensor& tensor : sample_tensors()) {
    std::vector<std::uint8_t> bytes(tensor_bytes(tensor.dtype, tensor.shape));
    checkpoint.read(tensor.section, tensor.name, Slice::whole(tensor.shape), bytes);
    if (bytes != sample_bytes(tensor, seed)) return false;
  }
  return true;
}

}  // namespace penstock::checkpoint::test
