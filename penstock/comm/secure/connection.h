// The client's end of an authenticated connection: shakes hands, then sends and receives frames.
//
// Every call has a deadline. Thread safety: one thread at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "penstock/comm/secure/frames.h"
#include "penstock/comm/secure/handshake.h"
#include "penstock/comm/secure/socket.h"
#include "penstock/errors.h"

namespace penstock::comm {

// The connection is of no use any more; the message says why.
class ConnectionLost final : public Error {
 public:
  using Error::Error;
};

// How a handshake ended.
enum class HandshakeEnd {
  Done,
  Silent,   // the deadline passed: the other end accepts connections and does not answer
  Closed,   // closed before a challenge came: a server that is ending, or one that has too many strangers
  Foreign,  // what came is not this protocol
  Refused   // the two ends have different secrets: the server closed after the proof, or its own was wrong
};

class SecureConnection {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // Takes a connected socket. Both ends must have the same limit of a payload.
  SecureConnection(Socket socket, std::size_t max_payload);

  // To be called once, before anything else.
  HandshakeEnd shake_hands(const JobKey& key, Purpose purpose, int rank, TimePoint deadline);

  // Returns false if the deadline passed; the payload may still be sent later, or not at all. Throws
  // ConnectionLost.
  bool send(std::string_view payload, TimePoint deadline);

  // Returns the next payload, or std::nullopt if the deadline passed. Throws ConnectionLost, also for bytes
  // that did not come from the server.
  std::optional<std::string> receive(TimePoint deadline);

  // Readable when `receive` may have something.
  int fd() const { return socket_.fd(); }

 private:
  bool flush(TimePoint deadline);
  // Reads exactly `count` bytes of the handshake.
  HandshakeEnd read_exactly(std::size_t count, std::string& bytes, TimePoint deadline);

  Socket socket_;
  std::size_t max_payload_;
  std::optional<FrameWriter> writer_;
  std::optional<FrameReader> reader_;
  std::string unsent_;
};

// Waits until the descriptor is ready for `events` of poll. Returns false at the deadline.
bool wait_ready(int fd, short events, std::chrono::steady_clock::time_point deadline);

}  // namespace penstock::comm
