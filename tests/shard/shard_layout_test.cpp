// How a tensor is cut over ranks: exhaustively for small shapes.
#include "penstock/shard/layout/shard_layout.h"

#include <gtest/gtest.h>

#include "penstock/errors.h"
#include "penstock/mesh/local_shard.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace shard_layout_test {

using test::has_text;
using test::message_of;
using Numbers = std::vector<std::int64_t>;

TEST(ShardLayout, PiecesAreThoseOfAShardPlacement) {
  for (std::int64_t a = 0; a <= 7; ++a)
    for (std::int64_t b = 0; b <= 7; ++b)
      for (int ranks = 1; ranks <= 5; ++ranks)
        for (const std::int64_t dim : {0, 1, -1}) {
          const ShardLayout layout({a, b}, dim, ranks);
          EXPECT_EQ(layout.dim(), dim == 0 ? 0 : 1);
          std::int64_t sum = 0;
          for (int rank = 0; rank < ranks; ++rank) {
            const LocalShard part = local_shape_and_offset({a, b}, {ranks}, {rank}, {Shard{dim}});
            ASSERT_EQ(layout.piece_shape(rank), part.shape);
            ASSERT_EQ(layout.offset(rank), part.offset[static_cast<std::size_t>(layout.dim())]);
            ASSERT_LE(layout.piece_numel(rank), layout.padded_numel());
            sum += layout.piece_numel(rank);
          }
          EXPECT_EQ(sum, a * b);
          EXPECT_EQ(layout.numel(), a * b);
          EXPECT_EQ(layout.padded_shape(), layout.piece_shape(0));
          EXPECT_EQ(layout.even(), (layout.dim() == 0 ? a : b) % ranks == 0);
        }
}

TEST(ShardLayout, BadInputSaysWhatToChange) {
  EXPECT_TRUE(has_text(message_of<ValueError>([] { ShardLayout({3, 4}, 2, 2); }), "-2 to 1"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { ShardLayout({}, 0, 2); }), "0-dim"));
  EXPECT_THROW(ShardLayout({3}, 0, 0), ValueError);
  EXPECT_EQ(ShardLayout({}, 0, 1).numel(), 1);
}

}  // namespace shard_layout_test
}  // namespace penstock
