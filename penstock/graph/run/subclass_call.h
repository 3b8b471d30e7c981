// The forward and backward of a captured function some of whose tensors are subclasses: takes them apart before the graph runs, and puts together what it
// gives. To autograd it is one node over the subclasses themselves, so gradients reach them as what they are.
//
// What backward gets is brought to what it was captured for: a gradient of the same kind in another context (a DTensor in other placements) by
// Payload::with_context_of. Another kind is a TypeError that names the result.
// The tensors saved for backward are the plain ones inside. They are watched by the subclasses and plain tensors they belong to, as writing those is
// what autograd notices.
// Private to this folder: CapturedCall owns one where it is needed. Thread rule: as for CapturedCall.
#pragma once

#include <torch/custom_class.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "penstock/graph/trace/capture.h"
#include "penstock/graph/run/execute.h"
#include "penstock/graph/partition/partition.h"

namespace penstock::graph {

// Throws NotImplemented, naming both, for an input that is written and shares memory with another where one of them is a subclass. The same tensor given
// twice is one.
void refuse_shared_writes(const Values& inputs, const ViewAndMutationMeta& meta, const Convention& convention);

class SubclassCall final : public torch::CustomClassHolder {
 public:
  struct Context {
    const JointGraph& joint;                         // without writes
    const Partition& halves;
    const ViewAndMutationMeta& meta;
    const Convention& convention;
    std::vector<char> written, shares_changed;       // for each tensor among the inputs: its data is written; one in the same memory is changed
  };
  explicit SubclassCall(const Context& context);

  // One tensor for each of meta.forward_returns(), undefined where there is none.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

  // ---- for the node of autograd ----

  struct Saved {
    enum class How { AsIs, Copied };
    How how = How::AsIs;
  };
  // Writing one of these before backward must be noticed: places among the inputs and among `returned`.
  struct Watched {
    std::vector<std::size_t> inputs, returned;
  };
  // One of the forward outputs that is a tensor.
  struct Returned {
    std::size_t place = 0;
    enum class How { AsIs, Copied, Unshared } how = How::AsIs;   // Unshared: another tensor in the same memory
  };
  // An input of backward.
  struct Tangent {
    std::size_t returned = 0;   // whose gradient it is
    std::string name;           // of that result, for messages
  };

  std::vector<at::Tensor> flatten_inputs(const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> rebuild_returned(const std::vector<c10::IValue>& results, const std::vector<at::Tensor>& inputs) const;
  void flatten_tangent(std::size_t tangent, const at::Tensor& gradient, std::vector<at::Tensor>& flat) const;
  std::vector<at::Tensor> rebuild_gradients(const std::vector<c10::IValue>& results) const;

  const Executor forward, backward;
  const std::shared_ptr<const SubclassLayout> layout;
  const std::size_t forward_outputs;        // plain ones
  std::vector<Saved> saved;
  Watched watched;
  std::vector<Returned> returned;
  std::vector<Tangent> tangents;

 private:
  // A plain tensor among the forward outputs that lies in an input which is written.
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
