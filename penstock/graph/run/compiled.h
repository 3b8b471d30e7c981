// A function that runs as a graph: captured on its first call, replayed after that, with the same results as the function itself.
//
//   Compiled step(function);
//   Values results = step({x, w});         // captured: analysis, joint graph, no writes, forward and backward
//   results[0].toTensor().sum().backward();
//   step({x2, w2});                        // replayed
//
// Inputs that the function writes are written, outputs that are inputs or views of them are so, gradients flow as through the
// function: all of forward is one node of autograd, views and writes of inputs are done outside of it.
//
// A capture holds for inputs of the same sizes, strides, offsets, dtypes, devices and needs of gradients, that alias each other in the
// same way, under the same grad mode, with the same values of what is not a tensor; of tensor subclasses (a DTensor) also of the same kind,
// context (mesh, placements) and contents in shape. Another call captures again, or with `recapture = false` throws StateError naming what differs.
// Dims may be marked as dynamic: then one capture holds for all their sizes (dynamic_dims.h).
// Subclasses are taken apart: the graph is over the plain tensors in them (subclass_record.h), results and gradients are put together again.
// Backward can be run once unless the graph is retained, as always. Differentiating it again (create_graph) throws NotImplemented.
// A saved tensor that was written in between is an error, as always.
// Random numbers are drawn from the default generators, in the order of the function.
// Thread rule: calls of one object must not overlap; backward may run on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/graph/trace/analyze.h"
#include "penstock/graph/trace/capture.h"
#include "penstock/graph/ir/dynamic_dims.h"
#include "penstock/graph/partition/partition.h"

namespace penstock::graph {

// What backward gets from forward: see partition.h.
enum class Partitioner : std::uint8_t { Default, MinCut };

struct CompileOptions {
  bool recapture = true;
  Partitioner partitioner = Partitioner::Default;
  DynamicOptions dynamic = {};
};

class CapturedCall;
struct BoundSizes;

class Compiled {
 public:
  explicit Compiled(Function function, const CompileOptions& options = {}, Convention convention = {});
  ~Compiled();
  Compiled(Compiled&&) noexcept;
  Compiled& operator=(Compiled&&) noexcept;

  Values operator()(const Values& inputs);

  // One for each kind of call so far; the last one captured is last.
  std::size_t captures() const { return calls_.size(); }
  const ViewAndMutationMeta& meta(std::size_t capture) const;          // of the function as called
  const ViewAndMutationMeta& inner_meta(std::size_t capture) const;    // with duplicates removed and overlapping inputs merged
  const JointGraph& joint(std::size_t capture) const;                  // without writes
  const Partition& partition(std::size_t capture) const;

  // Of dynamic dims: whether a capture holds for all sizes, how many sizes it was compared at, and why the last kind of call that has none was
  // refused one (empty when none was).
  bool is_dynamic(std::size_t capture) const;
  std::size_t checked_sizes(std::size_t capture) const;
  std::string dynamic_refused() const;

 private:
  struct Refused;   // a kind of call that was captured for each of its sizes, and why
  Values capture(const Values& inputs);
  // With a capture for all sizes, where that is possible; nothing otherwise.
  c10::intrusive_ptr<CapturedCall> capture_dynamic(const Values& inputs);
  Values check_and_run(CapturedCall& call, const Values& inputs, const c10::intrusive_ptr<BoundSizes>& sizes);

  Function function_;
  CompileOptions options_;
  Convention convention_;
  std::vector<c10::intrusive_ptr<CapturedCall>> calls_;
  std::vector<Refused> refused_;
};

}  // namespace penstock::graph
