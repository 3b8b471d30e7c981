// The two graphs of a capture as one differentiable function: tensors in, what the forward graph returns out.
// To autograd it is a single node, which holds what forward saved and runs the backward graph.
#pragma once

#include <torch/custom_class.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/graph/compiler/graph_compiler.h"
#include "penstock/graph/run/function_capture.h"

namespace penstock::graph {

// The defined tensors among values: the inputs of a graph.
std::vector<at::Tensor> tensors_among(const Values& values);

struct CompiledHalves {
  std::shared_ptr<const CompiledGraph> forward, backward;
};

class GraphCall : public torch::CustomClassHolder {
 public:
  // Takes the tensors among the inputs of the captured function. Returns one tensor for each of
  // meta.forward_returns(), undefined if there is none.
  virtual std::vector<at::Tensor> run(const std::vector<at::Tensor>& primals, const CallSizes& sizes) = 0;
};

// For plain tensors, or for subclasses if the capture has any.
c10::intrusive_ptr<GraphCall> make_graph_call(const PartitionedCapture& capture, CompiledHalves halves);

// If all tensors are plain.
class PlainGraphCall final : public GraphCall {
 public:
  PlainGraphCall(const PartitionedCapture& capture, CompiledHalves halves);
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& primals, const CallSizes& sizes) override;

  // ---- for the autograd node ----

  // A tensor that forward saves for backward.
  struct Saved {
    enum class How { AsIs, Copied, Unwatched };
    How how = How::AsIs;
    // A tensor that uses the same memory: writing it must be detected.
    std::optional<std::size_t> watch_primal, watch_output;
  };
  // An input that backward writes.
  struct WrittenInBackward {
    std::size_t primal = 0;
    std::string name;
  };

  const CompiledHalves halves;
  const std::size_t forward_outputs;  // without what is saved
  const std::vector<TangentInfo> tangents;
  std::vector<Saved> saved;
  std::vector<WrittenInBackward> written_in_backward;
  std::shared_ptr<const RunAgain> run_again;  // null: second derivatives are refused
  std::vector<char> kept_inputs;              // by primal: kept alive for a second derivative

 private:
  // A result that is returned to autograd: its index among the forward outputs.
  struct Returned {
    std::size_t output = 0;
    bool copied = false;  // something other than this result holds the same tensor
    // An output that shares its memory, as in the function: the same tensor again.
    std::optional<std::size_t> shares;
  };
  void plan_returned(const FunctionCapture& capture);
  void plan_saved(const PartitionedCapture& capture);

  std::vector<Returned> returned_;
  std::vector<std::size_t> differentiated_;  // outputs, one for each tangent
};

}  // namespace penstock::graph
