// Forward and backward of a captured function some of whose tensors are subclasses: flattens them before the
// graph runs, and rebuilds its results. To autograd it is one node over the subclasses themselves, so their
// gradients are subclasses too.
//
// Gradients are converted to what backward was captured for: one of the same kind in another context (a
// DTensor with other placements) by Payload::with_context_of. Another kind is a TypeError that names the
// result.
// The tensors saved for backward are the plain ones inside. Writes to them are detected through the
// subclasses and plain tensors they belong to, since autograd counts the versions of those.
// Private to this folder. Thread safety: that of GraphCall.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "penstock/graph/run/graph_call.h"

namespace penstock::graph {

// Throws NotImplemented, naming both inputs, if an input is written and shares memory with another one and
// either is a subclass. A tensor passed twice counts as one.
void reject_shared_writes(const Values& inputs, const ViewAndMutationMeta& meta,
                          const Convention& convention);

class SubclassCall final : public GraphCall {
 public:
  SubclassCall(const PartitionedCapture& capture, CompiledHalves halves);
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, const CallSizes& sizes) override;

  // ---- for the autograd node ----

  struct Saved {
    enum class How { AsIs, Copied };
    How how = How::AsIs;
  };
  // Tensors whose modification before backward must be detected: indices into the inputs and into `returned`.
  struct Watched {
    std::vector<std::size_t> inputs, returned;
  };
  // A forward output that is a tensor.
  struct Returned {
    std::size_t place = 0;
    // Unshared: another tensor in the same memory.
    enum class How { AsIs, Copied, Unshared } how = How::AsIs;
  };
  // An input of backward.
  struct Tangent {
    std::size_t returned = 0;  // the result whose gradient it is
    std::string name;          // of that result, for messages
  };

  std::vector<at::Tensor> flatten_inputs(const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> rebuild_returned(const std::vector<c10::IValue>& results,
                                           const std::vector<at::Tensor>& inputs) const;
  void flatten_tangent(std::size_t tangent, const at::Tensor& gradient, std::vector<at::Tensor>& flat) const;
  std::vector<at::Tensor> rebuild_gradients(const std::vector<c10::IValue>& results) const;

  const CompiledHalves halves;
  const std::shared_ptr<const SubclassLayout> layout;
  const std::size_t forward_outputs;  // plain ones
  std::vector<Saved> saved;
  Watched watched;
  std::vector<Returned> returned;
  std::vector<Tangent> tangents;
  std::shared_ptr<const RunAgain> run_again;  // null: second derivatives are refused
  std::vector<char> kept_inputs;              // kept alive for a second derivative

 private:
  // A plain tensor among the forward outputs that is in the memory of a mutated input.
  struct View {
    std::size_t output = 0, input = 0;
    Geometry geometry;
  };
  void plan_returned(const FunctionCapture& capture);
  void plan_views(const FunctionCapture& capture);
  void plan_saved(const PartitionedCapture& partitioned);
  void plan_tangents(const FunctionCapture& capture);

  std::vector<View> views_;
};

}  // namespace penstock::graph
