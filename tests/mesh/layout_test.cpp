#include "penstock/mesh_layout.h"

#include <gtest/gtest.h>

#include <limits>
#include <unordered_set>

#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace layout_test {

using test::has_text;
using test::message_of;
using Numbers = std::vector<std::int64_t>;

TEST(MeshLayout, RowMajor) {
  const MeshLayout grid({2, 3, 4});
  EXPECT_EQ(grid.ndim(), 3);
  EXPECT_EQ(grid.size(), 24);
  EXPECT_EQ(grid.size(1), 3);
  EXPECT_EQ(grid.shape(), (Numbers{2, 3, 4}));
  EXPECT_EQ(grid.extent(), 24);
  EXPECT_EQ(grid.index({1, 2, 3}), 23);
  EXPECT_EQ(grid.coordinate(17), (Numbers{1, 1, 1}));
  EXPECT_EQ(grid.coordinate(24), std::nullopt);
  EXPECT_EQ(grid.coordinate(-1), std::nullopt);
  EXPECT_EQ(grid.to_string(), "(2, 3, 4):(12, 4, 1)");
}

TEST(MeshLayout, NoAxesAreOneIndex) {
  EXPECT_EQ(MeshLayout().size(), 1);
  EXPECT_EQ(MeshLayout().index({}), 0);
  EXPECT_EQ(MeshLayout().indices(), (Numbers{0}));
  EXPECT_EQ(MeshLayout().coordinate(0), Numbers{});
  EXPECT_EQ(MeshLayout().to_string(), "():()");
}

TEST(MeshLayout, Slice) {
  const MeshLayout grid({2, 3, 4});
  EXPECT_EQ(grid.slice({0, 2}), MeshLayout({2, 4}, {12, 1}));
  EXPECT_EQ(grid.slice({2, 0}), MeshLayout({4, 2}, {1, 12}));
  EXPECT_EQ(grid.slice({1}).indices(), (Numbers{0, 4, 8}));
  EXPECT_EQ(grid.slice({2, 0}).indices(), (Numbers{0, 12, 1, 13, 2, 14, 3, 15}));
}

TEST(MeshLayout, FlattenJoinsWhatContinues) {
  const MeshLayout grid({2, 3, 4});
  EXPECT_EQ(grid.flatten({0, 1}), MeshLayout({6}, {4}));
  EXPECT_EQ(grid.flatten(), MeshLayout({24}));
  EXPECT_EQ(grid.flatten({0, 2}).to_string(), "((2, 4)):((12, 1))");
  EXPECT_EQ(grid.flatten({0, 2}).indices(), (Numbers{0, 1, 2, 3, 12, 13, 14, 15}));
  EXPECT_EQ(grid.flatten({0, 2}).size(0), 8);
  EXPECT_EQ(grid.flatten({0, 2}).index({5}), 13);
  EXPECT_EQ(grid.flatten({0, 2}).coordinate(13), Numbers{5});
  EXPECT_EQ(grid.flatten({0, 2}).coordinate(4), std::nullopt);
}

TEST(MeshLayout, UnflattenUndoesFlatten) {
  const MeshLayout grid({2, 3, 4});
  EXPECT_EQ(grid.flatten({0, 1}).unflatten(0, {2, 3}), grid.slice({0, 1}));
  EXPECT_EQ(grid.flatten({0, 2}).unflatten(0, {2, 4}), grid.slice({0, 2}));
  EXPECT_EQ(grid.flatten({0, 2}).unflatten(0, {2, 2, 2}).to_string(), "(2, 2, 2):(12, 2, 1)");
  EXPECT_EQ(grid.flatten({0, 2}).unflatten(0, {4, 2}).to_string(), "((2, 2), 2):((12, 2), 1)");
  EXPECT_EQ(grid.unflatten(2, {1, 2, 2}).to_string(), "(2, 3, 1, 2, 2):(12, 4, 0, 2, 1)");
}

TEST(MeshLayout, SizeOneHasNoStride) {
  EXPECT_EQ(MeshLayout({2, 1, 4}, {4, 99, 1}), MeshLayout({2, 1, 4}, {4, 0, 1}));
  EXPECT_EQ(MeshLayout({2, 1}).to_string(), "(2, 1):(1, 0)");
  EXPECT_EQ(MeshLayout({2, 1}).coordinate(1), (Numbers{1, 0}));
  EXPECT_NE(MeshLayout({2, 1}), MeshLayout({1, 2}));
}

TEST(MeshLayout, Origin) {
  const MeshLayout column({2}, {4});  // 8 ranks as 2 x 4: the columns 0 4, 1 5, 2 6, 3 7
  for (std::int64_t index = 0; index < 8; ++index) EXPECT_EQ(column.origin(index), index % 4);
  const MeshLayout row({4}, {1});
  for (std::int64_t index = 0; index < 8; ++index) EXPECT_EQ(row.origin(index), index / 4 * 4);
}

TEST(MeshLayout, EqualityAndHash) {
  std::unordered_set<MeshLayout> seen = {MeshLayout({2, 4}), MeshLayout({4, 2}), MeshLayout({2, 4}, {1, 2}),
                                         MeshLayout({8})};
  EXPECT_EQ(seen.size(), 4U);
  EXPECT_TRUE(seen.contains(MeshLayout({2, 4}, {4, 1})));
  EXPECT_TRUE(seen.contains(MeshLayout({2, 4}).flatten()));
  EXPECT_EQ(std::hash<MeshLayout>{}(MeshLayout({2, 4}).flatten()), std::hash<MeshLayout>{}(MeshLayout({8})));
}

TEST(MeshLayout, Disjoint) {
  const MeshLayout grid({2, 3, 4});
  EXPECT_TRUE(grid.slice({0}).is_disjoint(grid.slice({1, 2})));
  EXPECT_FALSE(grid.slice({0, 1}).is_disjoint(grid.slice({1})));
  EXPECT_FALSE(grid.flatten({0, 1}).is_disjoint(grid.slice({1})));
  EXPECT_EQ(grid.slice({2}).concatenate(grid.slice({0})), grid.slice({2, 0}));
  EXPECT_THROW(grid.slice({2}).concatenate(grid), ValueError);
}

TEST(MeshLayout, ErrorsSayWhatToChange) {
  const MeshLayout grid({2, 3});
  EXPECT_TRUE(has_text(message_of<ValueError>([] { MeshLayout({2, 0}); }), "size 0"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { MeshLayout({2, -3}); }), "-3"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { MeshLayout({2, 3}, {3}); }), "2 sizes and 1 strides"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] {
                         MeshLayout({2, 3}, {2, 1});
                       }),
                       "(2, 3):(2, 1), expected axes that do not overlap"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { MeshLayout({2}, {0}); }), "stride 0"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { grid.slice({2}); }), "got 2, expected 0 to 1"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { grid.slice({1, 1}); }), "axis 1 twice"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         grid.unflatten(1, {2, 2});
                       }),
                       "a product of 3, the size of axis 1"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { grid.unflatten(1, {-1, -3}); }), "a size of -1"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { grid.index({0}); }), "1 numbers, expected 2"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { grid.index({0, 3}); }), "got 3, expected 0 to 2"));
  // 2 x (2 x 3) of 2 x 2 x 3 without the middle axis: positions 0 1 2 | 6 7 8 cannot be split as 3 x 2.
  EXPECT_TRUE(has_text(message_of<ValueError>([] {
                         MeshLayout({2, 2, 3}).flatten({0, 2}).unflatten(0, {3, 2});
                       }),
                       "flattened from"));
}

TEST(MeshLayout, NumbersTooBigAreRefused) {
  const std::int64_t big = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(MeshLayout({big, 2}), ValueError);
  EXPECT_THROW(MeshLayout({2}, {big}), ValueError);
  EXPECT_THROW(MeshLayout({big, big, big}), ValueError);
  EXPECT_THROW(MeshLayout({2, 2}, {big / 2, 1}), ValueError);
  EXPECT_THROW(AxisLayout({{big / 2, 3}, {4, 1}}), ValueError);
  EXPECT_THROW(MeshLayout({4}).unflatten(0, {big, big}), ValueError);
}

}  // namespace layout_test
}  // namespace penstock
