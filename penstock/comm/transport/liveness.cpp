#include "penstock/comm/transport/liveness.h"
#include "penstock/base/describe.h"

#include <fmt/format.h>

#include <utility>

namespace penstock::comm {

std::string RankEvent::describe() const {
  switch (state) {
    case RankState::Running:
      return fmt::format("rank {} is running", rank);
    case RankState::Left:
      return fmt::format("rank {} has left the world", rank);
    case RankState::Failed:
      return fmt::format("rank {} failed: {}", rank, reason);
    case RankState::Lost:
      return fmt::format("rank {} was lost: {}", rank, reason);
  }
  return {};
}

void RankEvent::raise(CommContext context, const std::string& where) const {
  context.lost_rank = rank;
  if (state == RankState::Failed) throw PeerFailedError(describe() + where, std::move(context));
  throw PeerLostError(describe() + where, std::move(context));
}

Liveness::Liveness(int world_size) : ranks_(static_cast<std::size_t>(world_size)) {
  for (int rank = 0; rank < world_size; ++rank) ranks_[static_cast<std::size_t>(rank)].rank = rank;
}

void Liveness::report(const RankEvent& event) {
  std::vector<std::shared_ptr<Listener>> to_call;
  {
    std::lock_guard lock(mutex_);
    RankEvent& known = ranks_.at(static_cast<std::size_t>(event.rank));
    if (known.state != RankState::Running) return;
    known = event;
    if (event.state == RankState::Failed || event.state == RankState::Lost) {
      if (!first_failure_) first_failure_ = event;
      for (const auto& weak : listeners_)
        if (auto listener = weak.lock()) to_call.push_back(std::move(listener));
    }
    std::erase_if(listeners_, [](const auto& weak) { return weak.expired(); });
  }
  changed_.notify_all();
  for (const auto& listener : to_call) (*listener)(event);
}

std::optional<RankEvent> Liveness::first_failure() const {
  std::lock_guard lock(mutex_);
  return first_failure_;
}

RankEvent Liveness::state_of(int rank) const {
  std::lock_guard lock(mutex_);
  return ranks_.at(static_cast<std::size_t>(rank));
}

std::optional<RankEvent> Liveness::await_failure(Clock::time_point deadline) const {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] { return first_failure_.has_value(); });
  return first_failure_;
}

std::shared_ptr<void> Liveness::listen(Listener listener) {
  auto token = std::make_shared<Listener>(std::move(listener));
  std::lock_guard lock(mutex_);
  listeners_.push_back(token);
  return token;
}

}  // namespace penstock::comm
