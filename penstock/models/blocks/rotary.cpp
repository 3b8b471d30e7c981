#include "penstock/models/blocks/rotary.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>

#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/mode.h"
#include "penstock/torch/dispatch/constant_tensor.h"
#include "penstock/torch/kernels/fused_math.h"

namespace penstock::models {
namespace {

using TableKey = std::pair<at::Device, at::ScalarType>;

bool comes_before(const TableKey& a, const TableKey& b) {
  return std::make_tuple(a.first.type(), a.first.index(), a.second) <
         std::make_tuple(b.first.type(), b.first.index(), b.second);
}

bool is_here(at::Device device) {
  return device.is_cpu() || (c10::impl::hasDeviceGuardImpl(device.type()) &&
                             c10::impl::getDeviceGuardImpl(device.type())->deviceCount() > device.index());
}

}  // namespace

Rotary::Rotary(std::int64_t head_width, std::int64_t context, double theta)
    : context_(context), tables_(comes_before) {
  const NoModesGuard real;  // the table is kept, so it must never be fake
  const at::Tensor frequencies =
      at::pow(theta, at::arange(0, head_width, 2, at::kDouble).div(-static_cast<double>(head_width)));
  angles_ = at::outer(at::arange(0, context, at::kDouble), frequencies);
}

const at::Tensor& Rotary::table_for(const at::Tensor& like, at::Tensor& fake) {
  const at::ScalarType dtype = like.scalar_type() == at::kDouble ? at::kComplexDouble : at::kComplexFloat;
  const TableKey key(like.device(), dtype);
  const auto found = tables_.find(key);
  if (found != tables_.end()) return found->second;
  at::Tensor table;
  {
    const NoModesGuard real;
    table = at::polar(at::ones_like(angles_), angles_).to(dtype).unsqueeze(1);
    // Real for fake tensors, too, so that a capture of the model has a constant.
    if (!is_fake(like) || is_here(like.device()))
      return tables_[key] = constant_tensor(table.to(like.device()));
  }
  fake = to_fake(table, like.device());
  return fake;
}

at::Tensor Rotary::turns(std::int64_t first, std::int64_t length, const at::Tensor& like) {
  if (first < 0 || length < 0 || first + length > context_)
    throw ValueError(describe("positions", fmt::format("{} to {}", first, first + length - 1),
                              fmt::format("0 to {}", context_ - 1),
                              "shorten the sequence, or set model.context higher"));
  at::Tensor fake;
  return table_for(like, fake).narrow(0, first, length);
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& turns) { return rotate_pairs(x, turns); }

}  // namespace penstock::models
