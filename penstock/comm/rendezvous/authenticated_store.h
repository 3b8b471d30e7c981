// The rendezvous store of ranks that share a secret, as c10d wants it.
//
// Rank 0 hosts it and uses its table directly; the other ranks have a connection each. A request ends within
// seconds: with its reply, with ConnectionLost if the host is gone, or with a TimeoutError if it does not
// answer. The host leaves last: its destructor waits, for a limited time, until the other ranks have closed
// their connections, so that nobody's last request is reset.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/launch/launch_notices.h"
#include "penstock/comm/secure/store_client.h"
#include "penstock/comm/secure/store_server.h"
#include "penstock/comm/transport/host_lookup.h"
#include "penstock/comm/transport/liveness.h"
#include "penstock/comm/transport/tcp_listen.h"
#include "penstock/torch/compat/version.h"

namespace penstock::comm {

class AuthenticatedStore final : public c10d::Store {
 public:
  using Bytes = std::vector<std::uint8_t>;

  // Hosts the store on `listener`.
  static c10::intrusive_ptr<AuthenticatedStore> host(ListeningSocket listener, const LaunchEnv& env);
  // Connects to the store of rank 0 and retries until the deadline. Throws TimeoutError if nobody answers,
  // ConfigError if whoever answers has another secret or is not such a store, PeerLostError if the launcher
  // says that a rank has ended.
  // `host`: of the rendezvous.
  static c10::intrusive_ptr<AuthenticatedStore> connect(const LaunchEnv& env, HostLookup& host,
                                                        Clock::time_point deadline,
                                                        const LaunchNotices& notices);

  AuthenticatedStore(std::unique_ptr<StoreServer> server, std::unique_ptr<StoreClient> client,
                     const LaunchEnv& env);
  ~AuthenticatedStore() override;

  // After a failure that `liveness` knows of, the host waits only briefly for the others.
  void watch(std::shared_ptr<const Liveness> liveness);

  void set(const std::string& key, const Bytes& value) override;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  Bytes get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
#if PENSTOCK_TORCH_AT_LEAST(2, 8)
  // Requests of several threads do not disturb each other, so that both handles may use one connection.
  c10::intrusive_ptr<c10d::Store> clone() override;
  bool hasExtendedApi() const override { return false; }
#endif

 private:
  StoreReply ask(StoreRequest request);

  std::unique_ptr<StoreServer> server_;  // one of these two is null
  std::unique_ptr<StoreClient> client_;
  const std::string place_;
  const int rank_;
  const int exceptions_;                 // in flight when this object was made
  std::atomic<bool> unanswered_{false};  // the last request
  std::mutex mutex_;                     // guards liveness_
  std::shared_ptr<const Liveness> liveness_;
};

}  // namespace penstock::comm
