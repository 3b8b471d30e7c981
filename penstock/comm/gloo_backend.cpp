// Gloo behind c10d. Facts that shape this file: a send's wait returns only when the receive is posted; isCompleted() of a
// point-to-point work stays false until wait(); a wait that times out closes the connection and ends the group; Gloo's
// destructor waits for its running collectives.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "penstock/base/env.h"
#include "penstock/comm/c10d_backend.h"

namespace penstock::comm {

namespace {

std::chrono::milliseconds milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return std::max(left, std::chrono::milliseconds(1));  // zero would mean "no limit" to c10d
}

class GlooPointToPoint final : public Transfer {
 public:
  explicit GlooPointToPoint(C10dWorkPtr work) : work_(std::move(work)) {}

  WaitResult wait(Clock::time_point deadline) override {
    if (done_) return WaitResult::Done;
    if (interrupted_.load()) return WaitResult::Interrupted;
    try {
      if (!work_->wait(milliseconds_until(deadline))) return WaitResult::Interrupted;
    } catch (const std::exception&) {
      if (Clock::now() >= deadline) return WaitResult::TimedOut;
      throw;
    }
    // An interrupt sets Gloo's flag first; older versions still report success then.
    done_ = true;
    return WaitResult::Done;
  }

  bool done() override { return done_; }  // Gloo cannot tell without waiting
  bool resumable() const override { return false; }

  void interrupt() noexcept override {
    interrupted_.store(true);
    try {
      work_->abort();
    } catch (...) {
      // Nothing more can be done from here: the waiting thread then ends at its deadline.
    }
  }

 private:
  C10dWorkPtr work_;
  bool done_ = false;
  std::atomic<bool> interrupted_{false};
};

class GlooCollective final : public Transfer {
 public:
  explicit GlooCollective(C10dWorkPtr work) : work_(std::move(work)) {}

  WaitResult wait(Clock::time_point deadline) override {
    if (interrupted_.load() && !work_->isCompleted()) return WaitResult::Interrupted;
    try {
      work_->wait(milliseconds_until(deadline));
    } catch (const std::exception&) {
      if (!work_->isCompleted()) return WaitResult::TimedOut;
      throw;
    }
    return WaitResult::Done;
  }

  bool done() override { return work_->isCompleted(); }
  void interrupt() noexcept override { interrupted_.store(true); }

 private:
  C10dWorkPtr work_;
  std::atomic<bool> interrupted_{false};
};

class GlooBackend final : public C10dBackend {
 public:
  using C10dBackend::C10dBackend;

  std::string name() const override { return "gloo"; }

  Abilities abilities() const override {
    Abilities can;
#if PENSTOCK_TORCH_AT_LEAST(2, 11)
    can.all_gather = true;
#endif
    // reduce_scatter stays composed on every version: summed in rank order it gives the same bits everywhere.
    return can;
  }

  void abandon() noexcept override {
    // Its destructor would wait for collectives that can no longer end; the process is about to fail anyway, so the
    // group stays alive until exit.
    group_.release();
  }

 protected:
  TransferPtr point_to_point(C10dWorkPtr work) override { return std::make_shared<GlooPointToPoint>(std::move(work)); }
  TransferPtr collective(C10dWorkPtr work) override { return std::make_shared<GlooCollective>(std::move(work)); }
};

}  // namespace

bool gloo_available() { return true; }

std::shared_ptr<Backend> make_gloo_backend(const Store& store, const BackendOptions& options) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  // One collective at a time and in order; a second worker would only compete for the cores that compute.
  gloo->threads = 1;
  const auto interface = env_text("GLOO_SOCKET_IFNAME");
  gloo->devices.push_back(interface               ? c10d::ProcessGroupGloo::createDeviceForInterface(*interface)
                          : options.loopback_only ? c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
                                                  : c10d::ProcessGroupGloo::createDefaultDevice());
  auto c10d_store = store.for_c10d();
  c10d_store->setTimeout(options.timeout);
  return std::make_shared<GlooBackend>(
      c10::make_intrusive<c10d::ProcessGroupGloo>(c10d_store, options.axis_rank, options.size, gloo));
}

}  // namespace penstock::comm
