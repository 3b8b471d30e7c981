#include "penstock/comm/rendezvous/authenticated_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "penstock/base/warnings.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

using namespace std::chrono_literals;

// Limits of the time for one request, whatever the run's timeout is. The host answers from a thread of its
// own.
constexpr std::chrono::milliseconds kShortestReply{1000}, kLongestReply{15000};
// The same for a host of which nothing is heard, once it has left a request unanswered.
constexpr std::chrono::milliseconds kReplyAfterSilence{50};
// How long one attempt to connect may take, and one handshake, before it is tried again.
constexpr std::chrono::milliseconds kConnectTime{2000};
constexpr auto kHandshakeTime = 5s;
// An end that refuses the secret, or speaks something else, is believed after this time: until then a process
// of an earlier job may still be ending.
constexpr auto kRefusalTime = 3s;
// How long the host waits for the others to close their connections. They do so at once when they leave; the
// monitor has already waited for that.
constexpr auto kLastRequests = 10s, kLastRequestsAfterFailure = 2s;

std::string text_of_bytes(const AuthenticatedStore::Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

AuthenticatedStore::Bytes bytes_of_text(const std::string& text) { return {text.begin(), text.end()}; }

CommContext rendezvous_context(const LaunchEnv& env, Clock::time_point begin) {
  CommContext context;
  context.rank = env.rank;
  context.operation = "rendezvous";
  context.elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
  return context;
}

const char* describe_end(HandshakeEnd end) {
  switch (end) {
    case HandshakeEnd::Done:
      return "done";
    case HandshakeEnd::Silent:
      return "a process accepts connections there and does not answer";
    case HandshakeEnd::Closed:
      return "a process accepts connections there and closes them";
    case HandshakeEnd::Foreign:
      return "what answers there is not a Penstock store of this version";
    case HandshakeEnd::Refused:
      return "the store there belongs to a job with another secret";
  }
  return "";
}

// Throws if the launcher says that a rank has ended.
void check_notices(const LaunchNotices& notices, const LaunchEnv& env, Clock::time_point begin) {
  if (const auto ended = notices.first())
    RankEvent{ended->rank, RankState::Lost, ended->how + " before it joined"}.raise(
        rendezvous_context(env, begin), ", while connecting to the store");
}

}  // namespace

AuthenticatedStore::AuthenticatedStore(std::unique_ptr<StoreServer> server,
                                       std::unique_ptr<StoreClient> client, const LaunchEnv& env)
    : server_(std::move(server)),
      client_(std::move(client)),
      place_(env.rendezvous.describe()),
      rank_(env.rank),
      exceptions_(std::uncaught_exceptions()) {}

AuthenticatedStore::~AuthenticatedStore() {
  if (!server_) return;
  const auto begin = Clock::now();
  const bool unwinding = std::uncaught_exceptions() > exceptions_;
  const auto failed = [&] {
    const std::lock_guard lock(mutex_);
    if (unwinding) return true;
    return liveness_ && liveness_->first_failure().has_value();
  };
  while (!server_->await_alone(Clock::now() + 50ms)) {
    const auto limit = failed() ? kLastRequestsAfterFailure : kLastRequests;
    if (Clock::now() - begin >= limit) return;
  }
}

c10::intrusive_ptr<AuthenticatedStore> AuthenticatedStore::host(ListeningSocket listener,
                                                                const LaunchEnv& env) {
  if (env.secret.empty() && !env.rendezvous.loopback_only())
    warn_once("comm",
              fmt::format("{} is not set: any process that can reach port {} and speaks Penstock's protocol "
                          "may join this job. Set it to the same random text on all hosts (head -c 32 "
                          "/dev/urandom | base64)",
                          kSecretVariable, env.rendezvous.port));
  auto server = std::make_unique<StoreServer>(Socket(listener.release()), JobKey(rendezvous_secret(env)),
                                              env.world_size);
  return c10::make_intrusive<AuthenticatedStore>(std::move(server), nullptr, env);
}

c10::intrusive_ptr<AuthenticatedStore> AuthenticatedStore::connect(const LaunchEnv& env, HostLookup& host,
                                                                   Clock::time_point deadline,
                                                                   const LaunchNotices& notices) {
  const auto begin = Clock::now();
  const JobKey key(rendezvous_secret(env));
  const Rendezvous& place = env.rendezvous;
  Clock::time_point refused_since = Clock::time_point::max();  // max: not refused
  for (auto pause = 5ms;; pause = std::min<std::chrono::milliseconds>(pause * 2, 50ms)) {
    check_notices(notices, env, begin);
    std::string why;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    Socket socket(host.connect(place.port, std::clamp<std::chrono::milliseconds>(left, 1ms, kConnectTime)));
    if (socket) {
      SecureConnection connection(std::move(socket), kMaxStoreMessage);
      const auto end = connection.shake_hands(key, Purpose::Store, env.rank,
                                              std::min(deadline, Clock::now() + kHandshakeTime));
      if (end == HandshakeEnd::Done)
        return c10::make_intrusive<AuthenticatedStore>(
            nullptr, std::make_unique<StoreClient>(std::move(connection)), env);
      why = describe_end(end);
      if (end == HandshakeEnd::Refused || end == HandshakeEnd::Foreign) {
        const auto now = Clock::now();
        refused_since = std::min(refused_since, now);
        if (now - refused_since >= kRefusalTime || now >= deadline)
          throw ConfigError(fmt::format(
              "rendezvous at {}: {}; {}", place.describe(), why,
              end == HandshakeEnd::Refused
                  ? fmt::format("start all ranks of a job with the same {}, the same number of ranks and the "
                                "same version of Penstock",
                                kSecretVariable)
                  : std::string(
                        "set MASTER_PORT to a free port on rank 0's host, and use the same version of "
                        "Penstock everywhere")));
      } else {
        refused_since = Clock::time_point::max();
      }
    } else {
      why = host.problem();
    }
    if (Clock::now() >= deadline)
      throw TimeoutError(
          fmt::format("no answer from the rendezvous at {}:{} ({}); check that rank 0 is running "
                      "and that MASTER_ADDR and MASTER_PORT name its host and port",
                      place.host, place.port, why),
          rendezvous_context(env, begin));
    std::this_thread::sleep_for(pause);
  }
}

void AuthenticatedStore::watch(std::shared_ptr<const Liveness> liveness) {
  const std::lock_guard lock(mutex_);
  liveness_ = std::move(liveness);
}

StoreReply AuthenticatedStore::ask(StoreRequest request) {
  StoreReply reply;
  if (server_) {
    reply = server_->table().apply(request);
  } else {
    const auto begin = Clock::now();
    std::shared_ptr<const Liveness> liveness;
    {
      const std::lock_guard lock(mutex_);
      liveness = liveness_;
    }
    auto limit = std::clamp<std::chrono::milliseconds>(timeout_, kShortestReply, kLongestReply);
    // Whoever asks has already waited for a silent host in vain: its error must not take as long again.
    if (liveness && liveness->silent_since(0)) limit = unanswered_ ? kReplyAfterSilence : kShortestReply;
    auto answer = client_->ask(std::move(request), begin + limit);
    unanswered_ = !answer;
    if (!answer) {
      const std::string silence = liveness ? liveness->describe_silence() : "";
      CommContext context;
      context.rank = rank_;
      context.operation = "store";
      context.elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
      throw TimeoutError(
          fmt::format("the rendezvous store at {} does not answer; the process that hosts it, usually "
                      "rank 0, is stopped or unreachable{}{}; look at its output, and check the "
                      "network to its host",
                      place_, silence.empty() ? "" : ": ", silence),
          context);
    }
    reply = std::move(*answer);
  }
  if (!reply.refused.empty()) throw ValueError(reply.refused);
  return reply;
}

void AuthenticatedStore::set(const std::string& key, const Bytes& value) {
  StoreRequest request;
  request.operation = StoreOperation::Set;
  request.keys = {key};
  request.value = text_of_bytes(value);
  ask(std::move(request));
}

AuthenticatedStore::Bytes AuthenticatedStore::compareSet(const std::string& key, const Bytes& expected,
                                                         const Bytes& desired) {
  StoreRequest request;
  request.operation = StoreOperation::CompareSet;
  request.keys = {key};
  request.expected = text_of_bytes(expected);
  request.value = text_of_bytes(desired);
  return bytes_of_text(ask(std::move(request)).value);
}

AuthenticatedStore::Bytes AuthenticatedStore::get(const std::string& key) {
  StoreRequest request;
  request.operation = StoreOperation::Get;
  request.keys = {key};
  StoreReply reply = ask(request);
  if (!reply.found) {
    wait({key}, timeout_);
    reply = ask(request);
    if (!reply.found) throw StateError(fmt::format("store: key {} was deleted while it was read", key));
  }
  return bytes_of_text(reply.value);
}

std::int64_t AuthenticatedStore::add(const std::string& key, std::int64_t value) {
  StoreRequest request;
  request.operation = StoreOperation::Add;
  request.keys = {key};
  request.amount = value;
  return ask(std::move(request)).amount;
}

bool AuthenticatedStore::deleteKey(const std::string& key) {
  StoreRequest request;
  request.operation = StoreOperation::Delete;
  request.keys = {key};
  return ask(std::move(request)).found;
}

bool AuthenticatedStore::check(const std::vector<std::string>& keys) {
  StoreRequest request;
  request.operation = StoreOperation::Check;
  request.keys = keys;
  return ask(std::move(request)).found;
}

std::int64_t AuthenticatedStore::getNumKeys() {
  StoreRequest request;
  request.operation = StoreOperation::Count;
  return ask(std::move(request)).amount;
}

void AuthenticatedStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void AuthenticatedStore::wait(const std::vector<std::string>& keys,
                              const std::chrono::milliseconds& timeout) {
  const auto begin = Clock::now();
  const auto deadline = begin + (timeout == kNoTimeout ? timeout_ : timeout);
  for (auto pause = std::chrono::microseconds(200); !check(keys);
       pause = std::min<std::chrono::microseconds>(pause * 2, 20ms)) {
    if (Clock::now() >= deadline) {
      CommContext context;
      context.rank = rank_;
      context.operation = "store wait";
      context.elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
      throw TimeoutError(
          fmt::format("timed out waiting for key {} of the rendezvous store at {}", keys.front(), place_),
          context);
    }
    std::this_thread::sleep_for(pause);
  }
}

#if PENSTOCK_TORCH_AT_LEAST(2, 8)
c10::intrusive_ptr<c10d::Store> AuthenticatedStore::clone() {
  return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
}
#endif

}  // namespace penstock::comm
