#include "penstock/comm/backend/c10d_backend.h"

#include <mutex>

namespace penstock::comm {

namespace {

// c10d's flight recorder, one per process, is not safe when several groups start collectives at once, as a
// thread world does. With one process per rank this lock is never contended.
std::unique_lock<std::mutex> one_at_a_time() {
  static std::mutex mutex;
  return std::unique_lock(mutex);
}

c10d::ReduceOp::RedOpType to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::Avg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::Min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::Max:
      return c10d::ReduceOp::MAX;
  }
  return c10d::ReduceOp::SUM;
}

// Returns a view of the same memory without ownership, for CPU tensors. Gloo's threads release a tensor some
// time after they report completion. Code that waits for the work (which keeps the memory alive until then)
// would still see the tensor in use, and a pool would need one more buffer than are ever in use. Worse, the
// tensor may be the last owner of this group, through the graph that computed it: the group would be
// destroyed on its own thread, for which it would wait.
at::Tensor borrowed(const at::Tensor& tensor) {
  if (!tensor.is_cpu())
    return tensor.grad_fn() ? tensor.detach() : tensor;  // of streams: owned, not the graph
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().requires_grad(false));
}

}  // namespace

TransferPtr C10dBackend::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  const auto lock = one_at_a_time();
  std::vector<at::Tensor> tensors = {borrowed(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d(op);
  return collective(group_->allreduce(tensors, options));
}

TransferPtr C10dBackend::broadcast(const at::Tensor& tensor, int source) {
  const auto lock = one_at_a_time();
  std::vector<at::Tensor> tensors = {borrowed(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  return collective(group_->broadcast(tensors, options));
}

TransferPtr C10dBackend::all_gather(const at::Tensor& output, const at::Tensor& input) {
  const auto lock = one_at_a_time();
  at::Tensor out = borrowed(output);
  at::Tensor in = borrowed(input);
#if PENSTOCK_TORCH_AT_LEAST(2, 14)
  return collective(group_->all_gather_single(out, in));
#else
  return collective(group_->_allgather_base(out, in));
#endif
}

TransferPtr C10dBackend::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  const auto lock = one_at_a_time();
  at::Tensor out = borrowed(output);
  at::Tensor in = borrowed(input);
  c10d::ReduceScatterOptions options;
  options.reduceOp = to_c10d(op);
#if PENSTOCK_TORCH_AT_LEAST(2, 14)
  return collective(group_->reduce_scatter_single(out, in, options));
#else
  return collective(group_->_reduce_scatter_base(out, in, options));
#endif
}

TransferPtr C10dBackend::all_to_all(const at::Tensor& output, const at::Tensor& input,
                                    std::vector<std::int64_t> output_splits,
                                    std::vector<std::int64_t> input_splits) {
  const auto lock = one_at_a_time();
  at::Tensor out = borrowed(output);
  at::Tensor in = borrowed(input);
#if PENSTOCK_TORCH_AT_LEAST(2, 14)
  return collective(group_->all_to_all_single(out, in, output_splits, input_splits));
#else
  return collective(group_->alltoall_base(out, in, output_splits, input_splits));
#endif
}

TransferPtr C10dBackend::barrier() {
  const auto lock = one_at_a_time();
  return collective(group_->barrier());
}

}  // namespace penstock::comm
