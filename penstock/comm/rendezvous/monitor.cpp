#include "penstock/comm/rendezvous/monitor.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <sstream>

#include "penstock/base/log.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/transport/tcp_listen.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

enum class NoticeKind : std::uint8_t { Hello = 1, Left = 2, Failed = 3, Lost = 4 };

// Wire format: kind (1 byte), rank (4), length (4), text; integers in network order.
struct Notice {
  NoticeKind kind{};
  int rank = 0;
  std::string text;
};

constexpr std::size_t kHeaderBytes = 9;
constexpr std::uint32_t kMaxText = 16 * 1024;
constexpr int kStrangerLimit = 64;

std::string encode(const Notice& notice) {
  const std::string text = notice.text.substr(0, kMaxText);
  const std::uint32_t fields[2] = {htonl(static_cast<std::uint32_t>(notice.rank)),
                                   htonl(static_cast<std::uint32_t>(text.size()))};
  std::string bytes(1, static_cast<char>(notice.kind));
  bytes.append(reinterpret_cast<const char*>(fields), sizeof fields);
  return bytes + text;
}

// Removes one whole notice from the front of `buffer`. Returns false if it is not complete yet. Throws on
// malformed bytes.
bool decode(std::string& buffer, Notice& notice) {
  if (buffer.size() < kHeaderBytes) return false;
  std::uint32_t fields[2];
  std::memcpy(fields, buffer.data() + 1, sizeof fields);
  const std::uint32_t length = ntohl(fields[1]);
  const auto kind = static_cast<std::uint8_t>(buffer[0]);
  if (kind < 1 || kind > 4 || length > kMaxText)
    throw MismatchError("monitor: received bytes that are not a notice");
  if (buffer.size() < kHeaderBytes + length) return false;
  notice.kind = static_cast<NoticeKind>(kind);
  notice.rank = static_cast<int>(ntohl(fields[0]));
  notice.text = buffer.substr(kHeaderBytes, length);
  buffer.erase(0, kHeaderBytes + length);
  return true;
}

std::string random_secret() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
}

void keep_alive(int fd) {
  const int on = 1, idle_s = 10, interval_s = 5, probes = 3;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

bool send_all(int fd, const std::string& bytes) noexcept {
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    // Notices are small and rare: a socket buffer that is full for a second belongs to a process that no
    // longer reads.
    pollfd ready{fd, POLLOUT, 0};
    if (poll(&ready, 1, 1000) <= 0) return false;
    const ssize_t n = send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) return false;
    sent += static_cast<std::size_t>(n);
  }
  return true;
}

}  // namespace

// State of the monitor's thread. On rank 0 `peers_` holds a connection per other rank; elsewhere one, to rank
// 0.
class Monitor::Loop {
 public:
  Loop(int rank, int size, std::shared_ptr<Liveness> liveness)
      : rank_(rank), size_(size), liveness_(std::move(liveness)) {
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0)
      throw StateError(fmt::format("monitor: cannot create an event descriptor: {}", std::strerror(errno)));
  }

  ~Loop() {
    for (auto& [fd, peer] : peers_) close(fd);
    close(wake_);
  }

  void host(ListeningSocket listener, std::string secret) {
    listener_ = std::move(listener);
    secret_ = std::move(secret);
  }

  void join(int hub_fd, const std::string& secret) {
    keep_alive(hub_fd);
    if (!send_all(hub_fd, encode({NoticeKind::Hello, rank_, secret})))
      throw CommError("monitor: rank 0 closed the connection during the handshake",
                      {.rank = rank_, .operation = "rendezvous"});
    peers_[hub_fd] = Peer{0, {}};
  }

  // The thread's body. Ends when `stop_` is set and the outgoing notices are written.
  void run() {
    for (;;) {
      std::vector<pollfd> polled = {{wake_, POLLIN, 0}};
      if (listener_.fd() >= 0) polled.push_back({listener_.fd(), POLLIN, 0});
      for (const auto& [fd, peer] : peers_) polled.push_back({fd, POLLIN, 0});
      if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) {
        log().error("monitor: poll failed: {}; lost ranks will only be detected by timeout",
                    std::strerror(errno));
        return;
      }
      for (const pollfd& ready : polled) {
        if (ready.revents == 0) continue;
        if (ready.fd == wake_) {
          drain_wake();
        } else if (ready.fd == listener_.fd()) {
          accept_one();
        } else {
          read_from(ready.fd);
        }
      }
      if (send_queued()) return;
    }
  }

  // Passes a notice to the thread; `last`: the thread ends after sending it.
  void post(Notice notice, bool last) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(notice));
      stop_ = stop_ || last;
    }
    const std::uint64_t one = 1;
    if (write(wake_, &one, sizeof one) < 0 && errno != EAGAIN)
      log().error("monitor: cannot wake the monitor thread: {}", std::strerror(errno));
  }

  void await_sent(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    sent_.wait_for(lock, limit, [&] { return queue_.empty(); });
  }

  int rank() const { return rank_; }

  std::atomic<bool> failed_{false};  // this rank has reported its own failure

 private:
  struct Peer {
    int rank = -1;  // -1: connected, Hello not yet received
    std::string buffer;
  };

  void drain_wake() {
    std::uint64_t count = 0;
    while (read(wake_, &count, sizeof count) > 0) {
    }
  }

  void accept_one() {
    const int fd = accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return;
    const auto strangers =
        std::count_if(peers_.begin(), peers_.end(), [](const auto& entry) { return entry.second.rank < 0; });
    if (strangers >= kStrangerLimit + size_) {
      close(fd);
      return;
    }
    keep_alive(fd);
    peers_[fd] = Peer{};
  }

  void read_from(int fd) {
    const auto found = peers_.find(fd);
    if (found == peers_.end()) return;
    Peer& peer = found->second;
    char bytes[4096];
    const ssize_t n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
      drop(fd, n == 0 ? "its connection closed without a goodbye (killed or crashed)"
                      : fmt::format("its connection broke ({})", std::strerror(errno)));
      return;
    }
    peer.buffer.append(bytes, static_cast<std::size_t>(n));
    try {
      for (Notice notice; peers_.count(fd) != 0 && decode(peer.buffer, notice);) take(fd, notice);
    } catch (const MismatchError&) {
      drop(fd, "it sent bytes that are not a notice");
    }
  }

  void take(int fd, const Notice& notice) {
    Peer& peer = peers_.at(fd);
    if (notice.kind == NoticeKind::Hello) {
      const bool known = notice.text == secret_ && notice.rank > 0 && notice.rank < size_ && peer.rank < 0;
      if (known) {
        peer.rank = notice.rank;
        // A rank that joins after a loss must also be notified of it.
        for (const Notice& old : spread_) send_all(fd, encode(old));
      } else {
        close(fd);
        peers_.erase(fd);
      }
      return;
    }
    if (peer.rank < 0 || notice.rank < 0 || notice.rank >= size_)
      return drop(fd, "it sent a notice before Hello");
    report(notice);
    if (rank_ == 0) spread(notice);
  }

  void drop(int fd, const std::string& why) {
    const int lost = peers_.at(fd).rank;
    close(fd);
    peers_.erase(fd);
    if (lost < 0 || liveness_->state_of(lost).state != RankState::Running) return;
    const Notice notice{NoticeKind::Lost, lost, why};
    report(notice);
    if (rank_ == 0) spread(notice);
  }

  void report(const Notice& notice) {
    if (notice.rank == rank_) return;
    const RankState state = notice.kind == NoticeKind::Left     ? RankState::Left
                            : notice.kind == NoticeKind::Failed ? RankState::Failed
                                                                : RankState::Lost;
    liveness_->report({notice.rank, state, notice.text});
  }

  // Rank 0 forwards its notices to all other ranks.
  void spread(const Notice& notice) {
    spread_.push_back(notice);
    const std::string bytes = encode(notice);
    for (const auto& [fd, peer] : peers_)
      if (peer.rank >= 0 && peer.rank != notice.rank) send_all(fd, bytes);
  }

  bool send_queued() {
    std::unique_lock lock(mutex_);
    while (!queue_.empty()) {
      const Notice notice = queue_.front();
      lock.unlock();
      if (rank_ == 0) {
        spread(notice);
      } else {
        for (const auto& [fd, peer] : peers_) send_all(fd, encode(notice));
      }
      lock.lock();
      queue_.pop_front();
    }
    sent_.notify_all();
    return stop_;
  }

  const int rank_;
  const int size_;
  const std::shared_ptr<Liveness> liveness_;
  ListeningSocket listener_;
  std::string secret_;
  std::map<int, Peer> peers_;   // by descriptor; owned by the thread once it runs
  std::vector<Notice> spread_;  // everything rank 0 has forwarded
  int wake_ = -1;

  std::mutex mutex_;  // guards the members below
  std::condition_variable sent_;
  std::deque<Notice> queue_;
  bool stop_ = false;
};

Monitor::Monitor(const LaunchEnv& env, const Store& store, std::shared_ptr<Liveness> liveness,
                 Clock::time_point deadline)
    : loop_(std::make_shared<Loop>(env.rank, env.world_size, std::move(liveness))) {
  if (env.rank == 0) {
    const std::string address = listen_address(env);
    auto listener = ListeningSocket::bind(address, 0, "free some TCP ports");
    const std::string secret = random_secret();
    store.set("monitor", fmt::format("{} {} {}", listener.port(), secret,
                                     address.empty() ? env.rendezvous.host : address));
    loop_->host(std::move(listener), secret);
  } else {
    const std::string place = store.get("monitor", deadline, "rank 0 to open its monitor");
    int port = 0;
    std::string secret, host;
    std::istringstream(place) >> port >> secret >> host;
    const int fd = connect_to(host, port);
    if (fd < 0)
      throw PeerLostError(fmt::format("cannot reach rank 0's monitor at {}:{} ({}); rank 0 has probably died",
                                      host, port, std::strerror(errno)),
                          {.rank = env.rank, .lost_rank = 0, .operation = "rendezvous"});
    loop_->join(fd, secret);
  }
  thread_ = std::thread([loop = loop_] { loop->run(); });
}

Monitor::~Monitor() {
  loop_->post({loop_->failed_ ? NoticeKind::Failed : NoticeKind::Left, loop_->rank(), ""}, true);
  thread_.join();
}

void Monitor::fail(const std::string& reason) noexcept {
  try {
    if (loop_->failed_.exchange(true)) return;
    loop_->post({NoticeKind::Failed, loop_->rank(), reason}, false);
    loop_->await_sent(std::chrono::seconds(1));
  } catch (const std::exception& error) {
    log().error("monitor: the failure of this rank could not be reported to the others: {}", error.what());
  }
}

}  // namespace penstock::comm
