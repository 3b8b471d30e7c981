#include "penstock/placement.h"

#include <gtest/gtest.h>

#include <unordered_set>

#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace placement_test {

using test::has_text;
using test::message_of;

TEST(Placement, TextIsReadBack) {
  const Placements all = {Replicate{},
                          Shard{0},
                          Shard{-1},
                          Shard{12},
                          StridedShard{0, 2},
                          StridedShard{3, 16},
                          Partial{},
                          Partial{PartialOp::Avg},
                          Partial{PartialOp::Min},
                          Partial{PartialOp::Max},
                          Partial{PartialOp::Product}};
  for (const Placement& placement : all)
    EXPECT_EQ(parse_placement(placement.to_string()), placement) << placement.to_string();
  EXPECT_EQ(to_string(all),
            "[R, S(0), S(-1), S(12), _S(0, 2), _S(3, 16), P(sum), P(avg), P(min), P(max), P(product)]");
  EXPECT_EQ(parse_placements(to_string(all)), all);
  EXPECT_EQ(parse_placements("[]"), Placements{});
  EXPECT_EQ(parse_placements(" [ R ,_S(0,2) ] "), (Placements{Replicate{}, StridedShard{0, 2}}));
  EXPECT_EQ(std::unordered_set<Placement>(all.begin(), all.end()).size(), all.size());
}

TEST(Placement, MalformedTextIsRefused) {
  for (const char* text : {"",
                           "r",
                           "S",
                           "S0",
                           "S()",
                           "S(0",
                           "S(0)junk",
                           "S(0) R",
                           "S(x)",
                           "S(1.5)",
                           "S(99999999999999999999)",
                           "_S(0)",
                           "_S(0, 0)",
                           "_S(0, 2, 3)",
                           "P",
                           "P()",
                           "P(mean)",
                           "P(sum",
                           "[R]",
                           "Replicate()",
                           "RR"})
    EXPECT_THROW(parse_placement(text), ConfigError) << text;
  for (const char* text : {"", "R", "[R", "R]", "[R,]", "[,R]", "[R R]", "[R]]", "[[R]]"})
    EXPECT_THROW(parse_placements(text), ConfigError) << text;
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { parse_placement("S(0)junk"); }), "check \"junk\""));
}

TEST(Placement, Predicates) {
  const Placement shard = Shard{1}, strided = StridedShard{1, 2}, partial = Partial{PartialOp::Max},
                  whole = Replicate{};
  EXPECT_TRUE(shard.is_shard() && shard.is_shard(1) && shard.splits() && shard.splits(1));
  EXPECT_FALSE(shard.is_shard(0) || shard.is_strided_shard() || shard.is_partial() || shard.is_replicate() ||
               shard.splits(0));
  EXPECT_TRUE(strided.is_strided_shard() && strided.splits(1));
  EXPECT_FALSE(strided.is_shard() || strided.is_shard(1) || strided.splits(2));
  EXPECT_EQ(strided.dim(), 1);
  EXPECT_EQ(strided.split_factor(), 2);
  EXPECT_TRUE(partial.is_partial() && partial.is_partial(PartialOp::Max));
  EXPECT_FALSE(partial.is_partial(PartialOp::Sum) || partial.splits() || partial.splits(0));
  EXPECT_EQ(partial.partial_op(), PartialOp::Max);
  EXPECT_TRUE(whole.is_replicate() && Placement().is_replicate());
  EXPECT_THROW(whole.dim(), StateError);
  EXPECT_THROW(shard.split_factor(), StateError);
  EXPECT_THROW(shard.partial_op(), StateError);
  EXPECT_NE(shard, strided);
}

TEST(Placement, Normalize) {
  EXPECT_EQ(normalize_placements({Shard{-1}, StridedShard{-3, 2}, Replicate{}, Partial{}}, 4, 3),
            (Placements{Shard{2}, StridedShard{0, 2}, Replicate{}, Partial{}}));
  EXPECT_EQ(normalize_placements({}, 0, 3), Placements{});
  EXPECT_EQ(normalize_placements({Replicate{}}, 1, 0), Placements{Replicate{}});
}

TEST(Placement, NormalizeErrorsSayWhatToChange) {
  EXPECT_TRUE(has_text(message_of<ValueError>([] { normalize_placements({Shard{0}}, 2, 1); }),
                       "[S(0)], 1 of them, expected 2, one per mesh axis"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] {
                         normalize_placements({Replicate{}, Shard{2}}, 2, 2);
                       }),
                       "placement of mesh axis 1: got S(2), expected a dim from -2 to 1"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { normalize_placements({Shard{-3}}, 1, 2); }), "S(-3)"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { normalize_placements({Shard{0}}, 1, 0); }),
                       "the tensor has no dims"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] {
                         normalize_placements({StridedShard{0, 0}}, 1, 1);
                       }),
                       "split factor of at least 1"));
}

TEST(Placement, ListsHash) {
  std::unordered_set<Placements> seen = {
      {}, {Replicate{}}, {Replicate{}, Replicate{}}, {Shard{0}, Replicate{}}, {Replicate{}, Shard{0}}};
  EXPECT_EQ(seen.size(), 5U);
  EXPECT_TRUE(seen.contains(Placements{Shard{0}, Replicate{}}));
}

}  // namespace placement_test
}  // namespace penstock
