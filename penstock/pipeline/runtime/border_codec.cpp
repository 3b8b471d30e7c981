#include "penstock/pipeline/runtime/border_codec.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "penstock/torch/compat/float8.h"

namespace penstock {
namespace {

// Whether every rank of its mesh holds the whole tensor.
bool is_whole(const TensorMeta& meta) {
  const auto* distributed = std::get_if<DistributedRecord>(&meta);
  if (distributed == nullptr) return true;
  return std::all_of(distributed->placements().begin(), distributed->placements().end(),
                     [](const Placement& each) { return each == Placement(Replicate{}); });
}

}  // namespace

BorderCodec::BorderCodec(BorderOptions options) : options_(std::move(options)) {}

BorderCodec::Form BorderCodec::form_of(const TensorMeta& meta) const {
  Form form;
  if (options_.equal_ranks && is_whole(meta)) form.ranks = options_.equal_ranks->size();
  const at::ScalarType dtype = local_record(meta).dtype();
  const std::size_t narrow = options_.dtype == BorderDtype::Float8 ? 1 : 2;
  if (at::isFloatingType(dtype) && c10::elementSize(dtype) > narrow) form.dtype = options_.dtype;
  return form;
}

bool BorderCodec::changes(const TensorMeta& meta) const {
  const Form form = form_of(meta);
  return form.ranks > 1 || form.dtype != BorderDtype::Same;
}

std::int64_t BorderCodec::share_size(std::int64_t elements, const Form& form) const {
  return (elements + form.ranks - 1) / form.ranks;
}

at::Tensor BorderCodec::narrowed(const at::Tensor& values, BorderDtype dtype) const {
  switch (dtype) {
    case BorderDtype::BFloat16:
      return values.to(at::kBFloat16);
    case BorderDtype::Float8:
      return to_float8(values);
    case BorderDtype::Same:
      break;
  }
  return values;
}

// The values of one share.
at::Tensor BorderCodec::widened(const at::Tensor& message, std::int64_t elements, const Form& form) const {
  return form.dtype == BorderDtype::Float8 ? from_float8(message, elements) : message;
}

at::Tensor BorderCodec::encode(const at::Tensor& memory, const TensorMeta& meta) {
  const c10::NoGradGuard no_grad;
  const Form form = form_of(meta);
  at::Tensor values = memory.detach().reshape({-1});
  if (form.ranks > 1) {
    const std::int64_t share = share_size(values.numel(), form);
    const std::int64_t first = std::min(share * options_.equal_ranks->axis_rank(), values.numel());
    const std::int64_t count = std::min(share, values.numel() - first);
    const at::Tensor own = values.narrow(0, first, count);
    // The shares have one size; the last ones may be filled up.
    values = count == share ? own : at::cat({own, own.new_zeros({share - count})});
  }
  const at::Tensor message = narrowed(values, form.dtype);
  if (form.dtype != BorderDtype::Same) {
    const at::Tensor exact = values.to(at::kDouble);
    const at::Tensor error = widened(message, values.numel(), form).to(at::kDouble).sub(exact);
    const at::Tensor squares = at::stack({error.square().sum(), exact.square().sum()});
    squares_ = squares_.defined() ? squares_.add_(squares) : squares;
  }
  return message.contiguous();
}

at::Tensor BorderCodec::buffer_for(const at::Tensor& memory, const TensorMeta& meta) const {
  const Form form = form_of(meta);
  const std::int64_t share = share_size(memory.numel(), form);
  switch (form.dtype) {
    case BorderDtype::BFloat16:
      return at::empty({share}, memory.options().dtype(at::kBFloat16));
    case BorderDtype::Float8:
      return at::empty({float8_bytes(share)}, memory.options().dtype(at::kByte));
    case BorderDtype::Same:
      break;
  }
  return at::empty({share}, memory.options());
}

void BorderCodec::decode(const at::Tensor& message, const at::Tensor& memory, const TensorMeta& meta) const {
  const c10::NoGradGuard no_grad;
  const Form form = form_of(meta);
  const at::Tensor target = memory.view({-1});
  if (form.ranks == 1) {
    target.copy_(widened(message, target.numel(), form));
    return;
  }
  const at::Tensor messages = at::empty({form.ranks, message.numel()}, message.options());
  options_.equal_ranks
      ->all_gather(messages.view({-1}), message, {.label = "shares of a border", .timeout = {}})
      .wait();
  const std::int64_t share = share_size(target.numel(), form);
  for (std::int64_t rank = 0; rank < form.ranks; ++rank) {
    const std::int64_t first = std::min(share * rank, target.numel());
    const std::int64_t count = std::min(share, target.numel() - first);
    target.narrow(0, first, count).copy_(widened(messages[rank], share, form).narrow(0, 0, count));
  }
}

void BorderCodec::begin_step() {
  bytes_ = 0;
  squares_ = at::Tensor();
}

BorderReport BorderCodec::report() const {
  BorderReport report{.bytes = bytes_};
  if (!squares_.defined()) return report;
  const at::Tensor squares = squares_.cpu();
  report.squared_error = squares[0].item<double>();
  report.squared_values = squares[1].item<double>();
  return report;
}

}  // namespace penstock
