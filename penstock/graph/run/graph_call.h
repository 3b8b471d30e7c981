// The two graphs of a capture as one differentiable function: tensors in, what the forward graph returns out.
// To autograd it is a single node, which holds what forward saved and runs the backward graph. If backward is
// split, a second node follows it, which the parameters whose gradients wait come after.
#pragma once

#include <torch/custom_class.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/graph/run/function_capture.h"
#include "penstock/graph/wrap/graph_wrapper.h"
#include "penstock/graph_compiler.h"

namespace penstock::graph {

// The defined tensors among values: the inputs of a graph.
std::vector<at::Tensor> tensors_among(const Values& values);

struct CompiledHalves {
  std::shared_ptr<const CompiledGraph> forward, backward;
  GraphWrappers wrappers = {};  // around both, outermost first

  // Of a backward that is split (partition/backward_split.h), otherwise null and empty. Each part takes some
  // of the saved tensors: places among them.
  std::shared_ptr<const CompiledGraph> weights = {};
  std::vector<std::size_t> saved_for_backward = {}, saved_for_weights = {};
  std::vector<char> is_deferred = {};  // by gradient: computed by `weights`
  std::size_t kept = 0;                // values that `backward` returns for `weights`
};

// Over the tensors that the compiled halves take and return: plain ones, or subclasses if these are wrapped
// (wrap/subclasses.h).
class GraphCall final : public torch::CustomClassHolder {
 public:
  GraphCall(const PartitionedCapture& capture, CompiledHalves halves);
  // Takes the tensors among the inputs of the captured function. Returns one tensor for each of
  // meta.forward_returns(), undefined if there is none.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& primals, const CallSizes& sizes);

  // ---- for the autograd node ----

  // A tensor that forward saves for backward.
  struct Saved {
    // Unwatched: with a version counter of its own.
    enum class How { AsIs, Copied, Unwatched };
    How how = How::AsIs;
  };
  // Tensors in the memory of saved ones: writing them before backward must be detected. Autograd counts the
  // versions of a subclass, not those of the tensors inside.
  struct Watched {
    std::vector<std::size_t> primals, outputs;
  };
  // An input of backward; `geometry` is null if a wrapper of the graphs takes the gradient as it is
  // (GraphWrapper::tangents).
  struct Tangent {
    std::optional<Geometry> geometry;
  };
  // An input that backward writes.
  struct WrittenInBackward {
    std::size_t primal = 0;
    std::string name;
  };

  const CompiledHalves halves;
  const std::size_t forward_outputs;  // without what is saved
  std::vector<Tangent> tangents;
  std::vector<Saved> saved;
  Watched watched;
  std::vector<WrittenInBackward> written_in_backward;
  at::Device device_of_gradients = at::kCPU;  // of the first one
  std::shared_ptr<const RunAgain> run_again;  // null: second derivatives are refused
  std::vector<char> kept_inputs;              // by primal: kept alive for a second derivative

 private:
  // A result that is returned to autograd: its index among the forward outputs.
  struct Returned {
    std::size_t output = 0;
    // Copied: something other than this result holds the same tensor. Unshared: a subclass holds it; the
    // result is another tensor in the same memory, as in the function.
    enum class How { AsIs, Copied, Unshared } how = How::AsIs;
    // An output that shares its memory, as in the function: the same tensor again.
    std::optional<std::size_t> shares;
  };
  void plan_returned(const FunctionCapture& capture);
  Returned plan_plain(const FunctionCapture& capture, std::size_t output) const;
  void plan_tangents(const FunctionCapture& capture);
  void plan_saved(const PartitionedCapture& capture);

  // Counts the writes of the forward graph, which runs below autograd, as versions of the inputs.
  void count_writes_in_graph(const std::vector<at::Tensor>& primals) const;

  std::vector<std::size_t> written_in_graph_;  // primals that the forward graph writes
  std::vector<Returned> returned_;
  std::vector<std::size_t> differentiated_;  // outputs, one for each tangent
};

}  // namespace penstock::graph
