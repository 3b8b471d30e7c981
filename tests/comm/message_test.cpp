#include "penstock/comm/message/message.h"
#include "tests/throws.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#endif

namespace penstock::comm {
namespace message_test {

using test::message_of;
using Bytes = std::vector<std::uint8_t>;
using ::testing::HasSubstr;

constexpr MessageKind kShapes("SHAP");

// A struct as a user would add one, with all kinds of nesting.
struct Parameter {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::optional<double> scale;
  bool operator==(const Parameter&) const = default;
};
void encode(MessageWriter& writer, const Parameter& p) { writer.write(p.name).write(p.sizes).write(p.scale); }
void decode(MessageReader& reader, Parameter& p) { reader.read(p.name).read(p.sizes).read(p.scale); }

struct Plan {
  std::uint8_t a = 0;
  std::int16_t b = 0;
  std::uint32_t c = 0;
  std::int64_t d = 0;
  bool flag = false;
  std::vector<Parameter> parameters;
  std::optional<std::vector<std::pair<std::string, std::uint16_t>>> table;
  std::vector<std::optional<std::vector<bool>>> masks;
  Bytes blob;
  bool operator==(const Plan&) const = default;
};
void encode(MessageWriter& writer, const Plan& p) {
  writer.write(p.a)
      .write(p.b)
      .write(p.c)
      .write(p.d)
      .write(p.flag)
      .write(p.parameters)
      .write(p.table)
      .write(p.masks)
      .write(p.blob);
}
void decode(MessageReader& reader, Plan& p) {
  reader.read(p.a)
      .read(p.b)
      .read(p.c)
      .read(p.d)
      .read(p.flag)
      .read(p.parameters)
      .read(p.table)
      .read(p.masks)
      .read(p.blob);
}

template <class T>
Bytes to_bytes(const T& value) {
  return MessageWriter(kShapes, 1).write(value).finish();
}
template <class T>
T from_bytes(const Bytes& bytes) {
  MessageReader reader(bytes, kShapes, {1, 1});
  T value = reader.read<T>();
  reader.expect_end();
  return value;
}

Plan example() {
  Plan plan{7,  -300, 70000,      -(std::int64_t{1} << 40), true, {{"weight", {4, 8}, 0.5}, {"", {}, {}}},
            {}, {},   {0, 255, 1}};
  plan.table = std::vector<std::pair<std::string, std::uint16_t>>{{"x", 1}, {"y", 65535}};
  plan.masks = {std::nullopt, std::vector<bool>{true, false, true}};
  return plan;
}

// A frame with a correct checksum over an arbitrary payload, to reach the checks of the fields.
Bytes framed(const Bytes& payload) {
  MessageWriter writer(kShapes, 1);
  writer.append(payload);
  return writer.finish();
}

TEST(Message, RoundTripOfNestedStructs) {
  EXPECT_EQ(from_bytes<Plan>(to_bytes(example())), example());
  EXPECT_EQ(from_bytes<Plan>(to_bytes(Plan{})), Plan{});
}

TEST(Message, EveryIntegerKeepsItsExtremes) {
  const auto check = [](auto value) { EXPECT_EQ(from_bytes<decltype(value)>(to_bytes(value)), value); };
  const auto extremes = [&]<class T>(T) {
    check(std::numeric_limits<T>::min());
    check(std::numeric_limits<T>::max());
    EXPECT_EQ(to_bytes(T{1}).size(), kMessageHeaderBytes + sizeof(T));
  };
  extremes(std::int8_t{});
  extremes(std::uint8_t{});
  extremes(std::int16_t{});
  extremes(std::uint16_t{});
  extremes(std::int32_t{});
  extremes(std::uint32_t{});
  extremes(std::int64_t{});
  extremes(std::uint64_t{});
}

TEST(Message, FloatingPointTravelsBitByBit) {
  const double odd_nan = std::bit_cast<double>(std::uint64_t{0x7ff8dead0000beef});
  for (const double value : {0.0, -0.0, 1e-310, std::numeric_limits<double>::infinity(), odd_nan})
    EXPECT_EQ(std::bit_cast<std::uint64_t>(from_bytes<double>(to_bytes(value))),
              std::bit_cast<std::uint64_t>(value));
  EXPECT_EQ(from_bytes<float>(to_bytes(-1.25f)), -1.25f);
  EXPECT_NE(to_bytes(0.0), to_bytes(-0.0));
}

// The bytes were computed by another program from docs/messages.md. If this fails, the format number must
// change.
TEST(Message, BytesAreStable) {
  const Bytes expected = {0x50, 0x4e, 0x53, 0x4b, 0x01, 0x00, 0x02, 0x00, 0x53, 0x48, 0x41, 0x50, 0x25,
                          0x00, 0x00, 0x00, 0x38, 0x2b, 0x79, 0xf5, 0x0f, 0x2b, 0xb7, 0x6b, 0xfe, 0xff,
                          0xff, 0xff, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xf8, 0x3f, 0x02, 0x00,
                          0x00, 0x00, 0xc3, 0xa9, 0x02, 0x00, 0x00, 0x00, 0x01, 0x00, 0xcd, 0xab, 0x00,
                          0x01, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
  MessageWriter writer(kShapes, 2);
  writer.write(std::int32_t{-2})
      .write(true)
      .write(1.5)
      .write("\xc3\xa9")
      .write(std::vector<std::uint16_t>{1, 0xabcd});
  writer.write(std::optional<std::int64_t>{}).write(std::optional<std::int64_t>{-1});
  EXPECT_EQ(writer.finish(), expected);
  const Bytes letter = {'a'};
  EXPECT_EQ(message_checksum(letter), 0xaf63dc4c8601ec8cu);  // published FNV-1a test value
}

TEST(Message, EqualValuesGiveEqualBytes) {
  Plan other = example();
  other.blob.reserve(1000);  // capacity is not part of the value
  other.parameters[0].name = std::string(100, 'x');
  other.parameters[0].name = "weight";
  EXPECT_EQ(to_bytes(example()), to_bytes(other));
  other.masks[1]->back() = false;
  EXPECT_NE(to_bytes(example()), to_bytes(other));
}

TEST(Message, EveryTruncationFails) {
  const Bytes whole = to_bytes(example());
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const Bytes cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_THROW(MessageReader(std::span(cut), kShapes, {1, 1}), MismatchError) << size;
  }
}

TEST(Message, EveryTruncationOfThePayloadFailsWithoutTheChecksumToo) {
  const Bytes whole = to_bytes(example());
  for (std::size_t size = kMessageHeaderBytes; size < whole.size(); ++size) {
    const Bytes cut =
        framed({whole.begin() + kMessageHeaderBytes, whole.begin() + static_cast<std::ptrdiff_t>(size)});
    EXPECT_THROW(from_bytes<Plan>(cut), MismatchError) << size;
  }
}

TEST(Message, EverySingleBitFlipFails) {
  const Bytes whole = to_bytes(example());
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    Bytes flipped = whole;
    flipped[bit / 8] = static_cast<std::uint8_t>(flipped[bit / 8] ^ (1u << (bit % 8)));
    EXPECT_THROW(MessageReader(std::span(flipped), kShapes, {0, 65535}), MismatchError) << bit;
  }
}

TEST(Message, GarbageFails) {
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    Bytes garbage(random() % 100);
    for (auto& byte : garbage) byte = static_cast<std::uint8_t>(random());
    EXPECT_THROW(MessageReader(std::span(garbage), kShapes, {0, 65535}), MismatchError);
    // After a valid header garbage may be a valid value by chance, but then it encodes to the same bytes.
    const Bytes message = framed(garbage);
    try {
      EXPECT_EQ(to_bytes(from_bytes<Plan>(message)), message);
    } catch (const MismatchError&) {
    }
  }
}

TEST(Message, BytesThatAreNotAMessageAreNamed) {
  Bytes http = {'H', 'T', 'T', 'P'};
  http.resize(40);
  const std::string text = message_of<MismatchError>([&] {
    MessageReader(std::span(http), kShapes, {1, 1});
  });
  EXPECT_EQ(text.substr(0, text.find(';')),
            "message \"SHAP\", byte 0: these bytes are not a message: got \"HTTP\", expected \"PNSK\"");
  const Bytes nothing;
  EXPECT_THAT(message_of<MismatchError>([&] {
                MessageReader(std::span(nothing), kShapes, {1, 1});
              }),
              HasSubstr("the header is truncated: got 0 bytes, expected at least 24"));
}

TEST(Message, VersionSkewNamesBothVersionsAndTheRemedy) {
  const Bytes bytes = MessageWriter(kShapes, 5).finish();
  EXPECT_EQ(message_of<MismatchError>([&] {
              MessageReader(std::span(bytes), kShapes, {2, 4});
            }),
            "message \"SHAP\", byte 6: the sender's version of this message is not supported: got version 5, "
            "expected version 2 to 4; run the same build of Penstock on all ranks");
  EXPECT_THAT(message_of<MismatchError>([&] {
                MessageReader(std::span(bytes), kShapes, {6, 6});
              }),
              HasSubstr("expected version 6;"));
  for (const VersionRange range : {VersionRange{5, 5}, VersionRange{0, 5}, VersionRange{5, 65535}})
    EXPECT_EQ(MessageReader(bytes, kShapes, range).version(), 5);
  EXPECT_THROW(MessageReader(std::span(bytes), kShapes, {6, 5}), ValueError);
}

TEST(Message, AnotherFormatIsNamed) {
  Bytes bytes = to_bytes(true);
  bytes[4] = 2;
  EXPECT_THAT(
      message_of<MismatchError>([&] {
        MessageReader(std::span(bytes), kShapes, {1, 1});
      }),
      HasSubstr("byte 4: the message format differs: got format 2, expected format 1; run the same build"));
}

TEST(Message, WrongKindIsNamed) {
  const Bytes bytes = MessageWriter(MessageKind("PLAN"), 1).finish();
  EXPECT_THAT(message_of<MismatchError>([&] {
                MessageReader(std::span(bytes), kShapes, {1, 1});
              }),
              HasSubstr("byte 8: another kind of message was received: got \"PLAN\", expected \"SHAP\""));
  EXPECT_THROW(MessageKind("a b!"), ValueError);
}

TEST(Message, BadBoolIsRefused) {
  EXPECT_THAT(message_of<MismatchError>([] { from_bytes<bool>(framed({2})); }),
              HasSubstr("byte 24: this byte is not a bool: got 2, expected 0 or 1"));
  EXPECT_THROW(from_bytes<std::optional<std::uint8_t>>(framed({255, 1})), MismatchError);
  EXPECT_FALSE(from_bytes<bool>(framed({0})));
}

TEST(Message, TrailingBytesAreRefused) {
  const Bytes bytes = framed({1, 0, 9});
  MessageReader reader(bytes, kShapes, {1, 1});
  EXPECT_EQ(reader.read<std::uint16_t>(), 1);
  EXPECT_THAT(message_of<MismatchError>([&] { reader.expect_end(); }),
              HasSubstr("byte 26: bytes are left over after the last field: got 1, expected 0"));
  EXPECT_EQ(reader.read<std::uint8_t>(), 9);
  reader.expect_end();
  EXPECT_THAT(message_of<MismatchError>([&] { reader.read<std::uint32_t>(); }),
              HasSubstr("byte 27: a field extends past the end: got 0 bytes left, expected 4"));
}

TEST(Message, AppendedBytesAreRefused) {
  Bytes bytes = to_bytes(example());
  bytes.push_back(0);
  EXPECT_THAT(message_of<MismatchError>([&] {
                MessageReader(std::span(bytes), kShapes, {1, 1});
              }),
              HasSubstr("the length does not match"));
}

TEST(Message, HugeCountsFailBeforeMemoryIsTaken) {
  const Bytes all_ones = framed({255, 255, 255, 255, 1, 2, 3});
  EXPECT_THAT(message_of<MismatchError>([&] { from_bytes<std::vector<std::uint64_t>>(all_ones); }),
              HasSubstr("byte 24: a count is larger than the bytes that follow allow: got 4294967295 "
                        "elements, expected at most 0 in 3 bytes"));
  EXPECT_THROW(from_bytes<std::string>(all_ones), MismatchError);
  EXPECT_THROW(from_bytes<Bytes>(all_ones), MismatchError);
  EXPECT_THROW(from_bytes<std::vector<Plan>>(all_ones), MismatchError);
}

// Large in memory, one byte in the message.
struct Wide {
  std::uint8_t value = 0;
  std::array<std::uint8_t, 4095> rest{};
};
void decode(MessageReader& reader, Wide& wide) {
  const std::size_t at = reader.offset();
  if (reader.read(wide.value); wide.value == 255) reader.refuse(at, "wide", "255", "less");
}

TEST(Message, MemoryIsNotReservedOnTrust) {
  // 8192 elements are possible in 8192 bytes, but would take 32 MiB; the second one is invalid.
  Bytes payload = {0, 32, 0, 0, 1, 255};
  payload.resize(4 + 8192);
  const Bytes bytes = framed(payload);
  MessageReader reader(bytes, kShapes, {1, 1});
  std::vector<Wide> values;
  EXPECT_THAT(message_of<MismatchError>([&] { reader.read(values); }),
              HasSubstr("byte 29: wide: got 255, expected less"));
  EXPECT_LE(values.capacity() * sizeof(Wide), bytes.size());
}

TEST(Message, OversizeIsRefusedOnBothSides) {
  MessageWriter writer(kShapes, 1, 100);
  writer.write(std::string(72, 'x'));  // 24 + 4 + 72
  EXPECT_THAT(message_of<MismatchError>([&] { writer.write(true); }),
              HasSubstr("writing a message that is too large: got 101 bytes, expected at most 100"));
  const Bytes bytes = writer.finish();
  EXPECT_EQ(bytes.size(), 100u);
  EXPECT_THAT(message_of<MismatchError>([&] {
                MessageReader(std::span(bytes), kShapes, {1, 1}, 99);
              }),
              HasSubstr("the message is too large: got 100 bytes, expected at most 99"));
  EXPECT_EQ(MessageReader(bytes, kShapes, {1, 1}, 100).read<std::string>(), std::string(72, 'x'));
  EXPECT_THROW(MessageWriter(kShapes, 1, 23), ValueError);
  MessageWriter large(kShapes, 1);
  EXPECT_THROW(large.write(Bytes(kDefaultMaxMessageBytes)), MismatchError);
}

TEST(Message, AWriterIsUsedOnce) {
  MessageWriter writer(kShapes, 1);
  writer.finish();
  EXPECT_THROW(writer.write(true), StateError);
  EXPECT_THROW(writer.finish(), StateError);
}

struct Nothing {};
void encode(MessageWriter&, const Nothing&) {}

TEST(Message, ElementsWithoutBytesAreRefusedWhenWritten) {
  EXPECT_THROW(to_bytes(std::vector<Nothing>(3)), InvariantError);
  EXPECT_EQ(to_bytes(std::vector<Nothing>()).size(), kMessageHeaderBytes + 4);
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK

template <class T>
rc::Gen<std::optional<T>> any_optional(rc::Gen<T> gen) {
  return rc::gen::map(rc::gen::maybe(std::move(gen)), [](const rc::Maybe<T>& maybe) {
    return maybe ? std::optional<T>(*maybe) : std::nullopt;
  });
}

rc::Gen<Parameter> any_parameter() {
  return rc::gen::build<Parameter>(
      rc::gen::set(&Parameter::name), rc::gen::set(&Parameter::sizes),
      rc::gen::set(&Parameter::scale, any_optional(rc::gen::arbitrary<double>())));
}

rc::Gen<Plan> any_plan() {
  return rc::gen::build<Plan>(
      rc::gen::set(&Plan::a), rc::gen::set(&Plan::b), rc::gen::set(&Plan::c), rc::gen::set(&Plan::d),
      rc::gen::set(&Plan::flag),
      rc::gen::set(&Plan::parameters, rc::gen::container<std::vector<Parameter>>(any_parameter())),
      rc::gen::set(&Plan::table,
                   any_optional(rc::gen::arbitrary<std::vector<std::pair<std::string, std::uint16_t>>>())),
      rc::gen::set(&Plan::masks, rc::gen::container<std::vector<std::optional<std::vector<bool>>>>(
                                     any_optional(rc::gen::arbitrary<std::vector<bool>>()))),
      rc::gen::set(&Plan::blob));
}

RC_GTEST_PROP(MessageProperty, NestedStructsRoundTrip, ()) {
  const Plan plan = *any_plan();
  const Bytes bytes = to_bytes(plan);
  RC_ASSERT(from_bytes<Plan>(bytes) == plan);
  RC_ASSERT(to_bytes(from_bytes<Plan>(bytes)) == bytes);
}

RC_GTEST_PROP(MessageProperty, DifferentValuesGiveDifferentBytes, ()) {
  const Plan a = *any_plan();
  const Plan b = *any_plan();
  RC_ASSERT((a == b) == (to_bytes(a) == to_bytes(b)));
}

RC_GTEST_PROP(MessageProperty, DamageOfAFewBytesIsFound, ()) {
  Bytes bytes = to_bytes(*any_plan());
  const Bytes whole = bytes;
  const auto hits =
      *rc::gen::nonEmpty(rc::gen::arbitrary<std::vector<std::pair<std::uint32_t, std::uint8_t>>>());
  for (const auto& [at, value] : hits) bytes[at % bytes.size()] = value;
  RC_PRE(bytes != whole);
  RC_ASSERT_THROWS_AS(MessageReader(std::span(bytes), kShapes, {1, 1}), MismatchError);
}

#endif

}  // namespace message_test
}  // namespace penstock::comm
