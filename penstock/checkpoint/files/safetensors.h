// The safetensors format: named tensors in one file that can be mapped into memory.
//
//   bytes 0-7    length n of the header, little-endian
//   then n       JSON: {"__metadata__": {text: text},
//                       name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}}
//   the rest     values, row-major, little-endian; offsets count from here
//
//   Header header = lay_out({{"w", Dtype::F32, {2, 3}}, {"b", Dtype::BF16, {3}}});
//   std::string first = header_bytes(header);                    // then the data, header.data_bytes() of it
//   Header again = parse_header(mapped_bytes, file_bytes, "model.safetensors");
//
// A header from a file is not trusted: length, JSON, duplicate names, dtypes, shapes and offsets are checked,
// and the tensors must fill the data without overlap or gap. Violations throw a CheckpointError that names
// the file and the tensor. Reading allocates no more than a small multiple of the header size.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::checkpoint {

// Element types of the format that occupy whole bytes.
enum class Dtype : std::uint8_t {
  Bool,
  U8,
  I8,
  F8E5M2,
  F8E4M3,
  F8E8M0,
  I16,
  U16,
  F16,
  BF16,
  I32,
  U32,
  F32,
  C64,
  F64,
  I64,
  U64
};

std::string_view dtype_code(Dtype dtype);  // "BF16"
std::optional<Dtype> dtype_of_code(std::string_view code);
std::uint64_t item_bytes(Dtype dtype);

// Size of a tensor's values. Throws ValueError for a negative size and for more than 2^62 bytes.
std::uint64_t tensor_bytes(Dtype dtype, const std::vector<std::int64_t>& shape);

// "F32[2, 3]"
std::string tensor_text(Dtype dtype, const std::vector<std::int64_t>& shape);

struct TensorEntry {
  std::string name;
  Dtype dtype = Dtype::F32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // offsets in the data part

  friend bool operator==(const TensorEntry&, const TensorEntry&) = default;
};

struct Header {
  std::vector<TensorEntry> entries;  // in data order
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;  // offset in the file; set by parse_header

  std::uint64_t data_bytes() const { return entries.empty() ? 0 : entries.back().end; }
  // Returns null if there is no tensor of that name. Linear.
  const TensorEntry* find(std::string_view name) const;
};

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the safetensors library

// Assigns offsets: tensors with wide element types first, so that all are aligned, then by name. The input
// order is irrelevant. Throws ValueError for an empty or repeated name and for the name "__metadata__".
Header lay_out(std::vector<TensorEntry> entries);

// Returns length and JSON, padded with spaces so that the data begins at a multiple of 64. Throws ValueError
// for a name that is not UTF-8 and for a header beyond the limit.
std::string header_bytes(const Header& header);

// `bytes`: the beginning of a file of `file_bytes`, at least the whole header. `where` names the file in
// errors.
Header parse_header(std::span<const std::uint8_t> bytes, std::uint64_t file_bytes, const std::string& where);

}  // namespace penstock::checkpoint
