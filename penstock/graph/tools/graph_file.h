// Captured graphs in files.
//
//   GraphFile file{joint, meta, partition.saved, signature};
//   save_graph("step.psgraph", file);
//   const GraphFile again = load_graph("step.psgraph");
//   Executor run(again.joint.graph);
//
// The format: "PSGRAPH1", the version of the fields (u32), the number of bytes that follow (u64), their XXH64 (u64), and the fields, little
// endian. Operators are written by name; tensors that the graph holds by their bytes, in row-major order.
//
// What a file can have wrong is a ValueError that names the file and the byte: damage, another version, an operator that this LibTorch does
// not have, a graph that contradicts itself. Reading never touches memory outside of the file and takes no more than a multiple of its size.
// Values of a constant kind that has no form in files (generators, objects) are NotImplemented when written.
// Needs xxHash: without it both throw ConfigError.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "penstock/graph/trace/capture.h"
#include "penstock/graph/tools/signature.h"

namespace penstock::graph {

struct GraphFile {
  JointGraph joint;
  ViewAndMutationMeta meta;
  std::vector<ValueId> saved;               // values of the joint graph that forward hands to backward
  std::optional<GraphSignature> signature;
};

inline constexpr std::uint32_t kGraphFileVersion = 3;

std::vector<std::uint8_t> encode_graph(const GraphFile& file);
// `name` stands for the file in messages.
GraphFile decode_graph(std::span<const std::uint8_t> bytes, const std::string& name = "graph");

void save_graph(const std::filesystem::path& path, const GraphFile& file);
GraphFile load_graph(const std::filesystem::path& path);

namespace detail {
// XXH64, seed 0.
std::uint64_t graph_checksum(std::span<const std::uint8_t> bytes);
}

}  // namespace penstock::graph
