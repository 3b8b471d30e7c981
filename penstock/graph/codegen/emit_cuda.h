// Loop kernels as CUDA, for NVRTC.
//
//   const std::string source = emit_cuda({{"k0", kernel, "aten::add, aten::relu"}});
//   const CudaPlan plan = cuda_plan(kernel);
//   // extern "C" __global__ void k0(p0, p1, ..., int aligned)
//
// A function takes the addresses of the buffers in the order of the kernel, and then
//   Elements, Rows   int aligned: whether every address is a multiple of CudaPlan::alignment
//   Columns          the same, long long rows of a split, void* partial sums; see below
// A written buffer may be one that is read where may_share_memory_on_cuda says so.
//
// How work is divided. Elements: a thread computes `vector` neighbours. Rows: a block computes a row, in
// several passes; where the loads of a row fit in registers, it is read once. Columns: a block computes the
// sums of some columns over a split of the rows; with several splits, a second function, NAME_end(partial
// sums, int splits, written buffers), adds up their partial sums in their order. No result depends on the
// order in which blocks run.
//
// Numbers. Operations are not contracted. Sums are partial ones by thread, then by pairs of threads, in the
// type of the result; those of splits in double. Exp, log, tanh, sigmoid and erf are CUDA's. Thread safety:
// any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/graph/codegen/emit_cpp.h"
#include "penstock/graph/codegen/loop_kernel.h"

namespace penstock::graph {

// Part of keys of compiled code, as kEmitterVersion.
inline constexpr int kCudaEmitterVersion = 1;

// How a kernel is launched.
struct CudaPlan {
  unsigned vector = 1;            // neighbours that a thread computes at once
  unsigned threads = 1;           // of a block
  std::size_t alignment = 1;      // of addresses, in bytes, for loads of whole vectors
  std::int64_t blocks = 0;        // of Elements and Rows; of Columns: for each split
  std::size_t iterations = 1;     // Rows: of the loop over a row
  bool resident = false;          // Rows: loads are kept in registers
  std::int64_t rows = 0;          // Columns
  std::vector<std::size_t> sums;  // Columns: instructions

  // Columns: into how many splits the rows are divided on a device, and the bytes of the partial sums.
  std::int64_t splits(int multiprocessors) const;
  std::size_t workspace_bytes(std::int64_t splits, std::int64_t columns) const;
};
CudaPlan cuda_plan(const LoopKernel& kernel);

// The kernels are verified, and those of Columns have one loop over the columns.
std::string emit_cuda(const std::vector<NamedKernel>& kernels);
// The functions of a single kernel, without what it has in common with others.
std::string emit_cuda_function(const NamedKernel& kernel);

// Whether the written buffer may have the memory of the read one.
bool may_share_memory_on_cuda(const LoopKernel& kernel, std::size_t read, std::size_t written);

}  // namespace penstock::graph
