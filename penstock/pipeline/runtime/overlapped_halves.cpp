#include "penstock/pipeline/runtime/overlapped_halves.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cfenv>
#include <exception>
#include <memory>
#include <optional>

#include "penstock/dtensor.h"
#include "penstock/torch/dispatch/autocast_scope.h"

namespace penstock {

namespace {

constexpr int kForwards = 0, kBackwards = 1;

// The state of one thread, for another one.
class ThreadState {
 public:
  ThreadState() { std::fegetenv(&floating_point_); }

  template <class Body>
  void run(const Body& body) const {
    std::fesetenv(&floating_point_);
    at::init_num_threads();
    const at::ThreadLocalStateGuard guard(libtorch_);
    const AutocastStateScope autocast(autocast_);
    std::optional<ImplicitReplicationGuard> replicates;
    if (replicates_) replicates.emplace();
    body();
  }

 private:
  at::ThreadLocalState libtorch_;
  AutocastState autocast_ = autocast_state();
  bool replicates_ = ImplicitReplicationGuard::active();
  std::fenv_t floating_point_;
};

// Runs one half to its end.
void run_half(TurnTaking& turns, int party, const std::shared_ptr<OverlappedHalves::Half>& half,
              const OverlappedHalves::Body& body) {
  try {
    if (party == kBackwards) turns.await_first_turn();
    const UnitHalfGuard current(half);
    body(*half);
  } catch (...) {
    turns.fail(party, std::current_exception());
    return;
  }
  turns.finish(party);
}

}  // namespace

OverlappedHalves::~OverlappedHalves() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void OverlappedHalves::Half::record(UnitPiece::Kind kind) {
  const std::int64_t now = steady_now_ns();
  unit_->pieces.push_back({member_, begin_ns_, now, kind});
  begin_ns_ = now;
}

void OverlappedHalves::Half::begin_exchange() {
  record(UnitPiece::Kind::Compute);
  unit_->overlapped += unit_->turns.hand_over(party_);
}

void OverlappedHalves::Half::end_exchange() noexcept { record(UnitPiece::Kind::Exchange); }

void OverlappedHalves::serve() {
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stop_ || job_; });
    if (stop_) return;
    lock.unlock();
    job_();
    lock.lock();
    job_ = nullptr;
    lock.unlock();
    changed_.notify_all();
  }
}

void OverlappedHalves::start(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    job_ = std::move(job);
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  changed_.notify_all();
}

void OverlappedHalves::await_job() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !job_; });
}

std::vector<UnitPiece> OverlappedHalves::run(const Body& forwards, const Body& backwards,
                                             c10::Device device) {
  const auto unit = std::make_shared<Unit>(limit_);
  const auto first = std::make_shared<Half>(unit, kForwards);
  const auto second = std::make_shared<Half>(unit, kBackwards);
  const ThreadState state;
  start([&] {
    // For good, not for a scope: leaving it would select the first device of the machine, which may belong to
    // another rank.
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
    state.run([&] { run_half(unit->turns, kBackwards, second, backwards); });
  });
  run_half(unit->turns, kForwards, first, forwards);
  await_job();
  if (const std::exception_ptr error = unit->turns.error()) std::rethrow_exception(error);
  overlapped_ += unit->overlapped;
  std::vector<UnitPiece> pieces = std::move(unit->pieces);
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const UnitPiece& a, const UnitPiece& b) { return a.begin_ns < b.begin_ns; });
  return pieces;
}

}  // namespace penstock
