#include "penstock/torch/random/running_step.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <limits>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/step_context.h"

namespace penstock {
namespace {

// In the place of the step; no step is negative.
constexpr std::int64_t kRunningStep = std::numeric_limits<std::int64_t>::min();

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
