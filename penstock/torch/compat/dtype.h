// Names and numbers of element types that do not depend on the LibTorch version.
//
//   dtype_name(at::kBFloat16)            // "bfloat16"
//   dtype_number(at::kBFloat16)          // 13, on every LibTorch, today and later
//   find_dtype(13).here                  // at::kBFloat16
//
// The numbers travel in messages (docs/messages.md), so an entry of the table in dtype.cpp may be added,
// never changed. Quantized types have none: they mean nothing without their scale and zero point. Thread
// safe.
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
  std::string_view since;              // the oldest supported LibTorch that has it; empty when all have
  std::optional<at::ScalarType> here;  // nothing when this LibTorch is older
};

// Every element type that has a number, in order of the numbers.
std::span<const DtypeEntry> dtype_table();

// Null for a number that this build of Penstock does not know.
const DtypeEntry* find_dtype(std::uint8_t number);

// Nothing for a type without a number (quantized, undefined, or newer than this build).
std::optional<std::uint8_t> dtype_number(at::ScalarType dtype);

// "float32"; for a type without a number LibTorch's own name.
std::string dtype_name(at::ScalarType dtype);

}  // namespace penstock
