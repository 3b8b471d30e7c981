#include "penstock/train/job/replica_gradients.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/comm/group/agreement.h"
#include "penstock/dtensor/tensor/layout_text.h"
#include "penstock/errors.h"
#include "penstock/gradients.h"
#include "penstock/torch/tree/distributed_type.h"

namespace penstock::train {

namespace {

constexpr std::int64_t kBucketBytes = 25 << 20;

at::Tensor local(const at::Tensor& tensor) { return local_if_distributed(tensor, kDetach); }

}  // namespace

ReplicaGradients::ReplicaGradients(comm::Group group, std::vector<Part> parts, std::optional<int> divisor)
    : group_(std::move(group)), divisor_(divisor.value_or(group_.size())) {
  std::vector<std::string> lines;
  for (Part& part : parts) {
    State state{std::move(part), {}, {}, false};
    std::int64_t bytes = 0;
    for (const optim::NamedParameter& parameter : state.part.parameters) {
      lines.push_back(fmt::format("{}: {}", state.part.name, layout_text(parameter.name, parameter.tensor)));
      state.trainable.push_back(parameter.tensor.requires_grad());
      if (!parameter.tensor.requires_grad()) continue;
      const at::Tensor mine = local(parameter.tensor);
      auto& buckets = state.buckets;
      if (buckets.empty() || bytes >= kBucketBytes ||
          buckets.back().parameters[0].scalar_type() != parameter.tensor.scalar_type()) {
        buckets.emplace_back();
        bytes = 0;
      }
      buckets.back().parameters.push_back(parameter.tensor);
      buckets.back().elements += mine.numel();
      bytes += static_cast<std::int64_t>(mine.nbytes());
    }
    parts_.push_back(std::move(state));
  }
  comm::require_agreement(group_, "parameters of data-parallel replicas", lines,
                          "build the same model, with the same parameters frozen, on all replicas");
}

void ReplicaGradients::begin(std::size_t part) {
  State& state = parts_.at(part);
  if (state.begun)
    throw StateError(describe(fmt::format("gradients of {}", state.part.name),
                              "a reduction that is already in flight", "a reduction completed by finish()",
                              "call finish() after every step, and do not call begin() while gradients "
                              "accumulate over several steps"));
  for (std::size_t i = 0; i < state.trainable.size(); ++i) {
    const optim::NamedParameter& parameter = state.part.parameters[i];
    if (parameter.tensor.requires_grad() != state.trainable[i])
      throw StateError(
          describe(fmt::format("requires_grad of {}", parameter.name),
                   parameter.tensor.requires_grad() ? "true" : "false",
                   fmt::format("{}, as at construction, when the replicas compared their parameters",
                               state.trainable[i] ? "true" : "false"),
                   "freeze or unfreeze parameters on all replicas before the job is constructed"));
    if (!state.trainable[i] && parameter.tensor.grad().defined())
      throw StateError(describe(fmt::format("gradient of {}", parameter.name),
                                "a gradient on a frozen parameter", "no gradient",
                                "clear it: replicas would update the parameter differently"));
  }
  const at::NoGradGuard no_grad;
  optim::settle_gradients(state.part.parameters);
  if (group_.size() > 1)
    for (Bucket& bucket : state.buckets) start(bucket);
  state.begun = true;
}

void ReplicaGradients::start(Bucket& bucket) const {
  const at::TensorOptions options = local(bucket.parameters[0]).options();
  const auto count = static_cast<std::int64_t>(bucket.parameters.size());
  std::vector<at::Tensor> pieces;
  const at::Tensor marks = at::ones({count}, options);
  bucket.present.clear();
  for (std::int64_t i = 0; i < count; ++i) {
    const at::Tensor& parameter = bucket.parameters[static_cast<std::size_t>(i)];
    const at::Tensor gradient = local(parameter.grad());
    bucket.present.push_back(gradient.defined());
    if (!gradient.defined()) marks[i].zero_();
    pieces.push_back(gradient.defined() ? gradient.reshape({-1}).to(options.dtype())
                                        : at::zeros({local(parameter).numel()}, options));
  }
  pieces.push_back(marks);
  bucket.flat = at::cat(pieces);
  bucket.work =
      group_.all_reduce(bucket.flat, comm::ReduceOp::Sum, {.label = "gradients of replicas", .timeout = {}});
}

void ReplicaGradients::write(Bucket& bucket) const {
  if (group_.size() == 1) {
    for (const at::Tensor& parameter : bucket.parameters)
      if (parameter.grad().defined()) local(parameter.grad()).div_(divisor_);
    return;
  }
  bucket.work.wait();
  const at::Tensor values = bucket.flat.narrow(0, 0, bucket.elements).div_(divisor_);
  // Only a rank without a gradient reads the marks, for which it waits for the device.
  at::Tensor marks;
  if (std::find(bucket.present.begin(), bucket.present.end(), false) != bucket.present.end())
    marks = bucket.flat.narrow(0, bucket.elements, bucket.flat.numel() - bucket.elements)
                .to(at::kCPU, at::kFloat);
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
    const at::Tensor& parameter = bucket.parameters[i];
    const at::Tensor mean = values.narrow(0, offset, local(parameter).numel());
    offset += mean.numel();
    if (!bucket.present[i] && marks.data_ptr<float>()[i] == 0) continue;
    at::Tensor& gradient = parameter.mutable_grad();
    if (!bucket.present[i]) gradient = at::empty_like(parameter.detach(), at::MemoryFormat::Preserve);
    const at::Tensor target = local(gradient);
    target.copy_(mean.view(target.sizes()));
  }
  bucket.flat.reset();
  bucket.work = {};
}

void ReplicaGradients::finish() {
  const at::NoGradGuard no_grad;
  for (std::size_t part = 0; part < parts_.size(); ++part)
    if (!parts_[part].begun) begin(part);
  for (State& state : parts_) {
    for (Bucket& bucket : state.buckets) write(bucket);
    state.begun = false;
  }
}

std::int64_t ReplicaGradients::buffer_bytes() const {
  std::int64_t bytes = 0;
  for (const State& state : parts_)
    for (const Bucket& bucket : state.buckets)
      if (bucket.flat.defined()) bytes += static_cast<std::int64_t>(bucket.flat.nbytes());
  return bytes;
}

}  // namespace penstock::train
