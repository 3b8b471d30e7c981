// Executes a redistribution on the local tensors of this rank.
//
//   const LocalTransfer& transfer = transfer_between(from, to, PartialTarget::Refuse);
//   at::Tensor local = transfer.run(mesh, old_local);                     // collective: every rank of the mesh calls it
//
// Which elements go where is computed once, from the index ranges that each rank along an axis holds before and after a
// step; it serves every tensor of the same spec. Results are contiguous and never share memory with the source, unless the
// redistribution has no steps, or nothing but slices of dim 0.
// A local tensor that is a wrapper (fake while a function is captured, or a subclass) is moved by the operators of
// comm/operators.h, which its payload or the tracer sees; a plain one by the groups themselves, with less memory.
// Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "penstock/mesh_groups.h"
#include "penstock/dtensor/plan/redistribute_plan.h"
#include "penstock/dtensor/tensor/spec.h"
#include "penstock/mesh/local_shard.h"

namespace penstock::detail {

// A local tensor that may still be on its way.
struct PendingLocal {
  at::Tensor tensor;                       // the result, when `finish` is empty
  comm::Work work;                         // to be waited for first
  std::function<at::Tensor()> finish;      // then makes the result of what arrived

  at::Tensor get();
};

// Indices [source, source + length) of one local tensor's dim are [target, target + length) of another's.
struct Run {
  std::int64_t source = 0, target = 0, length = 0;
};

// Of a local tensor that holds the indices `have` of a dim, those that `want` says: contiguous, in order.
at::Tensor cut(const at::Tensor& local, std::int64_t dim, const std::vector<Segment>& have, const std::vector<Segment>& want);

class LocalTransfer {
 public:
  LocalTransfer(const DTensorSpec& from, const DTensorSpec& to, PartialTarget partial_target);

  const RedistributePlan& plan() const { return plan_; }

  at::Tensor run(const comm::MeshGroups& mesh, const at::Tensor& local) const;
  // Returns when the last collective has started.
  PendingLocal start(const comm::MeshGroups& mesh, const at::Tensor& local) const;

 private:
  struct Step {
    RedistributeKind kind;
    int axis;
    PartialOp op = PartialOp::Sum;
    std::int64_t dim = 0;                           // that is joined or split
    std::int64_t other_dim = 0;                     // AllToAll: the dim that is split
    std::vector<std::int64_t> result_shape;         // of this rank
    std::vector<std::vector<std::int64_t>> shapes;  // per member: what it sends here, or is sent
    std::vector<std::vector<Run>> take;             // per member: from the local tensor into its piece
    std::vector<std::vector<Run>> put;              // per member: from its piece into the result
    bool even = false;                              // all pieces have one shape
    bool direct = false;                            // pieces lie one behind the other in memory, in order
  };

  Step make_step(const DTensorSpec& from, const RedistributeStep& planned) const;
  static at::Tensor run_step_by_operators(const Step& step, const comm::Group& group, const at::Tensor& local);
  static PendingLocal start_step(const Step& step, const comm::Group& group, const at::Tensor& local);

  RedistributePlan plan_;
  std::vector<Step> steps_;
};

// From a table of this thread. Both specs are of one mesh and one geometry.
std::shared_ptr<const LocalTransfer> transfer_between(const SpecPtr& from, const SpecPtr& to, PartialTarget partial_target);

}  // namespace penstock::detail
