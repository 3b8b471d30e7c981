// Replaces expert_kernels_cuda.cpp, gate_kernels_cuda.cpp and grouped_kernels_cuda.cpp in builds without
// CUDA.
#include "penstock/errors.h"
#include "penstock/torch/experts/expert_kernels.h"

namespace penstock::detail {

namespace {
[[noreturn]] void no_expert_kernels() {
  throw StateError("a CUDA kernel was called in a build without CUDA");
}
}  // namespace

void launch_top_choices(const at::Tensor&, const at::Tensor&) { no_expert_kernels(); }
void launch_expert_order(const at::Tensor&, std::int64_t, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, const at::Tensor&) {
  no_expert_kernels();
}
bool routes_on_device(std::int64_t) { return false; }
at::Tensor launch_route_tokens(const at::Tensor&, const at::Tensor&, bool, bool, const at::Tensor&,
                               const at::Tensor&) {
  no_expert_kernels();
}
void launch_route_tokens_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                  bool, bool, const at::Tensor&) {
  no_expert_kernels();
}
void launch_join_columns(const at::Tensor&, const at::Tensor&, const at::Tensor&) { no_expert_kernels(); }
void launch_split_columns(const at::Tensor&, const at::Tensor&, const at::Tensor&) { no_expert_kernels(); }
void launch_gather_rows(const at::Tensor&, const at::Tensor&, const at::Tensor&) { no_expert_kernels(); }
void launch_combine_rows(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  no_expert_kernels();
}
void launch_combine_rows_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                  const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  no_expert_kernels();
}
void launch_weighted_gate(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          const at::Tensor&) {
  no_expert_kernels();
}
void launch_weighted_gate_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&) {
  no_expert_kernels();
}
at::Tensor launch_grouped_product(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, bool) {
  no_expert_kernels();
}
at::Tensor launch_grouped_outer(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool) {
  no_expert_kernels();
}

}  // namespace penstock::detail
