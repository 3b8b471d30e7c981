// Instructions of loop kernels as text that C++ and CUDA read alike.
//
//   instruction_text(kernel, i)                     // "v3 + v4"
//
// Names: v0, v1, ... are the instructions' values; i8 to i64, u8, u16 the types; from_half, to_half,
// from_bfloat16, to_bfloat16, exp_of, log_of, tanh_of, sigmoid_of, erf_of functions of the language's
// prelude, which also gives it GCC's __builtin_nan, inf, fabs and sqrt. Private to this folder. Thread
// safety: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "penstock/graph/codegen/loop_kernel.h"

namespace penstock::graph {

// Of an element in memory, and of a value.
std::string_view memory_type(ElementType type);
std::string_view value_type(ElementType type);

std::string number_text(const LoopInstruction& number);
// "variable * stride", or a simpler form.
std::string index_text(std::string_view variable, std::int64_t stride);
std::string operand_text(const LoopInstruction& instruction, std::size_t operand);

// What an instruction computes; not of loads, positions and reductions.
std::string instruction_text(const LoopKernel& kernel, std::size_t instruction);
// An item of memory as a value, and a value as what is stored in an item.
std::string loaded_text(ElementType type, const std::string& item);
std::string stored_text(ElementType type, const std::string& value);

}  // namespace penstock::graph
