// Compares communication through Penstock with direct calls of c10d, and UCX with Gloo, in one run.
//
//   penstock launch -n 2 -- comm_bench            (or: comm_bench, which launches its own two ranks)
//
// Ping-pong: one-way latency, 4 B to 8 MB. Stream: many transfers in flight, each with its own tag like the
// microbatches of a pipeline; bytes per second. all_reduce: time per call. The methods alternate in short
// blocks. Columns show the median over the blocks; ratios are taken within each block, where other load on
// the machine affects both sides equally, and the median is shown.
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <thread>

#include "bench/comm/direct_gloo.h"
#include "bench/figures.h"
#include "penstock/base/env.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/comm/transport/ucx_transport.h"
#include "penstock/torch/compat/version.h"
#include "penstock/world.h"

namespace {

using namespace penstock;
using penstock::bench::median;
using namespace penstock::comm;

constexpr std::chrono::milliseconds kLimit{60'000};
constexpr int kBlocks = 21;

double seconds(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Median over the blocks of a value per block.
double ratio(const std::vector<double>& above, const std::vector<double>& below) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < above.size(); ++i) ratios.push_back(above[i] / below[i]);
  return median(ratios);
}

std::string size_text(std::size_t bytes) {
  return bytes >= 1 << 20   ? fmt::format("{} MB", bytes >> 20)
         : bytes >= 1 << 10 ? fmt::format("{} KB", bytes >> 10)
                            : fmt::format("{} B", bytes);
}

// One way of moving tensors between two ranks.
struct Way {
  std::string name;
  std::function<void(const at::Tensor&)> send, recv;
  std::function<void(const at::Tensor&, int count)>
      stream;  // rank 0 sends `count` transfers, rank 1 receives them
};

class Bench {
 public:
  // Gloo as used without Penstock listens on the same interface.
  explicit Bench(World& world) : world_(world), direct_(world, "127.0.0.1") {
    const int peer = 1 - world.rank();
    const auto start = [this](bool sends, const at::Tensor& t, int to, int tag) {
      std::vector<at::Tensor> tensors = {t};
      return sends ? direct_->send(tensors, to, tag) : direct_->recv(tensors, to, tag);
    };
    ways_.push_back({"c10d", [=](const at::Tensor& t) { start(true, t, peer, 1)->wait(kLimit); },
                     [=](const at::Tensor& t) { start(false, t, peer, 1)->wait(kLimit); },
                     [=, this](const at::Tensor& t, int count) {
                       std::vector<c10::intrusive_ptr<c10d::Work>> all;
                       for (int i = 0; i < count; ++i)
                         all.push_back(start(world_.rank() == 0, t, 1 - world_.rank(), 100 + i));
                       for (const auto& work : all) work->wait(kLimit);
                     }});
    add_group("penstock gloo", P2PTransport::Gloo);
    if (ucx_available()) add_group("penstock ucx", P2PTransport::Ucx);
  }

  void run() {
    if (world_.rank() == 0)
      fmt::print("LibTorch {}, 2 ranks on one host, {} cores; medians, one-way\n\n", torch_version(),
                 std::thread::hardware_concurrency());
    ping_pong();
    all_reduce();
    stream();
  }

 private:
  void add_group(const std::string& name, P2PTransport p2p) {
    groups_.push_back(world_.new_group({0, 1}, {.name = name, .p2p = p2p}));
    const Group group = groups_.back();
    const int peer = 1 - world_.rank();
    ways_.push_back({name, [=](const at::Tensor& t) { group.send(t, peer); },
                     [=](const at::Tensor& t) { group.recv(t, peer); },
                     [=, this](const at::Tensor& t, int count) {
                       std::vector<Work> all;
                       for (int i = 0; i < count; ++i)
                         all.push_back(world_.rank() == 0 ? group.isend(t, peer, {.tag = 100 + i})
                                                          : group.irecv(t, peer, {.tag = 100 + i}));
                       wait_all(all);
                     }});
  }

  void barrier() { world_.group().barrier().wait(); }

  void ping_pong() {
    row_header("ping-pong");
    for (const std::size_t bytes :
         {4ul, 256ul, 4096ul, 16384ul, 65536ul, 131072ul, 262144ul, 1048576ul, 8388608ul}) {
      const at::Tensor tensor = at::zeros({static_cast<std::int64_t>(bytes / 4)});
      const int repeats = bytes > 500'000 ? 40 : 400;
      std::vector<std::vector<double>> times(ways_.size());
      for (int block = 0; block < kBlocks; ++block)
        for (std::size_t w = 0; w < ways_.size(); ++w) {
          barrier();
          std::vector<double> in_block;
          for (int i = 0; i < repeats / kBlocks + 3; ++i) {
            const auto begin = Clock::now();
            if (world_.rank() == 0) {
              ways_[w].send(tensor);
              ways_[w].recv(tensor);
            } else {
              ways_[w].recv(tensor);
              ways_[w].send(tensor);
            }
            if (i >= 2) in_block.push_back(seconds(begin) / 2 * 1e6);
          }
          times[w].push_back(median(in_block));
        }
      print_row(bytes, times, "us", false);
    }
  }

  void stream() {
    row_header("stream");
    for (const std::size_t bytes : {4096ul, 65536ul, 131072ul, 262144ul, 1048576ul, 8388608ul}) {
      const at::Tensor tensor = at::zeros({static_cast<std::int64_t>(bytes / 4)});
      const int count = static_cast<int>(std::clamp<std::size_t>((8 << 20) / bytes, 4, 128));
      std::vector<std::vector<double>> rates(ways_.size());
      for (int block = 0; block < kBlocks; ++block)
        for (std::size_t w = 0; w < ways_.size(); ++w) {
          barrier();
          const auto begin = Clock::now();
          ways_[w].stream(tensor, count);
          barrier();
          if (block >= 2) rates[w].push_back(static_cast<double>(bytes) * count / seconds(begin) / 1e6);
        }
      print_row(bytes, rates, "MB/s", true);
    }
  }

  void all_reduce() {
    if (world_.rank() == 0)
      fmt::print("\n{:<12}{:>16}{:>16}{:>10}\n", "all_reduce", "c10d", "penstock", "ratio");
    for (const std::size_t bytes : {4ul, 4096ul, 65536ul, 262144ul, 1048576ul, 8388608ul}) {
      const at::Tensor tensor = at::zeros({static_cast<std::int64_t>(bytes / 4)});
      const int repeats = bytes > 500'000 ? 6 : 40;
      std::vector<double> direct, ours;
      for (int block = 0; block < kBlocks; ++block)
        for (const bool through : {false, true}) {
          barrier();
          std::vector<double> in_block;
          for (int i = 0; i < repeats; ++i) {
            const auto begin = Clock::now();
            if (through) {
              world_.group().all_reduce(tensor).wait();
            } else {
              std::vector<at::Tensor> tensors = {tensor};
              direct_->allreduce(tensors)->wait(kLimit);
            }
            if (i >= 1) in_block.push_back(seconds(begin) * 1e6);
          }
          (through ? ours : direct).push_back(median(in_block));
        }
      if (world_.rank() == 0)
        fmt::print("{:<12}{:>13.1f} us{:>13.1f} us{:>10.2f}\n", size_text(bytes), median(direct),
                   median(ours), ratio(ours, direct));
    }
  }

  void row_header(const char* what) {
    if (world_.rank() != 0) return;
    fmt::print("\n{:<12}", what);
    for (const Way& way : ways_) fmt::print("{:>18}", way.name);
    fmt::print("{:>16}{}\n", "penstock/c10d", ways_.size() > 2 ? "        ucx/gloo" : "");
  }

  void print_row(std::size_t bytes, const std::vector<std::vector<double>>& values, const char* unit,
                 bool whole) {
    if (world_.rank() != 0) return;
    fmt::print("{:<12}", size_text(bytes));
    for (const auto& column : values)
      fmt::print("{:>18}", whole ? fmt::format("{:.0f} {}", median(column), unit)
                                 : fmt::format("{:.1f} {}", median(column), unit));
    fmt::print("{:>16.2f}", ratio(values[1], values[0]));
    if (values.size() > 2) fmt::print("{:>16.2f}", ratio(values[2], values[1]));
    fmt::print("\n");
    std::fflush(stdout);
  }

  World& world_;
  bench::DirectGloo direct_;
  std::vector<Group> groups_;
  std::vector<Way> ways_;
};

}  // namespace

int main(int, char** argv) {
  if (!env_text("RANK")) {
    LaunchOptions options;
    options.ranks = 2;
    options.command = {std::filesystem::canonical(argv[0]).string()};
    options.prefix = false;
    return launch(options).exit_code;
  }
  at::set_num_threads(1);
  World world = World::from_env();
  Bench measured(world);
  // Pin each rank's main thread to its own core, as computation would in a real run; Gloo's threads, started
  // above, stay unpinned.
  bench::pin(world.rank());
  measured.run();
}
