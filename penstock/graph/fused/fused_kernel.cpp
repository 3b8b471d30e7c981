#include "penstock/graph/fused/fused_kernel.h"

#include <ATen/EmptyTensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "penstock/base/warnings.h"
#include "penstock/graph/compiler/plain_tensor.h"

namespace penstock::graph {
namespace {

bool has_layout(const at::Tensor& tensor, const Geometry& geometry) {
  if (!tensor.defined() || !is_plain(tensor) || tensor.device() != geometry.device ||
      tensor.scalar_type() != geometry.dtype || tensor.sizes() != at::IntArrayRef(geometry.sizes))
    return false;
  const at::IntArrayRef strides = tensor.strides();
  for (std::size_t d = 0; d < strides.size(); ++d)
    if (strides[d] != geometry.strides[d] && geometry.sizes[d] != 1) return false;
  return true;
}

at::Tensor made_as(const Geometry& geometry) {
  if (geometry.device.is_cpu())
    return at::Tensor(at::detail::empty_strided_cpu(geometry.sizes, geometry.strides, geometry.dtype));
  return at::empty_strided(geometry.sizes, geometry.strides,
                           at::TensorOptions(geometry.dtype).device(geometry.device));
}

struct Tolerance {
  double relative = 0, absolute = 0;  // the latter of the largest finite number
};
Tolerance tolerance_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return {0.02, 0.02};
    case at::kHalf:
      return {0.003, 0.003};
    case at::kDouble:
      return {1e-9, 1e-9};
    default:
      return {1e-4, 1e-5};
  }
}

// Of single elements, what may be decided otherwise because numbers that are compared differ in their last
// bits.
constexpr double kDecidedOtherwise = 1e-3;

}  // namespace

std::string difference_from_operators(const at::Tensor& kernel, const at::Tensor& operators, bool exact,
                                      bool may_decide, at::ScalarType rounded) {
  if (kernel.sizes() != operators.sizes() || kernel.scalar_type() != operators.scalar_type())
    return "another shape";
  if (kernel.numel() == 0) return {};
  const auto flat = [](const at::Tensor& tensor) {
    return tensor.detach()
        .to(at::kCPU)
        .to(tensor.is_floating_point() ? at::kDouble : at::kLong)
        .reshape({-1});
  };
  const at::Tensor a = flat(kernel).contiguous(), b = flat(operators).contiguous();
  const std::int64_t items = a.numel();
  std::int64_t different = 0, first = -1;
  const auto note = [&](std::int64_t i) {
    if (different++ == 0) first = i;
  };
  if (!kernel.is_floating_point()) {
    const auto *x = a.data_ptr<std::int64_t>(), *y = b.data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < items; ++i)
      if (x[i] != y[i]) note(i);
  } else {
    const auto *x = a.data_ptr<double>(), *y = b.data_ptr<double>();
    double largest = 0;
    for (std::int64_t i = 0; i < items; ++i)
      if (std::isfinite(y[i])) largest = std::max(largest, std::abs(y[i]));
    const Tolerance tolerance =
        tolerance_of(rounded == at::ScalarType::Undefined ? kernel.scalar_type() : rounded);
    for (std::int64_t i = 0; i < items; ++i) {
      if (std::isnan(x[i]) && std::isnan(y[i])) continue;
      if (exact ? x[i] == y[i] && std::signbit(x[i]) == std::signbit(y[i]) : x[i] == y[i]) continue;
      if (!exact && std::isfinite(x[i]) && std::isfinite(y[i]) &&
          std::abs(x[i] - y[i]) <= tolerance.relative * std::abs(y[i]) + tolerance.absolute * largest)
        continue;
      note(i);
    }
  }
  if (different == 0) return {};
  if (!exact && may_decide &&
      static_cast<double>(different) <= 1 + kDecidedOtherwise * static_cast<double>(items))
    return {};
  return fmt::format("{} of {} elements differ, the first is element {}: {} instead of {}", different, items,
                     first, a[first].item<double>(), b[first].item<double>());
}

FusedKernel::FusedKernel(const Graph& graph, FusedGroup group, std::string source, const CodeTarget& target,
                         std::unique_ptr<const KernelCall> function, const FusedKernelOptions& options)
    : group_(std::move(group)),
      source_(std::move(source)),
      function_(std::move(function)),
      options_(options),
      graph_(graph),
      state_(options.check ? State::Unchecked : State::Good) {
  if (options.check) common_ = target.emit({});
  for (const ValueId input : group_.inputs) inputs_.push_back(graph[input].geometry);
  for (const ValueId output : group_.outputs) outputs_.push_back(graph[output].geometry);
  const LoopKernel& kernel = group_.kernel;
  for (std::size_t j = 0; j < outputs_.size(); ++j)
    for (std::size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i] == outputs_[j] && target.may_share_memory(kernel, i, inputs_.size() + j))
        sharing_.push_back({i, j});
  // What the operators round to a half type, the kernel keeps in float.
  for (const std::size_t node : group_.nodes)
    for_each_value(graph.nodes[node].results, [&](ValueId value) {
      const at::ScalarType dtype = graph[value].geometry.dtype;
      if (dtype == at::kBFloat16 || (dtype == at::kHalf && rounded_ != at::kBFloat16)) rounded_ = dtype;
    });
  may_decide_ = std::any_of(
      kernel.instructions.begin(), kernel.instructions.end(),
      [](const LoopInstruction& each) { return each.op >= LoopOp::Equal && each.op <= LoopOp::LessEqual; });
}

bool FusedKernel::fits(std::span<const at::Tensor* const> inputs) const {
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (!has_layout(*inputs[i], inputs_[i])) return false;
  return true;
}

void FusedKernel::call(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> results) const {
  c10::SmallVector<void*, 16> buffers;
  for (const at::Tensor* input : inputs) buffers.push_back(input->data_ptr());
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) results[i] = made_as(outputs_[i]);
    buffers.push_back(results[i].data_ptr());
  }
  const bool measures = measures_.load(std::memory_order_relaxed);
  if (measures) function_->wait();
  const auto begin = measures ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
  function_->run(buffers);
  if (measures) function_->wait();
  calls_.fetch_add(1, std::memory_order_relaxed);
  if (!measures) return;
  const auto taken = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count());
  std::uint64_t least = nanoseconds_;
  while ((least == 0 || taken < least) &&
         !nanoseconds_.compare_exchange_weak(least, std::max<std::uint64_t>(taken, 1))) {
  }
}

void FusedKernel::call_operators(std::span<const at::Tensor* const> inputs,
                                 std::span<at::Tensor> results) const {
  {
    const std::lock_guard lock(mutex_);
    if (!operators_) operators_ = std::make_unique<Executor>(graph_of_group(graph_, group_));
  }
  std::vector<at::Tensor> given;
  for (const at::Tensor* input : inputs) given.push_back(*input);
  const std::vector<c10::IValue> computed = (*operators_)(std::move(given));
  for (std::size_t i = 0; i < results.size(); ++i) results[i] = computed[i].toTensor();
  calls_of_operators_.fetch_add(1, std::memory_order_relaxed);
}

void FusedKernel::check(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> results) const {
  // The kernel may write over its inputs.
  std::vector<at::Tensor> expected(results.size());
  call_operators(inputs, expected);
  call(inputs, results);
  std::string difference;
  for (std::size_t i = 0; i < results.size() && difference.empty(); ++i) {
    difference = difference_from_operators(results[i], expected[i], options_.exact, may_decide_, rounded_);
    if (difference.empty() && results[i].strides() != expected[i].strides()) {
      for (std::size_t d = 0; d < outputs_[i].sizes.size(); ++d)
        if (outputs_[i].sizes[d] > 1 && results[i].strides()[d] != expected[i].strides()[d])
          difference = "other strides";
    }
    if (!difference.empty()) difference = fmt::format("result {}: {}", i, difference);
  }
  if (difference.empty()) {
    state_ = State::Good;
    return;
  }
  state_ = State::Bad;
  warn_once("graph",
            fmt::format("training.compile_check: a generated kernel for {} does not compute what its "
                        "operators compute ({}); the operators run in its place; {}",
                        group_.operators, difference,
                        save_for_inspection(common_ + source_,
                                            to_text(graph_of_group(graph_, group_)) + difference + "\n")));
  for (std::size_t i = 0; i < results.size(); ++i) results[i] = expected[i];
}

void FusedKernel::run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> results) const {
  const State state = state_.load(std::memory_order_acquire);
  if (state == State::Bad || !fits(inputs)) return call_operators(inputs, results);
  if (state == State::Unchecked) return check(inputs, results);
  call(inputs, results);
}

}  // namespace penstock::graph
