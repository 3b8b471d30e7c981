#include "penstock/comm/secure/store_client.h"

#include "penstock/errors.h"

namespace penstock::comm {

std::optional<StoreReply> StoreClient::ask(StoreRequest request, TimePoint deadline) {
  const std::unique_lock lock(mutex_, deadline);
  if (!lock) return std::nullopt;
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
