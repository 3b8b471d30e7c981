#include "penstock/comm/transport/liveness.h"
#include "penstock/base/describe.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "penstock/base/text.h"

namespace penstock::comm {

std::string silence_text(const std::string& it, Clock::duration silent) {
  return fmt::format(
      "nothing was heard from {} for {:.0f} s: its process is stopped, or its host or the network to it is "
      "down",
      it, std::chrono::duration<double>(silent).count());
}

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

void Liveness::note_silence(int rank, std::optional<Clock::time_point> since) {
  std::lock_guard lock(mutex_);
  if (since) {
    silent_[rank] = *since;
  } else {
    silent_.erase(rank);
  }
}

std::optional<Clock::time_point> Liveness::silent_since(int rank) const {
  std::lock_guard lock(mutex_);
  const auto found = silent_.find(rank);
  return found == silent_.end() ? std::nullopt : std::optional(found->second);
}

std::string Liveness::describe_silence() const {
  std::lock_guard lock(mutex_);
  if (silent_.empty()) return {};
  std::vector<int> ranks;
  Clock::time_point since = silent_.begin()->second;
  for (const auto& [rank, silent] : silent_) {
    ranks.push_back(rank);
    since = std::min(since, silent);
  }
  return silence_text(fmt::format("rank{} {}", ranks.size() > 1 ? "s" : "", format_list(ranks)),
                      Clock::now() - since);
}

std::shared_ptr<void> Liveness::listen(Listener listener) {
  auto token = std::make_shared<Listener>(std::move(listener));
  std::lock_guard lock(mutex_);
  listeners_.push_back(token);
  return token;
}

}  // namespace penstock::comm
