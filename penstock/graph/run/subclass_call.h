// Forward and backward of a captured function some of whose tensors are subclasses: flattens them before the
// graph runs, and rebuilds its results. To autograd it is one node over the subclasses themselves, so their
// gradients are subclasses too.
//
// Gradients are converted to what backward was captured for: one of the same kind in another context (a
// DTensor with other placements) by Payload::with_context_of. Another kind is a TypeError that names the
// result.
// The tensors saved for backward are the plain ones inside. Writes to them are detected through the
// subclasses and plain tensors they belong to, since autograd counts the versions of those.
// Private to this folder: owned by CapturedCall where needed. Thread safety: that of CapturedCall.
#pragma once

#include <torch/custom_class.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "penstock/graph/partition/partition.h"
#include "penstock/graph/run/execute.h"
#include "penstock/graph/trace/capture.h"

namespace penstock::graph {

// Throws NotImplemented, naming both inputs, if an input is written and shares memory with another one and
// either is a subclass. A tensor passed twice counts as one.
void reject_shared_writes(const Values& inputs, const ViewAndMutationMeta& meta,
                          const Convention& convention);

class SubclassCall final : public torch::CustomClassHolder {
 public:
  struct Context {
    const JointGraph& joint;  // without writes
    const Partition& halves;
    const ViewAndMutationMeta& meta;
    const Convention& convention;
    // For each tensor among the inputs: whether its data is written; whether an input in the same memory
    // changes.
    std::vector<char> written, shares_changed;
  };
  explicit SubclassCall(const Context& context);

  // Returns one tensor for each of meta.forward_returns(), undefined if there is none.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

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

  const Executor forward, backward;
  const std::shared_ptr<const SubclassLayout> layout;
  const std::size_t forward_outputs;  // plain ones
  std::vector<Saved> saved;
  Watched watched;
  std::vector<Returned> returned;
  std::vector<Tangent> tangents;

 private:
  // A plain tensor among the forward outputs that is in the memory of a mutated input.
  struct View {
    std::size_t output = 0, input = 0;
    Geometry geometry;
  };
  void plan_returned(const Context& context);
  void plan_views(const Context& context);
  void plan_saved(const Context& context);
  void plan_tangents(const Context& context);

  std::vector<View> views_;
};

}  // namespace penstock::graph
