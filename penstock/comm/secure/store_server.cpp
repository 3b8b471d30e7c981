#include "penstock/comm/secure/store_server.h"

#include <utility>

namespace penstock::comm {

ServerLimits store_limits(int ranks) {
  ServerLimits limits;
  // All ranks may arrive at once, and each may be busy while it shakes hands.
  limits.half_open += 2 * static_cast<std::size_t>(ranks);
  limits.peers += 8 * static_cast<std::size_t>(ranks);
  limits.max_payload = kMaxStoreMessage;
  limits.max_unsent = 2 * kMaxStoreMessage;
  limits.ranks = ranks;
  return limits;
}

StoreServer::StoreServer(Socket listener, const JobKey& key, int ranks)
    : table_(std::make_shared<StoreTable>()) {
  SecureServer::Events events;
  events.received = [this](SecureServer::Id peer, std::string_view payload) {
    server_->send(peer, table_->apply(StoreRequest::from_bytes(payload)).to_bytes());
  };
  server_ = std::make_unique<SecureServer>(std::move(listener), Purpose::Store, key, store_limits(ranks),
                                           std::move(events));
  server_->start();
}

}  // namespace penstock::comm
