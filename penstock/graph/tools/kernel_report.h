// Generated kernels of a captured graph (graph/fused), as a table: `penstock inspect graph --kernels`.
//
//   fmt::print("{}", kernel_report(halves, inputs, {}));
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/graph/partition/partition.h"

namespace penstock::graph {

struct KernelReportOptions {
  std::size_t runs = 7;  // of forward and backward, after one that is not counted
  bool exact = false;    // CompileOptions::compile_exact
  bool sources = false;  // of each kernel, after the table
};

// Compiles both halves with the compiler "fused" and with the executor, and runs them with these inputs (one
// for each input of the forward half); gradients of results are ones. The table has a row for each kernel:
// operators, bytes moved, time of its shortest run, share of the step, and its rate beside that of a copy of
// a large tensor in the same run. Kernels of equal layers are one row.
std::string kernel_report(const Partition& halves, const std::vector<at::Tensor>& inputs,
                          const KernelReportOptions& options);

// What a copy between large tensors moves, in bytes per second, on the CPU with the threads of LibTorch.
double copy_bandwidth(c10::Device device = at::kCPU);

}  // namespace penstock::graph
