#include "penstock/comm/transport/ucx_transport.h"

#include <fmt/format.h>
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/log.h"
#include "penstock/comm/transport/ucx_wake_event.h"
#include "penstock/comm/transport/ucx_worker.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

using std::chrono::microseconds;

constexpr auto kCancelTime = std::chrono::milliseconds(100);

// The 64 bits that UCX matches on, from the top: source axis rank (16), tag (32), kind (16, outside the
// mask).
constexpr std::uint64_t kMatchMask = ~std::uint64_t{0xffff};
constexpr int kMaxSize = 1 << 16;

// Enough progress calls to empty a queue (64 entries) that nobody fills any more.
constexpr int kLastRounds = 1000;

// The peer's process has ended.
constexpr ucs_status_t kLost = UCS_ERR_CONNECTION_RESET;

std::uint64_t wire_tag(int source, std::uint32_t tag, std::uint16_t kind) {
  return (static_cast<std::uint64_t>(source) << 48) | (static_cast<std::uint64_t>(tag) << 16) | kind;
}

microseconds choose_spin(const UcxOptions& options, int size) {
  if (options.spin) return *options.spin;
  if (const auto chosen = env_int("PENSTOCK_UCX_SPIN_US", 0, 10'000'000)) return microseconds(*chosen);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int usable = sched_getaffinity(0, sizeof cores, &cores) == 0
                         ? CPU_COUNT(&cores)
                         : static_cast<int>(std::thread::hardware_concurrency());
  // Sleeping and waking cost about 11 us more than polling (UCX 1.13.1, 4 B): polling a few times as long
  // gains almost everything that can be gained and wastes little.
  return microseconds(std::max(options.ranks_on_host, size) > usable ? 5 : 50);
}

}  // namespace

class UcxTransport::Core {
 public:
  // UCX holds a pointer to it while a request runs. Owned by the core, so that a dropped handle leaves
  // nothing dangling.
  struct Operation {
    Core* core = nullptr;
    bool receives = false;
    int peer = 0;
    void* request = nullptr;          // null when UCX has finished with it
    bool dropped = false;             // the handle is destroyed: nobody will read the result
    WakeEvent* wake_event = nullptr;  // of the wait that sleeps for it
    ucs_status_t status = UCS_INPROGRESS;
    Arrival arrival;
    std::atomic<bool> done = false;  // set last: status and arrival may be read once it is seen
  };

  // Holds the mutex for a caller that posts or looks something up. Polling waits yield to it: with a plain
  // mutex the poller would usually win.
  class Turn {
   public:
    explicit Turn(Core& core) : core_(core) {
      core_.turns_.fetch_add(1, std::memory_order_relaxed);
      core_.mutex_.lock();
      core_.turns_.fetch_sub(1, std::memory_order_relaxed);
    }
    ~Turn() { core_.mutex_.unlock(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Core& core_;
  };

  // How a sleep ended: something may have changed, or no event could be expected and it slept briefly.
  enum class Sleep { Woken, Napped };

  Core(int axis_rank, int size, const Publish& publish, const Fetch& fetch, const UcxOptions& options)
      : axis_rank_(axis_rank),
        size_(size),
        spin_(choose_spin(options, size)),
        worker_(axis_rank, size, publish, fetch) {}

  int axis_rank() const { return axis_rank_; }
  microseconds spin() const { return spin_; }
  bool uses_cma() const { return worker_.uses_cma(); }
  void check_peer(int peer) const;

  // These need a Turn.
  Operation* send(const void* data, std::size_t bytes, int peer, std::uint32_t tag, std::uint16_t kind);
  Operation* recv(void* data, std::size_t capacity, int peer, std::uint32_t tag);
  void drop(Operation* operation) noexcept;

  // Calls UCX progress once unless another thread is doing so; returns the number of events.
  unsigned try_progress();
  // Sleeps until any transport has something to do, the operation's wake event is signalled, or `nap` or the
  // deadline passes.
  Sleep sleep(Operation& operation, const std::atomic<bool>& interrupted, Clock::time_point deadline,
              microseconds nap);
  // Called when a wait that had slept ends: another sleeper must take over listening.
  void pass_on() noexcept;
  void close() noexcept;

  // Any thread may call, without a Turn.
  bool has_unfinished() const { return unfinished_.load(std::memory_order_relaxed) > 0; }
  bool has_unfinished_sends() const {
    return unfinished_sends_.load(std::memory_order_relaxed) > 0 &&
           !sends_may_never_finish_.load(std::memory_order_relaxed);
  }
  // Like try_progress, for callers that have other work if another thread is making progress.
  unsigned help() noexcept;

 private:
  static void wake_mover() noexcept;
  CommError no_events(const char* why) const;
  Operation* take();
  Operation* started(Operation* operation, ucs_status_ptr_t result);
  void finish(Operation& operation, ucs_status_t status) noexcept;  // UCX has finished with it
  void report(Operation& operation, ucs_status_t status) noexcept;  // for its waiter
  unsigned progress() noexcept;
  void lose(int peer) noexcept;
  std::size_t running() const;
  void settle_until(Clock::time_point deadline) noexcept;
  static void on_sent(void* request, ucs_status_t status, void* operation);
  static void on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info,
                          void* operation);

  const int axis_rank_;
  const int size_;
  const microseconds spin_;
  std::atomic<int> turns_ = 0;                              // callers that wait for the mutex
  std::atomic<int> unfinished_ = 0, unfinished_sends_ = 0;  // with UCX; changed under the mutex
  std::atomic<bool> sends_may_never_finish_ = false;        // a peer is lost or the transport is closed
  std::mutex mutex_;                                        // guards the members below
  UcxWorker worker_;
  bool closed_ = false;
  std::deque<Operation> operations_;  // a deque keeps addresses stable
  std::vector<Operation*> free_;
  std::vector<WakeEvent*> sleepers_;
  std::vector<std::unique_ptr<WakeEvent>> spare_wake_events_;
};

// All transports of this process, and the thread that completes their sends. Never destroyed: the thread may
// access it until the process ends.
class UcxTransport::Mover {
 public:
  static Mover& instance() {
    static Mover& mover = *new Mover;
    return mover;
  }

  void add(const std::shared_ptr<Core>& core) {
    const std::lock_guard lock(mutex_);
    std::erase_if(cores_, [](const auto& each) { return each.expired(); });
    cores_.push_back(core);
  }

  // Called when a send was not transmitted completely at once.
  void wake() noexcept {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    if (std::exchange(work_, true)) return;
    changed_.notify_one();
  }

  // Processes arrivals for the other transports. Returns whether more may still come.
  bool help_others(const Core* own) {
    bool unfinished = false;
    for (const auto& core :
         cores_that([&](const Core& each) { return &each != own && each.has_unfinished(); })) {
      core->help();
      unfinished = true;
    }
    return unfinished;
  }

 private:
  template <class Condition>
  std::vector<std::shared_ptr<Core>> cores_that(Condition condition) {
    std::vector<std::shared_ptr<Core>> result;
    const std::lock_guard lock(mutex_);
    for (const auto& weak : cores_)
      if (auto core = weak.lock(); core && condition(*core)) result.push_back(std::move(core));
    return result;
  }

  void run() {
    constexpr microseconds kShortest(20), kLongest(500);
    auto nap = kShortest;
    for (;;) {
      const auto busy = cores_that([](const Core& each) { return each.has_unfinished_sends(); });
      if (busy.empty()) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return work_; });
        work_ = false;
        nap = kShortest;
        continue;
      }
      unsigned moved = 0;
      for (const auto& core : busy) moved += core->help();
      nap = moved > 0 ? kShortest : std::min(2 * nap, kLongest);
      std::this_thread::sleep_for(nap);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<Core>> cores_;
  bool work_ = false;
  std::thread thread_;
};

void UcxTransport::Core::wake_mover() noexcept { Mover::instance().wake(); }

CommError UcxTransport::Core::no_events(const char* why) const {
  return CommError(
      fmt::format("UCX transport: axis rank {} cannot wait for events: {}; set PENSTOCK_P2P=gloo "
                  "to use sockets instead",
                  axis_rank_, why),
      {});
}

void UcxTransport::Core::check_peer(int peer) const {
  if (peer < 0 || peer >= size_ || peer == axis_rank_)
    throw ValueError(describe("UCX transport: peer", fmt::format("axis rank {}", peer),
                              fmt::format("another member, 0 to {} but not {}", size_ - 1, axis_rank_)));
}

UcxTransport::Core::Operation* UcxTransport::Core::take() {
  if (closed_) throw StateError("the UCX transport was closed; no transfer can start on it");
  if (free_.empty()) {
    free_.reserve(operations_.size() + 1);  // so that releasing never allocates
    Operation& fresh = operations_.emplace_back();
    fresh.core = this;
    return &fresh;
  }
  Operation* operation = free_.back();
  free_.pop_back();
  operation->dropped = false;
  operation->status = UCS_INPROGRESS;
  operation->done.store(false, std::memory_order_relaxed);
  return operation;
}

UcxTransport::Core::Operation* UcxTransport::Core::started(Operation* operation, ucs_status_ptr_t result) {
  // The callback ran before the call returned.
  if (operation->done.load(std::memory_order_relaxed)) return operation;
  if (!UCS_PTR_IS_PTR(result)) {
    finish(*operation, UCS_PTR_STATUS(result));
    return operation;
  }
  operation->request = result;
  ++unfinished_;
  if (!operation->receives) {
    ++unfinished_sends_;
    wake_mover();
  }
  // A send that waits for room in the peer's queue causes no event: wake a sleeper so that it polls.
  if (!operation->receives && !sleepers_.empty()) sleepers_.front()->notify();
  return operation;
}

UcxTransport::Core::Operation* UcxTransport::Core::send(const void* data, std::size_t bytes, int peer,
                                                        std::uint32_t tag, std::uint16_t kind) {
  Operation* operation = take();
  operation->receives = false;
  operation->peer = peer;
  operation->arrival = {bytes, kind};
  if (worker_.is_lost(peer)) return started(operation, reinterpret_cast<ucs_status_ptr_t>(kLost));
  ucp_request_param_t params{};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.cb.send = on_sent;
  params.user_data = operation;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  return started(operation, ucp_tag_send_nbx(worker_.endpoint(peer), data, bytes,
                                             wire_tag(axis_rank_, tag, kind), &params));
}

UcxTransport::Core::Operation* UcxTransport::Core::recv(void* data, std::size_t capacity, int peer,
                                                        std::uint32_t tag) {
  Operation* operation = take();
  operation->receives = true;
  operation->peer = peer;
  operation->arrival = {};
  ucp_request_param_t params{};
  // Always use the callback: otherwise UCX 1.13 leaves the size and tag of a message that had already arrived
  // unset.
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  params.cb.recv = on_received;
  params.user_data = operation;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  started(operation,
          ucp_tag_recv_nbx(worker_.get(), data, capacity, wire_tag(peer, tag, 0), kMatchMask, &params));
  // What a dead peer had sent can still be received; nothing more will come.
  if (operation->request != nullptr && worker_.is_lost(peer))
    ucp_request_cancel(worker_.get(), operation->request);
  return operation;
}

void UcxTransport::Core::on_sent(void* request, ucs_status_t status, void* operation) {
  auto& sent = *static_cast<Operation*>(operation);
  sent.core->finish(sent, status);
  ucp_request_free(request);
}

void UcxTransport::Core::on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info,
                                     void* operation) {
  auto& received = *static_cast<Operation*>(operation);
  received.arrival = {info->length, static_cast<std::uint16_t>(info->sender_tag)};
  received.core->finish(received, status);
  ucp_request_free(request);
}

void UcxTransport::Core::finish(Operation& operation, ucs_status_t status) noexcept {
  if (operation.request != nullptr) {
    --unfinished_;
    if (!operation.receives) --unfinished_sends_;
  }
  operation.request = nullptr;
  if (operation.dropped) {
    free_.push_back(&operation);
    return;
  }
  report(operation, status == UCS_ERR_CANCELED && worker_.is_lost(operation.peer) ? kLost : status);
}

void UcxTransport::Core::report(Operation& operation, ucs_status_t status) noexcept {
  operation.status = status;
  if (operation.wake_event != nullptr) operation.wake_event->notify();
  operation.done.store(true, std::memory_order_release);
}

void UcxTransport::Core::drop(Operation* operation) noexcept {
  if (operation->request == nullptr) {
    free_.push_back(operation);
    return;
  }
  operation->dropped = true;
  // Otherwise it could take a message meant for a later receive. A dropped send continues.
  if (operation->receives) ucp_request_cancel(worker_.get(), operation->request);
}

unsigned UcxTransport::Core::progress() noexcept {
  if (closed_) return 0;
  return ucp_worker_progress(worker_.get());
}

unsigned UcxTransport::Core::help() noexcept {
  if (turns_.load(std::memory_order_relaxed) > 0 || !mutex_.try_lock()) return 0;
  const unsigned moved = progress();
  mutex_.unlock();
  return moved;
}

unsigned UcxTransport::Core::try_progress() {
  if (turns_.load(std::memory_order_relaxed) > 0 || !mutex_.try_lock()) {
    std::this_thread::yield();
    return 0;
  }
  const unsigned moved = progress();
  mutex_.unlock();
  return moved;
}

UcxTransport::Core::Sleep UcxTransport::Core::sleep(Operation& operation,
                                                    const std::atomic<bool>& interrupted,
                                                    Clock::time_point deadline, microseconds nap) {
  std::unique_ptr<WakeEvent> wake_event;
  bool armed = false;
  pollfd waits[3] = {};
  {
    const Turn turn(*this);
    for (int attempt = 0; attempt < 3 && !armed; ++attempt) {
      if (progress() > 0 || closed_ || operation.done.load(std::memory_order_relaxed) || interrupted.load())
        return Sleep::Woken;
      const ucs_status_t status = ucp_worker_arm(worker_.get());
      if (status != UCS_OK && status != UCS_ERR_BUSY) throw no_events(ucs_status_string(status));
      armed = status == UCS_OK;
    }
    if (spare_wake_events_.empty()) {
      wake_event = std::make_unique<WakeEvent>();
    } else {
      wake_event = std::move(spare_wake_events_.back());
      spare_wake_events_.pop_back();
    }
    sleepers_.push_back(wake_event.get());
    operation.wake_event = wake_event.get();
    waits[0] = {wake_event->fd(), POLLIN, 0};
    waits[1] = {armed ? worker_.event_fd() : -1, POLLIN, 0};  // poll ignores negative descriptors
    waits[2] = {worker_.is_lost(operation.peer) ? -1 : worker_.process_fd(operation.peer), POLLIN, 0};
  }
  // Not armed: UCX has work that causes no event (a full queue at the peer), so check again after a short
  // sleep.
  auto rest = std::chrono::ceil<microseconds>(deadline - Clock::now());
  rest = std::clamp(rest, microseconds(0), armed ? microseconds(std::chrono::hours(1)) : nap);
  const timespec timeout{rest.count() / 1'000'000, rest.count() % 1'000'000 * 1000};
  const int ready = ppoll(waits, std::size(waits), &timeout, nullptr);
  const int failure = ready < 0 ? errno : 0;
  const Turn turn(*this);
  operation.wake_event = nullptr;
  std::erase(sleepers_, wake_event.get());
  wake_event->reset();
  spare_wake_events_.push_back(std::move(wake_event));
  if (failure != 0 && failure != EINTR) throw no_events(std::strerror(failure));
  if (ready > 0 && waits[2].revents != 0) lose(operation.peer);
  return armed ? Sleep::Woken : Sleep::Napped;
}

void UcxTransport::Core::lose(int peer) noexcept {
  // What the peer sent before it ended is complete in the local queue: take it first.
  for (int round = 0; round < kLastRounds; ++round) progress();
  worker_.set_lost(peer);
  sends_may_never_finish_ = true;
  if (closed_) return;
  for (Operation& operation : operations_) {
    if (operation.request == nullptr || operation.peer != peer || operation.dropped) continue;
    if (operation.receives) ucp_request_cancel(worker_.get(), operation.request);
    // UCX keeps the request, because it cannot cancel it or because the receive had begun; its waiter need
    // not wait.
    if (operation.request != nullptr) report(operation, kLost);
  }
}

void UcxTransport::Core::pass_on() noexcept {
  const Turn turn(*this);
  if (!sleepers_.empty()) sleepers_.front()->notify();
}

std::size_t UcxTransport::Core::running() const {
  return static_cast<std::size_t>(std::count_if(operations_.begin(), operations_.end(),
                                                [](const Operation& o) { return o.request != nullptr; }));
}

void UcxTransport::Core::settle_until(Clock::time_point deadline) noexcept {
  while (running() > 0 && Clock::now() < deadline)
    if (progress() == 0) std::this_thread::yield();
}

void UcxTransport::Core::close() noexcept {
  const Turn turn(*this);
  // Receives end at once; sends get a short time to complete, because the peer may be about to receive them.
  for (Operation& operation : operations_)
    if (operation.request != nullptr && operation.receives)
      ucp_request_cancel(worker_.get(), operation.request);
  settle_until(Clock::now() + kCancelTime);
  for (Operation& operation : operations_)
    if (operation.request != nullptr) ucp_request_cancel(worker_.get(), operation.request);
  settle_until(Clock::now() + kCancelTime);
  const std::size_t left = running();
  if (left > 0)
    log().debug("UCX transport: axis rank {} closes with {} unfinished transfers; its worker is leaked",
                axis_rank_, left);
  worker_.close(left > 0);
  closed_ = true;
  sends_may_never_finish_ = true;
  for (Operation& operation : operations_)
    if (operation.request != nullptr) finish(operation, UCS_ERR_CANCELED);
}

class UcxTransport::Handle final : public UcxTransfer {
 public:
  Handle(std::shared_ptr<Core> core, bool receives, int peer, std::uint32_t tag, std::size_t bytes)
      : core_(std::move(core)), receives_(receives), peer_(peer), tag_(tag), bytes_(bytes) {}

  ~Handle() override {
    if (operation_ == nullptr) return;
    const Core::Turn turn(*core_);
    core_->drop(operation_);
  }

  // Call with a Turn, once.
  void begin(Core::Operation* operation) {
    operation_ = operation;
    if (operation_->done.load(std::memory_order_relaxed)) settle();
  }

  WaitResult wait(Clock::time_point deadline) override;

  bool done() override {
    if (operation_ != nullptr) {
      core_->try_progress();
      look();
    }
    return operation_ == nullptr;
  }

  void interrupt() noexcept override {
    interrupted_.store(true);
    const Core::Turn turn(*core_);
    if (operation_ != nullptr && operation_->wake_event != nullptr) operation_->wake_event->notify();
  }

  Arrival arrival() const override {
    if (operation_ != nullptr || status_ != UCS_OK)
      throw StateError(fmt::format(
          "UCX transport: arrival of {} was requested before it was done; call wait() first", name()));
    return arrival_;
  }

 private:
  // Returns the operation to the core and keeps its result here.
  void settle() {
    status_ = operation_->status;
    arrival_ = operation_->arrival;
    core_->drop(std::exchange(operation_, nullptr));
  }

  bool look() {
    if (!operation_->done.load(std::memory_order_acquire)) return false;
    const Core::Turn turn(*core_);
    settle();
    return true;
  }

  std::string name() const {
    return receives_ ? fmt::format("the receive from axis rank {} with tag {} (at axis rank {})", peer_, tag_,
                                   core_->axis_rank())
                     : fmt::format("the send of {} bytes to axis rank {} with tag {} (at axis rank {})",
                                   bytes_, peer_, tag_, core_->axis_rank());
  }

  WaitResult result() const;

  const std::shared_ptr<Core> core_;
  Core::Operation* operation_ = nullptr;  // null once the result is here; changes under a Turn
  const bool receives_;
  const int peer_;
  const std::uint32_t tag_;
  const std::size_t bytes_;
  std::atomic<bool> interrupted_ = false;
  ucs_status_t status_ = UCS_INPROGRESS;
  Arrival arrival_;
};

WaitResult UcxTransport::Handle::result() const {
  if (status_ == UCS_OK) return WaitResult::Done;
  if (status_ == UCS_ERR_MESSAGE_TRUNCATED)
    throw MismatchError(
        describe(fmt::format("UCX transport: message from axis rank {} with tag {} is longer than its "
                             "receive (at axis rank {})",
                             peer_, tag_, core_->axis_rank()),
                 arrival_.bytes > bytes_ ? fmt::format("{} bytes", arrival_.bytes) : std::string("more"),
                 fmt::format("at most {} bytes", bytes_),
                 "make both sides agree on shape and dtype, or receive into a larger buffer"));
  if (status_ == UCS_ERR_CANCELED)
    throw StateError(fmt::format("the UCX transport was closed during {}; finish transfers first", name()));
  throw CommError(fmt::format("UCX transport: {} failed: {}; axis rank {} has probably died, see its log",
                              name(), ucs_status_string(status_), peer_),
                  {});
}

WaitResult UcxTransport::Handle::wait(Clock::time_point deadline) {
  if (operation_ == nullptr) return result();
  constexpr microseconds kAloneTime(5), kShortestNap(50), kLongestNap(1000), kHelpTime(20), kHelpNap(250);
  auto helped = Clock::now();
  bool others_wait = false;
  bool slept = false;
  WaitResult ended = WaitResult::Done;
  auto idle_since = Clock::now();
  microseconds nap = kShortestNap;
  int last_rounds = 100;  // a wait that ended still receives what is in the queue
  for (unsigned round = 0;; ++round) {
    const unsigned moved = core_->try_progress();
    if (look()) break;
    if (moved > 0 && (interrupted_.load(std::memory_order_relaxed) || Clock::now() >= deadline) &&
        --last_rounds > 0)
      continue;
    if (interrupted_.load(std::memory_order_relaxed)) {
      ended = WaitResult::Interrupted;
      break;
    }
    if (moved == 0 && round % 8 != 0) continue;  // reading the clock costs as much as checking the queues
    const auto now = Clock::now();
    if (moved > 0) {
      idle_since = now;
      nap = kShortestNap;
    }
    if (now >= deadline) {
      ended = WaitResult::TimedOut;
      break;
    }
    if (now - helped > kHelpTime) {
      others_wait = Mover::instance().help_others(core_.get());
      helped = now;
    }
    if (now - idle_since < core_->spin()) {
      // The peer may share this core if other programs use the rest: let it run. On one core a round trip
      // then takes 18 us instead of twice the polling time.
      if (now - idle_since > kAloneTime) std::this_thread::yield();
      continue;
    }
    slept = true;
    const auto wake_up = others_wait ? std::min(deadline, now + kHelpNap) : deadline;
    const auto sleep = core_->sleep(*operation_, interrupted_, wake_up, nap);
    nap = std::min(nap * 2, kLongestNap);
    // After events, messages tend to follow each other: poll again. Not after a nap.
    if (sleep == Core::Sleep::Woken && (!others_wait || Clock::now() < wake_up)) idle_since = Clock::now();
    round = 0;
  }
  if (slept) core_->pass_on();
  return ended == WaitResult::Done ? result() : ended;
}

bool ucx_available() { return true; }

std::string ucx_version() { return ucp_get_version_string(); }

UcxTransport::UcxTransport(int axis_rank, int size, const Publish& publish, const Fetch& fetch,
                           UcxOptions options) {
  if (size < 1 || size > kMaxSize || axis_rank < 0 || axis_rank >= size)
    throw ValueError(describe("UCX transport: axis rank and size", fmt::format("{} of {}", axis_rank, size),
                              fmt::format("0 <= axis rank < size <= {}", kMaxSize)));
  core_ = std::make_shared<Core>(axis_rank, size, publish, fetch, options);
  Mover::instance().add(core_);
}

UcxTransport::~UcxTransport() { core_->close(); }

std::shared_ptr<UcxTransfer> UcxTransport::send(const void* data, std::size_t bytes, int peer,
                                                std::uint32_t tag, std::uint16_t kind) {
  core_->check_peer(peer);
  auto handle = std::make_shared<Handle>(core_, false, peer, tag, bytes);
  const Core::Turn turn(*core_);
  handle->begin(core_->send(data, bytes, peer, tag, kind));
  return handle;
}

std::shared_ptr<UcxTransfer> UcxTransport::recv(void* data, std::size_t capacity, int peer,
                                                std::uint32_t tag) {
  core_->check_peer(peer);
  auto handle = std::make_shared<Handle>(core_, true, peer, tag, capacity);
  const Core::Turn turn(*core_);
  handle->begin(core_->recv(data, capacity, peer, tag));
  return handle;
}

bool UcxTransport::fetches_large_messages() const { return core_->uses_cma(); }

}  // namespace penstock::comm
