#include "penstock/torch/tree/tensor_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <limits>
#include <set>
#include <thread>
#include <unordered_set>

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#endif

#include "penstock/errors.h"
#include "penstock/torch/compat/dtype.h"
#include "penstock/torch/tree/tensor_meta.h"
#include "tests/throws.h"
#include "tests/torch/fake_shard.h"
#include "tests/torch/record_generators.h"

namespace penstock {
namespace tensor_record_test {

using test::FakeShards;
using test::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Sizes = std::vector<std::int64_t>;

// ---- element types ----

TEST(Dtype, NumbersAreFixed) {
  // Part of the wire format: a change breaks every mix of builds.
  const std::vector<std::pair<int, const char*>> expected = {{1, "uint8"},
                                                             {2, "int8"},
                                                             {3, "int16"},
                                                             {4, "int32"},
                                                             {5, "int64"},
                                                             {6, "float16"},
                                                             {7, "float32"},
                                                             {8, "float64"},
                                                             {9, "complex32"},
                                                             {10, "complex64"},
                                                             {11, "complex128"},
                                                             {12, "bool"},
                                                             {13, "bfloat16"},
                                                             {14, "bits1x8"},
                                                             {15, "bits2x4"},
                                                             {16, "bits4x2"},
                                                             {17, "bits8"},
                                                             {18, "bits16"},
                                                             {19, "float8_e5m2"},
                                                             {20, "float8_e4m3fn"},
                                                             {21, "float8_e5m2fnuz"},
                                                             {22, "float8_e4m3fnuz"},
                                                             {23, "uint16"},
                                                             {24, "uint32"},
                                                             {25, "uint64"},
                                                             {26, "uint1"},
                                                             {27, "uint2"},
                                                             {28, "uint3"},
                                                             {29, "uint4"},
                                                             {30, "uint5"},
                                                             {31, "uint6"},
                                                             {32, "uint7"},
                                                             {33, "int1"},
                                                             {34, "int2"},
                                                             {35, "int3"},
                                                             {36, "int4"},
                                                             {37, "int5"},
                                                             {38, "int6"},
                                                             {39, "int7"},
                                                             {40, "float8_e8m0fnu"},
                                                             {41, "float4_e2m1fn_x2"},
                                                             {42, "bcomplex32"}};
  ASSERT_EQ(dtype_table().size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(dtype_table()[i].number, expected[i].first);
    EXPECT_EQ(dtype_table()[i].name, expected[i].second);
    EXPECT_EQ(find_dtype(static_cast<std::uint8_t>(expected[i].first)), &dtype_table()[i]);
  }
  EXPECT_EQ(find_dtype(0), nullptr);
  EXPECT_EQ(find_dtype(43), nullptr);
  EXPECT_EQ(find_dtype(255), nullptr);
}

TEST(Dtype, EveryTypeOfThisLibTorchHasANumberOrIsQuantized) {
  std::set<std::uint8_t> seen;
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<at::ScalarType>(i);
    if (type == at::ScalarType::Undefined) continue;
    const auto number = dtype_number(type);
    EXPECT_EQ(number.has_value(), !at::isQIntType(type)) << c10::toString(type);
    if (number) {
      EXPECT_TRUE(seen.insert(*number).second);
      EXPECT_EQ(find_dtype(*number)->here, type);
    }
  }
  EXPECT_FALSE(dtype_number(at::ScalarType::Undefined));
  EXPECT_EQ(dtype_name(at::kBFloat16), "bfloat16");
  EXPECT_EQ(dtype_name(at::kQInt8), "QInt8");
}

// ---- plain records ----

// A tensor created from a record has the same record, and memory for everything its strides reach.
void expect_reproduced(const at::Tensor& tensor) {
  const TensorRecord record = record_of(tensor);
  EXPECT_EQ(record.shape(), tensor.sizes().vec());
  EXPECT_EQ(record.stride(), tensor.strides().vec());
  EXPECT_EQ(record.dtype(), tensor.scalar_type());
  EXPECT_EQ(record.requires_grad(), tensor.requires_grad());
  EXPECT_EQ(record.numel(), tensor.numel());
  const at::Tensor made = make_tensor(record, at::kCPU);
  EXPECT_EQ(record_of(made), record) << to_string(record);
  EXPECT_EQ(made.storage_offset(), 0);
  EXPECT_EQ(static_cast<std::int64_t>(made.storage().nbytes()), record.storage_bytes()) << to_string(record);
  EXPECT_TRUE(made.is_leaf());
  const at::Tensor raw = make_raw_tensor(record, at::kCPU);
  EXPECT_FALSE(raw.requires_grad());
  EXPECT_EQ(record_of(raw), record.with_requires_grad(false));
  EXPECT_THAT(differences(record, record_of(raw)), IsEmpty());
}

TEST(TensorRecord, ViewsKeepTheirLayout) {
  const at::Tensor base = at::arange(24, at::kFloat).view({2, 3, 4});
  expect_reproduced(base);
  expect_reproduced(base.transpose(0, 2));
  expect_reproduced(base.permute({1, 2, 0}));
  expect_reproduced(base.select(1, 2));
  expect_reproduced(base.slice(2, 1, 4, 2));
  expect_reproduced(base.narrow(0, 1, 1));
  expect_reproduced(at::ones({3, 1}).expand({3, 5}));
  expect_reproduced(at::ones({}).expand({2, 2}));
  expect_reproduced(at::empty({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast));
}

TEST(TensorRecord, EmptyAndZeroDimTensors) {
  expect_reproduced(at::ones({}));
  expect_reproduced(at::ones({0}));
  expect_reproduced(at::ones({3, 0, 2}));
  expect_reproduced(at::ones({3, 0, 2}).transpose(0, 2));
  expect_reproduced(at::ones({1, 1}));
  expect_reproduced(at::ones({1}).as_strided({1}, {7}));
}

TEST(TensorRecord, EveryDtype) {
  for (const DtypeEntry& entry : dtype_table()) {
    if (!entry.here) continue;
    expect_reproduced(at::empty({2, 3}, *entry.here).t());
    const bool differentiable = at::isFloatingType(*entry.here) || at::isComplexType(*entry.here);
    if (differentiable) {
      expect_reproduced(at::empty({2}, *entry.here).requires_grad_(true));
    } else {
      EXPECT_THROW(TensorRecord({2}, {1}, *entry.here, true), ValueError) << entry.name;
    }
  }
}

TEST(TensorRecord, RequiresGradOfResultsAndLeaves) {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_(true);
  expect_reproduced(weight);
  expect_reproduced(weight * 2);
  expect_reproduced((weight * 2).t());
  expect_reproduced((weight * 2).detach());
}

TEST(TensorRecord, ContiguousCountsAsLibTorch) {
  for (const Sizes& shape : {Sizes{}, Sizes{4}, Sizes{2, 3, 4}, Sizes{2, 0, 4}, Sizes{0, 0}, Sizes{1, 5, 1}})
    EXPECT_EQ(TensorRecord::contiguous(shape, at::kHalf), record_of(at::empty(shape, at::kHalf)));
}

TEST(TensorRecord, MadeOnOtherDevices) {
  const TensorRecord record({2, 3}, {1, 2}, at::kBFloat16, true);
  const at::Tensor meta = make_tensor(record, at::Device(at::kMeta));
  EXPECT_TRUE(meta.is_meta());
  EXPECT_EQ(record_of(meta), record);
}

TEST(TensorRecord, ImpossibleTensorsAreRefused) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  EXPECT_THAT(message_of<ValueError>([] {
                TensorRecord({2, 3}, {1}, at::kFloat);
              }),
              HasSubstr("[2, 3] and [1], expected the same number of dims"));
  EXPECT_THAT(message_of<ValueError>([] {
                TensorRecord({2, -1}, {1, 1}, at::kFloat);
              }),
              HasSubstr("shape: got [2, -1]"));
  EXPECT_THAT(message_of<ValueError>([] { TensorRecord({2}, {-1}, at::kFloat); }),
              HasSubstr("stride: got [-1]"));
  EXPECT_THAT(message_of<ValueError>([] { TensorRecord({2}, {1}, at::kQInt8); }), HasSubstr("dequantize"));
  EXPECT_THAT(message_of<ValueError>([] { TensorRecord({2}, {1}, at::kLong, true); }),
              HasSubstr("true for int64"));
  EXPECT_THROW(TensorRecord({2}, {1}, at::ScalarType::Undefined), ValueError);
  EXPECT_THROW(TensorRecord({2}, {1}, static_cast<at::ScalarType>(100)), ValueError);
  EXPECT_THAT(message_of<ValueError>([] {
                TensorRecord({kHuge, 2}, {1, 1}, at::kByte);
              }),
              HasSubstr("fewer bytes"));
  EXPECT_THROW(TensorRecord({kHuge}, {1}, at::kFloat), ValueError);
  EXPECT_THROW(TensorRecord({kHuge}, {0}, at::kFloat), ValueError);
  EXPECT_THROW(TensorRecord({3}, {kHuge}, at::kByte), ValueError);
  EXPECT_THROW(TensorRecord({2, 2}, {kHuge, kHuge}, at::kByte), ValueError);
  EXPECT_THROW(TensorRecord::contiguous({kHuge, 4}, at::kByte), ValueError);
  EXPECT_THROW(TensorRecord::contiguous({0, kHuge, 4}, at::kByte), ValueError);
  EXPECT_THROW(TensorRecord::contiguous({-1}, at::kByte), ValueError);
  EXPECT_NO_THROW(TensorRecord({2}, {kHuge}, at::kByte));
  EXPECT_NO_THROW(TensorRecord({0}, {kHuge}, at::kDouble));
}

TEST(TensorRecord, TensorsThatFourFieldsCannotDescribe) {
  EXPECT_THAT(message_of<PipeliningMetadataError>([] { record_of(at::Tensor()); }),
              HasSubstr("an undefined tensor"));
  EXPECT_THAT(message_of<PipeliningMetadataError>([] {
                record_of(at::ones({2, 2}).to_sparse());
              }),
              HasSubstr("to_dense()"));
  const at::Tensor quantized = at::quantize_per_tensor(at::ones({2}), 0.5, 0, at::kQInt8);
  EXPECT_THAT(message_of<PipeliningMetadataError>([&] { record_of(quantized); }), HasSubstr("dequantize()"));
  EXPECT_THROW(meta_of(at::Tensor()), PipeliningMetadataError);
}

TEST(TensorRecord, DifferencesNameEachFieldButRequiresGrad) {
  const TensorRecord a({2, 3}, {3, 1}, at::kFloat, true);
  EXPECT_THAT(differences(a, a), IsEmpty());
  EXPECT_THAT(differences(a, TensorRecord({2, 4}, {4, 1}, at::kHalf, true)),
              ElementsAre("shape: got [2, 4], expected [2, 3]", "stride: got [4, 1], expected [3, 1]",
                          "dtype: got float16, expected float32"));
  EXPECT_THAT(differences(a, TensorRecord({2, 3}, {1, 2}, at::kFloat, true)),
              ElementsAre("stride: got [1, 2], expected [3, 1]"));
  // Equal for the contract, though not equal as values; the separate comparison reports it.
  const TensorRecord no_grad = a.with_requires_grad(false);
  EXPECT_NE(a, no_grad);
  EXPECT_THAT(differences(a, no_grad), IsEmpty());
  EXPECT_THAT(requires_grad_differences(a, no_grad), ElementsAre("requires_grad: got false, expected true"));
  EXPECT_THAT(requires_grad_differences(no_grad, a), ElementsAre("requires_grad: got true, expected false"));
  EXPECT_THAT(requires_grad_differences(a, a), IsEmpty());
}

TEST(TensorRecord, Text) {
  EXPECT_EQ(to_string(TensorRecord()), "float32[]");
  EXPECT_EQ(to_string(TensorRecord({2, 3}, {3, 1}, at::kHalf)), "float16[2, 3]");
  EXPECT_EQ(to_string(TensorRecord({2, 3}, {1, 2}, at::kFloat, true)),
            "float32[2, 3] stride [1, 2] requires_grad");
}

TEST(TensorRecord, EqualityAndHashSeeEveryField) {
  const std::vector<TensorRecord> all = {
      TensorRecord(),
      TensorRecord({0}, {1}, at::kFloat),
      TensorRecord({2, 3}, {3, 1}, at::kFloat),
      TensorRecord({3, 2}, {3, 1}, at::kFloat),
      TensorRecord({2, 3}, {1, 2}, at::kFloat),
      TensorRecord({2, 3}, {3, 1}, at::kHalf),
      TensorRecord({2, 3}, {3, 1}, at::kFloat, true),
      TensorRecord({2, 3, 1}, {3, 1, 1}, at::kFloat),
  };
  std::unordered_set<TensorRecord> set(all.begin(), all.end());
  EXPECT_THAT(set, SizeIs(all.size()));
  std::set<std::size_t> hashes;
  for (const auto& record : all) hashes.insert(record.hash());
  EXPECT_THAT(hashes, SizeIs(all.size()));
}

// ---- distributed records ----

TEST(DistributedRecord, ByDynamicType) {
  FakeShards shards;
  const at::Tensor whole = shards.make(4, 3, true);
  const TensorMeta meta = meta_of(whole);
  ASSERT_TRUE(is_distributed(meta));
  const auto& record = std::get<DistributedRecord>(meta);
  EXPECT_EQ(record, distributed_record_of(whole));
  EXPECT_EQ(record.local().shape(), (Sizes{2, 3}));
  EXPECT_EQ(record.global_shape(), (Sizes{4, 3}));
  EXPECT_EQ(record.global_stride(), (Sizes{3, 1}));
  EXPECT_EQ(record.placements(), (Placements{Shard{0}}));
  EXPECT_EQ(record.mesh_key(), (MeshKey{{"tp"}, MeshLayout({2})}));
  EXPECT_TRUE(record.requires_grad());
  EXPECT_TRUE(requires_grad(meta));
  EXPECT_EQ(local_record(meta), record.local());
  EXPECT_EQ(record_of(make_raw_tensor(meta, at::kCPU)), record.local().with_requires_grad(false));
  EXPECT_EQ(meta_of(whole.detach()), TensorMeta(record.with_requires_grad(false)));

  const at::Tensor plain = at::ones({4, 3});
  EXPECT_EQ(meta_of(plain), TensorMeta(record_of(plain)));
  EXPECT_FALSE(is_distributed(meta_of(plain)));
}

TEST(DistributedRecord, AskingForTheOtherKindNamesTheRightCall) {
  FakeShards shards;
  const at::Tensor whole = shards.make(4, 3);
  const auto plain_asked = message_of<PipeliningMetadataError>([&] { record_of(whole); });
  EXPECT_THAT(plain_asked, HasSubstr("got a distributed tensor, expected a plain one"));
  EXPECT_THAT(plain_asked, HasSubstr("distributed_record_of(tensor)"));
  EXPECT_THAT(plain_asked, HasSubstr("meta_of(tensor)"));
  // Also catchable as its base class.
  EXPECT_THROW(record_of(whole), std::exception);
  EXPECT_EQ(record_of(local_if_distributed(whole)).shape(), (Sizes{2, 3}));
  EXPECT_THAT(message_of<PipeliningMetadataError>([&] { distributed_record_of(at::ones({2})); }),
              HasSubstr("call record_of(tensor)"));
  EXPECT_THAT(message_of<PipeliningMetadataError>([&] { distributed_record_of(at::Tensor()); }),
              HasSubstr("an undefined tensor"));
}

TEST(DistributedRecord, LocalIfDistributed) {
  FakeShards shards;
  const at::Tensor whole = shards.make(4, 3, true);
  const at::Tensor local = local_if_distributed(whole);
  EXPECT_TRUE(at::equal(local, at::arange(6, at::kFloat).view({2, 3})));
  EXPECT_TRUE(local.requires_grad());
  EXPECT_NE(local.grad_fn(), nullptr);  // connected: backward reaches the whole
  const at::Tensor detached = local_if_distributed(whole, kDetach);
  EXPECT_FALSE(detached.requires_grad());
  EXPECT_EQ(detached.grad_fn(), nullptr);
  EXPECT_TRUE(at::equal(detached, local));

  const at::Tensor plain = at::ones({2}).requires_grad_(true);
  EXPECT_TRUE(local_if_distributed(plain).is_same(plain));
  EXPECT_FALSE(local_if_distributed(plain, kDetach).requires_grad());
  EXPECT_TRUE(local_if_distributed(plain, kDetach).is_alias_of(plain));
  EXPECT_FALSE(local_if_distributed(at::Tensor()).defined());
  EXPECT_FALSE(local_if_distributed(at::Tensor(), kDetach).defined());
}

TEST(DistributedRecord, RegistrationEndsWithItsObject) {
  at::Tensor whole;
  {
    FakeShards shards;
    whole = shards.make(4, 3);
    EXPECT_TRUE(is_distributed_tensor(whole));
    FakeShards others("other");  // a second type at the same time
    const at::Tensor other = others.make(2, 2);
    EXPECT_EQ(distributed_type_of(whole)->name, "fake");
    EXPECT_EQ(distributed_type_of(other)->name, "other");
    EXPECT_THAT(message_of<ValueError>([] { FakeShards("fake"); }), HasSubstr("\"fake\" a second time"));
    EXPECT_EQ(distributed_type_of(whole)->name, "fake");  // the refused one changed nothing
  }
  EXPECT_FALSE(is_distributed_tensor(whole));
  EXPECT_EQ(record_of(whole).shape(), (Sizes{4, 3}));
  EXPECT_THAT(message_of<ValueError>([] { DistributedTypeRegistration({.name = "half"}); }),
              HasSubstr("holds, record and local"));
}

TEST(DistributedRecord, ReadersAndRegistrationsMayRunAtTheSameTime) {
  FakeShards shards;
  const at::Tensor whole = shards.make(4, 3);
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i)
    readers.emplace_back([&] {
      while (!stop)
        if (!is_distributed_tensor(whole)) ++wrong;
    });
  for (int i = 0; i < 20; ++i) FakeShards coming_and_going("coming");
  stop = true;
  for (auto& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
}

TEST(DistributedRecord, DifferencesNameEachField) {
  const auto all = test::distributed_variants();
  const std::vector<std::vector<std::string>> fields = {
      {},
      {"shape", "stride"},
      {"dtype"},
      {"stride"},
      {"global shape"},
      {"global stride"},
      {"placements"},
      {"placements"},
      {"placements"},
      {"placements"},
      {"placements"},
      {"placements"},
      {"mesh axes"},
      {"mesh axes"},
      {"mesh layout"},
      {"mesh layout"},
      {},  // requires_grad
  };
  ASSERT_EQ(all.size(), fields.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::vector<std::string> found;
    for (const std::string& line : differences(TensorMeta(all[0]), TensorMeta(all[i])))
      found.push_back(line.substr(0, line.find(':')));
    EXPECT_EQ(found, fields[i]) << to_string(all[i]);
  }
  EXPECT_THAT(differences(all[0], all[6]), ElementsAre("placements: got [S(1), R], expected [S(0), R]"));
  EXPECT_THAT(differences(all[0], all[12]), ElementsAre("mesh axes: got [tp, dp], expected [dp, tp]"));
  EXPECT_THAT(differences(all[0], all[15]), ElementsAre("mesh layout: got none, expected (2, 2):(2, 1)"));
  EXPECT_THAT(requires_grad_differences(TensorMeta(all[0]), TensorMeta(all[16])),
              ElementsAre("requires_grad: got true, expected false"));
}

TEST(DistributedRecord, ComparedWithAPlainOneOneLineNamesTheKind) {
  const DistributedRecord distributed = test::distributed_variants()[0];
  const TensorMeta plain = distributed.local();
  EXPECT_THAT(differences(TensorMeta(distributed), plain),
              ElementsAre("kind: got a plain tensor, expected a distributed tensor"));
  EXPECT_THAT(differences(plain, TensorMeta(distributed)),
              ElementsAre("kind: got a distributed tensor, expected a plain tensor"));
  EXPECT_NE(plain, TensorMeta(distributed));
  EXPECT_THAT(differences(TensorMeta(distributed), TensorMeta(TensorRecord::contiguous({9}, at::kFloat))),
              SizeIs(3));
}

TEST(DistributedRecord, EqualityAndHashSeeEveryField) {
  const auto all = test::distributed_variants();
  std::unordered_set<TensorMeta> set(all.begin(), all.end());
  set.insert(TensorMeta(all[0].local()));
  EXPECT_THAT(set, SizeIs(all.size() + 1));
  EXPECT_EQ(all[0], test::distributed_variants()[0]);
  EXPECT_EQ(all[0].hash(), test::distributed_variants()[0].hash());
}

TEST(DistributedRecord, InconsistentPartsAreRefused) {
  const TensorRecord local = TensorRecord::contiguous({2, 3}, at::kFloat);
  const MeshKey key{{"tp"}, MeshLayout({2})};
  const auto refused = [&](Sizes shape, Sizes stride, Placements placements, MeshKey mesh) {
    return message_of<ValueError>([&] { DistributedRecord(local, shape, stride, placements, mesh); });
  };
  EXPECT_NO_THROW(DistributedRecord(local, {4, 3}, {3, 1}, {Shard{0}}, key));
  EXPECT_THAT(refused({4}, {3, 1}, {Shard{0}}, key), HasSubstr("global shape: got [4], expected 2 dims"));
  EXPECT_THAT(refused({4, 3}, {1}, {Shard{0}}, key), HasSubstr("global stride: got [1]"));
  EXPECT_THAT(refused({4, -3}, {3, 1}, {Shard{0}}, key), HasSubstr("no negative number"));
  EXPECT_THAT(refused({4, 3}, {3, 1}, {Shard{2}}, key), HasSubstr("dims below 2"));
  EXPECT_THAT(refused({4, 3}, {3, 1}, {Shard{-1}}, key), HasSubstr("counted from the front"));
  EXPECT_THAT(refused({4, 3}, {3, 1}, {StridedShard{0, 0}}, key), HasSubstr("split factors of at least 1"));
  EXPECT_THAT(refused({4, 3}, {3, 1}, {Shard{0}, Replicate{}}, key),
              HasSubstr("got [S(0), R], expected 1 placement"));
  EXPECT_THAT(refused({4, 3}, {3, 1}, {}, key), HasSubstr("got [], expected 1 placement"));
  EXPECT_THAT(refused({4, 3}, {3, 1}, {Shard{0}}, MeshKey{{"a", "b"}, MeshLayout({2})}),
              HasSubstr("mesh axis names: got [a, b]"));
  EXPECT_THAT(refused({4, 3}, {3, 1}, {Shard{0}}, MeshKey{{"a", "b"}, std::nullopt}),
              HasSubstr("expected 2 placements"));
  EXPECT_EQ(DistributedRecord().global_shape(), Sizes{});
  EXPECT_EQ(DistributedRecord().mesh_key(), MeshKey{});
}

TEST(DistributedRecord, Text) {
  const auto record = test::distributed_variants()[0];
  EXPECT_EQ(to_string(TensorMeta(record)),
            "float32[2, 3] of [4, 3], placements [S(0), R], mesh [dp, tp] (2, 2):(2, 1)");
  EXPECT_EQ(to_string(std::optional<TensorMeta>()), "nothing");
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK

RC_GTEST_PROP(RecordProperty, TensorsMadeFromARecordHaveIt, ()) {
  const TensorRecord record = test::arbitrary_record(*rc::gen::inRange<std::size_t>(0, 5));
  RC_ASSERT(record_of(make_tensor(record, at::Device(at::kMeta))) == record);
}

RC_GTEST_PROP(RecordProperty, DifferencesAgreeWithEquality, ()) {
  const TensorMeta a = test::arbitrary_meta();
  const TensorMeta b = *rc::gen::arbitrary<bool>() ? a : test::arbitrary_meta();
  RC_CLASSIFY(a == b);
  const bool no_difference = differences(a, b).empty() && requires_grad_differences(a, b).empty();
  RC_ASSERT(no_difference == (a == b));
  RC_ASSERT(differences(b, a).size() == differences(a, b).size());
  if (a == b) RC_ASSERT(std::hash<TensorMeta>{}(a) == std::hash<TensorMeta>{}(b));
}

#endif

}  // namespace tensor_record_test
}  // namespace penstock
