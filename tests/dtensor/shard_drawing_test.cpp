// Drawings of shardings: the exact text, the SVG by its structure.
#include "penstock/dtensor/plan/shard_drawing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "penstock/dtensor/plan/shard_grid.h"
#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::test {
namespace shard_drawing_test {

using Numbers = std::vector<std::int64_t>;

DeviceMesh mesh_of(const Numbers& shape, const std::vector<std::string>& names = {}) {
  std::int64_t size = 1;
  for (const std::int64_t n : shape) size *= n;
  return init_device_mesh("cpu", shape, names, 0, static_cast<int>(size));
}

DeviceMesh two_by_two() { return mesh_of({2, 2}, {"dp", "tp"}); }

TEST(ShardDrawingText, UnevenRowsAndAnEmptyRank) {
  EXPECT_EQ(draw_sharding_text({5}, mesh_of({4}), {Shard{0}}), R"([5] as [S(0)] on 4 ranks
dim 0 to the right; cells name ranks

  0-1   2-3   4
+-----+-----+---+
| 0   | 1   | 2 |
+-----+-----+---+
no elements: rank 3
)");
}

TEST(ShardDrawingText, RowsAndColumns) {
  EXPECT_EQ(draw_sharding_text({5, 4}, two_by_two(), {Shard{0}, Shard{-1}}),
            R"([5, 4] as [S(0), S(1)] on dp=2 x tp=2
dim 0 down, dim 1 to the right; cells name ranks

      0-1   2-3
    +-----+-----+
0-2 | 0   | 1   |
    +-----+-----+
3-4 | 2   | 3   |
    +-----+-----+
)");
}

TEST(ShardDrawingText, ReplicatedPartsListTheirRanks) {
  EXPECT_EQ(draw_sharding_text({5, 4}, two_by_two(), {Shard{0}, Replicate{}}),
            R"([5, 4] as [S(0), R] on dp=2 x tp=2
dim 0 down, dim 1 to the right; cells name ranks

      0-3
    +------+
0-2 | 0, 1 |
    +------+
3-4 | 2, 3 |
    +------+
ranks with a comma between them hold the same values
)");
  // Four or more consecutive ranks are a range; long lists take several lines.
  EXPECT_EQ(draw_sharding_text({2}, mesh_of({2, 12}), {Shard{0}, Replicate{}}),
            R"([2] as [S(0), R] on 2 x 12 ranks
dim 0 to the right; cells name ranks

  0      1
+------+-------+
| 0-11 | 12-23 |
+------+-------+
ranks with a comma between them hold the same values
)");
  EXPECT_EQ(draw_sharding_text({2, 1}, mesh_of({9, 2}), {Replicate{}, Shard{0}}),
            R"([2, 1] as [R, S(0)] on 9 x 2 ranks
dim 0 down, dim 1 to the right; cells name ranks

    0
  +------------------------+
0 | 0, 2, 4, 6, 8, 10, 12, |
  | 14, 16                 |
  +------------------------+
1 | 1, 3, 5, 7, 9, 11, 13, |
  | 15, 17                 |
  +------------------------+
ranks with a comma between them hold the same values
)");
}

TEST(ShardDrawingText, StridedShards) {
  // Split by tp first: rank 2, on tp 0, has what comes after rank 0's.
  EXPECT_EQ(draw_sharding_text({7}, two_by_two(), {StridedShard{0, 2}, Shard{0}}),
            R"([7] as [_S(0, 2), S(0)] on dp=2 x tp=2
dim 0 to the right; cells name ranks

  0-1   2-3   4-5   6
+-----+-----+-----+---+
| 0   | 2   | 1   | 3 |
+-----+-----+-----+---+
)");
  // Literal: two pieces, each over both ranks.
  EXPECT_EQ(draw_sharding_text({4}, mesh_of({2}, {"tp"}), {StridedShard{0, 2}}), R"([4] as [_S(0, 2)] on tp=2
dim 0 to the right; cells name ranks

  0   1   2   3
+---+---+---+---+
| 0 | 1 | 0 | 1 |
+---+---+---+---+
)");
}

TEST(ShardDrawingText, Terms) {
  EXPECT_EQ(draw_sharding_text({4, 4}, two_by_two(), {Shard{0}, Partial{}}),
            R"([4, 4] as [S(0), P(sum)] on dp=2 x tp=2
dim 0 down, dim 1 to the right; cells name ranks

      0-3
    +-------+
0-1 | 0 + 1 |
    +-------+
2-3 | 2 + 3 |
    +-------+
P(sum) over tp: the tensor is the sum of the terms, which + joins
)");
  // Replicas of partial values, of a scalar.
  EXPECT_EQ(draw_sharding_text({}, two_by_two(), {Replicate{}, Partial{PartialOp::Max}}),
            R"([] as [R, P(max)] on dp=2 x tp=2
cells name ranks

+---------------+
| 0, 2 max 1, 3 |
+---------------+
P(max) over tp: the tensor is the maximum of the terms, which max joins
ranks with a comma between them hold the same values
)");
  EXPECT_TRUE(has_text(draw_sharding_text({4}, two_by_two(), {Partial{}, Partial{PartialOp::Min}}),
                       "| 0 & 1 & 2 & 3 |"));
}

TEST(ShardDrawingText, MoreDimsAreATableAndAPicture) {
  EXPECT_EQ(draw_sharding_text({2, 5, 8}, two_by_two(), {Shard{2}, Shard{1}}),
            R"([2, 5, 8] as [S(2), S(1)] on dp=2 x tp=2

rank  (dp, tp)  dim 0  dim 1  dim 2
   0  (0, 0)    all    0-2    0-3
   1  (0, 1)    all    3-4    0-3
   2  (1, 0)    all    0-2    4-7
   3  (1, 1)    all    3-4    4-7

dim 1 down, dim 2 to the right; cells name ranks

      0-3   4-7
    +-----+-----+
0-2 | 0   | 2   |
    +-----+-----+
3-4 | 1   | 3   |
    +-----+-----+
)");
  const std::string three = draw_sharding_text({4, 2, 6}, mesh_of({2, 2, 3}), {Shard{0}, Shard{1}, Shard{2}});
  EXPECT_TRUE(has_text(three, "dim 0 down, dim 2 to the right"));
  EXPECT_TRUE(has_text(three, "different parts of the dims that are not drawn"));
  EXPECT_EQ(draw_sharding_text({1, 2, 3}, mesh_of({2}), {Partial{}}), R"([1, 2, 3] as [P(sum)] on 2 ranks

rank  at   dim 0  dim 1  dim 2
   0  (0)  all    all    all
   1  (1)  all    all    all
P(sum) over axis 0: the tensor is the sum of the terms that its ranks hold
)");
}

TEST(ShardDrawingText, NothingToDraw) {
  EXPECT_EQ(draw_sharding_text({0, 4}, mesh_of({2}), {Shard{1}}), R"([0, 4] as [S(1)] on 2 ranks

rank  at   dim 0    dim 1
   0  (0)  nothing  0-1
   1  (1)  nothing  2-3
the tensor has no elements
)");
  EXPECT_EQ(draw_sharding_text({2}, DeviceMesh("cpu", {1}, {7}, {}, 7), {Shard{0}}),
            R"([2] as [S(0)] on 1 rank
dim 0 to the right; cells name ranks

  0-1
+-----+
| 7   |
+-----+
)");
  // Too many pieces for a grid: the table, with long lists truncated.
  EXPECT_TRUE(has_text(draw_sharding_text({4096, 4}, mesh_of({2}), {StridedShard{0, 512}}),
                       "0-3, 8-11, 16-19, ... 4088-4091 (512 ranges)   all"));
}

TEST(ShardDrawingText, ManyPiecesOfOneDimGoDown) {
  EXPECT_TRUE(has_text(draw_sharding_text({26}, mesh_of({13}), {Shard{0}}),
                       "dim 0 down; cells name ranks\n\n      +----+\n0-1   | 0  |\n"));
}

TEST(ShardDrawing, BadPlacementsAreRefused) {
  for (const auto& draw : {draw_sharding_text, draw_sharding_svg}) {
    EXPECT_THROW(draw({4}, two_by_two(), {Shard{0}}), ValueError);
    EXPECT_THROW(draw({4}, two_by_two(), {Shard{0}, Shard{1}}), ValueError);
  }
}

// Every element of the picture lists the ranks that hold it according to local_boxes.
TEST(ShardDrawing, CellsAgreeWithTheBoxesOfTheRanks) {
  const std::vector<Placement> ways{Replicate{},        Shard{0},           Shard{1},
                                    StridedShard{0, 2}, StridedShard{1, 3}, Partial{}};
  for (const Numbers& shape : {Numbers{5, 4}, {1, 7}, {12, 3}})
    for (const Numbers& mesh_shape : {Numbers{2, 2}, {3, 2}, {2, 4}})
      for (const Placement& a : ways)
        for (const Placement& b : ways) {
          const detail::ShardGrid grid(shape, mesh_of(mesh_shape), {a, b});
          ASSERT_EQ(grid.drawn, (std::vector<int>{0, 1}));
          std::int64_t covered = 0;
          for (std::size_t row = 0; row < grid.rows().size(); ++row)
            for (std::size_t column = 0; column < grid.columns().size(); ++column) {
              const Segment rows = grid.rows()[row], columns = grid.columns()[column];
              covered += rows.length * columns.length;
              std::set<int> drawn;
              for (const auto& term : grid.ranks_of(row, column)) drawn.insert(term.begin(), term.end());
              for (std::int64_t i = rows.offset; i < rows.offset + rows.length; ++i)
                for (std::int64_t j = columns.offset; j < columns.offset + columns.length; ++j) {
                  std::set<int> expected;
                  for (const auto& part : grid.parts)
                    for (const ShardBox& box : local_boxes(shape, mesh_shape, part.coordinate, {a, b}))
                      if (box.offset[0] <= i && i < box.offset[0] + box.shape[0] && box.offset[1] <= j &&
                          j < box.offset[1] + box.shape[1])
                        expected.insert(part.rank);
                  ASSERT_EQ(drawn, expected) << to_string(Placements{a, b}) << " at " << i << ", " << j;
                }
            }
          EXPECT_EQ(covered, shape[0] * shape[1]);
        }
}

// Returns what is wrong with a text as XML, or an empty string. Knows what the drawings use: elements,
// attributes, references.
std::string xml_fault(const std::string& text) {
  std::vector<std::string> open;
  const auto bad_reference = [&](const std::string& part) {
    for (std::size_t at = part.find('&'); at != std::string::npos; at = part.find('&', at + 1)) {
      const std::size_t end = part.find(';', at);
      if (end == std::string::npos ||
          !std::set<std::string>{"&amp", "&lt", "&gt", "&quot", "&#10"}.contains(part.substr(at, end - at)))
        return true;
    }
    return false;
  };
  std::size_t at = 0;
  bool rooted = false;
  while (at < text.size()) {
    const std::size_t tag = std::min(text.find('<', at), text.size());
    const std::string content = text.substr(at, tag - at);
    if (content.find('>') != std::string::npos || bad_reference(content)) return "content " + content;
    if (open.empty() && content.find_first_not_of("\n ") != std::string::npos)
      return "text outside of the root: " + content;
    if (tag == text.size()) break;
    const std::size_t end = text.find('>', tag);
    if (end == std::string::npos) return "a tag without an end";
    std::string inside = text.substr(tag + 1, end - tag - 1);
    at = end + 1;
    if (inside.starts_with('/')) {
      if (open.empty() || open.back() != inside.substr(1))
        return "</" + inside.substr(1) + "> where " + (open.empty() ? "nothing" : open.back()) + " is open";
      open.pop_back();
      continue;
    }
    const bool closed = inside.ends_with('/');
    if (closed) inside.pop_back();
    std::size_t position = std::min(inside.find(' '), inside.size());
    const std::string name = inside.substr(0, position);
    if (open.empty() && std::exchange(rooted, true)) return "a second root " + name;
    std::set<std::string> seen;
    while ((position = inside.find_first_not_of(' ', position)) != std::string::npos) {
      const std::size_t equals = inside.find("=\"", position);
      const std::size_t close = equals == std::string::npos ? equals : inside.find('"', equals + 2);
      if (close == std::string::npos) return "attributes of " + inside;
      const std::string attribute = inside.substr(position, equals - position),
                        value = inside.substr(equals + 2, close - equals - 2);
      if (!seen.insert(attribute).second) return attribute + " twice";
      if (attribute.empty() || value.find('<') != std::string::npos || bad_reference(value))
        return attribute + " = " + value;
      position = close + 1;
    }
    if (!closed) open.push_back(name);
  }
  return !rooted ? "no root" : open.empty() ? "" : open.back() + " stays open";
}

TEST(ShardDrawingSvg, TheCheckerFindsFaults) {
  EXPECT_EQ(xml_fault("<a b=\"1\"><c/>x &amp; y</a>\n"), "");
  for (const char* bad : {"", "<a>", "<a></b>", "<a b=1/>", "<a b=\"1\" b=\"2\"/>", "<a>&</a>",
                          "<a>x > y</a>", "<a/><b/>", "<a b=\"&\"/>", "x<a/>"})
    EXPECT_NE(xml_fault(bad), "") << bad;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(ShardDrawingSvg, EveryRankIsThere) {
  const std::vector<Placement> ways{Replicate{}, Shard{0}, StridedShard{0, 2}, Partial{}};
  for (const Numbers& shape : {Numbers{}, {5}, {3, 4}, {2, 3, 5}, {0, 4}})
    for (const Placement& a : ways)
      for (const Placement& b : ways) {
        if (shape.empty() && (a.splits() || b.splits())) continue;
        const std::string svg = draw_sharding_svg(shape, mesh_of({2, 3}, {"dp", "tp"}), {a, b});
        ASSERT_EQ(xml_fault(svg), "") << svg;
        EXPECT_TRUE(has_text(svg, "prefers-color-scheme:dark"));
        EXPECT_TRUE(has_text(svg, to_string(Placements{a, b})));
        for (int rank = 0; rank < 6; ++rank) {
          EXPECT_TRUE(has_text(svg, ">rank " + std::to_string(rank) + " at ("));
          EXPECT_TRUE(has_text(svg, ".r" + std::to_string(rank) + "{fill:#"));
          EXPECT_TRUE(has_text(svg, "class=\"r" + std::to_string(rank) + "\""));
        }
        EXPECT_EQ(has_text(svg, "hatched: terms") == true, a.is_partial() || b.is_partial());
      }
}

TEST(ShardDrawingSvg, CellsAreInProportionAndStriped) {
  const std::string svg = draw_sharding_svg({6, 4}, two_by_two(), {Shard{0}, Replicate{}});
  EXPECT_EQ(count(svg, "class=\"cell\""), 2u);
  // Two stripes per cell, and one more each in the legend.
  for (const char* rank : {"class=\"r0\"", "class=\"r1\"", "class=\"r2\"", "class=\"r3\""})
    EXPECT_EQ(count(svg, rank), 2u);
  EXPECT_EQ(count(svg, "height=\"180.0\""),
            6u);  // half of the picture: two stripes and a border for each row
  EXPECT_TRUE(has_text(svg, "rank 3 at (1, 1): dim 0: 3-5"));
  EXPECT_TRUE(has_text(draw_sharding_svg({3}, mesh_of({4}), {Shard{0}}), "rank 3 at (3): nothing"));
}

TEST(ShardDrawingSvg, NamesAreEscaped) {
  const std::string svg = draw_sharding_svg({4}, mesh_of({2}, {"<a&\"b\x01>"}), {Partial{}});
  EXPECT_EQ(xml_fault(svg), "");
  EXPECT_TRUE(has_text(svg, "&lt;a&amp;&quot;b\xEF\xBF\xBD&gt;=2"));
  EXPECT_EQ(svg.find('\x01'), std::string::npos);
}

TEST(ShardDrawingSvg, ManyRanksAndManyPieces) {
  const std::string many = draw_sharding_svg({4}, mesh_of({128}), {Replicate{}});
  EXPECT_EQ(xml_fault(many), "");
  EXPECT_TRUE(has_text(many, ">0-127<"));
  EXPECT_TRUE(has_text(many, ">rank 127 at (127): everything<"));
  const std::string pieces = draw_sharding_svg({100000}, mesh_of({2}), {StridedShard{0, 20000}});
  EXPECT_EQ(xml_fault(pieces), "");
  EXPECT_EQ(count(pieces, "class=\"cell\""), 0u);
  EXPECT_TRUE(has_text(pieces, "(20000 ranges)"));
}

}  // namespace shard_drawing_test
}  // namespace penstock::test
