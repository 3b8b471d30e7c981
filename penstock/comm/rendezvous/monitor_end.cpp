#include "penstock/comm/rendezvous/monitor_end.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <future>
#include <utility>

#include "penstock/base/log.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/comm/launch/launch_signals.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

using namespace std::chrono_literals;

constexpr auto kSendTime = 1s;
// How long rank 0 waits for the others after a failure: they have been told, and may read why from the store.
constexpr auto kLeaveTimeAfterFailure = 2s;
// After this time a user should know why rank 0 still runs.
constexpr auto kLeaveSayTime = 5s;
// When another rank leaves, rank 0 has this long to see it.
constexpr auto kGoodbyeTime = 2s;
// If a round of this thread was later than this, its own process was stopped: what the others said meanwhile
// has not been read yet.
constexpr auto kOwnPause = 3s;

void report_notice(Liveness& liveness, const Notice& notice) {
  switch (notice.kind) {
    case NoticeKind::Alive:
      return;
    case NoticeKind::Silent:
      return liveness.note_silence(
          notice.rank, Clock::now() - std::chrono::seconds(parse_integer(notice.text).value_or(0)));
    case NoticeKind::Heard:
      return liveness.note_silence(notice.rank, std::nullopt);
    case NoticeKind::Left:
    case NoticeKind::Failed:
    case NoticeKind::Lost:
      break;
  }
  const RankState state = notice.kind == NoticeKind::Left     ? RankState::Left
                          : notice.kind == NoticeKind::Failed ? RankState::Failed
                                                              : RankState::Lost;
  liveness.report({notice.rank, state, notice.text});
}

}  // namespace

MonitorPace MonitorPace::of(std::chrono::milliseconds timeout) {
  const auto interval = std::clamp<std::chrono::milliseconds>(timeout / 8, 500ms, 5000ms);
  return {.interval = interval,
          .suspicion = 3 * std::max<std::chrono::milliseconds>(interval, 1000ms),
          .silence = timeout + std::clamp<std::chrono::milliseconds>(timeout / 2, 2000ms, 5000ms)};
}

// ------------------------------------------------------------------------------------------------------- hub

MonitorHub::MonitorHub(const JobKey& key, int world_size, std::shared_ptr<Liveness> liveness,
                       std::chrono::milliseconds timeout)
    : End(key),
      world_size_(world_size),
      liveness_(std::move(liveness)),
      timeout_(timeout),
      pace_(MonitorPace::of(timeout)) {}

void MonitorHub::start(Socket listener) {
  ServerLimits limits;
  limits.half_open += 2 * static_cast<std::size_t>(world_size_);
  limits.peers = 2 * static_cast<std::size_t>(world_size_);
  limits.max_payload = kMaxNotice;
  limits.ranks = world_size_;
  // Each event holds the hub while it runs.
  const auto hub = [weak = weak_from_this()] { return weak.lock(); };
  SecureServer::Events events;
  events.joined = [hub](SecureServer::Id peer, int rank) {
    if (const auto self = hub()) self->joined(peer, rank);
  };
  events.received = [hub](SecureServer::Id peer, std::string_view payload) {
    if (const auto self = hub()) self->received(peer, payload);
  };
  events.closed = [hub](SecureServer::Id peer, int, const std::string& why) {
    if (const auto self = hub()) self->closed(peer, why);
  };
  events.tick = [hub] {
    if (const auto self = hub()) self->tick();
  };
  events.failed = [hub](const std::string& why) {
    if (const auto self = hub())
      self->liveness_->report({0, RankState::Failed, "its monitor has failed: " + why});
  };
  server_ =
      std::make_unique<SecureServer>(std::move(listener), Purpose::Monitor, key, limits, std::move(events));
  server_->start();
}

void MonitorHub::joined(SecureServer::Id peer, int rank) {
  const auto known = std::find_if(peers_.begin(), peers_.end(),
                                  [&](const auto& entry) { return entry.second.rank == rank; });
  if (rank == 0 || (known != peers_.end() && known->second.spoke)) {
    log().warn("monitor: a second process claims to be rank {}; it is not listened to", rank);
    server_->close(peer);
    return;
  }
  // A rank whose handshake was answered too late tries again, and its first connection may still be open.
  if (known != peers_.end()) {
    server_->close(known->first);
    peers_.erase(known);
  }
  peers_[peer] = {.rank = rank, .heard = Clock::now()};
  // A rank that joins after a loss must also be notified of it. If it is lost meanwhile, the list grows.
  const std::vector<Notice> known_losses = spread_;
  for (const Notice& old : known_losses) server_->send(peer, old.to_bytes());
}

void MonitorHub::received(SecureServer::Id peer, std::string_view payload) {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  const int from = found->second.rank;
  found->second.heard = Clock::now();
  found->second.spoke = true;
  if (std::exchange(found->second.silent, false)) {
    liveness_->note_silence(from, std::nullopt);
    tell_others({NoticeKind::Heard, from, ""});
  }
  const Notice notice = Notice::from_bytes(payload, world_size_);
  const bool of_itself = notice.rank == from;
  if (of_itself == (notice.kind == NoticeKind::Lost) || notice.kind > NoticeKind::Lost)
    throw MismatchError(fmt::format("rank {} sent a notice about rank {} that only {} may send", from,
                                    notice.rank, of_itself ? "others" : "that rank"));
  if (notice.kind != NoticeKind::Alive) spread(notice);
}

void MonitorHub::closed(SecureServer::Id peer, const std::string& why) {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  const Peer gone = found->second;
  peers_.erase(found);
  if (gone.spoke && liveness_->state_of(gone.rank).state == RankState::Running)
    spread({NoticeKind::Lost, gone.rank, why});
}

void MonitorHub::tick() {
  const auto now = Clock::now();
  if (now - last_tick_ > kOwnPause)
    for (auto& [id, peer] : peers_) {
      peer.heard = now;
      if (peer.silent) liveness_->note_silence(peer.rank, now);
    }
  last_tick_ = now;
  // Sending may end a connection and change the map, so all is looked at first.
  std::vector<Notice> suspected, lost;
  for (auto& [id, peer] : peers_) {
    if (!peer.spoke || liveness_->state_of(peer.rank).state != RankState::Running) continue;
    const auto silent = now - peer.heard;
    if (silent > pace_.silence) {
      peer.silent = true;
      lost.push_back({NoticeKind::Lost, peer.rank, silence_text("it", silent)});
    } else if (silent > pace_.suspicion && !std::exchange(peer.silent, true)) {
      liveness_->note_silence(peer.rank, peer.heard);
      suspected.push_back({NoticeKind::Silent, peer.rank,
                           fmt::format("{}", std::chrono::ceil<std::chrono::seconds>(silent).count())});
    }
  }
  for (const Notice& notice : suspected) tell_others(notice);
  for (const Notice& notice : lost) spread(notice);
  if (now - last_alive_ < pace_.interval) return;
  last_alive_ = now;
  const std::string alive = Notice{NoticeKind::Alive, 0, ""}.to_bytes();
  std::vector<SecureServer::Id> ids;
  for (const auto& [id, peer] : peers_) ids.push_back(id);
  for (const auto id : ids) server_->send(id, alive);
}

void MonitorHub::spread(const Notice& notice) {
  if (notice.rank != 0) report_notice(*liveness_, notice);
  // Each rank is told once of each other one.
  const bool told =
      std::any_of(spread_.begin(), spread_.end(), [&](const Notice& old) { return old.rank == notice.rank; });
  if (told) return;
  spread_.push_back(notice);
  tell_others(notice);
}

void MonitorHub::tell_others(const Notice& notice) {
  const std::string bytes = notice.to_bytes();
  std::vector<SecureServer::Id> ids;  // sending may end a connection, and change the map
  for (const auto& [id, peer] : peers_)
    if (peer.rank != notice.rank) ids.push_back(id);
  for (const auto id : ids) server_->send(id, bytes);
}

void MonitorHub::send(const Notice& notice) {
  const auto done = std::make_shared<std::promise<void>>();
  auto future = done->get_future();
  server_->post([this, notice, done] {
    spread(notice);
    done->set_value();
  });
  future.wait_for(kSendTime);
}

bool MonitorHub::anyone_answers() {
  const auto found = std::make_shared<std::promise<bool>>();
  auto future = found->get_future();
  server_->post([this, found] {
    found->set_value(
        std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) { return !entry.second.silent; }));
  });
  return future.wait_for(kSendTime) != std::future_status::ready || future.get();
}

void MonitorHub::leave(bool failed) {
  const auto begin = Clock::now();
  auto until = begin + timeout_;
  bool said = false;
  for (;;) {
    const auto now = Clock::now();
    const bool after_failure = failed || liveness_->first_failure().has_value();
    if (after_failure) until = std::min(until, now + kLeaveTimeAfterFailure);
    if (server_->await_alone(std::min(until, now + 100ms)) || now >= until) break;
    if (after_failure && !anyone_answers()) break;
    if (!said && now - begin > kLeaveSayTime) {
      said = true;
      log().info("comm: rank 0 hosts the store and waits up to {:.0f} s for {} to leave",
                 std::chrono::duration<double>(until - now).count(), count_of(server_->peers(), "rank"));
    }
  }
  server_->stop();
}

// ----------------------------------------------------------------------------------------------------- spoke

MonitorSpoke::MonitorSpoke(SecureConnection connection, const JobKey& key, int rank, int world_size,
                           std::shared_ptr<Liveness> liveness, std::chrono::milliseconds timeout)
    : End(key),
      rank_(rank),
      world_size_(world_size),
      liveness_(std::move(liveness)),
      pace_(MonitorPace::of(timeout)),
      connection_(std::move(connection)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_)
    throw StateError(fmt::format("monitor: cannot create an event descriptor: {}; raise `ulimit -n`",
                                 std::strerror(errno)));
}

MonitorSpoke::~MonitorSpoke() {
  if (thread_.joinable()) thread_.detach();  // it is this one, and about to end
}

void MonitorSpoke::start() {
  const AllSignalsBlocked blocked;  // signals are for the threads of the program
  thread_ = std::thread([self = shared_from_this()] { self->run(); });
}

void MonitorSpoke::send(const Notice& notice) {
  std::unique_lock lock(mutex_);
  queue_.push_back(notice);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.fd(), &one, sizeof one);
  if (!on_own_thread()) sent_.wait_for(lock, kSendTime, [&] { return queue_.empty() || over_; });
}

void MonitorSpoke::leave(bool failed) {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_.fd(), &one, sizeof one);
  }
  if (on_own_thread()) {
    log().error(
        "monitor: the world is destroyed while the loss of a rank is reported, which cannot wait for it");
    return;  // the thread ends when it has sent what it has to
  }
  thread_.join();
  if (over_ || failed || liveness_->first_failure()) return;
  // A socket that is closed with unread bytes resets the connection, and a goodbye that is lost on the way
  // would then not be repeated.
  ::shutdown(connection_.fd(), SHUT_WR);
  const auto until = Clock::now() + kGoodbyeTime;
  try {
    while (connection_.receive(until)) {
    }
  } catch (const ConnectionLost&) {
    // Rank 0 has closed its side: it has read everything.
  }
}

void MonitorSpoke::run() {
  bool connected = true;
  for (;;) {
    if (connected) connected = exchange();
    {
      const std::lock_guard lock(mutex_);
      if (!connected) {
        over_ = true;
        queue_.clear();
        sent_.notify_all();
      }
      if (stop_ && queue_.empty()) return;
    }
    std::array<pollfd, 2> polled = {
        {{wake_.fd(), POLLIN, 0}, {connected ? connection_.fd() : -1, POLLIN, 0}}};
    const auto wait = connected ? std::min<std::chrono::milliseconds>(pace_.interval, 1s) : 60s;
    if (poll(polled.data(), polled.size(), static_cast<int>(std::chrono::milliseconds(wait).count())) < 0 &&
        errno != EINTR)
      std::this_thread::sleep_for(100ms);
    std::uint64_t count = 0;
    while (read(wake_.fd(), &count, sizeof count) > 0) {
    }
  }
}

bool MonitorSpoke::exchange() {
  try {
    const auto now = Clock::now();
    while (const auto payload = connection_.receive(now)) {
      heard_ = now;
      if (std::exchange(silent_, false)) liveness_->note_silence(0, std::nullopt);
      const Notice notice = Notice::from_bytes(*payload, world_size_);
      if (notice.rank != rank_) report_notice(*liveness_, notice);
    }
    if (now - last_round_ > kOwnPause) {
      heard_ = now;
      if (silent_) liveness_->note_silence(0, now);
    }
    last_round_ = now;
    if (now - heard_ > pace_.silence) {
      lost(silence_text("it", now - heard_));
      return false;
    }
    if (now - heard_ > pace_.suspicion && !std::exchange(silent_, true)) liveness_->note_silence(0, heard_);
    std::unique_lock lock(mutex_);
    while (!queue_.empty()) {
      const Notice notice = queue_.front();
      lock.unlock();
      // Notices are small and rare: a socket buffer that stays full belongs to a process that does not read.
      const bool sent = connection_.send(notice.to_bytes(), Clock::now() + kSendTime);
      lock.lock();
      queue_.erase(queue_.begin());
      if (!sent) log().warn("monitor: a notice could not be sent, because rank 0 does not read");
    }
    sent_.notify_all();
    lock.unlock();
    if (now - last_alive_ >= pace_.interval) {
      last_alive_ = now;
      static_cast<void>(connection_.send(Notice{NoticeKind::Alive, rank_, ""}.to_bytes(), now));
    }
    return true;
  } catch (const std::exception& error) {
    // ConnectionLost, or a notice that makes no sense.
    lost(fmt::format("its connection closed without a goodbye ({})", error.what()));
    return false;
  }
}

void MonitorSpoke::lost(const std::string& why) {
  if (liveness_->state_of(0).state == RankState::Running) liveness_->report({0, RankState::Lost, why});
}

}  // namespace penstock::comm
