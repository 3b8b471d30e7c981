// Calls into c10d, shared by the Gloo and NCCL backends. The base class of process groups was renamed between
// LibTorch versions; only this header deals with that.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "penstock/comm/backend/backend.h"
#include "penstock/torch/compat/version.h"

#if PENSTOCK_TORCH_AT_LEAST(2, 0)
#include <torch/csrc/distributed/c10d/Backend.hpp>
#endif

namespace penstock::comm {

#if PENSTOCK_TORCH_AT_LEAST(2, 0)
using C10dGroup = c10d::Backend;
#else
using C10dGroup = c10d::ProcessGroup;
#endif
using C10dWorkPtr = c10::intrusive_ptr<c10d::Work>;

// A backend over any c10d group. Subclasses define how its works are waited for.
class C10dBackend : public Backend {
 public:
  explicit C10dBackend(c10::intrusive_ptr<C10dGroup> group) : group_(std::move(group)) {}

  TransferPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  TransferPtr broadcast(const at::Tensor& tensor, int source) override;
  TransferPtr all_gather(const at::Tensor& output, const at::Tensor& input) override;
  TransferPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override;
  TransferPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                         std::vector<std::int64_t> output_splits,
                         std::vector<std::int64_t> input_splits) override;
  TransferPtr barrier() override;

 protected:
  virtual TransferPtr collective(C10dWorkPtr work) = 0;

  c10::intrusive_ptr<C10dGroup> group_;
};

}  // namespace penstock::comm
