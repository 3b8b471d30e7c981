// Gradients that share memory with nothing that somebody else holds.
//
// Autograd keeps a gradient that nobody else holds as .grad(), without a copy, and adds later ones to it in
// place. It looks at the tensor object and not at its memory: of two gradients in one memory, such as that of
// a tensor and that of a view of it, it would keep both, and each addition would reach both. In a graph that
// is split, it would also change what the second part is going to read.
//
//   std::vector<std::size_t> shared = gradients_in_shared_memory(halves.backward, roles, halves.deferred);
//   wrappers = with_separate_gradients(std::move(wrappers), std::move(shared));   // the innermost one
//
// A plain tensor that is returned twice, or that is a tangent itself, is left alone: autograd copies what is
// held twice. Private to this folder. Thread safety: any thread.
#pragma once

#include <cstddef>
#include <vector>

#include "penstock/graph/partition/backward_split.h"
#include "penstock/graph/wrap/graph_wrapper.h"

namespace penstock::graph {

// The gradients that must be copied if their memory is still held by others when backward returns them.
// `deferred`: the nodes of the second part of a backward that is split.
std::vector<std::size_t> gradients_in_shared_memory(const Graph& backward, const BackwardRoles& roles,
                                                    const std::vector<std::size_t>& deferred);

// Adds a wrapper that copies these gradients where needed. Adds none if there are none.
GraphWrappers with_separate_gradients(GraphWrappers wrappers, std::vector<std::size_t> gradients);

}  // namespace penstock::graph
