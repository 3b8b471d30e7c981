// How the two ends of a connection prove to each other that they belong to the same job, without revealing
// the secret.
//
//   client                                         server
//   hello: purpose, rank, 32 random bytes    ->
//                                            <-    challenge: 32 random bytes
//   proof: HMAC(key, "client", all so far)   ->
//                                            <-    proof: HMAC(key, "server", all so far)
//
// Every message has a fixed size, so neither end reads anything whose length a stranger chose. The server
// proves itself only to a client that has done so: a stranger learns that a server is there, and nothing
// else. Proofs depend on the random bytes of both ends, so that a recorded one is useless, and on the
// direction, so that none can be sent back to its author. The keys of the connection are derived in the same
// way, one for each direction.
//
// Pure functions of bytes: sockets are in connection.h and server.h. Thread safety: use an object from one
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "penstock/comm/secure/secret.h"

namespace penstock::comm {

// What a connection is for. A proof for one purpose is refused by servers of another.
enum class Purpose : std::uint8_t { Store = 1, Monitor = 2, Launch = 3 };

inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kHelloBytes = 8 + 1 + 4 + kNonceBytes;  // magic and version, purpose, rank
inline constexpr std::size_t kChallengeBytes = 8 + kNonceBytes;      // magic and version
inline constexpr std::size_t kProofBytes = kDigestBytes;

// The keys of one connection.
struct SessionKeys {
  Digest client_to_server{};
  Digest server_to_client{};
};

class ClientHandshake {
 public:
  // `nonce`: kNonceBytes random bytes.
  ClientHandshake(const JobKey& key, Purpose purpose, int rank, std::string nonce);

  const std::string& hello() const { return hello_; }
  // Takes the server's challenge (kChallengeBytes) and returns the proof to send, or std::nullopt if these
  // bytes are no challenge of this protocol.
  std::optional<std::string> answer(std::string_view challenge);
  // Takes the server's proof (kProofBytes). Returns whether the server knows the secret.
  bool accepts(std::string_view proof) const;
  // After `accepts` returned true.
  SessionKeys keys() const;

 private:
  JobKey key_;
  std::string hello_;
  std::string transcript_;
};

class ServerHandshake {
 public:
  ServerHandshake(const JobKey& key, Purpose purpose, std::string nonce);

  // Takes the client's hello (kHelloBytes) and returns the challenge to send, or std::nullopt if these bytes
  // are no hello of this protocol and purpose. The rank is only claimed, and not yet proven.
  std::optional<std::string> challenge(std::string_view hello);
  // Takes the client's proof (kProofBytes) and returns the server's, or std::nullopt if it is wrong.
  std::optional<std::string> answer(std::string_view proof) const;
  int rank() const { return rank_; }
  // After `answer` returned a proof.
  SessionKeys keys() const;

 private:
  JobKey key_;
  Purpose purpose_;
  std::string nonce_;
  std::string transcript_;
  int rank_ = -1;
};

}  // namespace penstock::comm
