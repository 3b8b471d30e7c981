// Loop kernels as C++ without any header, for the compiler of the host.
//
//   const std::string source = emit_cpp({{"k0", kernel, "aten::add, aten::relu"}});
//   // extern "C" void k0(void* const* buffers, i64 begin, i64 end)
//
// A function takes the addresses of the buffers in the order of the kernel, and the part of
// LoopKernel::range() that it computes. Different parts may be computed by different threads; what is
// computed does not depend on how the range is divided. A written buffer may be one that is read, if both
// have the same type and strides: each element is read before it is written (Elements; Rows only where the
// passes over a row allow it, see may_share_memory).
//
// Numbers. No operation is contracted or reordered, except for the sums of a row: they have one partial sum
// for each lane of a vector, in float over at most 4,096 elements, then in double. Exp, log, tanh, sigmoid
// and erf are computed by the functions below in float32, with these largest errors in units of the last
// place: exp 2, log 2, tanh 3, sigmoid 4, erf 8 (tests/graph/loop_kernel_test.cpp measures them).
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/graph/codegen/loop_kernel.h"

namespace penstock::graph {

struct NamedKernel {
  std::string name;  // of the function
  LoopKernel kernel;
  std::string comment = {};  // what it stands for, one line
};

// Part of keys of compiled code: another number for each change of what is emitted for a kernel.
inline constexpr int kEmitterVersion = 2;

// The kernels are verified, and those of Columns have one loop over the columns.
std::string emit_cpp(const std::vector<NamedKernel>& kernels);
// A single function, without what it has in common with others.
std::string emit_function(const NamedKernel& kernel);

// Whether the written buffer may have the memory of the read one.
bool may_share_memory(const LoopKernel& kernel, std::size_t read, std::size_t written);

}  // namespace penstock::graph
