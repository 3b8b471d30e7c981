// Uses the rendezvous store that another process hosts.
//
// Thread safety: all functions may be called from any thread; requests of several threads are made one after
// the other.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "penstock/comm/secure/connection.h"
#include "penstock/comm/secure/store_table.h"

namespace penstock::comm {

class StoreClient {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // Takes a connection whose ends have shaken hands.
  explicit StoreClient(SecureConnection connection) : connection_(std::move(connection)) {}

  // Returns the reply, or std::nullopt if none came by the deadline; the request may be carried out later
  // nevertheless. Throws ConnectionLost if the host is gone, also for every later request.
  std::optional<StoreReply> ask(StoreRequest request, TimePoint deadline);

 private:
  std::timed_mutex mutex_;  // guards the members below
  SecureConnection connection_;
  std::uint64_t last_number_ = 0;
  std::optional<std::string> lost_;  // why the connection is of no use any more
};

}  // namespace penstock::comm
