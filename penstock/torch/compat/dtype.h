// Names and numbers of element types, independent of the LibTorch version.
//
//   dtype_name(at::kBFloat16)            // "bfloat16"
//   dtype_number(at::kBFloat16)          // 13, on every LibTorch version
//   find_dtype(13).here                  // at::kBFloat16
//
// The numbers are used in messages (docs/messages.md): entries may be added to the table in dtype.cpp, but
// never changed. Quantized types have no number, because they are meaningless without their scale and zero
// point. Thread safety: any thread.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace penstock {

struct DtypeEntry {
  std::uint8_t number = 0;
  std::string_view name;               // "float32"
  std::string_view since;              // the oldest supported LibTorch that has it; empty if all have it
  std::optional<at::ScalarType> here;  // std::nullopt if this LibTorch is older
};

// Every element type that has a number, in order of the numbers.
std::span<const DtypeEntry> dtype_table();

// Returns null for a number that this build of Penstock does not know.
const DtypeEntry* find_dtype(std::uint8_t number);

// Returns std::nullopt for a type without a number (quantized, undefined, or newer than this build).
std::optional<std::uint8_t> dtype_number(at::ScalarType dtype);

// "float32"; LibTorch's own name for a type without a number.
std::string dtype_name(at::ScalarType dtype);

}  // namespace penstock
