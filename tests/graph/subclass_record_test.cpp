// Records of tensor subclasses: flattening, counting, rebuilding and comparing.
#include "penstock/graph/ir/subclass_record.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "tests/graph/registered_wrappers.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace subclass_record_test {

using sample::Boxed;
using sample::Two;
using test::has_text;
using test::message_of;
using test::same_tensor;

at::Tensor random_nesting(std::mt19937& random, int depth) {
  switch (depth == 0 ? 0 : random() % 3) {
    case 1:
      return Boxed::make(random_nesting(random, depth - 1));
    case 2:
      return Two::make(random_nesting(random, depth - 1), random_nesting(random, depth - 1));
    default:
      return at::randn({2, 3});
  }
}

// The number of plain tensors, counted independently.
std::size_t leaves(const at::Tensor& tensor) {
  if (const auto* boxed = payload_as<Boxed>(tensor)) return leaves(boxed->inner);
  if (const auto* two = payload_as<Two>(tensor)) return leaves(two->a) + leaves(two->b);
  return 1;
}

TEST(SubclassRecord, RandomNestingsRoundTrip) {
  test::register_sample_kinds();
  std::mt19937 random(7);
  std::size_t nested = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<at::Tensor> tensors, flat;
    std::vector<FlattenRecord> records;
    for (int i = 0; i < 3; ++i) {
      tensors.push_back(random_nesting(random, 4));
      records.push_back(FlattenRecord::of(tensors.back(), flat.size()));
      EXPECT_EQ(records.back().first_flat(), flat.size());
      EXPECT_EQ(records.back().count(), leaves(tensors.back()));
      records.back().flatten(tensors.back(), flat);
      nested += records.back().count() > 2 ? 1 : 0;
    }
    // In order: each plain tensor has the index of its position.
    std::size_t next = 0;
    for (const FlattenRecord& record : records)
      record.for_each_plain([&](const PlainTensorMeta& plain) { EXPECT_EQ(plain.flat_index, next++); });
    EXPECT_EQ(next, flat.size());
    for (int i = 0; i < 3; ++i) {
      const at::Tensor again = records[i].rebuild(flat);
      EXPECT_TRUE(same_tensor(again, tensors[i]));
      EXPECT_TRUE(records[i].matches(again));
      EXPECT_EQ(records[i].difference(again), "");
      EXPECT_EQ(FlattenRecord::of(again, records[i].first_flat()), records[i]);
      EXPECT_EQ(records[i].plain_names().size(), records[i].count());
      const std::vector<at::Tensor> parts = plain_parts(again);
      for (std::size_t part = 0; part < parts.size(); ++part)
        EXPECT_TRUE(parts[part].is_same(flat[records[i].first_flat() + part]));
    }
  }
  EXPECT_GT(nested, 100u);
}

TEST(SubclassRecord, TellsKindsContextsAndGeometriesApart) {
  test::register_sample_kinds();
  const at::Tensor x = at::ones({2, 3});
  const FlattenRecord record = FlattenRecord::of(Two::make(Boxed::make(x), x), 5);
  EXPECT_EQ(record.first_flat(), 5u);
  EXPECT_EQ(record.plain_names(), (std::vector<std::string>{".a.inner", ".b"}));
  EXPECT_EQ(record.subclass().to_text(), "Two two");
  EXPECT_EQ(record.subclass().attributes[1].second.first_flat(), 6u);
  EXPECT_EQ(record.difference(x), "a plain tensor, in the capture Two two");
  EXPECT_EQ(record.difference(Boxed::make(x)), "Boxed, in the capture Two two");
  EXPECT_EQ(record.difference(Two::make(x, x)), "Two two with a a plain tensor, in the capture Boxed");
  EXPECT_TRUE(
      has_text(record.difference(Two::make(Boxed::make(x), at::ones({3, 2}).t())), "Two two with b "));
  EXPECT_NE(record, FlattenRecord::of(Two::make(Boxed::make(x), x), 4));
  EXPECT_EQ(record, FlattenRecord::of(Two::make(Boxed::make(x + 1), x), 5));
  EXPECT_NE(FlattenRecord::of(x, 0), FlattenRecord::of(x.t(), 0));
  // A wrapper with another outer shape.
  EXPECT_NE(record, FlattenRecord::of(Two::make(Boxed::make(x.t()), x.t()), 5));
}

TEST(SubclassRecord, HoldsNoMemory) {
  test::register_sample_kinds();
  FlattenRecord record;
  c10::weak_intrusive_ptr<c10::StorageImpl> memory(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, at::DataPtr(nullptr, at::kCPU), nullptr, false));
  {
    const at::Tensor x = at::ones({4});
    memory = c10::weak_intrusive_ptr<c10::StorageImpl>(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(x.storage().unsafeGetStorageImpl()));
    record = FlattenRecord::of(Boxed::make(x), 0);
  }
  EXPECT_TRUE(memory.expired());
  for (const auto& [name, inner] : record.subclass().like->inner_tensors())
    EXPECT_TRUE(is_fake(inner)) << name;
}

TEST(SubclassRecord, SaysWhatIsMissing) {
  test::register_sample_kinds();
  const at::Tensor x = at::ones({2});
  const FlattenRecord record = FlattenRecord::of(Two::make(x, x), 1);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         record.rebuild({x, x});
                       }),
                       "at least 3, of which it uses indices 1 to 2"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         record.rebuild({x, x, at::Tensor()});
                       }),
                       "tensor b of a Two is undefined"));
  EXPECT_FALSE(FlattenRecord::of(x, 0).rebuild({at::Tensor()}).defined());
}

}  // namespace subclass_record_test
}  // namespace penstock::graph
