#include "penstock/comm/rendezvous/store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>

#include "penstock/base/exception_text.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/launch/launch_notices.h"
#include "penstock/comm/rendezvous/authenticated_store.h"
#include "penstock/comm/secure/socket.h"
#include "penstock/comm/transport/call_with_timeout.h"
#include "penstock/comm/transport/host_lookup.h"
#include "penstock/comm/transport/tcp_listen.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/version.h"

namespace penstock::comm {

namespace {

using Bytes = std::vector<std::uint8_t>;

// Limits of the time for one store call, whatever the run's timeout is. The host answers from a dedicated
// thread.
constexpr std::chrono::milliseconds kShortestAnswer{1000}, kLongestAnswer{15000};
// How long the end of a store is waited for. The last rank removes the file of a rendezvous.
constexpr std::chrono::milliseconds kCloseTime{5000};

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The store that torchrun's agent hosts, which is a TCP store of c10d. Its protocol belongs to a version of
// LibTorch: an agent of another one accepts the connection and closes it at the first request, which is
// therefore made here.
c10::intrusive_ptr<c10d::Store> connect_to_agent(const LaunchEnv& env, HostLookup& host,
                                                 Clock::time_point deadline, std::chrono::milliseconds left,
                                                 CallWithTimeout& caller) {
  const auto begin = Clock::now();
  const Rendezvous& place = env.rendezvous;
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(place.port);
  options.isServer = false;
  options.waitWorkers = false;
  // Newer versions talk to the store in the constructor: they try again until this timeout when the
  // connection is closed, and have no timeout at all for an answer that does not come.
  options.timeout = std::min(left, kLongestAnswer);
#if PENSTOCK_TORCH_AT_LEAST(2, 4)
  options.useLibUV = false;  // not every LibTorch is built with libuv
#endif
  CommContext context;
  context.rank = env.rank;
  context.operation = "rendezvous";
  await_listening(host, place.port, deadline, context);
  std::string why = "it does not answer";
  try {
    const auto store = std::make_shared<c10::intrusive_ptr<c10d::Store>>();
    const auto connect = [store, options, host = place.host] {
      *store = c10::make_intrusive<c10d::TCPStore>(host, options);
      (*store)->check({"penstock"});
    };
    if (caller.run(connect, 2 * options.timeout)) return *store;
  } catch (const std::exception& error) {
    why = first_line(without_backtrace(error.what()));
  }
  context.elapsed_s = seconds_since(begin);
  throw CommError(
      fmt::format("rendezvous at {}: what listens there is no store that this program, with LibTorch {}, "
                  "understands ({}); use the torchrun of the same version, start the ranks with penstock "
                  "launch, mpirun or srun, or check MASTER_ADDR and MASTER_PORT",
                  place.describe(), torch_version(), why),
      context);
}

// What the ranks tell each other is for their user alone. c10d creates the file with permissions for
// everybody and uses any file that is there, also one that somebody else has prepared.
void claim_file(const Rendezvous& place) {
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(
        fmt::format("rendezvous at {}: {}; remove it, or set PENSTOCK_RENDEZVOUS to a new file in a folder "
                    "that all ranks can write",
                    place.describe(), why));
  };
  const Socket file(::open(place.path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  struct stat status {};
  if (!file || ::fstat(file.fd(), &status) != 0)
    refuse(fmt::format("the file cannot be opened ({})", std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) refuse("it is not a file");
  if (status.st_uid != ::geteuid())
    refuse(fmt::format("the file belongs to user {}, not to user {}", status.st_uid, ::geteuid()));
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0)
    refuse(fmt::format("the file has the mode {:04o}, which lets other users use it",
                       status.st_mode & (S_IRWXU | S_IRWXG | S_IRWXO)));
}

constexpr const char* kFileInUse =
    "the rendezvous file cannot be used; a rank that has locked it is stopped, or its file system does not "
    "answer";

// c10d's store in a file. It locks the file for each use, also in its constructor and its destructor.
c10::intrusive_ptr<c10d::Store> open_file_store(const LaunchEnv& env, std::chrono::milliseconds left,
                                                CallWithTimeout& caller) {
  const Rendezvous& place = env.rendezvous;
  // c10d would wait until the deadline for a file that cannot be created.
  if (const std::string folder = std::filesystem::path(place.path).parent_path().string();
      ::access(folder.c_str(), W_OK | X_OK) != 0)
    throw ConfigError(fmt::format(
        "rendezvous at {}: {}: {}; set PENSTOCK_RENDEZVOUS to a file in a folder that all ranks can write",
        place.describe(), folder, std::strerror(errno)));
  claim_file(place);
  // Never destroyed if nobody waits for it any more, see Backing::abandon.
  struct Opened {
    std::atomic<bool> taken = false;
    c10::intrusive_ptr<c10d::Store> store;
    ~Opened() {
      if (!taken) static_cast<void>(store.release());
    }
  };
  const auto opened = std::make_shared<Opened>();
  const auto open = [opened, path = place.path, ranks = env.world_size] {
    opened->store = c10::make_intrusive<c10d::FileStore>(path, ranks);
  };
  const auto limit = std::min(left, kLongestAnswer);
  if (caller.run(open, limit)) {
    opened->taken = true;
    return opened->store;
  }
  CommContext context;
  context.rank = env.rank;
  context.operation = "rendezvous";
  context.elapsed_s = std::chrono::duration<double>(limit).count();
  throw TimeoutError(fmt::format("rendezvous at {}: {}", place.describe(), kFileInUse), context);
}

}  // namespace

// A c10d store whose waits poll, so that they can end early. c10d's own TCPStore cannot wait with a short
// timeout: its connection is out of sync afterwards.
//
// While the ranks meet, a wait also ends when the launcher says that a rank has ended.
class Store::Interruptible final : public c10d::Store {
 public:
  // A store of c10d that all handles share.
  struct Backing {
    Backing(c10::intrusive_ptr<c10d::Store> c10d_store, std::shared_ptr<CallWithTimeout> on_thread,
            std::string excuse)
        : store(std::move(c10d_store)), caller(std::move(on_thread)), unanswered(std::move(excuse)) {}
    // A store whose calls may never return may not return from its destructor either. A thread of its own has
    // it then: `caller` may be stuck, and takes no further call.
    ~Backing() {
      if (!caller || abandoned_) return;
      try {
        CallWithTimeout closer;
        static_cast<void>(closer.run([last = std::move(store)]() mutable { last.reset(); }, kCloseTime));
      } catch (const std::exception&) {
        // No thread is left: the store, if it is still here, ends with this object.
      }
    }
    Backing(const Backing&) = delete;
    Backing& operator=(const Backing&) = delete;

    // After a call that did not return. c10d's stores may throw from their destructors, which nobody could
    // catch on the thread of that call: the store is never destroyed.
    void abandon() const {
      if (!abandoned_.exchange(true)) static_cast<void>(c10::intrusive_ptr<c10d::Store>(store).release());
    }

    c10::intrusive_ptr<c10d::Store> store;
    const std::shared_ptr<CallWithTimeout> caller;  // null: calls return soon
    const std::string unanswered;                   // what a call that does not return means

   private:
    mutable std::atomic<bool> abandoned_ = false;
  };

  // Calls own what they use, because they may be abandoned.
  Interruptible(std::shared_ptr<const Backing> backing, std::string prefix)
      : backing_(std::move(backing)), prefix_(std::move(prefix)) {
    timeout_ = backing_->store->getTimeout();
  }

  void set(const std::string& key, const Bytes& value) override {
    asked([inner = backing_->store, key = prefix_ + key, value] { return inner->set(key, value); });
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return asked([inner = backing_->store, key = prefix_ + key, expected, desired] {
      return inner->compareSet(key, expected, desired);
    });
  }
  Bytes get(const std::string& key) override {
    wait({key}, timeout_);
    return get_now(key);
  }
  Bytes get_now(const std::string& key) {
    return asked([inner = backing_->store, key = prefix_ + key] { return inner->get(key); });
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return asked([inner = backing_->store, key = prefix_ + key, value] { return inner->add(key, value); });
  }
  bool deleteKey(const std::string& key) override {
    return asked([inner = backing_->store, key = prefix_ + key] { return inner->deleteKey(key); });
  }
  bool check(const std::vector<std::string>& keys) override {
    std::vector<std::string> full;
    for (const auto& key : keys) full.push_back(prefix_ + key);
    return asked([inner = backing_->store, full] { return inner->check(full); });
  }
  std::int64_t getNumKeys() override {
    return asked([inner = backing_->store] { return inner->getNumKeys(); });
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    await(keys, Clock::now() + (timeout == kNoTimeout ? timeout_ : timeout),
          fmt::format("key {}", keys.front()));
  }
#if PENSTOCK_TORCH_AT_LEAST(2, 8)
  c10::intrusive_ptr<c10d::Store> clone() override {
    // It has its own connection, so it needs its own caller.
    auto store = asked([inner = backing_->store] { return inner->clone(); });
    auto copy = c10::make_intrusive<Interruptible>(
        std::make_shared<Backing>(std::move(store),
                                  backing_->caller ? std::make_shared<CallWithTimeout>() : nullptr,
                                  backing_->unanswered),
        prefix_);
    copy->liveness_ = liveness_;
    copy->own_rank_ = own_rank_;
    copy->notices_ = notices_;
    copy->place_ = place_;
    return copy;
  }
  bool hasExtendedApi() const override { return false; }
#endif

  void await(const std::vector<std::string>& keys, Clock::time_point deadline,
             const std::string& waiting_for) {
    const auto begin = Clock::now();
    auto pause = std::chrono::microseconds(200);
    while (!check(keys)) {
      CommContext context;
      context.rank = own_rank_;
      context.operation = "store wait";
      context.elapsed_s = seconds_since(begin);
      if (liveness_)
        if (const auto failure = liveness_->first_failure())
          failure->raise(context, fmt::format(", while waiting for {}", waiting_for));
      // A rank that ended after it had set the key was not needed any more.
      if (const auto ended = notices_ ? notices_->first() : std::nullopt; ended && !check(keys))
        RankEvent{ended->rank, RankState::Lost, ended->how + " before all ranks had met"}.raise(
            context, fmt::format(", while waiting for {}", waiting_for));
      if (Clock::now() >= deadline)
        throw TimeoutError(fmt::format("timed out waiting for {}", waiting_for), context);
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(20000));
    }
  }

  template <class Call>
  std::invoke_result_t<Call> answered(Call call) {
    using Result = std::invoke_result_t<Call>;
    if (!backing_->caller) return call();
    const auto limit = std::clamp<std::chrono::milliseconds>(timeout_, kShortestAnswer, kLongestAnswer);
    const auto run = [&](std::function<void()> work) {
      if (backing_->caller->run(std::move(work), limit)) return;
      backing_->abandon();
      CommContext context;
      context.rank = own_rank_;
      context.operation = "store";
      context.elapsed_s = std::chrono::duration<double>(limit).count();
      throw TimeoutError(backing_->unanswered, context);
    };
    if constexpr (std::is_void_v<Result>) {
      run(std::move(call));
    } else {
      const auto result = std::make_shared<std::optional<Result>>();
      run([result, call = std::move(call)] { *result = call(); });
      return std::move(**result);
    }
  }

  // If a store does not answer, its host process is stopped or dead; the monitor may know which rank failed
  // first.
  template <class Call>
  std::invoke_result_t<Call> asked(Call call) {
    try {
      return answered(std::move(call));
    } catch (const TimeoutError&) {
      throw;
    } catch (const ValueError&) {
      throw;  // the store refused the request and still answers
    } catch (const std::exception& error) {
      const std::string words = error.what();
      CommContext context;
      context.rank = own_rank_;
      context.operation = "store";
      const auto failure =
          liveness_ ? liveness_->await_failure(Clock::now() + std::chrono::seconds(1)) : std::nullopt;
      if (failure) failure->raise(context);
      context.lost_rank = 0;
      throw PeerLostError(
          fmt::format("the rendezvous store{} does not answer ({}); the process that hosts it, "
                      "usually rank 0, has ended: look at its output",
                      place_.empty() ? "" : " at " + place_, words.substr(0, words.find('\n'))),
          context);
    }
  }

  std::shared_ptr<const Backing> backing_;
  std::string prefix_;
  std::shared_ptr<const Liveness> liveness_;
  std::shared_ptr<LaunchNotices> notices_;
  std::string place_;  // of a store in another process
  int own_rank_ = -1;
};

Store::Store(c10::intrusive_ptr<Interruptible> store) : store_(std::move(store)) {}

c10::intrusive_ptr<Store::Interruptible> Store::typed() const {
  return c10::static_intrusive_pointer_cast<Interruptible>(store_);
}

Store Store::connect(const LaunchEnv& env, Clock::time_point deadline) {
  const Rendezvous& place = env.rendezvous;
  const auto left = std::max(std::chrono::milliseconds(1),
                             std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
  if (place.kind == Rendezvous::Kind::None) return in_process();
  const auto notices = std::make_shared<LaunchNotices>(env.notices, env.rank);
  const auto handle = [&](c10::intrusive_ptr<c10d::Store> inner, std::shared_ptr<CallWithTimeout> caller,
                          const char* unanswered) {
    inner->setTimeout(left);
    auto backing = std::make_shared<Interruptible::Backing>(std::move(inner), std::move(caller), unanswered);
    auto store = c10::make_intrusive<Interruptible>(std::move(backing), "penstock/" + place.prefix + "/");
    store->notices_ = notices;
    store->own_rank_ = env.rank;
    store->place_ = place.describe();
    return Store(std::move(store));
  };
  if (place.kind == Rendezvous::Kind::File) {
    const auto caller = std::make_shared<CallWithTimeout>();
    return handle(open_file_store(env, left, *caller), caller, kFileInUse);
  }
  // A name that does not exist is an error at once.
  HostLookup host(place.host);
  host.require_known(deadline,
                     "set MASTER_ADDR (or PENSTOCK_RENDEZVOUS) to the name or address of rank 0's host");
  if (!place.hosted_by_rank0) {
    const auto caller = std::make_shared<CallWithTimeout>();
    return handle(connect_to_agent(env, host, deadline, left, *caller), caller,
                  "the rendezvous store does not answer; the process that hosts it, usually rank 0, is "
                  "stopped or unreachable");
  }
  if (env.rank != 0) return handle(AuthenticatedStore::connect(env, host, deadline, *notices), nullptr, "");
  auto listener = ListeningSocket::bind(listen_address(env), place.port,
                                        "set MASTER_PORT to a free port, or end the process that uses it");
  return handle(AuthenticatedStore::host(std::move(listener), env), nullptr, "");
}

Store Store::in_process() {
  return Store(c10::make_intrusive<Interruptible>(
      std::make_shared<Interruptible::Backing>(c10::make_intrusive<c10d::HashStore>(), nullptr, ""), ""));
}

Store Store::with_prefix(const std::string& prefix) const {
  const auto mine = typed();
  auto sub = c10::make_intrusive<Interruptible>(mine->backing_, mine->prefix_ + prefix + "/");
  sub->liveness_ = mine->liveness_;
  sub->own_rank_ = mine->own_rank_;
  sub->notices_ = mine->notices_;
  sub->place_ = mine->place_;
  sub->setTimeout(mine->getTimeout());
  return Store(std::move(sub));
}

void Store::rendezvous_done() const {
  if (const auto& notices = typed()->notices_) notices->stop();
}

void Store::watch(std::shared_ptr<const Liveness> liveness, int own_rank) {
  if (auto* authenticated = dynamic_cast<AuthenticatedStore*>(typed()->backing_->store.get()))
    authenticated->watch(liveness);
  typed()->liveness_ = std::move(liveness);
  typed()->own_rank_ = own_rank;
}

void Store::set(const std::string& key, const std::string& value) const {
  store_->set(key, Bytes(value.begin(), value.end()));
}

void Store::remove(const std::string& key) const { store_->deleteKey(key); }

bool Store::has(const std::string& key) const { return store_->check({key}); }

std::int64_t Store::add(const std::string& key, std::int64_t amount) const {
  return store_->add(key, amount);
}

std::string Store::get(const std::string& key, Clock::time_point deadline,
                       const std::string& waiting_for) const {
  typed()->await({key}, deadline, waiting_for);
  return *try_get(key);
}

std::optional<std::string> Store::try_get(const std::string& key) const {
  if (!has(key)) return std::nullopt;
  const Bytes value = typed()->get_now(key);
  return std::string(value.begin(), value.end());
}

}  // namespace penstock::comm
