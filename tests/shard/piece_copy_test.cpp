// Copies between whole tensors and the rows of collectives, and the memory of those rows.
#include "penstock/shard/pieces/piece_copy.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/errors.h"
#include "penstock/shard/pieces/buffer_pool.h"

namespace penstock {
namespace piece_copy_test {

// All dims, ranks that divide and that do not, empty pieces, other parameters in the same rows, different
// dtypes.
TEST(PieceCopy, SplitAndJoinAreInverse) {
  for (const std::vector<std::int64_t>& shape :
       std::vector<std::vector<std::int64_t>>{{7}, {1}, {0}, {4, 6}, {5, 3}, {2, 3, 5}, {3, 0, 2}, {1, 9}})
    for (std::int64_t dim = 0; dim < static_cast<std::int64_t>(shape.size()); ++dim)
      for (int ranks = 1; ranks <= 4; ++ranks)
        for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
          const ShardLayout layout(shape, dim, ranks);
          const at::Tensor whole = at::arange(layout.numel(), at::kFloat).add(1).view(shape);
          const std::int64_t before = 3, width = before + layout.padded_numel() + 2;
          const at::Tensor rows = at::full({ranks, width}, -1, at::TensorOptions(dtype));
          split_pieces(whole, layout, rows, before);
          for (int rank = 0; rank < ranks; ++rank) {
            const at::Tensor place = rows[rank].narrow(0, before, layout.padded_numel());
            EXPECT_TRUE(at::equal(place.narrow(0, 0, layout.piece_numel(rank)),
                                  piece_of(whole, layout, rank).reshape({-1}).to(dtype)));
            EXPECT_EQ(
                place.narrow(0, layout.piece_numel(rank), layout.padded_numel() - layout.piece_numel(rank))
                    .abs()
                    .sum()
                    .item<double>(),
                0)
                << "padding";
            EXPECT_TRUE(rows[rank].narrow(0, 0, before).eq(-1).all().item<bool>())
                << "what stands beside it stays";
            EXPECT_TRUE(rows[rank].narrow(0, width - 2, 2).eq(-1).all().item<bool>());
          }
          const at::Tensor back = at::zeros(shape);
          join_pieces(rows, before, layout, back);
          EXPECT_TRUE(at::equal(back, whole));
          // A gradient may have any strides.
          if (shape.size() == 2) {
            const at::Tensor strided = whole.t().contiguous().t();
            rows.fill_(-1);
            split_pieces(strided, layout, rows, before);
            join_pieces(rows, before, layout, back.zero_());
            EXPECT_TRUE(at::equal(back, whole));
          }
        }
}

TEST(PieceCopy, PartsOfBytes) {
  const at::Tensor bytes = at::zeros({64}, at::kByte);
  const at::Tensor part = typed_part(bytes, 8, at::kFloat, {2, 3});
  part.fill_(1);
  EXPECT_EQ(bytes.narrow(0, 0, 8).sum().item<int>(), 0);
  EXPECT_TRUE(at::equal(typed_part(bytes, 8, at::kFloat, {6}), at::ones({6})));
  EXPECT_TRUE(part.is_alias_of(bytes));
  EXPECT_THROW(typed_part(bytes, 2, at::kFloat, {1}), InvariantError);
}

TEST(BufferPool, MemoryIsUsedAgain) {
  const BufferPool pool;
  void* first = nullptr;
  {
    const at::Tensor a = pool.empty({10, 10}, at::kFloat, at::kCPU);
    first = a.data_ptr();
    const at::Tensor b = pool.bytes(400, at::kCPU);
    EXPECT_NE(b.data_ptr(), first) << "lent";
    EXPECT_EQ(pool.allocations(), 2u);
  }
  const at::Tensor again = pool.bytes(390, at::kCPU), other = pool.bytes(1000, at::kCPU);
  EXPECT_EQ(pool.allocations(), 3u) << "one of the two, and one of another size";
  EXPECT_EQ(pool.held_bytes(), 448u + 448u + 1024u);
  EXPECT_EQ(pool.bytes(0, at::kCPU).numel(), 0);
  EXPECT_EQ(pool.allocations(), 3u);
}

// Lent memory may outlive the pool.
TEST(BufferPool, LentMemoryMayOutliveThePool) {
  at::Tensor kept;
  {
    const BufferPool pool;
    kept = pool.empty({4}, at::kDouble, at::kCPU);
  }
  kept.fill_(2);
  EXPECT_EQ(kept.sum().item<double>(), 8);
}

}  // namespace piece_copy_test
}  // namespace penstock
