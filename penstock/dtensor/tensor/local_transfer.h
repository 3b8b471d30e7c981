// Executes a redistribution on the local tensors of this rank.
//
//   const LocalTransfer& transfer = transfer_between(from, to, PartialTarget::Refuse);
//   at::Tensor local = transfer.run(mesh, old_local);  // collective: every rank of the mesh calls it
//
// Which elements are sent where is computed once, from the index ranges that each rank along an axis holds
// before and after a step, and used for every tensor of the same spec. Results are contiguous and do not
// share memory with the source, unless the redistribution has no steps, or only slices of dim 0.
// A local tensor that is a wrapper (fake during capture, or a subclass) is moved by the operators of
// comm/operators.h, which its payload or the tracer sees; a plain one is moved by the groups directly, with
// less memory.
// Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "penstock/dtensor/plan/redistribute_plan.h"
#include "penstock/dtensor/tensor/spec.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/world.h"

namespace penstock::detail {

// A local tensor whose communication may still be in progress.
struct PendingLocal {
  at::Tensor tensor;                   // the result if `finish` is empty
  comm::Work work;                     // to be waited for first
  std::function<at::Tensor()> finish;  // then computes the result from what arrived

  at::Tensor get();
};

// Indices [source, source + length) of one local tensor's dim are [target, target + length) of another's.
struct Run {
  std::int64_t source = 0, target = 0, length = 0;
};

// From a local tensor that holds the indices `have` of a dim, selects those in `want`: contiguous, in order.
at::Tensor cut(const at::Tensor& local, std::int64_t dim, const std::vector<Segment>& have,
               const std::vector<Segment>& want);

class LocalTransfer {
 public:
  LocalTransfer(const DTensorSpec& from, const DTensorSpec& to, PartialTarget partial_target);

  const RedistributePlan& plan() const { return plan_; }

  at::Tensor run(const comm::MeshGroups& mesh, const at::Tensor& local) const;
  // Returns when the last collective has been started.
  PendingLocal start(const comm::MeshGroups& mesh, const at::Tensor& local) const;

 private:
  struct Step {
    RedistributeKind kind;
    int axis;
    PartialOp op = PartialOp::Sum;
    std::int64_t dim = 0;                           // the dim that is joined or split
    std::int64_t other_dim = 0;                     // AllToAll: the dim that is split
    std::vector<std::int64_t> result_shape;         // of this rank
    std::vector<std::vector<std::int64_t>> shapes;  // per member: what it sends to or receives from this rank
    std::vector<std::vector<Run>> take;             // per member: from the local tensor into its piece
    std::vector<std::vector<Run>> put;              // per member: from its piece into the result
    bool even = false;                              // all pieces have the same shape
    bool direct = false;                            // the pieces are consecutive in memory, in order
  };

  Step make_step(const DTensorSpec& from, const RedistributeStep& planned) const;
  static at::Tensor run_step_by_operators(const Step& step, const comm::Group& group,
                                          const at::Tensor& local);
  static PendingLocal start_step(const Step& step, const comm::Group& group, const at::Tensor& local);

  RedistributePlan plan_;
  std::vector<Step> steps_;
};

// From a per-thread cache. Both specs must have the same mesh and geometry.
std::shared_ptr<const LocalTransfer> transfer_between(const SpecPtr& from, const SpecPtr& to,
                                                      PartialTarget partial_target);

}  // namespace penstock::detail
