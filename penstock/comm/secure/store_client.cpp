#include "penstock/comm/secure/store_client.h"

#include "penstock/errors.h"

namespace penstock::comm {

struct StoreClient::Turn {
  Turn(StoreClient& its_client, TimePoint deadline) : client(its_client) {
    std::unique_lock lock(client.mutex_);
    mine = client.free_.wait_until(lock, deadline, [&] { return !client.busy_; });
    if (mine) client.busy_ = true;
  }
  ~Turn() {
    if (!mine) return;
    const std::lock_guard lock(client.mutex_);
    client.busy_ = false;
    client.free_.notify_one();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  StoreClient& client;
  bool mine = false;
};

std::optional<StoreReply> StoreClient::ask(StoreRequest request, TimePoint deadline) {
  const Turn turn(*this, deadline);
  if (!turn.mine) return std::nullopt;
  if (lost_) throw ConnectionLost(*lost_);
  request.number = ++last_number_;
  const std::string bytes = request.to_bytes();
  try {
    if (!connection_.send(bytes, deadline)) return std::nullopt;
    while (const auto answer = connection_.receive(deadline)) {
      StoreReply reply = StoreReply::from_bytes(*answer);
      // A smaller number belongs to a request that was given up.
      if (reply.number == request.number) return reply;
    }
    return std::nullopt;
  } catch (const ConnectionLost& error) {
    lost_ = error.what();
    throw;
  } catch (const MismatchError& error) {
    lost_ = error.what();
    throw ConnectionLost(*lost_);
  }
}

}  // namespace penstock::comm
