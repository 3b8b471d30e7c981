// The wrapper that turns graphs over plain tensors into graphs over tensor subclasses: forward takes the
// inputs apart before the graph and puts the results together after it, backward does the same with
// gradients.
//
// Which plain tensors are inside is recorded when the function is captured (SubclassLayout), because autograd
// must see the subclasses themselves while backward is recorded. At run time this is a wrapper of graphs, not
// of calls, for the same reason: autograd's node is over the subclasses, so their gradients are subclasses.
//
// Gradients are converted to what backward was captured for: one of the same kind in another context (a
// DTensor with other placements) by Payload::with_context_of. Another kind is a TypeError that names the
// result.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph/trace/capture.h"
#include "penstock/graph/wrap/graph_wrapper.h"

namespace penstock::graph {

// Throws NotImplemented, naming both inputs, if an input is written and shares memory with another one and
// either is a subclass. A tensor passed twice counts as one.
void reject_shared_writes(const Values& inputs, const ViewAndMutationMeta& meta,
                          const Convention& convention);

// Around forward: one input for each tensor among the inputs of the function, one output for each of the
// forward returns, then the saved tensors, which are plain. Around backward: one gradient for each input,
// then what is kept for its second graph, which is plain; its tangents are one for each of
// SubclassLayout::tangents.
class Subclasses final : public GraphWrapper, public std::enable_shared_from_this<Subclasses> {
 public:
  // Throws NotImplemented if a result shares memory with a written input and has another dtype. `joint` must
  // have a layout; `meta` and `convention`: those of the captured function.
  Subclasses(const JointGraph& joint, const ViewAndMutationMeta& meta, const Convention& convention);

  std::string_view name() const override { return "subclasses"; }
  std::string decision() const override;
  std::vector<at::Tensor> tangents(std::vector<at::Tensor> gradients) const override;
  std::shared_ptr<const CompiledGraph> around(std::shared_ptr<const CompiledGraph> inner,
                                              GraphRole role) const override;

 private:
  friend class ForwardOverSubclasses;
  friend class BackwardOverSubclasses;
  // A plain tensor among the forward outputs that is in the memory of a mutated input.
  struct View {
    std::size_t output = 0, input = 0;
    Geometry geometry;
  };

  std::shared_ptr<const SubclassLayout> layout_;
  std::size_t flat_forward_outputs_ = 0;
  std::vector<View> views_;
  std::vector<std::string> tangent_names_;  // of the results whose gradients they are, for messages
};

}  // namespace penstock::graph
