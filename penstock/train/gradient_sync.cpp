#include "penstock/train/gradient_sync.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "penstock/optim/gradients.h"
#include "penstock/torch/distributed_type.h"

namespace penstock::train {

namespace {

constexpr std::int64_t kBucketBytes = 25 << 20;

at::Tensor local_gradient(const at::Tensor& parameter) { return local_if_distributed(parameter.grad(), kDetach); }

}  // namespace

GradientSync::GradientSync(const RankLayout& layout, const ModelStages& stages, bool overlap) : stages_(stages), replicas_(layout.shard_size() > 1 ? 1 : layout.dp_size()), overlap_(overlap) {
  if (replicas_ > 1) replica_group_ = layout.mesh().group("replicas");
  if (const int peer = stages.tied().peer; peer >= 0) {
    std::vector<int> pair = {layout.world().rank(), layout.pipeline_ranks()[static_cast<std::size_t>(peer)]};
    std::sort(pair.begin(), pair.end());
    tied_group_ = layout.world().group_of(pair, {.purpose = "tied weight", .p2p = comm::P2PTransport::Auto, .timeout = {}});
  }
}

void GradientSync::stage_done(int stage) {
  if (!overlap_ || replicas_ == 1) return;
  std::vector<optim::NamedParameter> ready;
  for (const optim::NamedParameter& parameter : stages_.parameters_of(stage))
    if (!stages_.is_tied(parameter.tensor)) ready.push_back(parameter);
  begin(ready);
  begun_.insert(stage);
}

void GradientSync::begin(const std::vector<optim::NamedParameter>& parameters) {
  const at::NoGradGuard no_grad;
  optim::settle_gradients(parameters);
  Bucket bucket;
  std::int64_t bytes = 0;
  const auto send = [&] {
    if (bucket.gradients.empty()) return;
    std::vector<at::Tensor> flat;
    for (const at::Tensor& gradient : bucket.gradients) flat.push_back(gradient.reshape({-1}));
    bucket.flat = at::cat(flat);
    bucket.work = replica_group_->all_reduce(bucket.flat, comm::ReduceOp::Sum, {.label = "gradients of replicas", .timeout = {}});
    buckets_.push_back(std::move(bucket));
    bucket = {};
    bytes = 0;
  };
  for (const optim::NamedParameter& parameter : parameters) {
    if (!parameter.tensor.grad().defined()) continue;
    const at::Tensor gradient = local_gradient(parameter.tensor);
    if (!bucket.gradients.empty() && (bytes >= kBucketBytes || bucket.gradients[0].scalar_type() != gradient.scalar_type())) send();
    bucket.gradients.push_back(gradient);
    bytes += gradient.numel() * gradient.element_size();
  }
  send();
}

void GradientSync::add_tied() {
  const ModelStages::TiedWeight& tied = stages_.tied();
  if (tied.embed.defined() && tied.head.defined()) {
    optim::settle_gradients({{"embed.weight", tied.embed}, {"head.weight", tied.head}});
    at::Tensor embed = tied.embed, head = tied.head;
    const at::NoGradGuard no_grad;
    local_gradient(embed).add_(local_gradient(head));
    head.mutable_grad() = at::Tensor();
  } else if (tied_group_) {
    const at::Tensor own = tied.embed.defined() ? tied.embed : tied.head;
    optim::settle_gradients({{"embed.weight", own}});
    at::Tensor gradient = local_gradient(own);
    at::Tensor sum = gradient.contiguous();
    tied_group_->all_reduce(sum, comm::ReduceOp::Sum, {.label = "gradient of the tied weight", .timeout = {}}).wait();
    if (!sum.is_same(gradient)) gradient.copy_(sum);
  }
}

std::int64_t GradientSync::buffer_bytes() const {
  std::int64_t bytes = 0;
  for (const Bucket& bucket : buckets_) bytes += static_cast<std::int64_t>(bucket.flat.nbytes());
  return bytes;
}

void GradientSync::finish() {
  const at::NoGradGuard no_grad;
  add_tied();
  if (replicas_ > 1) {
    std::vector<optim::NamedParameter> rest;
    for (const optim::NamedParameter& parameter : stages_.parameters())
      if (begun_.empty() || stages_.is_tied(parameter.tensor)) rest.push_back(parameter);
    begin(rest);
    for (Bucket& bucket : buckets_) {
      bucket.work.wait();
      bucket.flat.div_(replicas_);
      std::int64_t offset = 0;
      for (at::Tensor& gradient : bucket.gradients) {
        gradient.copy_(bucket.flat.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
        offset += gradient.numel();
      }
    }
    buckets_.clear();
    begun_.clear();
  }
}

}  // namespace penstock::train
