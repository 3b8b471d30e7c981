#include "penstock/comm/backend/backend.h"

namespace penstock::comm {

namespace {

class Completed final : public Transfer {
 public:
  WaitResult wait(Clock::time_point) override { return WaitResult::Done; }
  bool done() override { return true; }
  void interrupt() noexcept override {}
};

class FakeBackend final : public Backend {
 public:
  explicit FakeBackend(const BackendOptions& options) : options_(options) {}
  std::string name() const override { return "fake"; }

  Abilities abilities() const override {
    Abilities can;
    can.all_gather = can.reduce_scatter = can.average = can.half_sums = can.self_transfer = true;
    return can;
  }

  TransferPtr send(const at::Tensor&, int, std::uint64_t) override { return completed(); }
  TransferPtr recv(const at::Tensor&, int, std::uint64_t) override { return completed(); }
  TransferPtr all_reduce(const at::Tensor&, ReduceOp) override { return completed(); }
  TransferPtr broadcast(const at::Tensor&, int) override { return completed(); }
  TransferPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    output.view({options_.size, -1}).copy_(input.reshape({1, -1}).expand({options_.size, input.numel()}));
    return completed();
  }
  TransferPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp) override {
    output.copy_(input.view({options_.size, -1})[options_.axis_rank].view(output.sizes()));
    return completed();
  }
  TransferPtr all_to_all(const at::Tensor& output, const at::Tensor&, std::vector<std::int64_t>,
                         std::vector<std::int64_t>) override {
    output.zero_();
    return completed();
  }
  TransferPtr barrier() override { return completed(); }

 private:
  static TransferPtr completed() {
    static const TransferPtr instance = std::make_shared<Completed>();
    return instance;
  }
  BackendOptions options_;
};

}  // namespace

std::shared_ptr<Backend> make_fake_backend(const BackendOptions& options) {
  return std::make_shared<FakeBackend>(options);
}

}  // namespace penstock::comm
