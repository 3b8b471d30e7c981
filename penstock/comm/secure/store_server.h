// Hosts a rendezvous store for the other ranks.
//
// The hosting rank uses the table itself, without a socket. Thread safety: all functions may be called from
// any thread.
#pragma once

#include <chrono>
#include <memory>

#include "penstock/comm/secure/server.h"
#include "penstock/comm/secure/store_table.h"

namespace penstock::comm {

class StoreServer {
 public:
  // `ranks`: how many the job has.
  StoreServer(Socket listener, const JobKey& key, int ranks);

  ~StoreServer() { server_->stop(); }
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  StoreTable& table() { return *table_; }

  // The host leaves last: waits until all other ranks have closed their connections, or until the deadline.
  bool await_alone(std::chrono::steady_clock::time_point deadline) { return server_->await_alone(deadline); }

 private:
  std::shared_ptr<StoreTable> table_;
  std::unique_ptr<SecureServer> server_;
};

// The limits of a store's connections; both ends need the same ones.
ServerLimits store_limits(int ranks);

}  // namespace penstock::comm
