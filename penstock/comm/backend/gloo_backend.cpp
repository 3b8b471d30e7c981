// The Gloo backend, over c10d. Properties of Gloo that this file depends on: a send's wait returns only when
// the receive is posted; a wait that times out closes the connection and ends the group; Gloo's destructor
// waits for its running collectives; a receive larger than the send is silently accepted, so transfers must
// be matched by size as well.
//
// Reductions, broadcasts and barriers use c10d. Point-to-point transfers, and therefore gathers, use the
// connections that c10d created with Gloo's own 64-bit slots: c10d's 31-bit tags have no room for the
// contract of a transfer.
#include <fmt/format.h>
#include <gloo/transport/unbound_buffer.h>
#include <sched.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <tuple>

#include "penstock/base/env.h"
#include "penstock/base/exception_text.h"
#include "penstock/comm/backend/c10d_backend.h"
#include "penstock/comm/secure/sha256.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

std::chrono::milliseconds milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return std::max(left, std::chrono::milliseconds(1));  // zero would mean "no limit" to c10d
}

// Gives access to c10d's private connections.
class OpenGloo final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  gloo::Context& context() { return *contexts_.front(); }
};

// The highest byte separates these from the slots of Gloo's own collectives, which use small numbers there.
constexpr std::uint64_t kTransferSlots = 0x70ull << 56, kProofSlot = 0x71ull << 56;

class GlooPointToPoint final : public Transfer {
 public:
  // Holds the tensor as long as the transfer exists: Gloo reads or writes its memory.
  GlooPointToPoint(gloo::Context& context, at::Tensor tensor, bool sends)
      : tensor_(std::move(tensor)),
        buffer_(context.createUnboundBuffer(tensor_.data_ptr(), tensor_.nbytes())),
        sends_(sends) {}

  void start(int peer, std::uint64_t slot) {
    if (sends_) {
      buffer_->send(peer, slot);
    } else {
      buffer_->recv(peer, slot);
    }
  }

  WaitResult wait(Clock::time_point deadline) override {
    if (done_) return WaitResult::Done;
    if (interrupted_.load()) return WaitResult::Interrupted;
    try {
      const auto left = milliseconds_until(deadline);
      if (!(sends_ ? buffer_->waitSend(left) : buffer_->waitRecv(left))) return WaitResult::Interrupted;
    } catch (const std::exception&) {
      if (Clock::now() >= deadline) return WaitResult::TimedOut;
      throw;
    }
    done_ = true;
    return WaitResult::Done;
  }

  bool done() override { return done_; }  // Gloo cannot tell without waiting
  bool resumable() const override { return false; }

  void interrupt() noexcept override {
    interrupted_.store(true);
    try {
      sends_ ? buffer_->abortWaitSend() : buffer_->abortWaitRecv();
    } catch (...) {
      // Nothing more can be done here: the waiting thread then ends at its deadline.
    }
  }

 private:
  at::Tensor tensor_;
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer_;
  bool sends_;
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
      // It failed, or it completed between the timeout and the query: a completed work returns at once, or
      // throws its error.
      work_->wait(std::chrono::milliseconds(1));
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
  explicit GlooBackend(c10::intrusive_ptr<OpenGloo> gloo) : C10dBackend(gloo), context_(gloo->context()) {}

  std::string name() const override { return "gloo"; }

  // Gathers are composed of transfers, which start without waking c10d's worker thread. Reduce-scatters are
  // composed too:
  // summed in rank order, they give the same bits everywhere.
  Abilities abilities() const override { return {}; }

  TransferPtr send(const at::Tensor& tensor, int peer, std::uint64_t key) override {
    return start(tensor, true, peer, key);
  }
  TransferPtr recv(const at::Tensor& tensor, int peer, std::uint64_t key) override {
    return start(tensor, false, peer, key);
  }

  // Exchanges the proofs of all members. Throws CommError if another one arrives, a backend's exception if a
  // connection ends or says nothing in time.
  void prove_membership(const BackendOptions& options) {
    struct Exchange {
      Exchange(gloo::Context& context, const Digest& own)
          : sent(at::empty({static_cast<std::int64_t>(own.size())}, at::kByte)),
            received(at::zeros_like(sent)),
            send(context, sent, true),
            recv(context, received, false) {
        std::memcpy(sent.data_ptr(), own.data(), own.size());
      }
      at::Tensor sent, received;
      GlooPointToPoint send, recv;
    };
    std::map<int, Exchange> exchanges;  // by position
    for (int peer = 0; peer < options.size; ++peer)
      if (peer != options.axis_rank)
        exchanges.try_emplace(peer, context_, options.proof(options.axis_rank, peer));
    for (auto& [peer, exchange] : exchanges) exchange.recv.start(peer, kProofSlot);
    for (auto& [peer, exchange] : exchanges) exchange.send.start(peer, kProofSlot);
    const auto deadline = Clock::now() + options.timeout;
    for (auto& [peer, exchange] : exchanges) {
      if (exchange.recv.wait(deadline) != WaitResult::Done ||
          exchange.send.wait(deadline) != WaitResult::Done)
        throw std::runtime_error(fmt::format("the member at position {} does not answer", peer));
      const std::string_view said(static_cast<const char*>(exchange.received.data_ptr()), kDigestBytes);
      if (!equal_in_constant_time(said, as_text(options.proof(peer, options.axis_rank))))
        throw std::runtime_error(fmt::format("what answers for the member at position {} is none", peer));
    }
  }

  void abandon() noexcept override {
    // Its destructor would wait for collectives that can no longer end. The process is about to fail anyway,
    // so the group stays alive until exit.
    group_.release();
  }

 protected:
  TransferPtr collective(C10dWorkPtr work) override {
    return std::make_shared<GlooCollective>(std::move(work));
  }

 private:
  TransferPtr start(const at::Tensor& tensor, bool sends, int peer, std::uint64_t key) {
    auto transfer = std::make_shared<GlooPointToPoint>(context_, tensor, sends);
    transfer->start(peer, kTransferSlots | key);
    return transfer;
  }

  gloo::Context& context_;
};

// c10d's own default is the address that the host's name has, which on many systems is a loopback address.
std::shared_ptr<gloo::transport::Device> make_device(const std::string& interface,
                                                     const std::string& address) {
  using Gloo = c10d::ProcessGroupGloo;
  return interface.empty() ? Gloo::createDeviceForHostname(address)
                           : Gloo::createDeviceForInterface(interface);
}

// Returns the device whose thread serves the sockets of every group of this process; from now on a new one if
// `renew`.
//
// A sender holds a lock that this thread needs, and without the lock the thread spins instead of sleeping. If
// a send wakes the thread on the sender's own core and it preempts the sender at once, both make no progress
// until the next timer interrupt: 4 ms for a message of 100 us. So the thread does not preempt a running one
// (SCHED_BATCH): it runs when the sender waits, or on another core. There is only one such thread, because
// waking a second one makes the scheduler choose again.
std::shared_ptr<gloo::transport::Device> shared_device(const std::string& interface,
                                                       const std::string& address, bool renew) {
  static std::mutex mutex;
  // By process: a forked process lacks the thread.
  static std::map<std::tuple<pid_t, std::string, std::string>, std::weak_ptr<gloo::transport::Device>>
      devices;
  const std::lock_guard lock(mutex);
  auto& known = devices[{getpid(), interface, address}];
  if (auto device = known.lock(); device && !renew) return device;
  // A thread inherits the policy of the thread that starts it; a temporary one keeps the caller's policy
  // unchanged.
  auto device = std::async(std::launch::async, [&] {
                  if (sched_getscheduler(0) == SCHED_OTHER) {
                    const sched_param none{};
                    sched_setscheduler(0, SCHED_BATCH, &none);  // may fail in a sandbox: slower but correct
                  }
                  return make_device(interface, address);
                }).get();
  known = device;
  return device;
}

}  // namespace

bool gloo_available() { return true; }

std::shared_ptr<Backend> make_gloo_backend(const Store& store, const BackendOptions& options) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  // Collectives run one at a time and in order; a second worker would only compete for the cores that
  // compute.
  gloo->threads = 1;
  const std::string interfaces = env_text("GLOO_SOCKET_IFNAME").value_or("");
  // Of several interfaces the first is used: each would need a thread of its own.
  const std::string interface = interfaces.substr(0, interfaces.find(','));
  try {
    gloo->devices.push_back(shared_device(interface, options.address, options.new_device));
    auto backend = std::make_shared<GlooBackend>(
        c10::make_intrusive<OpenGloo>(store.for_c10d(), options.axis_rank, options.size, gloo));
    if (options.proof) {
      try {
        backend->prove_membership(options);
      } catch (...) {
        backend->abandon();
        throw;
      }
    }
    return backend;
  } catch (const Error&) {
    throw;  // from the store, which knows more
  } catch (const std::exception& error) {
    CommContext context;
    context.operation = "connect";
    throw CommError(
        fmt::format(
            "Gloo cannot connect the members of a group, where this rank listens on {}: {}; open the "
            "TCP ports between the hosts, or set GLOO_SOCKET_IFNAME to the interface of a network that "
            "connects them",
            interface.empty() ? options.address : interface, without_backtrace(error.what())),
        context);
  }
}

}  // namespace penstock::comm
