// Code that a compiler has generated in place of several operators, as a node of a graph that the executor
// runs.
//
//   Node node = generated_node(kernel, inputs, outputs);    // kernel: a GeneratedKernel that outlives the
//   runs
//
// The executor calls it with the tensors themselves, without boxing, and gives results the memory of
// arguments that are not used afterwards where the kernel allows it.
// Thread safety: run() may be called by several threads at once.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

class GeneratedKernel {
 public:
  virtual ~GeneratedKernel() = default;
  // A result that may be in the memory of an input of the same geometry.
  struct Sharing {
    std::size_t input = 0, result = 0;
  };
  virtual std::vector<Sharing> sharing() const { return {}; }
  // Computes the results. One that is defined is the memory to write it to, which may be that of an input as
  // sharing() says; others are to be made.
  virtual void run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> results) const = 0;
};

// The node that calls a kernel: lists of tensors.
Node generated_node(const GeneratedKernel& kernel, Operand inputs, Operand outputs);
// The kernel of such a node, null for any other one.
const GeneratedKernel* generated_kernel(const Node& node);

}  // namespace penstock::graph
