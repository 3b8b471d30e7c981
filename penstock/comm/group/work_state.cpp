#include "penstock/comm/group/work_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "penstock/base/exception_text.h"
#include "penstock/base/log.h"
#include "penstock/base/text.h"
#include "penstock/base/warnings.h"
#include "penstock/comm/record/recorder.h"
#include "penstock/comm/record/recorder_dump.h"
#include "penstock/errors.h"
#include "penstock/group.h"

namespace penstock::comm {

namespace {

// A transport may notice a closed connection before the monitor knows whose it was; wait this long for the
// monitor. Less if a rank has been silent for a while: then the transport has probably timed out by itself.
constexpr auto kFailureReportTime = std::chrono::seconds(3),
               kFailureReportTimeAfterSilence = std::chrono::seconds(1);
// On transports with resumable waits, how long a wait runs before it checks again which ranks are alive.
constexpr auto kSlice = std::chrono::milliseconds(250);
// A rank that left normally may still have data in flight; a wait for it continues this long.
constexpr auto kDepartureGraceTime = std::chrono::seconds(5);

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown error";
  }
}

// Errors of the caller, found before anything moved: the group stays usable.
bool is_misuse(const std::exception& error) {
  const auto is_one_of = [&]<class... Types>() {
    return ((dynamic_cast<const Types*>(&error) != nullptr) || ...);
  };
  return is_one_of.operator()<ValueError, TypeError, NotImplemented, InvariantError, std::logic_error>();
}

// -1 if the rank is not a member.
int position_of(int rank, const std::vector<int>& members) {
  const auto found = std::find(members.begin(), members.end(), rank);
  return found == members.end() ? -1 : static_cast<int>(found - members.begin());
}

// An abandoned backend lives until the process ends, and may write to this memory as long.
void keep_forever(std::vector<at::Tensor> tensors) {
  static std::mutex& mutex = *new std::mutex;
  static auto& kept = *new std::vector<at::Tensor>;
  const std::lock_guard lock(mutex);
  kept.insert(kept.end(), std::make_move_iterator(tensors.begin()), std::make_move_iterator(tensors.end()));
}

}  // namespace

void WorldCore::fail(const std::string& reason) noexcept {
  if (monitor) {
    monitor->fail(reason);
  } else if (!fake && env.world_size > 1) {
    liveness->report({env.rank, RankState::Failed, reason});  // a thread world shares one Liveness
  }
}

// ------------------------------------------------------------------------------------------------- WorkState

WorkState::WorkState(std::shared_ptr<GroupState> group, const char* operation, std::string label,
                     std::optional<int> peer, std::uint64_t bytes,
                     std::optional<std::chrono::milliseconds> timeout, int tag)
    : group_(std::move(group)),
      operation_(operation),
      label_(std::move(label)),
      peer_(peer),
      timeout_(timeout.value_or(group_->timeout)),
      deadline_(begin_ + timeout_) {
  group_->check_usable(operation);
  record_ = Recorder::global().begin({.operation = operation_,
                                      .group = std::string_view(group_->name),
                                      .label = std::string_view(label_),
                                      .tag = tag,
                                      .sequence = group_->operations++,
                                      .bytes = bytes,
                                      .peer = peer_});
}

WorkState::~WorkState() {
  if (finished_) return;
  // Dropped without a wait: the transport may still access the memory, so the group takes ownership of it.
  try {
    group_->adopt_abandoned(transfers_, kept_);
    warn_once(
        "comm",
        fmt::format("a {} on group {} was dropped without wait(); its memory is kept until the process ends",
                    operation_, group_->name));
  } catch (const std::exception& error) {
    log().error("comm: an unfinished {} could not be kept alive: {}", operation_, error.what());
  }
  Recorder::global().end(record_, OperationState::Failed);
}

CommContext WorkState::context() const {
  CommContext context;
  context.rank = group_->own_rank();
  context.peer = peer_;
  context.operation = operation_;
  context.group = group_->name;
  context.label = label_;
  context.elapsed_s = std::chrono::duration<double>(Clock::now() - begin_).count();
  return context;
}

void WorkState::wait(std::chrono::milliseconds timeout) {
  if (finished_) {
    if (error_) std::rethrow_exception(error_);
    return;
  }
  deadline_ = Clock::now() + timeout;
  try {
    std::size_t arrived = 0;
    const auto settle = [&] {
      for (; arrived < transfers_.size(); ++arrived)
        group_->wait_for(*TransferPtr(transfers_[arrived]), *this, deadline_);
    };
    settle();
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      steps_[i](*this);
      settle();
    }
  } catch (...) {
    const auto error = std::current_exception();
    timed_out_ = Clock::now() >= deadline_;
    group_->fail(fmt::format("{} on group {}{}: {}", operation_, group_->name,
                             label_.empty() ? "" : " (" + label_ + ")", first_line(message_of(error))),
                 error);
    finish(error);
    std::rethrow_exception(error);
  }
  finish(nullptr);
  group_->waits->withdraw_posts();
}

bool WorkState::done() {
  if (finished_) return true;
  if (continues_in_steps_) return false;
  return std::all_of(transfers_.begin(), transfers_.end(),
                     [](const auto& transfer) { return transfer->done(); });
}

void WorkState::wait_for(Transfer& transfer) { group_->wait_for(transfer, *this, deadline_); }

void WorkState::finish(std::exception_ptr error) noexcept {
  finished_ = true;
  error_ = std::move(error);
  Recorder::global().end(record_, !error_      ? OperationState::Done
                                  : timed_out_ ? OperationState::TimedOut
                                               : OperationState::Failed);
  steps_.clear();
  expected_transfers_.clear();
  if (error_) {
    group_->adopt_abandoned(transfers_, kept_);
  } else {
    transfers_.clear();
    kept_.clear();
  }
}

// ------------------------------------------------------------------------------------------------ GroupState

GroupState::GroupState(std::shared_ptr<WorldCore> world_core, std::string group_name,
                       std::vector<int> members, std::chrono::milliseconds group_timeout)
    : world(std::move(world_core)),
      name(std::move(group_name)),
      ranks(std::move(members)),
      axis_rank(position_of(world->env.rank, ranks)),
      timeout(group_timeout),
      waits(std::make_shared<GroupWaits>(world->store, common_name(), ranks, axis_rank)) {}

void GroupState::follow_liveness() {
  // After a loss every wait of this group ends, whichever rank was lost: a run cannot continue without a
  // rank. The reporting thread must not own the group, as GroupWaits explains.
  listener_ = world->liveness->listen([weak = std::weak_ptr(waits)](const RankEvent&) {
    if (const auto group_waits = weak.lock()) group_waits->interrupt();
  });
}

GroupState::~GroupState() {
  listener_.reset();
  waits->close();
  if (error_ || !abandoned_transfers_.empty()) {
    if (cpu) cpu->abandon();
    if (cuda) cuda->abandon();
    keep_forever(std::move(abandoned_tensors_));
  }
}

void GroupState::check_usable(const char* operation) const {
  std::exception_ptr error;
  {
    std::lock_guard lock(mutex_);
    error = error_;
  }
  if (error) std::rethrow_exception(error);
  if (const auto failure = world->liveness->first_failure()) {
    CommContext context;
    context.rank = own_rank();
    context.operation = operation;
    context.group = name;
    failure->raise(context);
  }
}

void GroupState::wait_for(Transfer& transfer, WorkState& work, Clock::time_point deadline) {
  const GroupWaits::Scope registered(*waits, transfer, work, deadline);
  // A loss reported before this transfer was registered did not interrupt it.
  if (world->liveness->first_failure()) transfer.interrupt();

  std::optional<Clock::time_point> departure_deadline;
  for (;;) {
    const auto now = Clock::now();
    const auto until = transfer.resumable() ? std::min(deadline, now + kSlice) : deadline;
    WaitResult result;
    try {
      result = transfer.wait(until);
    } catch (const MismatchError&) {
      throw;
    } catch (const std::exception& error) {
      raise(first_line(error.what()), work, false);
    }
    switch (result) {
      case WaitResult::Done:
        return;
      case WaitResult::Interrupted:
        raise("interrupted", work, false);
      case WaitResult::TimedOut:
        break;
    }
    if (Clock::now() >= deadline || !transfer.resumable()) raise("timed out", work, true);
    if (world->liveness->first_failure()) raise("interrupted", work, false);
    if (work.peer() && world->liveness->state_of(*work.peer()).state == RankState::Left) {
      if (!departure_deadline) departure_deadline = Clock::now() + kDepartureGraceTime;
      if (Clock::now() >= *departure_deadline) raise("the peer has left", work, false);
    }
  }
}

void GroupState::raise(const std::string& transport_error, WorkState& work, bool timed_out) {
  if (const std::string mismatch = waits->mismatch(); !mismatch.empty()) throw MismatchError(mismatch);
  CommContext context = work.context();
  auto failure = world->liveness->first_failure();
  if (!failure && !timed_out) {
    const bool silent = !world->liveness->describe_silence().empty();
    failure = world->liveness->await_failure(Clock::now() +
                                             (silent ? kFailureReportTimeAfterSilence : kFailureReportTime));
    // A collective that was started long before this wait reaches the transport's own time-out first.
    timed_out = silent && !world->liveness->describe_silence().empty();
  }
  if (failure) failure->raise(context);
  for (const int rank : ranks)
    if (rank != own_rank() && world->liveness->state_of(rank).state == RankState::Left) {
      context.lost_rank = rank;
      throw PeerLostError(fmt::format("rank {} has left the world while this operation still needed it; "
                                      "every rank must start the same "
                                      "operations before it leaves",
                                      rank),
                          context);
    }
  if (timed_out) {
    const std::string missing = waits->describe_missing_ranks(work);
    const std::string silence = world->liveness->describe_silence();
    throw TimeoutError(fmt::format("timed out{}{}{}; set a larger PENSTOCK_TIMEOUT_S if ranks are slow; {}",
                                   missing, silence.empty() ? "" : "; ", silence, dump_for_error("time-out")),
                       context);
  }
  throw CommError(fmt::format("the transport failed: {}", transport_error), context);
}

void GroupState::fail(const std::string& reason, std::exception_ptr error) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (error_) return;
    error_ = std::move(error);
  }
  // A rank that failed only because of another's failure reports nothing.
  if (!world->liveness->first_failure()) world->fail(reason);
}

void GroupState::adopt_abandoned(c10::ArrayRef<TransferPtr> transfers, c10::ArrayRef<at::Tensor> tensors) {
  std::lock_guard lock(mutex_);
  abandoned_transfers_.insert(abandoned_transfers_.end(), transfers.begin(), transfers.end());
  abandoned_tensors_.insert(abandoned_tensors_.end(), tensors.begin(), tensors.end());
}

void GroupState::started(WorkState& work, const std::function<void()>& start) {
  try {
    start();
  } catch (const std::exception& error) {
    if (is_misuse(error)) throw;
    std::exception_ptr cause = std::current_exception();
    if (dynamic_cast<const Error*>(&error) == nullptr) {  // of the backend
      try {
        raise(first_line(error.what()), work, false);
      } catch (const std::exception&) {
        cause = std::current_exception();
      }
    }
    fail(fmt::format("{} on group {}: {}", work.operation(), name, first_line(message_of(cause))), cause);
    std::rethrow_exception(cause);
  }
}

std::uint32_t GroupState::next_number(bool sends, int position, int tag) {
  // Internal tags are used once: counting them would keep an entry for each operation.
  if (tag > Group::kMaxTag) return 0;
  std::lock_guard lock(numbers_mutex_);
  return numbers_[static_cast<std::uint64_t>(position) << 33 |
                  static_cast<std::uint64_t>(static_cast<std::uint32_t>(tag)) << 1 | (sends ? 1 : 0)]++;
}

int GroupState::internal_tag(std::uint32_t operation, int phase) const {
  // The bit above the user tags separates these; the counter may wrap, but only long after its operations
  // have ended.
  static_assert(Group::kMaxTag == (1 << 28) - 1);
  return (1 << 28) | static_cast<int>((operation & 0x3ffffffu) << 2) | phase;
}

// ------------------------------------------------------------------------------------------------------ Work

void Work::wait() {
  if (state_) state_->wait();
}

void Work::wait(std::chrono::milliseconds timeout) {
  if (state_) state_->wait(timeout);
}

bool Work::done() { return !state_ || state_->done(); }

void wait_all(std::vector<Work>& works) {
  std::exception_ptr first;
  for (Work& work : works) {
    try {
      work.wait();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace penstock::comm
