// Compares a checkpoint with plain writing and flushing of the same bytes, and measures how long save()
// blocks its caller.
//
//   checkpoint_bench [MiB of tensors] [ranks] [folder]            default: 512 2 (the temporary folder)
//   penstock launch -n 2 -- checkpoint_bench ...  the ranks are processes, as in training; otherwise threads
//
// In every round both methods write to the same disk, one after the other, each rank its half. The ratio is
// taken within a round, and the median is shown. Half of the tensors are sharded by rows, half by columns,
// which is the hard case: every row of the file has a run from each rank. The checkpoint is flushed, read
// back and checksummed; the plain files are written in calls of 4 MiB and flushed.
#include <fcntl.h>
#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "penstock/base/files.h"
#include "penstock/checkpoint/tensors/load.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/dtensor.h"
#include "penstock/world.h"

namespace {

using namespace penstock;
using penstock::bench::median;
using namespace penstock::checkpoint;
using Clock = std::chrono::steady_clock;

constexpr int kRounds = 5;
constexpr std::int64_t kRows = 2048, kColumns = 2048;  // 16 MiB of float32

double seconds(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void write_plainly(const std::filesystem::path& path, const std::vector<TensorPart>& parts) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) throw std::runtime_error("cannot create " + path.string());
  for (const TensorPart& part : parts) {
    const auto* data = static_cast<const char*>(part.local.data_ptr());
    for (std::size_t at = 0, size = part.local.nbytes(); at < size;) {
      const ssize_t written =
          ::write(file, data + at, std::min<std::size_t>(size - at, std::size_t{4} << 20));
      if (written <= 0) throw std::runtime_error("cannot write " + path.string());
      at += static_cast<std::size_t>(written);
    }
  }
  if (::fsync(file) != 0) throw std::runtime_error("cannot flush " + path.string());
  ::close(file);
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t mib = argc > 1 ? std::atoll(argv[1]) : 512;
  const bool launched = comm::launch_env().world_size > 1;
  const int ranks = launched ? comm::launch_env().world_size : argc > 2 ? std::atoi(argv[2]) : 2;
  const std::filesystem::path folder =
      (argc > 3 ? std::filesystem::path(argv[3]) : std::filesystem::temp_directory_path()) /
      fmt::format("checkpoint_bench.{}", launched ? ::getppid() : ::getpid());
  const std::int64_t tensors = std::max<std::int64_t>(1, mib / 16);
  std::filesystem::create_directories(folder);

  std::vector<double> plain_s, ours_s, stall_s, copy_s, load_s, ratio;
  const auto measure = [&](comm::World& world) {
    comm::MeshGroups mesh(world, init_device_mesh("cpu", {ranks}, {}, world.rank(), ranks));
    std::vector<TensorPart> parts;
    for (std::int64_t i = 0; i < tensors; ++i) {
      const Placements placements{Shard{i % 2}};
      const auto shape = local_shape_and_offset({kRows, kColumns}, mesh.mesh(), placements).shape;
      parts.push_back(
          tensor_part(fmt::format("blocks.{}.weight", i), from_local(at::randn(shape), mesh, placements)));
    }
    for (TensorPart& part : parts) part.local = part.local.contiguous();
    CheckpointWriter writer(world, folder / "checkpoints", {.files = {.keep_last = 1}});
    WorldAgreement agreement(world);
    const auto timed = [&](const auto& work) {
      world.group().barrier().wait();
      const auto begin = Clock::now();
      work();
      world.group().barrier().wait();
      return seconds(begin);
    };
    for (int round = 0; round <= kRounds; ++round) {
      const double plain =
          timed([&] { write_plainly(folder / fmt::format("plain.{}", world.rank()), parts); });
      std::filesystem::remove(folder / fmt::format("plain.{}", world.rank()));
      SaveStall stall;
      const double ours = timed([&] {
        stall = writer.save(round, {.model = parts});
        writer.wait();
      });
      const double load = timed([&] {
        load_into(agreement, open_latest(agreement, folder / "checkpoints")->checkpoint, Section::Model,
                  parts);
      });
      if (world.rank() != 0 || round == 0) continue;  // the first round allocates buffers
      plain_s.push_back(plain);
      ours_s.push_back(ours);
      ratio.push_back(plain / ours);
      stall_s.push_back(stall.total());
      copy_s.push_back(stall.copying);
      load_s.push_back(load);
    }
  };
  if (launched) {
    auto world = comm::World::from_env();
    measure(world);
    if (world.rank() != 0) return 0;
  } else {
    comm::run_ranks(ranks, std::chrono::minutes(20), measure);
  }
  remove_tree(folder);
  const double gib = static_cast<double>(tensors) / 64;
  fmt::print("{:.2f} GiB, {} ranks, median of {} rounds\n", gib, ranks, kRounds);
  fmt::print("plain write and flush      {:6.2f} GiB/s\n", gib / median(plain_s));
  fmt::print("checkpoint, to the end     {:6.2f} GiB/s   {:.2f} of plain\n", gib / median(ours_s),
             median(ratio));
  fmt::print("save() returns after       {:6.1f} ms      (copying {:.1f} ms)\n", median(stall_s) * 1e3,
             median(copy_s) * 1e3);
  fmt::print("check and load             {:6.2f} GiB/s\n", gib / median(load_s));
  return 0;
}
