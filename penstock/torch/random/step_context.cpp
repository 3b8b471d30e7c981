#include "penstock/step_context.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/random/running_step.h"
#include "penstock/torch/random/step_info.h"

namespace penstock {

namespace {

void check(const StepContext& context) {
  // Outside of any step there is no context to make current, except to say that a forward is recomputed.
  if (!context.running && !context.recompute && !context.captured)
    throw ValueError(
        "step context: got a context outside of any step; set `running` or create a new StepContext");
  if (context.microbatches < 1)
    throw ValueError(describe("step context: number of microbatches", fmt::format("{}", context.microbatches),
                              "1 or more"));
  if (context.microbatch && (*context.microbatch < 0 || *context.microbatch >= context.microbatches))
    throw ValueError(describe("step context: microbatch", fmt::format("{}", *context.microbatch),
                              fmt::format("0 to {}", context.microbatches - 1),
                              "set `microbatches` to the number of this step"));
  if (!(context.loss_scale > 0) || !std::isfinite(context.loss_scale))
    throw ValueError(describe("step context: loss scale", fmt::format("{}", context.loss_scale),
                              "a finite number above 0"));
  if (const auto& rows = context.rows;
      rows && (rows->first < 0 || rows->count < 1 || rows->first > rows->global - rows->count))
    throw ValueError(describe("step context: rows", fmt::format("{} from {}", rows->count, rows->first),
                              fmt::format("a part of the {} rows of the microbatch", rows->global)));
}

std::shared_ptr<c10::DebugInfoBase> info_of(std::shared_ptr<const StepContext> context) {
  if (context == nullptr)
    throw ValueError("step context: got a null pointer; pass a snapshot from StepContext::current()");
  check(*context);
  // A scope inside of a half of an overlapped unit belongs to that half, one inside of a capture to that.
  const detail::StepInfo* outer = detail::current_step_info();
  return std::make_shared<detail::StepInfo>(std::move(context), outer == nullptr ? nullptr : outer->half,
                                            outer != nullptr && outer->any_rows);
}

}  // namespace

const detail::StepInfo* detail::current_step_info() {
  const c10::DebugInfoBase* info = c10::ThreadLocalDebugInfo::get(step_info_kind());
  if (info == nullptr) return nullptr;
  if (const auto* step = dynamic_cast<const StepInfo*>(info)) return step;
  // It may hide the context of an outer scope; continuing without it would change random numbers.
  throw StateError(
      "step context: other code has set PRODUCER_INFO in c10::ThreadLocalDebugInfo, which Penstock uses; "
      "it must use another kind");
}

std::shared_ptr<const StepContext> StepContext::current() {
  if (const detail::StepInfo* info = detail::current_step_info()) return info->context;
  static const std::shared_ptr<const StepContext> outside = [] {
    auto context = std::make_shared<StepContext>();
    context->running = false;
    return context;
  }();
  return outside;
}

RandomKey StepContext::key(std::int64_t layer, std::int64_t purpose) const {
  if (!running)
    throw StateError(
        "step context: random numbers were requested outside of any step, where every call would return the "
        "same ones; run under a StepGuard, or "
        "pass an explicit RandomKey");
  if (recorded)
    throw StateError(describe(
        "random numbers of a step",
        "requested while the step is recorded, so that every replay would draw the same",
        "a step that runs on the host each time", "disable PipelineOptions::device_graph or keyed dropout"));
  if (captured) return key_of_running_step(layer, purpose);
  return {
      .seed = seed, .step = step, .microbatch = microbatch.value_or(-1), .layer = layer, .purpose = purpose};
}

StepContext StepContext::recomputation() const {
  StepContext again = *this;
  again.recompute = true;
  return again;
}

GlobalBox StepContext::box_of(at::IntArrayRef sizes) const {
  if (captured) {
    const detail::StepInfo* info = detail::current_step_info();
    if (info != nullptr && info->any_rows) return box_of_running_step(sizes);
  }
  if (!rows) return {};
  if (sizes.empty() || sizes[0] % rows->count != 0)
    throw ValueError(describe("step context: dim 0 of a tensor that is split by the rows of the microbatch",
                              sizes.empty() ? std::string("none") : fmt::format("{}", sizes[0]),
                              fmt::format("a multiple of the {} rows here", rows->count),
                              "pass the GlobalBox of this tensor"));
  const std::int64_t per_row = sizes[0] / rows->count;
  GlobalBox box{sizes.vec(), std::vector<std::int64_t>(sizes.size(), 0)};
  box.global_shape[0] = rows->global * per_row;
  box.offset[0] = rows->first * per_row;
  return box;
}

StepGuard::StepGuard(StepContext context)
    : StepGuard(std::make_shared<const StepContext>(std::move(context))) {}

StepGuard::StepGuard(std::shared_ptr<const StepContext> context)
    : guard_(detail::step_info_kind(), info_of(std::move(context))) {}

}  // namespace penstock
