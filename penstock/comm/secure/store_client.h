// Uses the rendezvous store that another process hosts.
//
// Thread safety: all functions may be called from any thread; requests of several threads are made one after
// the other.
#pragma once

#include <chrono>
#include <condition_variable>
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
  struct Turn;

  // A std::timed_mutex, whose wait until a steady clock's time GCC 12's thread sanitizer does not know.
  std::mutex mutex_;  // guards busy_
  std::condition_variable free_;
  bool busy_ = false;  // whoever has set it may use the members below
  SecureConnection connection_;
  std::uint64_t last_number_ = 0;
  std::optional<std::string> lost_;  // why the connection is of no use any more
};

}  // namespace penstock::comm
