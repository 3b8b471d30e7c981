// The NCCL backend, over c10d. A transfer is ordered on CUDA streams: `wait` makes the current stream wait
// and returns at once, so that the host runs ahead; `done` returns whether the device has finished.
#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "penstock/base/log.h"
#include "penstock/comm/backend/c10d_backend.h"

namespace penstock::comm {

namespace {

class NcclTransfer final : public Transfer {
 public:
  explicit NcclTransfer(C10dWorkPtr work) : work_(std::move(work)) {}
  WaitResult wait(Clock::time_point) override {
    if (work_) work_->wait();
    return WaitResult::Done;
  }
  bool done() override { return !work_ || work_->isCompleted(); }
  void interrupt() noexcept override {}  // never blocks the host

 private:
  C10dWorkPtr work_;
};

class NcclBackend final : public C10dBackend {
 public:
  using C10dBackend::C10dBackend;
  ~NcclBackend() override {
#if PENSTOCK_TORCH_AT_LEAST(2, 6)
    // Communicators must be closed while CUDA still works, not at process exit.
    try {
      if (group_) group_->shutdown();
    } catch (const std::exception& error) {
      log().warn("comm: an NCCL communicator could not be closed: {}", error.what());
    }
#endif
  }
  std::string name() const override { return "nccl"; }

  Abilities abilities() const override {
    Abilities can;
    can.all_gather = can.reduce_scatter = can.average = can.half_sums = can.self_transfer = can.needs_batch =
        true;
    return can;
  }

  TransferPtr send(const at::Tensor& tensor, int peer, std::uint64_t) override {
    std::vector<at::Tensor> tensors = {tensor};
    return collective(group_->send(tensors, peer, 0));
  }
  TransferPtr recv(const at::Tensor& tensor, int peer, std::uint64_t) override {
    std::vector<at::Tensor> tensors = {tensor};
    return collective(group_->recv(tensors, peer, 0));
  }

  void begin_batch() override { group_->startCoalescing(); }
  TransferPtr end_batch() override { return std::make_shared<NcclTransfer>(group_->endCoalescing()); }
  void abandon() noexcept override { group_.release(); }

 protected:
  TransferPtr collective(C10dWorkPtr work) override {
    return std::make_shared<NcclTransfer>(std::move(work));
  }
};

}  // namespace

bool nccl_available() { return true; }

std::string nccl_version() { return c10d::getNcclVersion(); }

std::string gpu_identity(int local_rank, int& index) {
  const int count = c10::cuda::device_count();
  if (count == 0) return {};
  index = local_rank % count;
  char bus[32] = {};
  // Two ranks that each see one GPU through CUDA_VISIBLE_DEVICES have the same index and different bus IDs.
  if (cudaDeviceGetPCIBusId(bus, sizeof bus, index) != cudaSuccess) return {};
  return bus;
}

std::shared_ptr<Backend> make_nccl_backend(const Store& store, const BackendOptions& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  auto group =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store.for_c10d(), options.axis_rank, options.size, nccl);
  group->setBoundDeviceId(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(options.device_index)));
  return std::make_shared<NcclBackend>(std::move(group));
}

}  // namespace penstock::comm
