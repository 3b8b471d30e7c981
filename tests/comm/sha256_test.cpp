// SHA-256 and HMAC-SHA-256 against published vectors: FIPS 180-4 and NIST's byte-oriented examples, RFC 4231.
#include "penstock/comm/secure/sha256.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "penstock/comm/secure/secret.h"
#include "penstock/errors.h"

namespace penstock::comm {
namespace sha256_test {

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::uint8_t byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

TEST(Sha256, PublishedVectors) {
  const std::vector<std::pair<std::string, std::string>> vectors = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopq"
       "rst"
       "nopqrstu",
       "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
      {std::string(1'000'000, 'a'), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
      {std::string("\xbd", 1), "68325720aabd7c82f30f554b313d0570c95accbb7dc4b5aae11204c08ffe732b"},
      {std::string("\xc9\x8c\x8e\x55", 4),
       "7abc22c0ae5af26ce93dbb94433a0e0b2e119d014f8e7f65bd56c61ccccd9504"},
      {std::string(55, '\0'), "02779466cdec163811d078815c633f21901413081449002f24aa3e80f0b88ef7"},
      {std::string(56, '\0'), "d4817aa5497628e7c77e6b606107042bbba3130888c5f47a375e6179be789fbb"},
      {std::string(57, '\0'), "65a16cb7861335d5ace3c60718b5052e44660726da4cd13bb745381b235a1785"},
      {std::string(64, '\0'), "f5a5fd42d16a20302798ef6ed309979b43003d2320d9f0e8ea9831a92759fb4b"}};
  for (const auto& [text, expected] : vectors)
    EXPECT_EQ(hex(sha256(text)), expected) << text.size() << " bytes";
}

TEST(Sha256, ThePartsInWhichBytesArriveDoNotMatter) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 400; ++trial) {
    std::string text(random() % 400, '\0');
    for (char& byte : text) byte = static_cast<char>(random());
    Sha256 parts;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t count = std::min<std::size_t>(text.size() - at, random() % 90);
      parts.update(std::string_view(text).substr(at, count));
      at += count;
    }
    EXPECT_EQ(parts.finish(), sha256(text)) << text.size() << " bytes";
  }
}

TEST(HmacSha256, Rfc4231) {
  struct Vector {
    std::string key, text, expected;
  };
  std::string counting;
  for (char c = 1; c <= 25; ++c) counting += c;
  const std::vector<Vector> vectors = {
      {std::string(20, '\x0b'), "Hi There",
       "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {"Jefe", "what do ya want for nothing?",
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {std::string(20, '\xaa'), std::string(50, '\xdd'),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counting, std::string(50, '\xcd'), "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {std::string(131, '\xaa'),
       "This is a test using a larger than block-size key and a larger than block-size data. The key needs "
       "to be "
       "hashed before being used by the HMAC algorithm.",
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"}};
  for (const auto& [key, text, expected] : vectors) {
    EXPECT_EQ(hex(hmac_sha256(key, text)), expected);
    HmacSha256 parts(key);
    for (const char byte : text) parts.update({&byte, 1});
    EXPECT_EQ(hex(parts.finish()), expected);
  }
}

TEST(HmacSha256, ComparesWholeDigests) {
  const Digest digest = sha256("x");
  EXPECT_TRUE(equal_in_constant_time(as_text(digest), as_text(sha256("x"))));
  for (std::size_t i = 0; i < digest.size(); ++i) {
    Digest other = digest;
    other[i] ^= 0x80;
    EXPECT_FALSE(equal_in_constant_time(as_text(digest), as_text(other))) << i;
  }
  EXPECT_FALSE(equal_in_constant_time("abc", "ab"));
  EXPECT_TRUE(equal_in_constant_time("", ""));
}

TEST(Secret, IsRandomAndLongEnough) {
  const std::string one = make_secret(), other = make_secret();
  EXPECT_EQ(one.size(), 64u);
  EXPECT_NE(one, other);
  EXPECT_NO_THROW(check_secret(one));
  EXPECT_THROW(check_secret("too short"), ConfigError);
  EXPECT_THROW(check_secret(std::string(kLongestSecret + 1, 'x')), ConfigError);
  try {
    check_secret("hunter2");
  } catch (const ConfigError& error) {
    EXPECT_EQ(std::string(error.what()).find("hunter2"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("PENSTOCK_SECRET"), std::string::npos) << error.what();
  }
}

TEST(Secret, PurposesHaveDifferentDigests) {
  const JobKey key("a secret of a job");
  EXPECT_NE(key.digest("a", "bc"), key.digest("ab", "c"));
  EXPECT_NE(key.digest("a", "bc"), JobKey("another secret").digest("a", "bc"));
  EXPECT_EQ(key.digest("a", "bc"), JobKey("a secret of a job").digest("a", "bc"));
}

}  // namespace sha256_test
}  // namespace penstock::comm
