#include "penstock/torch/random/running_step.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <limits>
#include <memory>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/step_context.h"
#include "penstock/torch/random/step_info.h"

namespace penstock {
namespace {

// In the place of the step; no step is negative.
constexpr std::int64_t kRunningStep = std::numeric_limits<std::int64_t>::min();

// Added to the size of a dim whose rows are those of the running step; its offset begins here.
constexpr std::int64_t kRowsOfRunningStep = -(std::int64_t{1} << 62);
constexpr std::int64_t kMostRows = std::int64_t{1} << 60;

constexpr const char* kScaleName = "penstock::scale_of_running_step";

at::Tensor scale_like(const at::Tensor& like, double factor) {
  const auto step = StepContext::current();
  if (step->captured)
    throw StateError(
        "step context: the loss scale was requested while a graph is captured; replays have others");
  return at::full({}, factor * step->loss_scale, like.options());
}

at::Tensor shape_of_scale(const at::Tensor& like, double) { return at::empty({}, like.options()); }

at::Tensor scale_without_gradient(const at::Tensor& like, double factor) {
  const at::AutoDispatchBelowAutograd below;
  return scale_of_running_step(like, factor);
}

}  // namespace

RandomKey key_of_running_step(std::int64_t layer, std::int64_t purpose) {
  return {.seed = 0, .step = kRunningStep, .microbatch = -1, .layer = layer, .purpose = purpose};
}

std::array<std::int64_t, 5> completed(at::IntArrayRef key) {
  std::array<std::int64_t, 5> numbers{key[0], key[1], key[2], key[3], key[4]};
  if (numbers[1] != kRunningStep) return numbers;
  const auto step = StepContext::current();
  if (step->captured)
    throw StateError(
        "step context: random numbers were drawn while a graph is captured; replays draw others");
  const RandomKey now = step->key(numbers[3], numbers[4]);
  return {static_cast<std::int64_t>(now.seed), now.step, now.microbatch, now.layer, now.purpose};
}

GlobalBox box_of_running_step(at::IntArrayRef sizes) {
  if (sizes.empty())
    throw ValueError(describe("step context: dim 0 of a tensor that is split by the rows of the microbatch",
                              "none", "one, because other steps may have only some of the rows",
                              "pass the GlobalBox of this tensor"));
  GlobalBox box{sizes.vec(), std::vector<std::int64_t>(sizes.size(), 0)};
  box.global_shape[0] += kRowsOfRunningStep;
  box.offset[0] = kRowsOfRunningStep;
  return box;
}

AnyRowsScope::AnyRowsScope()
    : guard_(detail::step_info_kind(), [] {
        const detail::StepInfo* outer = detail::current_step_info();
        return std::make_shared<detail::StepInfo>(StepContext::current(),
                                                  outer == nullptr ? nullptr : outer->half, true);
      }()) {}

bool waits_for_rows(std::int64_t global, std::int64_t offset) {
  const auto waits = [](std::int64_t number) {
    return number >= kRowsOfRunningStep && number < kRowsOfRunningStep + kMostRows;
  };
  return waits(global) && waits(offset);
}

CompletedBox::CompletedBox(at::IntArrayRef global_shape, at::IntArrayRef offset)
    : global_shape_(global_shape), offset_(offset) {
  if (global_shape.size() != offset.size()) return;  // refused with the other arguments
  for (std::size_t dim = 0; dim < offset.size(); ++dim) {
    if (!waits_for_rows(global_shape[dim], offset[dim])) continue;
    if (own_shape_.empty()) {
      own_shape_ = global_shape.vec();
      own_offset_ = offset.vec();
    }
    const auto step = StepContext::current();
    if (step->captured)
      throw StateError(
          "step context: random numbers were drawn while a graph is captured; replays draw for other rows");
    const std::int64_t size = global_shape[dim] - kRowsOfRunningStep;
    const GlobalBox rows = step->box_of(size);
    own_shape_[dim] = rows.whole() ? size : rows.global_shape[0];
    own_offset_[dim] = offset[dim] - kRowsOfRunningStep + (rows.whole() ? 0 : rows.offset[0]);
  }
  if (own_shape_.empty()) return;
  global_shape_ = own_shape_;
  offset_ = own_offset_;
}

at::Tensor scale_of_running_step(const at::Tensor& like, double factor) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow(kScaleName, "")
                                 .typed<at::Tensor(const at::Tensor&, double)>();
  return handle.call(like, factor);
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def("scale_of_running_step(Tensor like, float factor) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, library) { library.impl("scale_of_running_step", scale_like); }
TORCH_LIBRARY_IMPL(penstock, CUDA, library) { library.impl("scale_of_running_step", scale_like); }
TORCH_LIBRARY_IMPL(penstock, Meta, library) { library.impl("scale_of_running_step", shape_of_scale); }
TORCH_LIBRARY_IMPL(penstock, Autograd, library) {
  library.impl("scale_of_running_step", scale_without_gradient);
}

}  // namespace penstock
