// One capture of a function: what Compiled keeps for each kind of call. It is made in two steps, between which captures at several sizes may be
// compared and become one for all sizes (generalize.h).
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
  // Captures, in shape: nothing is computed.
  CapturedCall(const Function& function, const Values& inputs, const Convention& convention);
  // Splits the graph and plans the run; nothing changes any more then.
  void make_ready(Partitioner partitioner);

  // `sizes`: null when nothing is dynamic.
  Values run(const Values& inputs, const c10::intrusive_ptr<BoundSizes>& sizes = {});

  // ---- for the node of autograd ----

  // What forward keeps for backward.
  struct Saved {
    enum class How { AsIs, Copied, Unwatched };
    How how = How::AsIs;
    std::optional<std::size_t> watch_primal, watch_output;  // a tensor in whose memory it lies: writing that one must be noticed
  };
  // Results that are returned to autograd: places among the forward outputs.
  struct Returned {
    std::size_t output = 0;
    bool needs_grad = false;
    bool copied = false;   // something else than this result holds the same tensor
    std::optional<std::size_t> shares;   // an output that it shares its memory with, as in the function: the same tensor once more
  };

  CallGuard guard;

 private:
  std::optional<JointGraph> early_joint_;   // when one run of the function was enough
  ViewAndMutationMeta first_look(const Function& function, const Values& inputs, const Convention& convention);

 public:
  ViewAndMutationMeta user_meta;
  const InputPlan plan;
  ViewAndMutationMeta meta;
  JointGraph joint;
  std::vector<char> primal_written, primal_shares_changed;  // for each primal: its data is written; one in the same memory is changed
  std::vector<Geometry> geometry_after;                     // of the inputs that are written, in the order of the forward outputs
  std::optional<DynamicCall> dynamic;                       // of a capture with dynamic dims

  // ---- once it is ready ----
  Partition halves;
  std::optional<Executor> forward, backward;
  std::vector<Saved> saved;
  std::vector<Returned> returned;
  std::vector<std::size_t> tangent_place;   // among `returned`, for each tangent

 private:
  void check_written_in_backward(std::size_t primal, const std::vector<at::Tensor>& primals) const;
  void find_written_primals(const Values& inner);
  void plan_saved();
  void plan_returned();
  void count_symbols_for_backward();
  std::vector<at::Tensor> run_forward(const std::vector<at::Tensor>& primals, const c10::intrusive_ptr<BoundSizes>& sizes);
  void write_inputs(const Values& inner, const std::vector<at::Tensor>& results, const BoundSizes* sizes) const;
  Values make_outputs(const Values& inputs, const Values& inner, const std::vector<at::Tensor>& results, const BoundSizes* sizes) const;

  std::vector<StorageId> memory_of_output_;                   // of the forward outputs, before writes were taken out
  c10::intrusive_ptr<SubclassCall> subclasses_;               // runs the graph where some tensor is a subclass; null: all are plain
};

}  // namespace penstock::graph
