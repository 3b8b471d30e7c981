#include "penstock/torch/compat/dtype.h"

#include <array>
#include <optional>

namespace penstock {

namespace {

using at::ScalarType;

constexpr DtypeEntry everywhere(std::uint8_t number, std::string_view name, ScalarType type) {
  return {number, name, {}, type};
}

// For a type added after the oldest supported LibTorch: defined only if this version's enumeration has it.
#define PENSTOCK_SINCE(release, number, name, type)                              \
  DtypeEntry {                                                                   \
    number, name, release, []<class Types>(Types) -> std::optional<ScalarType> { \
      if constexpr (requires { Types::type; })                                   \
        return Types::type;                                                      \
      else                                                                       \
        return std::nullopt;                                                     \
    }(ScalarType{})                                                              \
  }

// The numbers are part of the wire format: append new ones, never change or reuse one.
constexpr auto kTable = std::to_array<DtypeEntry>({
    everywhere(1, "uint8", ScalarType::Byte),
    everywhere(2, "int8", ScalarType::Char),
    everywhere(3, "int16", ScalarType::Short),
    everywhere(4, "int32", ScalarType::Int),
    everywhere(5, "int64", ScalarType::Long),
    everywhere(6, "float16", ScalarType::Half),
    everywhere(7, "float32", ScalarType::Float),
    everywhere(8, "float64", ScalarType::Double),
    everywhere(9, "complex32", ScalarType::ComplexHalf),
    everywhere(10, "complex64", ScalarType::ComplexFloat),
    everywhere(11, "complex128", ScalarType::ComplexDouble),
    everywhere(12, "bool", ScalarType::Bool),
    everywhere(13, "bfloat16", ScalarType::BFloat16),
    PENSTOCK_SINCE("2.6", 14, "bits1x8", Bits1x8),
    PENSTOCK_SINCE("2.6", 15, "bits2x4", Bits2x4),
    PENSTOCK_SINCE("2.6", 16, "bits4x2", Bits4x2),
    PENSTOCK_SINCE("2.6", 17, "bits8", Bits8),
    PENSTOCK_SINCE("2.6", 18, "bits16", Bits16),
    PENSTOCK_SINCE("2.6", 19, "float8_e5m2", Float8_e5m2),
    PENSTOCK_SINCE("2.6", 20, "float8_e4m3fn", Float8_e4m3fn),
    PENSTOCK_SINCE("2.6", 21, "float8_e5m2fnuz", Float8_e5m2fnuz),
    PENSTOCK_SINCE("2.6", 22, "float8_e4m3fnuz", Float8_e4m3fnuz),
    PENSTOCK_SINCE("2.6", 23, "uint16", UInt16),
    PENSTOCK_SINCE("2.6", 24, "uint32", UInt32),
    PENSTOCK_SINCE("2.6", 25, "uint64", UInt64),
    PENSTOCK_SINCE("2.6", 26, "uint1", UInt1),
    PENSTOCK_SINCE("2.6", 27, "uint2", UInt2),
    PENSTOCK_SINCE("2.6", 28, "uint3", UInt3),
    PENSTOCK_SINCE("2.6", 29, "uint4", UInt4),
    PENSTOCK_SINCE("2.6", 30, "uint5", UInt5),
    PENSTOCK_SINCE("2.6", 31, "uint6", UInt6),
    PENSTOCK_SINCE("2.6", 32, "uint7", UInt7),
    PENSTOCK_SINCE("2.6", 33, "int1", Int1),
    PENSTOCK_SINCE("2.6", 34, "int2", Int2),
    PENSTOCK_SINCE("2.6", 35, "int3", Int3),
    PENSTOCK_SINCE("2.6", 36, "int4", Int4),
    PENSTOCK_SINCE("2.6", 37, "int5", Int5),
    PENSTOCK_SINCE("2.6", 38, "int6", Int6),
    PENSTOCK_SINCE("2.6", 39, "int7", Int7),
    PENSTOCK_SINCE("2.7", 40, "float8_e8m0fnu", Float8_e8m0fnu),
    PENSTOCK_SINCE("2.8", 41, "float4_e2m1fn_x2", Float4_e2m1fn_x2),
    PENSTOCK_SINCE("2.14", 42, "bcomplex32", BComplex32),
});

#undef PENSTOCK_SINCE

}  // namespace

std::span<const DtypeEntry> dtype_table() { return kTable; }

const DtypeEntry* find_dtype(std::uint8_t number) {
  // Numbers start at 1 and have no gaps.
  return number >= 1 && number <= kTable.size() ? &kTable[number - 1] : nullptr;
}

std::optional<std::uint8_t> dtype_number(at::ScalarType dtype) {
  for (const DtypeEntry& entry : kTable)
    if (entry.here == dtype) return entry.number;
  return std::nullopt;
}

std::string dtype_name(at::ScalarType dtype) {
  const auto number = dtype_number(dtype);
  return number ? std::string(find_dtype(*number)->name) : std::string(c10::toString(dtype));
}

}  // namespace penstock
