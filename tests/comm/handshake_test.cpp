// The handshake and the frames as pure functions of bytes: right ones are accepted, all others refused.
#include "penstock/comm/secure/handshake.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "penstock/comm/secure/frames.h"
#include "penstock/errors.h"

namespace penstock::comm {
namespace handshake_test {

std::string random_text(std::mt19937& random, std::size_t size) {
  std::string text(size, '\0');
  for (char& byte : text) byte = static_cast<char>(random());
  return text;
}

const JobKey& right_key() {
  static const JobKey key("the secret of this job");
  return key;
}

// Everything that both ends say, with what a stranger did to it on the way.
struct Exchange {
  std::string hello, challenge, proof, answer;
  bool joined = false, trusted = false;
  SessionKeys client, server;
};

using Change = std::function<void(int message, std::string& bytes)>;

Exchange shake(std::mt19937& random, const JobKey& client_key, const JobKey& server_key,
               Purpose client_purpose, Purpose server_purpose, const Change& change = {}) {
  Exchange run;
  ClientHandshake client(client_key, client_purpose, 3, random_text(random, kNonceBytes));
  ServerHandshake server(server_key, server_purpose, random_text(random, kNonceBytes));
  const auto on_the_way = [&](int message, std::string bytes) {
    if (change) change(message, bytes);
    return bytes;
  };
  run.hello = on_the_way(0, client.hello());
  const auto challenge = server.challenge(run.hello);
  if (!challenge) return run;
  run.challenge = on_the_way(1, *challenge);
  const auto proof = client.answer(run.challenge);
  if (!proof) return run;
  run.proof = on_the_way(2, *proof);
  const auto answer = server.answer(run.proof);
  run.joined = answer.has_value();
  if (!answer) return run;
  run.answer = on_the_way(3, *answer);
  run.trusted = client.accepts(run.answer);
  run.client = client.keys();
  run.server = server.keys();
  EXPECT_EQ(server.rank(), 3);
  return run;
}

TEST(Handshake, EndsWithTheSameSecretTrustEachOther) {
  std::mt19937 random(1);
  const Exchange run = shake(random, right_key(), right_key(), Purpose::Store, Purpose::Store);
  EXPECT_TRUE(run.joined);
  EXPECT_TRUE(run.trusted);
  EXPECT_EQ(run.hello.size(), kHelloBytes);
  EXPECT_EQ(run.challenge.size(), kChallengeBytes);
  EXPECT_EQ(run.proof.size(), kProofBytes);
  EXPECT_EQ(run.answer.size(), kProofBytes);
  EXPECT_EQ(run.client.client_to_server, run.server.client_to_server);
  EXPECT_EQ(run.client.server_to_client, run.server.server_to_client);
  EXPECT_NE(run.client.client_to_server, run.client.server_to_client);
}

TEST(Handshake, AnotherSecretOrPurposeIsRefused) {
  std::mt19937 random(2);
  const JobKey other("the secret of another job");
  for (int trial = 0; trial < 50; ++trial) {
    EXPECT_FALSE(shake(random, other, right_key(), Purpose::Store, Purpose::Store).joined);
    EXPECT_FALSE(shake(random, right_key(), other, Purpose::Store, Purpose::Store).joined);
    EXPECT_FALSE(shake(random, right_key(), right_key(), Purpose::Store, Purpose::Monitor).joined);
    EXPECT_FALSE(shake(random, right_key(), right_key(), Purpose::Monitor, Purpose::Store).joined);
  }
}

TEST(Handshake, AChangeOfAnyBitIsNoticed) {
  std::mt19937 random(3);
  const std::size_t sizes[] = {kHelloBytes, kChallengeBytes, kProofBytes, kProofBytes};
  for (int message = 0; message < 4; ++message)
    for (std::size_t bit = 0; bit < 8 * sizes[message]; ++bit) {
      const Exchange run = shake(random, right_key(), right_key(), Purpose::Store, Purpose::Store,
                                 [&](int which, std::string& bytes) {
                                   if (which == message)
                                     bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << bit % 8);
                                 });
      EXPECT_FALSE(run.trusted) << "message " << message << ", bit " << bit;
      if (message < 3) {
        EXPECT_FALSE(run.joined) << "message " << message << ", bit " << bit;
      }
    }
}

TEST(Handshake, RecordedProofsAreUseless) {
  std::mt19937 random(4);
  const Exchange recorded = shake(random, right_key(), right_key(), Purpose::Store, Purpose::Store);
  for (int trial = 0; trial < 100; ++trial) {
    ServerHandshake server(right_key(), Purpose::Store, random_text(random, kNonceBytes));
    ASSERT_TRUE(server.challenge(recorded.hello));
    EXPECT_FALSE(server.answer(recorded.proof));
    EXPECT_FALSE(server.answer(recorded.answer)) << "a server's proof sent back to a server";
    ClientHandshake client(right_key(), Purpose::Store, 3, random_text(random, kNonceBytes));
    const auto proof = client.answer(recorded.challenge);
    ASSERT_TRUE(proof);
    EXPECT_FALSE(client.accepts(recorded.answer));
    EXPECT_FALSE(client.accepts(*proof)) << "its own proof sent back";
  }
}

TEST(Handshake, GarbageIsNeitherAHelloNorAChallengeNorAProof) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 20'000; ++trial) {
    const std::string garbage = random_text(random, random() % 80);
    ServerHandshake server(right_key(), Purpose::Store, random_text(random, kNonceBytes));
    EXPECT_FALSE(server.challenge(garbage));
    EXPECT_FALSE(server.answer(garbage)) << "before a hello";
    ClientHandshake client(right_key(), Purpose::Store, 0, random_text(random, kNonceBytes));
    EXPECT_FALSE(client.accepts(garbage)) << "before a challenge";
    EXPECT_FALSE(client.answer(garbage));
    ASSERT_TRUE(server.challenge(client.hello()));
    EXPECT_FALSE(server.answer(garbage));
  }
}

// --------------------------------------------------------------------------------------------------- frames

const Digest& frame_key() {
  static const Digest key = sha256("a key");
  return key;
}

TEST(Frames, ArriveInOrderHoweverTheyAreCut) {
  std::mt19937 random(6);
  for (int trial = 0; trial < 200; ++trial) {
    FrameWriter writer(frame_key(), 5000);
    FrameReader reader(frame_key(), 5000);
    std::vector<std::string> sent, received;
    std::string wire;
    for (int i = 0; i < 20; ++i) {
      sent.push_back(random_text(random, random() % 3 == 0 ? random() % 5000 : random() % 20));
      wire += writer.frame(sent.back());
    }
    for (std::size_t at = 0; at < wire.size();) {
      const std::size_t count = std::min<std::size_t>(wire.size() - at, 1 + random() % 700);
      reader.feed(std::string_view(wire).substr(at, count));
      at += count;
      while (const auto payload = reader.next()) received.push_back(*payload);
    }
    EXPECT_EQ(received, sent);
    EXPECT_EQ(reader.buffered(), 0u);
  }
}

// Reads all it can. Returns what was accepted; `refused`: whether the reader threw.
std::vector<std::string> read_all(FrameReader& reader, bool& refused) {
  std::vector<std::string> payloads;
  refused = false;
  try {
    while (const auto payload = reader.next()) payloads.push_back(*payload);
  } catch (const MismatchError&) {
    refused = true;
  }
  return payloads;
}

TEST(Frames, ChangedCutAndInjectedBytesAreNeverAccepted) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 5000; ++trial) {
    FrameWriter writer(frame_key(), 1000);
    const std::string first = random_text(random, random() % 40), second = random_text(random, random() % 40);
    std::string wire = writer.frame(first) + writer.frame(second);
    const std::string whole = wire;
    const std::size_t at = random() % wire.size();
    switch (random() % 4) {
      case 0:
        wire[at] = static_cast<char>(wire[at] ^ (1 + random() % 255));
        break;
      case 1:
        wire.erase(at, 1 + random() % 9);
        break;
      case 2:
        wire.insert(at, random_text(random, 1 + random() % 9));
        break;
      case 3:
        wire.resize(at);
        break;
    }
    if (wire == whole) continue;  // an inserted byte may equal its neighbour
    FrameReader reader(frame_key(), 1000);
    reader.feed(wire);
    bool refused = false;
    const auto accepted = read_all(reader, refused);
    // What was accepted is a beginning of what was sent; a change behind it was refused or is incomplete.
    ASSERT_LE(accepted.size(), 2u);
    if (!accepted.empty()) {
      EXPECT_EQ(accepted[0], first);
    }
    if (accepted.size() == 2) {
      EXPECT_EQ(accepted[1], second);
      EXPECT_TRUE(wire.starts_with(whole)) << "both frames are accepted only unchanged";
    }
  }
}

TEST(Frames, RepeatedReorderedAndReflectedOnesAreRefused) {
  FrameWriter writer(frame_key(), 100);
  const std::string first = writer.frame("first"), second = writer.frame("second");
  const auto accepted = [&](const std::string& wire, const Digest& key, bool& refused) {
    FrameReader reader(key, 100);
    reader.feed(wire);
    return read_all(reader, refused).size();
  };
  bool refused = false;
  EXPECT_EQ(accepted(first + second, frame_key(), refused), 2u);
  EXPECT_FALSE(refused);
  EXPECT_EQ(accepted(first + first, frame_key(), refused), 1u);
  EXPECT_TRUE(refused);
  EXPECT_EQ(accepted(second, frame_key(), refused), 0u);
  EXPECT_TRUE(refused);
  EXPECT_EQ(accepted(first, sha256("the key of the other direction"), refused), 0u);
  EXPECT_TRUE(refused);
}

TEST(Frames, LengthsAreLimited) {
  FrameWriter writer(frame_key(), 100);
  EXPECT_THROW(writer.frame(std::string(101, 'x')), ValueError);
  EXPECT_NO_THROW(writer.frame(std::string(100, 'x')));
  FrameReader reader(frame_key(), 100);
  reader.feed(std::string("\x60\x00\x00\x00", 4) + std::string(40, 'x'));  // announces 1.5 GiB
  EXPECT_THROW(reader.next(), MismatchError);
}

}  // namespace handshake_test
}  // namespace penstock::comm
