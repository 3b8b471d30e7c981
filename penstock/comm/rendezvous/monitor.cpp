#include "penstock/comm/rendezvous/monitor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <thread>
#include <utility>

#include "penstock/base/log.h"
#include "penstock/comm/rendezvous/monitor_end.h"
#include "penstock/comm/secure/secret.h"
#include "penstock/comm/transport/host_lookup.h"
#include "penstock/comm/transport/tcp_listen.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

using namespace std::chrono_literals;

constexpr auto kMonitorHandshakeTime = 5s;
// The monitor answers at once unless its host is overloaded or flooded by strangers.
constexpr auto kMonitorAnswerTime = 30s;
// Stands for a secret that all ranks have anyway.
constexpr const char* kKnownSecret = "-";

// Where rank 0's monitor listens. Ranks without a secret of their own get one here: whoever can read the
// store of another launcher, or the file of a rendezvous, can join the job anyway.
struct MonitorPlace {
  int port = 0;
  std::string secret;
  std::string host;
};

std::shared_ptr<Monitor::End> host_monitor(const LaunchEnv& env, const Store& store,
                                           std::shared_ptr<Liveness> liveness,
                                           std::chrono::milliseconds timeout) {
  const std::string address = listen_address(env);
  auto listener = ListeningSocket::bind(address, 0, "free some TCP ports");
  const int port = listener.port();
  const std::string secret = env.secret.empty() ? make_secret() : env.secret;
  auto hub = std::make_shared<MonitorHub>(JobKey(secret), env.world_size, std::move(liveness), timeout);
  hub->start(Socket(listener.release()));
  store.set("monitor", fmt::format("{} {} {}", port, env.secret.empty() ? secret : kKnownSecret,
                                   address.empty() ? env.rendezvous.host : address));
  return hub;
}

std::shared_ptr<Monitor::End> join_monitor(const LaunchEnv& env, const Store& store,
                                           std::shared_ptr<Liveness> liveness, Clock::time_point deadline,
                                           std::chrono::milliseconds timeout) {
  MonitorPlace place;
  std::istringstream(store.get("monitor", deadline, "rank 0 to open its monitor")) >> place.port >>
      place.secret >> place.host;
  const JobKey key(place.secret == kKnownSecret ? env.secret : place.secret);
  const auto until = std::min(deadline, Clock::now() + kMonitorAnswerTime);
  HostLookup host(place.host);
  std::string why;
  do {
    Socket socket(host.connect(place.port));
    if (!socket) {
      const int error = errno;
      why = host.problem();
      if (error == ECONNREFUSED) break;  // it listened before it said so
    } else {
      SecureConnection connection(std::move(socket), kMaxNotice);
      const auto end = connection.shake_hands(key, Purpose::Monitor, env.rank,
                                              std::min(until, Clock::now() + kMonitorHandshakeTime));
      if (end == HandshakeEnd::Done) {
        auto spoke = std::make_shared<MonitorSpoke>(std::move(connection), key, env.rank, env.world_size,
                                                    std::move(liveness), timeout);
        spoke->start();
        return spoke;
      }
      why = end == HandshakeEnd::Refused ? "what listens there does not know the job's secret"
                                         : "what listens there does not complete the handshake";
    }
    std::this_thread::sleep_for(50ms);
  } while (Clock::now() < until);
  throw PeerLostError(
      fmt::format(
          "cannot reach rank 0's monitor at {}:{} ({}); rank 0 has probably died, or a firewall closes "
          "that port",
          place.host, place.port, why),
      {.rank = env.rank, .lost_rank = 0, .operation = "rendezvous"});
}

}  // namespace

Monitor::Monitor(const LaunchEnv& env, const Store& store, std::shared_ptr<Liveness> liveness,
                 Clock::time_point deadline, std::chrono::milliseconds timeout)
    : rank_(env.rank),
      end_(env.rank == 0 ? host_monitor(env, store, std::move(liveness), timeout)
                         : join_monitor(env, store, std::move(liveness), deadline, timeout)) {}

const JobKey& Monitor::key() const { return end_->key; }

Monitor::~Monitor() {
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    failed = failed_;
  }
  if (!failed) tell("departure", [&] { end_->send({NoticeKind::Left, rank_, ""}); });
  tell("end", [&] { end_->leave(failed); });
}

void Monitor::fail(const std::string& reason) noexcept {
  tell("failure", [&] {
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(failed_, true)) return;
    }
    end_->send({NoticeKind::Failed, rank_, reason});
  });
}

void Monitor::report_lost(int rank, const std::string& reason) noexcept {
  tell("loss", [&] { end_->send({NoticeKind::Lost, rank, reason}); });
}

void Monitor::tell(const std::string& what, const std::function<void()>& post) noexcept {
  try {
    post();
  } catch (const std::exception& error) {
    log().error("monitor: the {} of this rank could not be reported to the others: {}", what, error.what());
  }
}

}  // namespace penstock::comm
