#include "penstock/comm/secure/server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/base/log.h"
#include "penstock/comm/secure/frames.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

using namespace std::chrono_literals;
using ServerClock = std::chrono::steady_clock;

// Others are served between two bursts of new connections, and between two parts of a long message.
constexpr int kAcceptsPerRound = 16;
constexpr std::size_t kReadPerRound = std::size_t{64} << 10;
// After the system refused a new connection for want of memory or descriptors.
constexpr auto kAcceptPause = 100ms;
constexpr auto kTick = 1s;

// Signals are for the threads of the program: a handler may do what must not happen here.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

enum class Stage { Hello, Proof, Open };

struct Connection {
  Socket socket;
  Stage stage = Stage::Hello;
  ServerClock::time_point until;  // of the handshake
  ServerHandshake handshake;
  std::string received;  // of the handshake's current message
  std::optional<FrameReader> reader;
  std::optional<FrameWriter> writer;
  std::string unsent;
  std::size_t sent = 0;  // bytes of `unsent` that are sent after all
  int rank = -1;
};

std::string peer_address(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  char host[NI_MAXHOST] = "an unknown address";
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0)
    getnameinfo(reinterpret_cast<sockaddr*>(&address), length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

// Strangers must leave the process most of its descriptors.
std::size_t half_open_limit(std::size_t wanted) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY) return wanted;
  return std::min<std::size_t>(wanted, std::max<std::size_t>(4, files.rlim_cur / 8));
}

}  // namespace

class SecureServer::Loop : public std::enable_shared_from_this<Loop> {
 public:
  Loop(Socket listener, Purpose purpose, const JobKey& key, const ServerLimits& limits, Events events)
      : listener_(std::move(listener)),
        purpose_(purpose),
        key_(key),
        limits_(limits),
        events_(std::move(events)),
        half_open_limit_(half_open_limit(limits.half_open)) {
    wake_ = Socket(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_)
      throw StateError(
          fmt::format("cannot create an event descriptor: {}; raise `ulimit -n`", std::strerror(errno)));
    reserve_ = Socket(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    fcntl(listener_.fd(), F_SETFL, fcntl(listener_.fd(), F_GETFL) | O_NONBLOCK);
  }

  ~Loop() {
    if (thread_.joinable()) thread_.detach();  // it is this one, and about to end
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    if (served_here_ == this) return abandon();
    wake();
    const std::lock_guard lock(joining_);
    if (thread_.joinable()) thread_.join();
  }

  void start() {
    const SignalsBlocked blocked;
    try {
      thread_ = std::thread([self = shared_from_this()] {
        served_here_ = self.get();
        try {
          self->run();
        } catch (const std::exception& error) {
          self->give_up(error.what());
        }
      });
    } catch (const std::system_error& error) {
      throw StateError(fmt::format("cannot start a thread: {}; raise `ulimit -u`", error.what()));
    }
  }

  void post(std::function<void()> action) {
    {
      const std::lock_guard lock(mutex_);
      if (failed_) return;
      posted_.push_back(std::move(action));
    }
    wake();
  }

  bool await_alone(ServerClock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return alone_.wait_until(lock, deadline, [&] { return open_ == 0 && posted_.empty(); });
  }

  std::size_t open() const {
    const std::lock_guard lock(mutex_);
    return open_;
  }

  void send(Id peer, std::string_view payload) {
    const auto found = connections_.find(peer);
    if (found == connections_.end() || found->second.stage != Stage::Open) return;
    Connection& connection = found->second;
    if (connection.sent > connection.unsent.size() / 2) {
      connection.unsent.erase(0, connection.sent);
      connection.sent = 0;
    }
    connection.unsent += connection.writer->frame(payload);
    if (connection.unsent.size() - connection.sent > limits_.max_unsent) {
      end(peer, "it does not read what is sent to it");
      return;
    }
    write(peer, connection);
  }

  void close(Id peer) {
    if (connections_.erase(peer) > 0) count();
  }

 private:
  // On the thread itself.
  void abandon() {
    if (std::exchange(abandoned_, true)) return;
    log().error("comm: a server is destroyed by one of its own events, which cannot wait for its end");
    connections_.clear();  // no peer causes an event any more
    count();
  }

  void wake() {
    const std::uint64_t one = 1;
    // Only a counter that is already large makes this fail, and then the thread wakes up anyway.
    [[maybe_unused]] const ssize_t written = ::write(wake_.fd(), &one, sizeof one);
  }

  void run() {
    std::vector<pollfd> polled;
    std::vector<Id> ids;
    auto next_tick = ServerClock::now() + kTick;
    for (;;) {
      const auto now = ServerClock::now();
      end_late_handshakes(now);
      if (events_.tick && now >= next_tick) {
        next_tick = now + kTick;
        events_.tick();
      }
      if (abandoned_ || run_posted()) return;

      polled.assign(1, {wake_.fd(), POLLIN, 0});
      // A negative descriptor is skipped by poll.
      polled.push_back({now >= accept_from_ ? listener_.fd() : -1, POLLIN, 0});
      ids.clear();
      for (const auto& [id, connection] : connections_) {
        polled.push_back({connection.socket.fd(),
                          static_cast<short>(connection.unsent.empty() ? POLLIN : POLLIN | POLLOUT), 0});
        ids.push_back(id);
      }
      if (poll(polled.data(), polled.size(), wait_ms(now, next_tick)) < 0 && errno != EINTR) {
        // Memory is short: try again later, serve nobody until then.
        std::this_thread::sleep_for(kAcceptPause);
        continue;
      }
      if (polled[0].revents != 0) {
        std::uint64_t count = 0;
        while (read(wake_.fd(), &count, sizeof count) > 0) {
        }
      }
      // Peers come before strangers.
      for (std::size_t i = 0; i < ids.size(); ++i)
        if (polled[i + 2].revents != 0) serve(ids[i], polled[i + 2].revents);
      if (polled[1].revents != 0) accept_some();
    }
  }

  // Peers that wait for an answer must see that none will come.
  void give_up(const std::string& why) {
    if (abandoned_) return;
    log().error("comm: connections to this process are no longer served: {}", why);
    listener_.reset();
    connections_.clear();
    std::vector<std::function<void()>> dropped;  // destroyed without the lock: they may own anything
    {
      const std::lock_guard lock(mutex_);
      failed_ = true;
      dropped.swap(posted_);
    }
    count();
    if (events_.failed) events_.failed(why);
  }

  int wait_ms(ServerClock::time_point now, ServerClock::time_point next_tick) const {
    auto until = now + 60s;
    if (events_.tick) until = std::min(until, next_tick);
    if (accept_from_ > now) until = std::min(until, accept_from_);
    for (const auto& [id, connection] : connections_)
      if (connection.stage != Stage::Open) until = std::min(until, connection.until);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - now).count();
    return static_cast<int>(std::clamp<long long>(left, 0, 60'000));
  }

  // Returns whether the thread should end.
  bool run_posted() {
    for (;;) {
      std::vector<std::function<void()>> actions;
      {
        const std::lock_guard lock(mutex_);
        if (posted_.empty()) {
          alone_.notify_all();
          return stop_;
        }
        actions.swap(posted_);
      }
      for (const auto& action : actions) {
        try {
          action();
        } catch (const std::exception& error) {
          log().error("comm: a task of the thread that serves connections failed: {}", error.what());
        }
        if (abandoned_) return true;
      }
    }
  }

  void end_late_handshakes(ServerClock::time_point now) {
    std::erase_if(connections_, [&](const auto& entry) {
      return entry.second.stage != Stage::Open && now >= entry.second.until;
    });
  }

  void accept_some() {
    for (int i = 0; i < kAcceptsPerRound; ++i) {
      Socket socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        const bool exhausted = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
        // Everything else concerns one connection that is already gone.
        if (!exhausted) return;
        // Strangers keep descriptors: the oldest of them gives way to whoever comes next.
        if (drop_oldest_stranger()) continue;
        refuse_one();
        return;
      }
      make_room();
      tune_connection(socket.fd());
      const Id id = next_id_++;
      connections_.emplace(id,
                           Connection{.socket = std::move(socket),
                                      .stage = Stage::Hello,
                                      .until = ServerClock::now() + limits_.handshake,
                                      .handshake = ServerHandshake(key_, purpose_, random_bytes(kNonceBytes)),
                                      .received = {},
                                      .reader = {},
                                      .writer = {},
                                      .unsent = {},
                                      .sent = 0,
                                      .rank = -1});
    }
  }

  // The process itself has used up its descriptors. The waiting connection is dropped by means of one kept
  // for that: otherwise poll would report it again and again. A rank that was dropped tries again.
  void refuse_one() {
    if (!warned_) {
      warned_ = true;
      log().warn("comm: no descriptors are left for connections to this process; raise `ulimit -n`");
    }
    reserve_.reset();
    Socket dropped(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    dropped.reset();
    reserve_ = Socket(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    accept_from_ = ServerClock::now() + kAcceptPause;
  }

  void make_room() {
    const auto strangers =
        static_cast<std::size_t>(std::count_if(connections_.begin(), connections_.end(),
                                               [](const auto& e) { return e.second.stage != Stage::Open; }));
    if (strangers >= half_open_limit_) drop_oldest_stranger();
  }

  // One that has sent no hello, if there is one: whoever sends the right bytes is likelier to be a rank.
  // Returns false if there is no stranger.
  bool drop_oldest_stranger() {
    for (const Stage stage : {Stage::Hello, Stage::Proof}) {
      const auto oldest = std::find_if(connections_.begin(), connections_.end(),
                                       [&](const auto& entry) { return entry.second.stage == stage; });
      if (oldest == connections_.end()) continue;
      connections_.erase(oldest);  // ids grow, so the first one is the oldest
      return true;
    }
    return false;
  }

  void serve(Id id, short ready) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    Connection& connection = found->second;
    if ((ready & POLLOUT) != 0 && !write(id, connection)) return;
    if ((ready & ~POLLOUT) == 0) return;
    if (connection.stage == Stage::Open) {
      read_frames(id, connection);
    } else if (!continue_handshake(id, connection)) {
      connections_.erase(id);
    }
  }

  // Returns false if the connection must be closed: strangers get no reason.
  bool continue_handshake(Id id, Connection& connection) {
    const std::size_t whole = connection.stage == Stage::Hello ? kHelloBytes : kProofBytes;
    char part[128];
    static_assert(sizeof part >= kHelloBytes && sizeof part >= kProofBytes);
    const IoResult got = read_some(connection.socket.fd(), part, whole - connection.received.size());
    if (got.state == IoState::Later) return true;
    if (got.state != IoState::Some) return false;
    connection.received.append(part, got.bytes);
    if (connection.received.size() < whole) return true;
    const std::string message = std::exchange(connection.received, {});
    if (connection.stage == Stage::Hello) {
      const auto challenge = connection.handshake.challenge(message);
      if (!challenge || connection.handshake.rank() >= limits_.ranks) return false;
      connection.stage = Stage::Proof;
      connection.unsent = *challenge;
      return write(id, connection);
    }
    const auto proof = connection.handshake.answer(message);
    if (!proof) note_refusal(connection);
    if (!proof || open() >= limits_.peers) return false;
    const SessionKeys keys = connection.handshake.keys();
    connection.reader.emplace(keys.client_to_server, limits_.max_payload);
    connection.writer.emplace(keys.server_to_client, limits_.max_payload);
    connection.stage = Stage::Open;
    connection.rank = connection.handshake.rank();
    connection.unsent += *proof;
    count();
    if (write(id, connection) && events_.joined) events_.joined(id, connection.rank);
    return true;
  }

  // For whoever wonders why a rank does not join; once, because strangers may repeat it.
  void note_refusal(const Connection& connection) {
    if (refused_) return;
    refused_ = true;
    log().warn(
        "comm: a process at {} claimed to be rank {} of this job and did not know its secret; if it is a "
        "rank, "
        "start all ranks with the same {}",
        peer_address(connection.socket.fd()), connection.handshake.rank(), kSecretVariable);
  }

  void read_frames(Id id, Connection& connection) {
    const IoResult got = read_some(connection.socket.fd(), part_.data(), part_.size());
    switch (got.state) {
      case IoState::Later:
        return;
      case IoState::Closed:
        return end(id, "its connection closed without a goodbye (killed or crashed)");
      case IoState::Broken:
        return end(id, fmt::format("its connection broke ({})", std::strerror(errno)));
      case IoState::Some:
        break;
    }
    connection.reader->feed({part_.data(), got.bytes});
    try {
      // An event may close the connection.
      for (auto found = connections_.find(id); found != connections_.end(); found = connections_.find(id)) {
        const auto payload = found->second.reader->next();
        if (!payload) return;
        events_.received(id, *payload);
      }
    } catch (const std::exception& error) {
      end(id, error.what());
    }
  }

  // Returns false if the connection ended.
  bool write(Id id, Connection& connection) {
    while (connection.sent < connection.unsent.size()) {
      const IoResult sent =
          write_some(connection.socket.fd(), std::string_view(connection.unsent).substr(connection.sent));
      if (sent.state == IoState::Later) return true;
      if (sent.state != IoState::Some) {
        end(id, fmt::format("its connection broke ({})", std::strerror(errno)));
        return false;
      }
      connection.sent += sent.bytes;
    }
    connection.unsent.clear();
    connection.sent = 0;
    return true;
  }

  void end(Id id, const std::string& why) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    const bool was_peer = found->second.stage == Stage::Open;
    const int rank = found->second.rank;
    connections_.erase(found);
    if (!was_peer) return;
    count();
    if (events_.closed) events_.closed(id, rank, why);
  }

  void count() {
    const auto peers = std::count_if(connections_.begin(), connections_.end(),
                                     [](const auto& entry) { return entry.second.stage == Stage::Open; });
    const std::lock_guard lock(mutex_);
    open_ = static_cast<std::size_t>(peers);
    if (open_ == 0) alone_.notify_all();
  }

  // Used by the thread alone.
  Socket listener_;
  const Purpose purpose_;
  const JobKey key_;
  const ServerLimits limits_;
  const Events events_;
  const std::size_t half_open_limit_;
  Socket wake_, reserve_;
  std::map<Id, Connection> connections_;
  std::vector<char> part_ = std::vector<char>(kReadPerRound);
  Id next_id_ = 1;
  ServerClock::time_point accept_from_{};
  bool warned_ = false;
  bool refused_ = false;
  bool abandoned_ = false;  // stopped by one of its own events
  inline static thread_local const Loop* served_here_ = nullptr;

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable alone_;
  std::vector<std::function<void()>> posted_;
  std::size_t open_ = 0;
  bool stop_ = false;
  bool failed_ = false;  // the thread has ended by an exception

  std::mutex joining_;  // of whoever waits for the thread's end
  std::thread thread_;
};

SecureServer::SecureServer(Socket listener, Purpose purpose, const JobKey& key, const ServerLimits& limits,
                           Events events)
    : loop_(std::make_shared<Loop>(std::move(listener), purpose, key, limits, std::move(events))) {}

SecureServer::~SecureServer() { loop_->stop(); }

void SecureServer::start() { loop_->start(); }

void SecureServer::send(Id peer, std::string_view payload) { loop_->send(peer, payload); }
void SecureServer::close(Id peer) { loop_->close(peer); }
std::size_t SecureServer::peers() const { return loop_->open(); }
void SecureServer::post(std::function<void()> action) { loop_->post(std::move(action)); }
void SecureServer::stop() { loop_->stop(); }
bool SecureServer::await_alone(std::chrono::steady_clock::time_point deadline) {
  return loop_->await_alone(deadline);
}

}  // namespace penstock::comm
