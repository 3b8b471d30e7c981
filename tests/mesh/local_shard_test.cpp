#include "penstock/mesh/local_shard.h"

#include <gtest/gtest.h>

#include <limits>

#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace local_shard_test {

using test::has_text;
using test::message_of;
using Numbers = std::vector<std::int64_t>;
using Segments = std::vector<Segment>;

TEST(LocalShard, ChunksRoundUp) {
  EXPECT_EQ(split_sizes_and_offsets(8, 4), (Segments{{0, 2}, {2, 2}, {4, 2}, {6, 2}}));
  EXPECT_EQ(split_sizes_and_offsets(5, 4), (Segments{{0, 2}, {2, 2}, {4, 1}, {5, 0}}));
  EXPECT_EQ(split_sizes_and_offsets(9, 4), (Segments{{0, 3}, {3, 3}, {6, 3}, {9, 0}}));
  EXPECT_EQ(split_sizes_and_offsets(1, 3), (Segments{{0, 1}, {1, 0}, {1, 0}}));
  EXPECT_EQ(split_sizes_and_offsets(0, 2), (Segments{{0, 0}, {0, 0}}));
  EXPECT_EQ(split_sizes_and_offsets(7, 1), (Segments{{0, 7}}));
  const std::int64_t big = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(split_sizes_and_offsets(big, 2), (Segments{{0, big / 2 + 1}, {big / 2 + 1, big / 2}}));
  EXPECT_THROW(split_sizes_and_offsets(-1, 2), ValueError);
  EXPECT_THROW(split_sizes_and_offsets(1, 0), ValueError);
}

TEST(LocalShard, OneAxisPerDim) {
  EXPECT_EQ(local_shape_and_offset({5, 3}, {2, 2}, {1, 0}, {Shard{0}, Shard{1}}),
            (LocalShard{{2, 2}, {3, 0}}));
  EXPECT_EQ(local_shape_and_offset({5, 3}, {2, 2}, {1, 1}, {Shard{0}, Shard{-1}}),
            (LocalShard{{2, 1}, {3, 2}}));
  EXPECT_EQ(local_shape_and_offset({5, 3}, {2, 2}, {1, 1}, {Replicate{}, Partial{}}),
            (LocalShard{{5, 3}, {0, 0}}));
  EXPECT_EQ(local_shape_and_offset({}, {2}, {1}, {Replicate{}}), (LocalShard{{}, {}}));
  EXPECT_EQ(local_boxes({}, {2}, {1}, {Replicate{}}), std::vector<ShardBox>{ShardBox{}});
}

TEST(LocalShard, SeveralAxesOnOneDim) {
  // 5 rows: 3 and 2, then 2 1 and 1 1.
  const auto rows = [](std::int64_t dp, std::int64_t tp) {
    return local_segments({5}, {2, 2}, {dp, tp}, {Shard{0}, Shard{0}})[0];
  };
  EXPECT_EQ(rows(0, 0), (Segments{{0, 2}}));
  EXPECT_EQ(rows(0, 1), (Segments{{2, 1}}));
  EXPECT_EQ(rows(1, 0), (Segments{{3, 1}}));
  EXPECT_EQ(rows(1, 1), (Segments{{4, 1}}));
}

TEST(LocalShard, OffsetOfAnEmptyShardIsTheDimSize) {
  EXPECT_EQ(local_shape_and_offset({1, 4}, {3, 2}, {2, 1}, {Shard{0}, Shard{1}}),
            (LocalShard{{0, 2}, {1, 2}}));
  EXPECT_EQ(local_shape_and_offset({3, 2}, {2, 2}, {1, 1}, {Shard{0}, Shard{0}}),
            (LocalShard{{0, 2}, {3, 0}}));
  EXPECT_TRUE(local_boxes({3, 2}, {2, 2}, {1, 1}, {Shard{0}, Shard{0}}).empty());
  EXPECT_EQ(local_shape_and_offset({0, 2}, {2}, {0}, {Shard{0}}), (LocalShard{{0, 2}, {0, 0}}));
  EXPECT_EQ(local_shape_and_offset({0, 2}, {2}, {0}, {Replicate{}}), (LocalShard{{0, 2}, {0, 0}}));
}

// Rows of [_S(0, k), S(0)] on dp=2 x tp=2 that were recorded from PyTorch.
TEST(LocalShard, StridedShardsAsRecorded) {
  const auto rows = [](std::int64_t n, std::int64_t factor, std::int64_t dp, std::int64_t tp) {
    return local_segments({n}, {2, 2}, {dp, tp}, {StridedShard{0, factor}, Shard{0}})[0];
  };
  EXPECT_EQ(rows(16, 2, 0, 0), (Segments{{0, 4}}));
  EXPECT_EQ(rows(16, 2, 0, 1), (Segments{{8, 4}}));
  EXPECT_EQ(rows(16, 2, 1, 0), (Segments{{4, 4}}));
  EXPECT_EQ(rows(16, 2, 1, 1), (Segments{{12, 4}}));
  // A factor that does not match tp=2.
  EXPECT_EQ(rows(16, 4, 0, 0), (Segments{{0, 2}, {4, 2}}));
  EXPECT_EQ(rows(16, 4, 0, 1), (Segments{{8, 2}, {12, 2}}));
  EXPECT_EQ(rows(16, 4, 1, 0), (Segments{{2, 2}, {6, 2}}));
  EXPECT_EQ(rows(16, 4, 1, 1), (Segments{{10, 2}, {14, 2}}));
  EXPECT_EQ(rows(8, 4, 1, 0), (Segments{{1, 1}, {3, 1}}));
  // A parameter of 3 and of 5 rows, sharded by tp and then by dp.
  EXPECT_EQ(rows(3, 2, 0, 0), (Segments{{0, 1}}));
  EXPECT_EQ(rows(3, 2, 0, 1), (Segments{{2, 1}}));
  EXPECT_EQ(rows(3, 2, 1, 0), (Segments{{1, 1}}));
  EXPECT_EQ(rows(3, 2, 1, 1), (Segments{}));
  EXPECT_EQ(rows(5, 2, 0, 0), (Segments{{0, 2}}));
  EXPECT_EQ(rows(5, 2, 0, 1), (Segments{{3, 1}}));
  EXPECT_EQ(rows(5, 2, 1, 0), (Segments{{2, 1}}));
  EXPECT_EQ(rows(5, 2, 1, 1), (Segments{{4, 1}}));
}

TEST(LocalShard, StridedShardsThatDoNotDivide) {
  // 7 rows by tp=2 into 0-3 and 4-6, then by dp=3.
  const auto rows = [](std::int64_t dp, std::int64_t tp) {
    return local_segments({7}, {3, 2}, {dp, tp}, {StridedShard{0, 2}, Shard{0}})[0];
  };
  EXPECT_EQ(rows(0, 0), (Segments{{0, 2}}));
  EXPECT_EQ(rows(1, 0), (Segments{{2, 2}}));
  EXPECT_EQ(rows(2, 0), (Segments{}));
  EXPECT_EQ(rows(0, 1), (Segments{{4, 1}}));
  EXPECT_EQ(rows(2, 1), (Segments{{6, 1}}));
}

TEST(LocalShard, OrderOfSplitsOnThreeAxes) {
  const Numbers shape = {16}, mesh = {2, 2, 2};
  const auto rows = [&](const Numbers& coordinate, const Placements& placements) {
    return local_segments(shape, mesh, coordinate, placements)[0];
  };
  // Axis 0, then 2, then 1.
  EXPECT_EQ(rows({1, 1, 0}, {Shard{0}, StridedShard{0, 2}, Shard{0}}), (Segments{{10, 2}}));
  // Axis 1, then 0, then 2.
  EXPECT_EQ(rows({1, 0, 1}, {StridedShard{0, 2}, Shard{0}, Shard{0}}), (Segments{{6, 2}}));
  // Axis 2, then 1, then 0.
  EXPECT_EQ(rows({1, 0, 0}, {StridedShard{0, 4}, StridedShard{0, 2}, Shard{0}}), (Segments{{2, 2}}));
  // A factor of 1 is a plain shard.
  EXPECT_EQ(rows({1, 0, 0}, {StridedShard{0, 1}, Replicate{}, Replicate{}}), (Segments{{8, 8}}));
}

TEST(LocalShard, BoxesOfAStridedShardAlone) {
  // The tp axis has been gathered: rows 0-1 and 4-5 of 8, and half of the columns.
  EXPECT_EQ(local_boxes({8, 6}, {2, 2}, {0, 1}, {StridedShard{0, 2}, Shard{1}}),
            (std::vector<ShardBox>{{{0, 3}, {2, 3}, {0, 0}}, {{4, 3}, {2, 3}, {2, 0}}}));
  EXPECT_EQ(local_shape_and_offset({8, 6}, {2, 2}, {0, 1}, {StridedShard{0, 2}, Shard{1}}),
            (LocalShard{{4, 3}, {0, 3}}));
  // A factor far larger than the dim works.
  EXPECT_EQ(local_segments({3}, {2}, {0}, {StridedShard{0, std::int64_t{1} << 60}})[0], (Segments{{0, 3}}));
  EXPECT_EQ(local_segments({3}, {2}, {1}, {StridedShard{0, std::int64_t{1} << 60}})[0], (Segments{}));
}

TEST(LocalShard, OfAMesh) {
  const auto shard = [](int rank) {
    return local_shape_and_offset({8, 6}, init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, rank, 8),
                                  {Shard{0}, Shard{1}});
  };
  EXPECT_EQ(shard(2), (LocalShard{{4, 3}, {4, 0}}));
  EXPECT_EQ(shard(5), (LocalShard{{0}, {}}));
  const DeviceMesh outside = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, 5, 8);
  EXPECT_TRUE(local_boxes({8, 6}, outside, {Shard{0}, Shard{1}}).empty());
  EXPECT_EQ(local_boxes({8, 6}, outside.as_rank(3), {Shard{0}, Shard{1}}),
            (std::vector<ShardBox>{{{4, 3}, {4, 3}, {0, 0}}}));
}

TEST(LocalShard, ErrorsSayWhatToChange) {
  const auto shard = [](const Numbers& shape, const Numbers& mesh, const Numbers& coordinate,
                        const Placements& placements) {
    return message_of<ValueError>([&] { local_shape_and_offset(shape, mesh, coordinate, placements); });
  };
  EXPECT_TRUE(has_text(shard({-1}, {2}, {0}, {Replicate{}}), "a dim of size -1"));
  EXPECT_TRUE(has_text(shard({1}, {2}, {0, 1}, {Replicate{}}), "2 numbers, expected 1"));
  EXPECT_TRUE(has_text(shard({1}, {2}, {2}, {Replicate{}}), "2 on axis 0 of size 2"));
  EXPECT_TRUE(has_text(shard({1}, {2, 2}, {0, 0}, {Replicate{}}), "one per mesh axis"));
  EXPECT_TRUE(has_text(shard({1}, {2}, {0}, {Shard{1}}), "a dim from -1 to 0"));
}

}  // namespace local_shard_test
}  // namespace penstock
