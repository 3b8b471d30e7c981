// Tensors as blocks of memory.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/errors.h"
#include "penstock/torch/tree/dense_layout.h"

namespace penstock {
namespace dense_layout_test {

using Dims = std::vector<std::int64_t>;

std::vector<at::Tensor> tensors() {
  const at::Tensor x = at::arange(2 * 3 * 4 * 5, at::kDouble).view({2, 3, 4, 5});
  return {x,
          x.permute({3, 1, 0, 2}),
          x.contiguous(at::MemoryFormat::ChannelsLast),
          x.narrow(1, 0, 2),
          x.slice(3, 1, 5, 2),
          x.select(2, 1).transpose(0, 2),
          x.unsqueeze(1).expand({-1, 3, -1, -1, -1}),
          x.unfold(2, 2, 1),
          x.narrow(0, 0, 0).transpose(1, 3),
          x.sum(),
          x.narrow(1, 1, 1).transpose(1, 2),
          x.narrow(0, 1, 1),
          at::ones({1}).expand({4}),
          at::ones({1, 1}).expand({1, 1})};
}

TEST(DenseLayout, IsWhatLibTorchCallsDense) {
  for (const at::Tensor& t : tensors())
    EXPECT_EQ(is_dense(t.sizes(), t.strides()), t.numel() == 0 || t.is_non_overlapping_and_dense())
        << t.sizes() << t.strides();
}

TEST(DenseLayout, StridesAreThoseOfAClone) {
  for (const at::Tensor& t : tensors()) {
    if (t.numel() == 0) continue;
    EXPECT_EQ(dense_strides(t.sizes(), t.strides()), t.clone().strides().vec()) << t.sizes() << t.strides();
  }
  const at::Tensor empty = at::empty({2, 0, 3}).transpose(0, 2);
  EXPECT_EQ(dense_strides(empty.sizes(), empty.strides()), empty.strides().vec());
}

TEST(DenseLayout, MemoryAndBack) {
  for (const at::Tensor& t : tensors()) {
    const Dims strides = dense_strides(t.sizes(), t.strides());
    const at::Tensor dense = in_layout(t, strides);
    EXPECT_TRUE(dense.equal(t));
    EXPECT_TRUE(same_layout(t.sizes(), dense.strides(), strides));
    // No copy if the layout is already dense.
    EXPECT_EQ(dense.is_same(t), is_dense(t.sizes(), t.strides())) << t.sizes() << t.strides();
    const at::Tensor memory = memory_of(dense);
    EXPECT_TRUE(memory.is_contiguous());
    EXPECT_EQ(memory.data_ptr(), dense.data_ptr());
    const at::Tensor arrived = at::empty_strided(t.sizes(), strides, t.options());
    memory_of(arrived).copy_(memory.view_as(memory_of(arrived)));
    EXPECT_TRUE(arrived.equal(t));
  }
  EXPECT_THROW(memory_of(at::ones({4, 4}).narrow(1, 0, 2)), ValueError);
  EXPECT_THROW(memory_of(at::ones({1}).expand({4})), ValueError);
}

TEST(DenseLayout, PendingConjugationsAreResolved) {
  const at::Tensor z = at::complex(at::ones({2, 3}), at::arange(6, at::kFloat).view({2, 3}));
  const at::Tensor resolved = in_layout(z.conj(), z.strides());
  EXPECT_FALSE(resolved.is_conj());
  EXPECT_TRUE(at::imag(resolved).equal(-at::imag(z)));
  const at::Tensor negated = at::imag(z.conj());
  ASSERT_TRUE(negated.is_neg());
  EXPECT_FALSE(in_layout(negated, Dims{3, 1}).is_neg());
  EXPECT_TRUE(in_layout(negated, Dims{3, 1}).equal(-at::imag(z)));
}

TEST(DenseLayout, RecordsOfTheSameMemoryCompareEqual) {
  const TensorRecord one({2, 1, 3}, {3, 3, 1}, at::kFloat), other({2, 1, 3}, {3, 1, 1}, at::kFloat),
      turned({2, 1, 3}, {1, 1, 2}, at::kFloat);
  EXPECT_EQ(comparable_meta(one), comparable_meta(other));
  EXPECT_NE(comparable_meta(one), comparable_meta(turned));
  const TensorRecord gaps({2, 3}, {12, 2}, at::kFloat, true);
  EXPECT_EQ(dense_meta(gaps), TensorMeta(TensorRecord::contiguous({2, 3}, at::kFloat, true)));
  EXPECT_EQ(dense_meta(turned), TensorMeta(turned));
  const TensorRecord none({0, 3}, {1, 7}, at::kFloat);
  EXPECT_EQ(comparable_meta(none), TensorMeta(TensorRecord::contiguous({0, 3}, at::kFloat)));
  const TensorMeta whole = DistributedRecord(gaps, {4, 3}, {3, 1}, {Shard{0}}, {{"tp"}, {}});
  EXPECT_EQ(dense_meta(whole),
            TensorMeta(DistributedRecord(TensorRecord::contiguous({2, 3}, at::kFloat, true), {4, 3}, {3, 1},
                                         {Shard{0}}, {{"tp"}, {}})));
}

}  // namespace dense_layout_test
}  // namespace penstock
