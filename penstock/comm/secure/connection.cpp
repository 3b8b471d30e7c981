#include "penstock/comm/secure/connection.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace penstock::comm {

bool wait_ready(int fd, short events, std::chrono::steady_clock::time_point deadline) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd ready{fd, events, 0};
    const int wait_ms = static_cast<int>(std::clamp<long long>(left.count(), 0, 60'000));
    const int n = poll(&ready, 1, wait_ms);
    if (n > 0) return true;  // an error or a hang-up counts: the next call reports it
    if (n < 0 && errno != EINTR)
      throw ConnectionLost(fmt::format("cannot wait for a socket: {}", std::strerror(errno)));
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
}

SecureConnection::SecureConnection(Socket socket, std::size_t max_payload)
    : socket_(std::move(socket)), max_payload_(max_payload) {
  tune_connection(socket_.fd());
}

HandshakeEnd SecureConnection::read_exactly(std::size_t count, std::string& bytes, TimePoint deadline) {
  bytes.clear();
  while (bytes.size() < count) {
    char part[256];
    const IoResult got = read_some(socket_.fd(), part, std::min(sizeof part, count - bytes.size()));
    switch (got.state) {
      case IoState::Some:
        bytes.append(part, got.bytes);
        break;
      case IoState::Later:
        if (!wait_ready(socket_.fd(), POLLIN, deadline)) return HandshakeEnd::Silent;
        break;
      case IoState::Closed:
      case IoState::Broken:
        return HandshakeEnd::Closed;
    }
  }
  return HandshakeEnd::Done;
}

HandshakeEnd SecureConnection::shake_hands(const JobKey& key, Purpose purpose, int rank, TimePoint deadline) {
  ClientHandshake handshake(key, purpose, rank, random_bytes(kNonceBytes));
  std::string bytes;
  try {
    unsent_ = handshake.hello();
    if (!flush(deadline)) return HandshakeEnd::Silent;
    if (const auto end = read_exactly(kChallengeBytes, bytes, deadline); end != HandshakeEnd::Done)
      // Whoever sends something else and closes speaks another protocol.
      return end == HandshakeEnd::Closed && !bytes.empty() ? HandshakeEnd::Foreign : end;
    const auto proof = handshake.answer(bytes);
    if (!proof) return HandshakeEnd::Foreign;
    unsent_ = *proof;
    if (!flush(deadline)) return HandshakeEnd::Silent;
  } catch (const ConnectionLost&) {
    return HandshakeEnd::Closed;
  }
  const auto end = read_exactly(kProofBytes, bytes, deadline);
  if (end == HandshakeEnd::Silent) return end;
  if (end != HandshakeEnd::Done || !handshake.accepts(bytes)) return HandshakeEnd::Refused;
  const SessionKeys keys = handshake.keys();
  writer_.emplace(keys.client_to_server, max_payload_);
  reader_.emplace(keys.server_to_client, max_payload_);
  return HandshakeEnd::Done;
}

bool SecureConnection::flush(TimePoint deadline) {
  while (!unsent_.empty()) {
    const IoResult sent = write_some(socket_.fd(), unsent_);
    if (sent.state == IoState::Broken) throw ConnectionLost(std::strerror(errno));
    if (sent.state == IoState::Some) {
      unsent_.erase(0, sent.bytes);
    } else if (!wait_ready(socket_.fd(), POLLOUT, deadline)) {
      return false;
    }
  }
  return true;
}

bool SecureConnection::send(std::string_view payload, TimePoint deadline) {
  if (!writer_) throw ConnectionLost("no handshake has taken place");
  // Memory must not grow while the other end does not read.
  if (!flush(deadline)) return false;
  unsent_ += writer_->frame(payload);
  return flush(deadline);
}

std::optional<std::string> SecureConnection::receive(TimePoint deadline) {
  if (!reader_) throw ConnectionLost("no handshake has taken place");
  for (;;) {
    try {
      if (auto payload = reader_->next()) return payload;
    } catch (const MismatchError& error) {
      throw ConnectionLost(error.what());
    }
    char part[16 * 1024];
    const IoResult got = read_some(socket_.fd(), part, sizeof part);
    switch (got.state) {
      case IoState::Some:
        reader_->feed({part, got.bytes});
        break;
      case IoState::Later:
        if (!wait_ready(socket_.fd(), POLLIN, deadline)) return std::nullopt;
        break;
      case IoState::Closed:
        throw ConnectionLost("the connection was closed by the other end");
      case IoState::Broken:
        throw ConnectionLost(std::strerror(errno));
    }
  }
}

}  // namespace penstock::comm
