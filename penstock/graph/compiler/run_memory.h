// The memory of a run of a graph by the executor, tensor by tensor, as its plan says: when each is allocated,
// which results go into the memory of arguments that are dead, and when each is freed.
//
//   const RunMemory memory = memory_of_run(halves.forward);
//   memory.peak_bytes()                           // while one of the nodes runs
//   for (const LiveMemory& each : memory.tensors) ...
//
// What kernels allocate for themselves and free before they return is not part of it. The run is one with the
// tensors that were planned and without a mode; inputs are passed by move, and nobody else holds the donated
// ones.
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

// Memory that exists while nodes [first, last] run.
struct LiveMemory {
  ValueId value = kNoValue;  // the first value in it
  std::int64_t bytes = 0;
  std::size_t first = 0;
  std::size_t last = 0;    // the last node of the graph if it is returned, or an input that is not used
  bool is_input = false;   // it exists before the run, if it is counted
  bool is_result = false;  // it exists after the run
};

struct RunMemory {
  std::vector<LiveMemory> tensors;
  std::vector<std::int64_t> live;  // by node: bytes while it runs

  std::int64_t peak_bytes() const;
  std::size_t peak_node() const;
};

struct RunMemoryOptions {
  std::vector<std::size_t> donated_inputs = {};  // ExecutorOptions::donated_inputs
  // An input whose memory counts until its last use. Others, such as parameters, are there anyway.
  struct Counted {
    std::size_t input = 0;
    std::size_t memory = 0;  // inputs with the same number share their memory
    std::int64_t bytes = 0;  // of that memory, of which the input may be a part
  };
  std::vector<Counted> counted_inputs = {};
};

RunMemory memory_of_run(const Graph& graph, const RunMemoryOptions& options = {});

}  // namespace penstock::graph
