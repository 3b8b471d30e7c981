// Saves captured graphs to files and loads them.
//
//   GraphFile file{joint, meta, partition.saved, signature};
//   save_graph("step.psgraph", file);
//   const GraphFile again = load_graph("step.psgraph");
//   Executor run(again.joint.graph);
//
// Format: "PSGRAPH1", the version of the fields (u32), the number of bytes that follow (u64), their XXH64
// (u64), and the fields, little endian (penstock/graph/codec). Operators are stored by name, tensors of the
// graph by the bytes of their memory, tables of symbols and layouts of subclasses with them.
//
// An invalid file is a ValueError that names the file and the byte offset: corruption, another version, an
// operator that this LibTorch does not have, an inconsistent graph. Reading never accesses memory outside the
// file and allocates at most a multiple of its size.
// Constants of kinds that the format cannot represent (generators, objects), and kinds of subclasses without
// a ContextCodec, are NotImplemented on writing. `samples`: tensors of this process that contexts of
// subclasses refer to (any DTensor on each mesh); a context that the process does not have is a StateError.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "penstock/graph/tools/signature.h"
#include "penstock/graph/trace/capture.h"

namespace penstock::graph {

struct GraphFile {
  JointGraph joint;
  ViewAndMutationMeta meta;
  std::vector<ValueId> saved;  // values of the joint graph that forward saves for backward
  std::optional<GraphSignature> signature;
};

inline constexpr std::uint32_t kGraphFileVersion = 6;

std::vector<std::uint8_t> encode_graph(const GraphFile& file);
// `name` identifies the file in messages.
GraphFile decode_graph(std::span<const std::uint8_t> bytes, const std::string& name = "graph",
                       const std::vector<at::Tensor>& samples = {});

void save_graph(const std::filesystem::path& path, const GraphFile& file);
GraphFile load_graph(const std::filesystem::path& path, const std::vector<at::Tensor>& samples = {});

namespace detail {
// XXH64, seed 0.
std::uint64_t graph_checksum(std::span<const std::uint8_t> bytes);
}  // namespace detail

}  // namespace penstock::graph
