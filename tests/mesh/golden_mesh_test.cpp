// Reference data of the section `dtensor`: device meshes and local shapes. Every listed case of these kinds
// is run; unknown kinds and queries fail.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "penstock/device_mesh.h"
#include "penstock/errors.h"
#include "penstock/mesh/local_shard.h"
#include "tests/golden_data.h"

namespace penstock {
namespace golden_mesh_test {

using nlohmann::json;
namespace fs = std::filesystem;
using Numbers = std::vector<std::int64_t>;
using Names = std::vector<std::string>;

std::map<std::string, json> cases_of(const std::string& kind) { return test::golden_cases("dtensor", kind); }

Names split(const std::string& text) {
  Names names;
  std::stringstream parts(text);
  for (std::string name; std::getline(parts, name, ',');) names.push_back(name);
  return names;
}

// [[0, 1], [2, 3]] against row-major ranks.
json nested(const std::vector<int>& ranks, const Numbers& shape, std::size_t axis, std::size_t& next) {
  if (axis == shape.size()) return ranks.at(next++);
  json list = json::array();
  for (std::int64_t i = 0; i < shape[axis]; ++i) list.push_back(nested(ranks, shape, axis + 1, next));
  return list;
}

void expect_mesh(const DeviceMesh& mesh, const json& expected) {
  SCOPED_TRACE(mesh.to_string());
  std::size_t next = 0;
  const json actual = {{"ranks", nested(mesh.ranks(), mesh.shape(), 0, next)},
                       {"shape", mesh.shape()},
                       {"dim_names", mesh.names()},
                       {"coordinate", mesh.coordinate() ? json(*mesh.coordinate()) : json()},
                       {"ndim", mesh.ndim()},
                       {"size", mesh.size()}};
  EXPECT_EQ(actual, expected);
}

bool names_twice(const Names& names) {
  return std::set<std::string>(names.begin(), names.end()).size() < names.size();
}

// PyTorch accepts an axis of size 1 twice in a slice, which makes its name ambiguous; Penstock refuses that.
void expect_slice(const DeviceMesh& mesh, const Names& axes, const json& expected) {
  if (names_twice(axes)) {
    EXPECT_THROW(mesh.slice(axes), ValueError);
  } else {
    expect_mesh(mesh.slice(axes), expected);
  }
}

Placement placement_of(const std::string& text) {
  if (text == "R") return Replicate{};
  if (text == "P") return Partial{};
  if (text.size() > 1 && text[0] == 'S') return Shard{std::stoll(text.substr(1))};
  if (text.size() > 1 && text[0] == 'P') return parse_placement("P(" + text.substr(1) + ")");
  throw std::runtime_error("unknown placement " + text);
}

TEST(GoldenMesh, EveryKindOfCaseIsKnown) {
  // The last two kinds belong to the tests of redistribution.
  const std::set<std::string> known = {"device_mesh", "local_shape_offset", "redistribute",
                                       "redistribute_grad"};
  const json index = test::golden_index("dtensor");
  for (const auto& [kind, ids] : index.at("ids").items()) EXPECT_TRUE(known.contains(kind)) << kind;
}

TEST(GoldenMesh, DeviceMeshes) {
  for (const auto& [id, item] : cases_of("device_mesh")) {
    SCOPED_TRACE(id);
    const Numbers shape = item.at("shape");
    const Names names = item.at("dim_names").is_null() ? Names{} : item.at("dim_names").get<Names>();
    for (const auto& [rank_text, expected] : item.at("per_rank").items()) {
      SCOPED_TRACE("rank " + rank_text);
      const DeviceMesh mesh =
          init_device_mesh("cpu", shape, names, std::stoi(rank_text), item.at("world").get<int>());
      for (const auto& [question, answers] : expected.items()) {
        SCOPED_TRACE(question);
        if (question == "coordinate") {
          EXPECT_EQ(mesh.coordinate() ? json(*mesh.coordinate()) : json(), answers);
        } else if (question == "local_ranks") {
          for (const auto& [name, position] : answers.items())
            EXPECT_EQ(mesh.axis_rank(name), position.get<int>()) << name;
        } else if (question == "slices") {
          for (const auto& [axes, answer] : answers.items()) expect_slice(mesh, split(axes), answer);
        } else if (question == "flatten") {
          for (const auto& [axes, answer] : answers.items()) expect_mesh(mesh.flatten(split(axes)), answer);
        } else if (question == "lookup_flattened" || question == "mixed_slice") {
          // Created by the `flatten` queries, whatever their order.
          for (const auto& [axes, answer] : expected.at("flatten").items()) mesh.flatten(split(axes));
          for (const auto& [axes, answer] : answers.items()) expect_slice(mesh, split(axes), answer);
        } else if (question == "errors") {
          for (const auto& [call, type] : answers.items()) {
            SCOPED_TRACE(call);
            // No error: an axis of size 1 that is named twice.
            EXPECT_TRUE(type.is_string() || names_twice(split(call.substr(call.find(' ') + 1))))
                << "PyTorch allows it";
            // KeyError, RuntimeError, ... all mean an invalid argument here.
            if (call.starts_with("slice ")) {
              EXPECT_THROW(mesh.slice(split(call.substr(6))), ValueError) << type;
            } else if (call.starts_with("flatten ")) {
              EXPECT_THROW(mesh.flatten(split(call.substr(8))), ValueError) << type;
            } else {
              ADD_FAILURE() << "unknown call";
            }
          }
        } else {
          ADD_FAILURE() << "unknown question";
        }
      }
    }
  }
}

TEST(GoldenMesh, LocalShapesAndOffsets) {
  for (const auto& [id, item] : cases_of("local_shape_offset")) {
    SCOPED_TRACE(id);
    Placements placements;
    for (const json& text : item.at("placements")) placements.push_back(placement_of(text));
    const Numbers global_shape = item.at("global_shape");
    const MeshLayout mesh(item.at("mesh_shape").get<Numbers>());
    const json& expected = item.at("per_rank_local_shape_and_offset");
    ASSERT_EQ(static_cast<std::int64_t>(expected.size()), mesh.size());
    for (std::size_t rank = 0; rank < expected.size(); ++rank) {
      const Numbers coordinate = *mesh.coordinate(static_cast<std::int64_t>(rank));
      const LocalShard shard = local_shape_and_offset(global_shape, mesh.shape(), coordinate, placements);
      EXPECT_EQ(json::array({shard.shape, shard.offset}), expected[rank]) << "rank " << rank;
    }
  }
}

}  // namespace golden_mesh_test
}  // namespace penstock
