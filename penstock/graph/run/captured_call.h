// One capture of a function, as Compiled keeps for each kind of call. It is built in two steps; in between,
// captures at several sizes can be compared and merged into one for all sizes (generalize.h).
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "penstock/graph/run/call_guard.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/dynamic_call.h"
#include "penstock/graph/run/execute.h"
#include "penstock/graph/run/input_plan.h"
#include "penstock/graph/run/subclass_call.h"

namespace penstock::graph {

class CapturedCall final : public torch::CustomClassHolder {
 public:
  // Captures the function on fake tensors: nothing is computed.
  CapturedCall(const Function& function, const Values& inputs, const Convention& convention);
  // Splits the graph and plans the run; nothing changes after that.
  void make_ready(Partitioner partitioner);

  // `sizes` is null if nothing is dynamic.
  Values run(const Values& inputs, const c10::intrusive_ptr<BoundSizes>& sizes = {});

  // ---- for the autograd node ----

  // A tensor that forward saves for backward.
  struct Saved {
    enum class How { AsIs, Copied, Unwatched };
    How how = How::AsIs;
    // A tensor that uses the same memory: writing it must be detected.
    std::optional<std::size_t> watch_primal, watch_output;
  };
  // A result that is returned to autograd: its index among the forward outputs.
  struct Returned {
    std::size_t output = 0;
    bool needs_grad = false;
    bool copied = false;  // something other than this result holds the same tensor
    // An output that shares its memory, as in the function: the same tensor again.
    std::optional<std::size_t> shares;
  };

  CallGuard guard;

 private:
  std::optional<JointGraph> early_joint_;  // if one run of the function was enough
  ViewAndMutationMeta initial_analysis(const Function& function, const Values& inputs,
                                       const Convention& convention);

 public:
  ViewAndMutationMeta user_meta;
  const InputPlan plan;
  ViewAndMutationMeta meta;
  JointGraph joint;
  // For each primal: whether its data is written; whether an input in the same memory changes.
  std::vector<char> primal_written, primal_shares_changed;
  // Of the mutated inputs, in the order of the forward outputs.
  std::vector<Geometry> geometry_after;
  std::optional<DynamicCall> dynamic;  // for a capture with dynamic dims

  // ---- set by make_ready() ----
  Partition halves;
  std::optional<Executor> forward, backward;
  std::vector<Saved> saved;
  std::vector<Returned> returned;
  std::vector<std::size_t> returned_of_tangent;  // index into `returned`, for each tangent

 private:
  void check_written_in_backward(std::size_t primal, const std::vector<at::Tensor>& primals) const;
  void find_written_primals(const Values& inner);
  void plan_saved();
  void plan_returned();
  void count_symbols_for_backward();
  std::vector<at::Tensor> run_forward(const std::vector<at::Tensor>& primals,
                                      const c10::intrusive_ptr<BoundSizes>& sizes);
  void write_inputs(const Values& inner, const std::vector<at::Tensor>& results,
                    const BoundSizes* sizes) const;
  Values make_outputs(const Values& inputs, const Values& inner, const std::vector<at::Tensor>& results,
                      const BoundSizes* sizes) const;

  // Of the forward outputs, before the writes were removed.
  std::vector<StorageId> memory_of_output_;
  // Runs the graph if some tensor is a subclass; null if all are plain.
  c10::intrusive_ptr<SubclassCall> subclasses_;
};

}  // namespace penstock::graph
