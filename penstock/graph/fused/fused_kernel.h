// A generated kernel as the executor calls it.
// Private to this folder. Thread safety: as GeneratedKernel says.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/compiler/generated_kernel.h"
#include "penstock/graph/fused/fusion.h"
#include "penstock/graph/fused/generated_code.h"

namespace penstock::graph {

struct FusedKernelOptions {
  bool exact = false;  // CompileRequest::exact
  bool check = false;  // CompileRequest::check
};

// What differs between what a kernel has computed and what the operators have: empty if nothing does beyond
// the tolerance that docs/fused.md states, none in exact mode. `may_decide`: the kernel compares numbers, so
// that single elements may be decided otherwise. `rounded`: the narrowest dtype that the operators round to
// on the way; without one, that of the result.
std::string difference_from_operators(const at::Tensor& kernel, const at::Tensor& operators, bool exact,
                                      bool may_decide, at::ScalarType rounded = at::ScalarType::Undefined);

class FusedKernel final : public GeneratedKernel {
 public:
  // `graph`: outlives the kernel. `source`: of the function, for messages and reports.
  FusedKernel(const Graph& graph, FusedGroup group, std::string source, const CodeTarget& target,
              std::unique_ptr<const KernelCall> function, const FusedKernelOptions& options);

  std::vector<Sharing> sharing() const override { return sharing_; }
  void run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> results) const override;

  const FusedGroup& group() const { return group_; }
  const std::string& source() const { return source_; }
  // Calls of the function, and those of the operators in its place.
  std::uint64_t calls() const { return calls_; }
  std::uint64_t calls_of_operators() const { return calls_of_operators_; }
  // While set, the time of the shortest call is kept: others may have been interrupted. Calls on a GPU are
  // waited for.
  void measure(bool on) const { measures_ = on; }
  std::uint64_t nanoseconds() const { return nanoseconds_; }
  void forget_times() const { calls_ = 0, nanoseconds_ = 0; }

 private:
  enum class State : std::uint8_t { Unchecked, Good, Bad };

  bool fits(std::span<const at::Tensor* const> inputs) const;
  void call(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> results) const;
  void call_operators(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> results) const;
  void check(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> results) const;

  FusedGroup group_;
  std::string source_;
  std::unique_ptr<const KernelCall> function_;
  FusedKernelOptions options_;
  std::string common_;  // source that all functions use; only to be saved after a check
  std::vector<Geometry> inputs_, outputs_;
  std::vector<Sharing> sharing_;
  bool may_decide_ = false;
  at::ScalarType rounded_ = at::ScalarType::Undefined;  // difference_from_operators()
  const Graph& graph_;

  mutable std::mutex mutex_;
  mutable std::unique_ptr<Executor> operators_;  // made when it is needed
  mutable std::atomic<State> state_;
  mutable std::atomic<bool> measures_{false};
  mutable std::atomic<std::uint64_t> calls_{0}, calls_of_operators_{0}, nanoseconds_{0};
};

}  // namespace penstock::graph
