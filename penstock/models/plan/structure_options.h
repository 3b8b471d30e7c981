// Options of what a model of code knows about its tokens besides their text: where they are in the syntax
// tree (structure), for which platform the code is, and how chunks of it are related.
//
//   StructureOptions structure{.width = 1024, .node_types = 256};
//   PlatformOptions platform{.width = 1024, .platforms = 12};
//   RelationOptions relations{.relations = 8, .heads = 16};
//
// Plain values, independent of LibTorch.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/transformer_options.h"

namespace penstock::models {

// One of the five tables of a structure embedding.
struct StructureTable {
  const char* name;      // of the module that holds it: "node_type"
  const char* key;       // of its size: "node_types"
  std::int64_t entries;  // rows
  bool ordinal;          // ids are numbers without a bound: those past the table count as its last row
};

struct StructureOptions {
  std::int64_t width = 128;
  std::int64_t structure_kinds = 16;    // model.structure_kinds: what a token is part of
  std::int64_t dependency_levels = 32;  // model.dependency_levels: levels of the graph of dependencies
  std::int64_t syntax_depths = 64;      // model.syntax_depths: depths in the syntax tree
  std::int64_t sibling_indices = 64;    // model.sibling_indices: places among the children of a node
  std::int64_t node_types = 256;        // model.node_types: types of nodes of the syntax tree
  bool operator==(const StructureOptions&) const = default;

  // Throws ConfigError that names the key.
  void check() const;
  // In the order of the fields.
  std::array<StructureTable, 5> tables() const;

  std::vector<ParameterShape> shapes(const std::string& prefix) const;
  std::int64_t parameter_count() const;
  // One row of each table.
  std::int64_t active_parameter_count() const { return 5 * width; }
  // Lookups are not counted.
  double flops_per_token(std::int64_t) const { return 0; }
};

struct PlatformOptions {
  std::int64_t width = 128;
  std::int64_t platforms = 16;  // model.platforms
  bool operator==(const PlatformOptions&) const = default;

  void check() const;
  std::vector<ParameterShape> shapes(const std::string& prefix) const;
  std::int64_t parameter_count() const { return platforms * width; }
  std::int64_t active_parameter_count() const { return width; }
  double flops_per_token(std::int64_t) const { return 0; }
};

struct RelationOptions {
  std::int64_t relations = 8;  // model.relations: kinds of relations between chunks
  std::int64_t heads = 4;      // of attention
  bool operator==(const RelationOptions&) const = default;

  void check() const;
  std::vector<ParameterShape> shapes(const std::string& prefix) const;
  std::int64_t parameter_count() const { return relations * heads; }
  std::int64_t active_parameter_count() const { return parameter_count(); }
  // Of the contraction, for rows of `length` whose relations are given for each pair of tokens.
  double flops_per_token(std::int64_t length) const;
};

}  // namespace penstock::models
