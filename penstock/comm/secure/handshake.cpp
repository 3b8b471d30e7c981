#include "penstock/comm/secure/handshake.h"

#include <utility>

#include "penstock/base/describe.h"

namespace penstock::comm {

namespace {

// The last byte is the version of the protocol.
constexpr std::string_view kHelloMagic("PNSTKHL\x01", 8);
constexpr std::string_view kChallengeMagic("PNSTKCH\x01", 8);

constexpr std::string_view kClientProof = "proof of the client";
constexpr std::string_view kServerProof = "proof of the server";

SessionKeys session_keys(const JobKey& key, std::string_view transcript) {
  return {.client_to_server = key.digest("frames of the client", transcript),
          .server_to_client = key.digest("frames of the server", transcript)};
}

void append_rank(std::string& bytes, std::uint32_t rank) {
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(rank >> shift);
}

std::uint32_t rank_at(std::string_view bytes) {
  std::uint32_t rank = 0;
  for (const char byte : bytes.substr(0, 4)) rank = rank << 8 | static_cast<unsigned char>(byte);
  return rank;
}

}  // namespace

ClientHandshake::ClientHandshake(const JobKey& key, Purpose purpose, int rank, std::string nonce)
    : key_(key) {
  PENSTOCK_INVARIANT(nonce.size() == kNonceBytes && rank >= 0, "a nonce has a fixed size");
  hello_ = std::string(kHelloMagic) + static_cast<char>(purpose);
  append_rank(hello_, static_cast<std::uint32_t>(rank));
  hello_ += nonce;
}

std::optional<std::string> ClientHandshake::answer(std::string_view challenge) {
  if (challenge.size() != kChallengeBytes || !challenge.starts_with(kChallengeMagic)) return std::nullopt;
  transcript_ = hello_ + std::string(challenge);
  return std::string(as_text(key_.digest(kClientProof, transcript_)));
}

bool ClientHandshake::accepts(std::string_view proof) const {
  return !transcript_.empty() &&
         equal_in_constant_time(proof, as_text(key_.digest(kServerProof, transcript_)));
}

SessionKeys ClientHandshake::keys() const { return session_keys(key_, transcript_); }

ServerHandshake::ServerHandshake(const JobKey& key, Purpose purpose, std::string nonce)
    : key_(key), purpose_(purpose), nonce_(std::move(nonce)) {
  PENSTOCK_INVARIANT(nonce_.size() == kNonceBytes, "a nonce has a fixed size");
}

std::optional<std::string> ServerHandshake::challenge(std::string_view hello) {
  if (hello.size() != kHelloBytes || !hello.starts_with(kHelloMagic) ||
      static_cast<std::uint8_t>(hello[kHelloMagic.size()]) != static_cast<std::uint8_t>(purpose_))
    return std::nullopt;
  const std::uint32_t rank = rank_at(hello.substr(kHelloMagic.size() + 1));
  if (rank > 0x7fffffffu) return std::nullopt;
  rank_ = static_cast<int>(rank);
  const std::string challenge = std::string(kChallengeMagic) + nonce_;
  transcript_ = std::string(hello) + challenge;
  return challenge;
}

std::optional<std::string> ServerHandshake::answer(std::string_view proof) const {
  if (transcript_.empty() || !equal_in_constant_time(proof, as_text(key_.digest(kClientProof, transcript_))))
    return std::nullopt;
  return std::string(as_text(key_.digest(kServerProof, transcript_)));
}

SessionKeys ServerHandshake::keys() const { return session_keys(key_, transcript_); }

}  // namespace penstock::comm
