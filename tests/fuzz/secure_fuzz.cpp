// What arrives at the ports of a job before and after the handshake, as arbitrary bytes: nothing but
// MismatchError may be thrown, nobody without the key may be let in, and whatever is accepted encodes to the
// same bytes.
//
// Input: a byte that chooses what the rest is.
//   0, 1   a hello for a server, a challenge for a client, each followed by a proof
//   2      frames, after a byte that says in what pieces they arrive
//   3      the payload of a request or a reply, for which a valid message header is made
//   4      requests of a store, a byte for each field; the table must never refuse by throwing
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/comm/message/message.h"
#include "penstock/comm/secure/frames.h"
#include "penstock/comm/secure/handshake.h"
#include "penstock/comm/secure/store_table.h"
#include "penstock/errors.h"

namespace {

using namespace penstock;
using namespace penstock::comm;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "secure_fuzz: %s\n", what);
  std::abort();
}

const JobKey& key() {
  static const JobKey instance("a secret that the input does not know");
  return instance;
}

void to_server(std::string_view bytes) {
  ServerHandshake server(key(), Purpose::Store, std::string(kNonceBytes, 'n'));
  if (!server.challenge(bytes.substr(0, kHelloBytes))) return;
  if (server.rank() < 0) fail("a rank below 0 was accepted");
  if (server.answer(bytes.substr(kHelloBytes))) fail("a server accepted a proof made without the key");
}

void to_client(std::string_view bytes) {
  ClientHandshake client(key(), Purpose::Store, 1, std::string(kNonceBytes, 'n'));
  if (!client.answer(bytes.substr(0, kChallengeBytes))) return;
  if (bytes.size() > kChallengeBytes && client.accepts(bytes.substr(kChallengeBytes)))
    fail("a client accepted a proof made without the key");
}

void to_reader(std::string_view bytes) {
  if (bytes.empty()) return;
  const std::size_t piece = 1 + static_cast<unsigned char>(bytes.front());
  FrameReader reader(sha256("a key that the input does not know"), 4096);
  try {
    for (std::size_t at = 1; at < bytes.size(); at += piece) {
      reader.feed(bytes.substr(at, piece));
      if (reader.next()) fail("a frame made without the key was accepted");
      if (reader.buffered() > 4096 + kFrameHeaderBytes + piece) fail("more is kept than a frame may have");
    }
  } catch (const MismatchError&) {
  }
}

template <class Value>
void decode_again(std::string_view payload, const char (&kind)[5]) {
  MessageWriter writer(MessageKind(kind), 1, kMaxStoreMessage);
  writer.append({reinterpret_cast<const std::uint8_t*>(payload.data()), payload.size()});
  const auto message = writer.finish();
  const std::string bytes(message.begin(), message.end());
  try {
    if (Value::from_bytes(bytes).to_bytes() != bytes) fail("what was read does not encode to the same bytes");
  } catch (const MismatchError&) {
  }
}

void to_table(std::string_view bytes) {
  StoreTable table;
  std::int64_t last_count = 0;
  for (std::size_t at = 0; at + 3 < bytes.size(); at += 4) {
    StoreRequest request;
    request.operation = static_cast<StoreOperation>(1 + static_cast<unsigned char>(bytes[at]) % 7);
    request.keys.assign(static_cast<unsigned char>(bytes[at + 1]) % 3, std::string(bytes.substr(at + 1, 1)));
    request.value = std::string(bytes.substr(at + 2, static_cast<unsigned char>(bytes[at + 2]) % 4));
    request.expected = std::string(bytes.substr(at + 3, 1));
    request.amount = static_cast<std::int64_t>(static_cast<unsigned char>(bytes[at + 3])) << 55;
    const StoreReply reply = table.apply(request);
    if (StoreReply::from_bytes(reply.to_bytes()).to_bytes() != reply.to_bytes())
      fail("a reply changes on the way");
    StoreRequest count;
    count.operation = StoreOperation::Count;
    const std::int64_t keys = table.apply(count).amount;
    if (keys < last_count - 1 || keys > last_count + 1) fail("one request changed several keys");
    if (!reply.refused.empty() && keys != last_count) fail("a refused request changed the table");
    last_count = keys;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 5) {
    case 0:
      to_server(rest);
      break;
    case 1:
      to_client(rest);
      break;
    case 2:
      to_reader(rest);
      break;
    case 3:
      decode_again<StoreRequest>(rest, "STRQ");
      decode_again<StoreReply>(rest, "STRE");
      break;
    case 4:
      to_table(rest);
      break;
  }
  return 0;
}
