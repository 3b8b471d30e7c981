// The kinds of constants that have a form in bytes. The numbers are part of the form. Private to this folder.
#pragma once

#include <cstdint>

namespace penstock::graph {

enum class ConstantKind : std::uint8_t {
  None,
  Int,
  Double,
  Bool,
  Complex,
  String,
  Device,
  IntList,
  DoubleList,
  BoolList,
  List,  // of anything
  StringList,
  Tensor,      // undefined, or a number wrapped in a tensor
  ContextText  // text that differs between processes (ContextCodec::encode_text)
};
constexpr ConstantKind last_of(ConstantKind) { return ConstantKind::ContextText; }

}  // namespace penstock::graph
