// The key-value store that ranks use for rendezvous: Penstock's own authenticated one, or c10d's TCPStore
// (under torchrun, whose agent hosts it), FileStore and HashStore.
//
// Every wait has a deadline and ends early when a rank of the world is known to be lost or failed. Used for
// rendezvous, group agreement and diagnosis; never on a hot path. Thread safe.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/transport/liveness.h"

namespace penstock::comm {

class Store {
 public:
  // Takes part in the rendezvous: hosts the store if this rank is its host, else connects. Throws ConfigError
  // if the port is in use, the host unknown or the secret another one, TimeoutError if the host does not
  // answer within the deadline, PeerLostError if the launcher says that a rank has ended.
  //
  // The host's store lives until the last handle is destroyed, and then waits, for a limited time, until the
  // other ranks have closed their connections.
  static Store connect(const LaunchEnv& env, Clock::time_point deadline);

  // A store inside this process, for thread worlds and worlds of one rank.
  static Store in_process();

  // The same store under `prefix`.
  Store with_prefix(const std::string& prefix) const;

  // Says that all ranks have met: from now on they learn from each other, not from the launcher, who has
  // ended.
  void rendezvous_done() const;

  // Makes waits of this handle and its copies end with PeerLostError once `liveness` knows of a failure.
  void watch(std::shared_ptr<const Liveness> liveness, int own_rank);

  void set(const std::string& key, const std::string& value) const;
  // Does nothing if the key is not set.
  void remove(const std::string& key) const;
  bool has(const std::string& key) const;
  // Adds to a counter and returns the new value.
  std::int64_t add(const std::string& key, std::int64_t amount) const;
  // Waits for the key. Throws a TimeoutError that names `waiting_for`.
  std::string get(const std::string& key, Clock::time_point deadline, const std::string& waiting_for) const;
  // Returns the value, or std::nullopt if the key is not set.
  std::optional<std::string> try_get(const std::string& key) const;

  // For c10d's own constructors; its waits are interruptible too.
  c10::intrusive_ptr<c10d::Store> for_c10d() const { return store_; }

 private:
  class Interruptible;
  explicit Store(c10::intrusive_ptr<Interruptible> store);
  c10::intrusive_ptr<Interruptible> typed() const;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace penstock::comm
