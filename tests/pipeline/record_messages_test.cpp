#include "penstock/pipeline/contract/record_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#endif

#include "penstock/torch/compat/dtype.h"
#include "tests/throws.h"
#include "tests/torch/record_generators.h"

namespace penstock::comm {
namespace record_messages_test {

using test::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Bytes = std::vector<std::uint8_t>;

template <class T>
T there_and_back(const T& value) {
  return from_message<T>(to_message(value));
}

// A payload with a correct header, to reach the checks of the fields.
Bytes framed(const Bytes& payload, MessageKind kind = RecordMessage<TensorMeta>::kKind,
             std::uint16_t version = kRecordVersion) {
  MessageWriter writer(kind, version);
  writer.append(payload);
  return writer.finish();
}
Bytes payload_of(const Bytes& message) { return Bytes(message.begin() + kMessageHeaderBytes, message.end()); }

std::string refusal(const Bytes& payload) {
  return message_of<MismatchError>([&] { from_message<TensorMeta>(framed(payload)); });
}

TensorMeta plain_example() { return TensorRecord({2, 3}, {1, 2}, at::kBFloat16, true); }

TensorMeta distributed_example() {
  // An axis of several modes (0 and 2 of a cube, flattened), and one of size 1.
  const MeshLayout cube = MeshLayout({2, 3, 2, 1}).flatten({0, 2});
  MeshKey key{{}, MeshLayout::from_axes({cube.axes().front(), AxisLayout()})};
  key.names = {"dp", "tp"};
  return DistributedRecord(TensorRecord::contiguous({2, 3}, at::kFloat), {8, 3}, {3, 1},
                           {StridedShard{0, 2}, Partial{PartialOp::Max}}, key);
}

TEST(RecordMessages, RoundTrip) {
  EXPECT_EQ(there_and_back(plain_example()), plain_example());
  EXPECT_EQ(there_and_back(distributed_example()), distributed_example());
  EXPECT_EQ(there_and_back(TensorMeta()), TensorMeta());
  EXPECT_EQ(there_and_back(TensorMeta(DistributedRecord())), TensorMeta(DistributedRecord()));
  for (const auto& record : test::distributed_variants())
    EXPECT_EQ(there_and_back(TensorMeta(record)), TensorMeta(record));

  StageMeta stage;
  EXPECT_EQ(there_and_back(stage), stage);
  stage.inputs = TensorMetas{plain_example(), distributed_example()};
  stage.output_grads = OptionalTensorMetas{std::nullopt, distributed_example()};
  EXPECT_EQ(there_and_back(stage), stage);
  const StageForwardMeta forward({plain_example(), distributed_example()});
  EXPECT_EQ(there_and_back(forward), forward);
  EXPECT_EQ(there_and_back(StageForwardMeta()), StageForwardMeta());
  const StageBackwardMeta backward({std::nullopt, plain_example(), std::nullopt});
  EXPECT_EQ(there_and_back(backward), backward);
  for (const MeshKey& key : {MeshKey{}, MeshKey{{"a"}, std::nullopt}, MeshKey{{}, MeshLayout()},
                             MeshKey{{"x", ""}, MeshLayout({4, 2}, {1, 4})}})
    EXPECT_EQ(there_and_back(key), key);
}

TEST(RecordMessages, EveryDtype) {
  for (const DtypeEntry& entry : dtype_table()) {
    if (entry.here) {
      const TensorMeta meta = TensorRecord({2}, {1}, *entry.here);
      EXPECT_EQ(there_and_back(meta), meta) << entry.name;
      EXPECT_EQ(payload_of(to_message(meta))[25], entry.number)
          << entry.name;  // after kind, shape and stride
    } else {
      Bytes payload = payload_of(to_message(TensorMeta(TensorRecord({2}, {1}, at::kFloat))));
      payload[25] = entry.number;
      EXPECT_THAT(refusal(payload), AllOf(HasSubstr("byte 49"), HasSubstr(std::string(entry.name)),
                                          HasSubstr("LibTorch " + std::string(entry.since)),
                                          HasSubstr("convert the tensor before it is sent")));
    }
  }
}

// Built by hand from docs/messages.md. If this fails, the version must change.
TEST(RecordMessages, BytesAreStable) {
  const auto i64 = [](Bytes& bytes, std::uint64_t value) {
    for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
  };
  const auto count = [](Bytes& bytes, std::uint8_t value) { bytes.insert(bytes.end(), {value, 0, 0, 0}); };
  const auto list = [&](Bytes& bytes, const std::vector<std::uint64_t>& values) {
    count(bytes, static_cast<std::uint8_t>(values.size()));
    for (const auto value : values) i64(bytes, value);
  };

  Bytes plain = {1};
  list(plain, {2, 3});
  list(plain, {1, 2});
  plain.insert(plain.end(), {13, 1});
  EXPECT_EQ(payload_of(to_message(plain_example())), plain);

  Bytes distributed = {2};
  list(distributed, {2, 3});
  list(distributed, {3, 1});
  distributed.insert(distributed.end(), {7, 0});
  list(distributed, {8, 3});
  list(distributed, {3, 1});
  count(distributed, 2);
  distributed.push_back(3);
  i64(distributed, 0);
  i64(distributed, 2);
  distributed.insert(distributed.end(), {4, 4});
  count(distributed, 2);
  for (const char* name : {"dp", "tp"}) {
    count(distributed, 2);
    distributed.insert(distributed.end(), name, name + 2);
  }
  distributed.push_back(1);
  count(distributed, 2);
  count(distributed, 2);
  for (const std::uint64_t number : {2, 6, 2, 1}) i64(distributed, number);  // (2:6, 2:1)
  count(distributed, 0);
  EXPECT_EQ(payload_of(to_message(distributed_example())), distributed);

  StageMeta stage;
  stage.outputs = TensorMetas{plain_example()};
  stage.input_grads = OptionalTensorMetas{std::nullopt, plain_example()};
  Bytes expected = {0, 1};
  count(expected, 1);
  expected.insert(expected.end(), plain.begin(), plain.end());
  expected.push_back(1);
  count(expected, 2);
  expected.insert(expected.end(), {0, 1});
  expected.insert(expected.end(), plain.begin(), plain.end());
  expected.push_back(0);
  EXPECT_EQ(payload_of(to_message(stage)), expected);
}

TEST(RecordMessages, NumbersOfPlacementsAreFixed) {
  const std::vector<std::pair<Placement, Bytes>> all = {
      {Replicate{}, {1}},
      {Shard{1}, {2, 1, 0, 0, 0, 0, 0, 0, 0}},
      {StridedShard{0, 3}, {3, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0}},
      {Partial{PartialOp::Sum}, {4, 1}},
      {Partial{PartialOp::Avg}, {4, 2}},
      {Partial{PartialOp::Min}, {4, 3}},
      {Partial{PartialOp::Max}, {4, 4}},
      {Partial{PartialOp::Product}, {4, 5}},
  };
  constexpr MessageKind kTest("TEST");
  for (const auto& [placement, bytes] : all) {
    const Bytes message = MessageWriter(kTest, 1).write(placement).finish();
    EXPECT_EQ(payload_of(message), bytes) << placement.to_string();
    MessageReader reader(message, kTest, {1, 1});
    EXPECT_EQ(reader.read<Placement>(), placement);
    reader.expect_end();
  }
}

TEST(RecordMessages, DifferentRecordsHaveDifferentBytes) {
  std::set<Bytes> seen;
  for (const auto& record : test::distributed_variants())
    EXPECT_TRUE(seen.insert(to_message(TensorMeta(record))).second) << to_string(record);
  EXPECT_TRUE(seen.insert(to_message(TensorMeta(test::distributed_variants()[0].local()))).second);
}

TEST(RecordMessages, AnotherVersionOrKindIsRefusedByName) {
  const Bytes payload = payload_of(to_message(plain_example()));
  const auto read = [](const Bytes& message) {
    return message_of<MismatchError>([&] { from_message<TensorMeta>(message); });
  };
  EXPECT_THAT(read(framed(payload, RecordMessage<TensorMeta>::kKind, kRecordVersion + 1)),
              AllOf(HasSubstr("got version 2, expected version 1"),
                    HasSubstr("run the same build of Penstock on all ranks")));
  EXPECT_THAT(read(framed(payload, RecordMessage<TensorMeta>::kKind, 0)), HasSubstr("got version 0"));
  EXPECT_THAT(read(to_message(StageForwardMeta({plain_example()}))),
              AllOf(HasSubstr("got \"FMET\", expected \"TMET\""), HasSubstr("same calls")));
  std::set<std::string_view> kinds = {
      RecordMessage<TensorMeta>::kKind.code(), RecordMessage<StageMeta>::kKind.code(),
      RecordMessage<StageForwardMeta>::kKind.code(), RecordMessage<StageBackwardMeta>::kKind.code(),
      RecordMessage<MeshKey>::kKind.code()};
  EXPECT_EQ(kinds.size(), 5u);
}

TEST(RecordMessages, UnknownNumbersAreRefusedByPlace) {
  Bytes payload = payload_of(to_message(TensorMeta(TensorRecord({2}, {1}, at::kFloat))));
  ASSERT_EQ(payload.size(), 27u);
  const auto with = [&](std::size_t at, std::uint8_t value) {
    Bytes changed = payload;
    changed[at] = value;
    return changed;
  };
  EXPECT_THAT(refusal(with(0, 3)),
              AllOf(HasSubstr("byte 24"), HasSubstr("kind of record"),
                    HasSubstr("got number 3, expected 1 or 2"), HasSubstr("same build")));
  EXPECT_THAT(refusal(with(0, 0)), HasSubstr("got number 0"));
  EXPECT_THAT(refusal(with(25, 200)), AllOf(HasSubstr("byte 49"), HasSubstr("element type is unknown"),
                                            HasSubstr("got number 200"), HasSubstr("same build")));
  EXPECT_THAT(refusal(with(25, 0)), HasSubstr("got number 0"));
  EXPECT_THAT(refusal(with(26, 2)), HasSubstr("not a bool"));

  const DistributedRecord record(TensorRecord({2}, {1}, at::kFloat), {2}, {1}, {Partial{}}, MeshKey{});
  payload = payload_of(to_message(TensorMeta(record)));
  // kind, local record, two lists of one, the count of placements
  const std::size_t placement = 1 + 26 + 12 + 12 + 4;
  ASSERT_EQ(payload[placement], 4);
  EXPECT_THAT(refusal(with(placement, 9)),
              AllOf(HasSubstr("placement is unknown"), HasSubstr("got number 9"), HasSubstr("same build")));
  EXPECT_THAT(refusal(with(placement + 1, 6)), AllOf(HasSubstr("reduction"), HasSubstr("got number 6")));
}

TEST(RecordMessages, ImpossibleRecordsAreRefused) {
  const auto record = [](const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& stride,
                         std::uint8_t dtype, bool grad) {
    return payload_of(MessageWriter(RecordMessage<TensorMeta>::kKind, 1)
                          .write(std::uint8_t{1})
                          .write(shape)
                          .write(stride)
                          .write(dtype)
                          .write(grad)
                          .finish());
  };
  EXPECT_EQ(from_message<TensorMeta>(framed(record({2}, {1}, 7, true))),
            TensorMeta(TensorRecord({2}, {1}, at::kFloat, true)));
  EXPECT_THAT(refusal(record({-2}, {1}, 7, false)),
              AllOf(HasSubstr("byte 25"), HasSubstr("shape: got [-2]")));
  EXPECT_THAT(refusal(record({2}, {-1}, 7, false)), HasSubstr("stride: got [-1]"));
  EXPECT_THAT(refusal(record({2}, {}, 7, false)), HasSubstr("same number of dims"));
  EXPECT_THAT(refusal(record({2}, {1}, 5, true)), HasSubstr("true for int64"));
  EXPECT_THAT(refusal(record({std::int64_t{1} << 62}, {1}, 7, false)), HasSubstr("fewer bytes"));
}

TEST(RecordMessages, LayoutsHaveOneSpelling) {
  using Axes = std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>;
  const auto read = [](const Axes& axes) {
    return message_of<MismatchError>([&] {
      from_message<MeshKey>(MessageWriter(RecordMessage<MeshKey>::kKind, 1)
                                .write(std::vector<std::string>{})
                                .write(true)
                                .write(axes)
                                .finish());
    });
  };
  EXPECT_THAT(read({{{2, 2}, {2, 1}}}), HasSubstr("shortest form"));  // (4:1) in two steps
  EXPECT_THAT(read({{{1, 5}}}), HasSubstr("shortest form"));
  EXPECT_THAT(read({{{2, 1}}, {{2, 1}}}), HasSubstr("byte 29"));  // two axes over the same ranks
  EXPECT_THAT(read({{{0, 1}}}), HasSubstr("MKEY"));
  EXPECT_THAT(read({{{-4, 1}}}), HasSubstr("MKEY"));
}

TEST(RecordMessages, EveryTruncationIsRefused) {
  StageMeta stage;
  stage.inputs = TensorMetas{plain_example(), distributed_example()};
  stage.output_grads = OptionalTensorMetas{std::nullopt, distributed_example()};
  const Bytes payload = payload_of(to_message(stage));
  for (std::size_t size = 0; size < payload.size(); ++size)
    EXPECT_THROW(from_message<StageMeta>(
                     framed(Bytes(payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(size)),
                            RecordMessage<StageMeta>::kKind)),
                 MismatchError)
        << size;
  Bytes longer = payload;
  longer.push_back(0);
  EXPECT_THROW(from_message<StageMeta>(framed(longer, RecordMessage<StageMeta>::kKind)), MismatchError);
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK

RC_GTEST_PROP(RecordMessagesProperty, RoundTripOfRecords, ()) {
  const TensorMeta meta = test::arbitrary_meta();
  RC_CLASSIFY(is_distributed(meta));
  RC_ASSERT(there_and_back(meta) == meta);
  RC_ASSERT(to_message(there_and_back(meta)) == to_message(meta));
}

RC_GTEST_PROP(RecordMessagesProperty, RoundTripOfStages, ()) {
  const StageMeta meta = test::arbitrary_stage_meta();
  RC_ASSERT(there_and_back(meta) == meta);
  if (meta.outputs)
    RC_ASSERT(there_and_back(StageForwardMeta(*meta.outputs)) == StageForwardMeta(*meta.outputs));
  if (meta.input_grads)
    RC_ASSERT(there_and_back(StageBackwardMeta(*meta.input_grads)) == StageBackwardMeta(*meta.input_grads));
}

RC_GTEST_PROP(RecordMessagesProperty, EqualExactlyWhenTheBytesAre, ()) {
  const TensorMeta a = test::arbitrary_meta();
  const TensorMeta b = *rc::gen::arbitrary<bool>() ? there_and_back(a) : test::arbitrary_meta();
  RC_CLASSIFY(a == b);
  RC_ASSERT((a == b) == (to_message(a) == to_message(b)));
  if (a == b) RC_ASSERT(std::hash<TensorMeta>{}(a) == std::hash<TensorMeta>{}(b));
}

#endif

}  // namespace record_messages_test
}  // namespace penstock::comm
