#include "penstock/train/job/find_not_finite.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>
#include <utility>

#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/fake.h"
#include "penstock/operator_traits.h"
#include "penstock/step_context.h"
#include "penstock/torch/tree/distributed_type.h"
#include "penstock/train/job/stage_scope.h"

namespace penstock::train {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool has_values(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta() && !is_fake(tensor) &&
         tensor.numel() > 0 && at::isFloatingType(tensor.scalar_type());
}

std::int64_t not_finite_values(const at::Tensor& tensor) {
  const at::Tensor local = local_if_distributed(tensor, kDetach);
  return has_values(local) ? at::isfinite(local).logical_not().sum().item<std::int64_t>() : 0;
}

std::string replica_text(const RankLayout& layout) {
  return layout.dp_size() > 1 ? fmt::format(", replica {}", layout.dp()) : std::string();
}

template <class Look>
std::optional<NonFiniteOrigin> first_of(const RankLayout& layout, const ModelStages& model, const char* kind,
                                        const Look& look) {
  const at::NoGradGuard no_grad;
  for (const PipelineStage& stage : model.stages()) {
    std::int64_t order = 0;
    for (const optim::NamedParameter& parameter : model.parameters_of(stage.index())) {
      const at::Tensor tensor = look(parameter);
      const std::int64_t bad = tensor.defined() ? not_finite_values(tensor) : 0;
      if (bad > 0)
        return NonFiniteOrigin{
            .run = 0,
            .microbatch = 0,
            .stage = stage.index(),
            .order = order,
            .what = fmt::format("{} {} has {} of {} values that are NaN or infinite (stage {}{})", kind,
                                parameter.name, bad, tensor.numel(), stage.index(), replica_text(layout))};
      ++order;
    }
  }
  return std::nullopt;
}

// The results are uninitialized memory.
bool returns_uninitialized_memory(std::string_view name) {
  return name.find("empty") != std::string_view::npos || name.find("resize") != std::string_view::npos;
}

// Writes a value chosen by the caller; infinities are intended.
bool writes_chosen_values(std::string_view name) {
  constexpr std::array<std::string_view, 5> kNames = {"aten::fill", "aten::masked_fill", "aten::where",
                                                      "aten::full", "aten::new_full"};
  for (const std::string_view each : kNames)
    if (name.starts_with(each)) return true;
  return false;
}

// The former contents of a written argument do not count.
bool overwrites(std::string_view name) {
  return name.starts_with("aten::copy_") || name.starts_with("aten::zero_") ||
         name.starts_with("aten::fill_") || name.ends_with("out");
}

// Further results of fused attention (log-sum-exp, seeds) are not model values.
bool only_first_result_counts(std::string_view name) {
  return name.find("attention") != std::string_view::npos;
}

}  // namespace

bool NonFiniteOrigin::is_before(const NonFiniteOrigin& other) const {
  return std::tie(run, microbatch, stage, order) <
         std::tie(other.run, other.microbatch, other.stage, other.order);
}

std::optional<NonFiniteOrigin> bad_parameter(const RankLayout& layout, const ModelStages& model) {
  return first_of(layout, model, "parameter", [](const optim::NamedParameter& each) { return each.tensor; });
}

std::optional<NonFiniteOrigin> bad_gradient(const RankLayout& layout, const ModelStages& model) {
  return first_of(layout, model, "the gradient of",
                  [](const optim::NamedParameter& each) { return each.tensor.grad(); });
}

std::optional<NonFiniteOrigin> earliest(const comm::World& world, const std::optional<NonFiniteOrigin>& own) {
  checkpoint::WorldAgreement agreement(world);
  const auto read = [](const checkpoint::Bytes& bytes) -> std::optional<NonFiniteOrigin> {
    if (bytes.empty()) return std::nullopt;
    const nlohmann::json finding = nlohmann::json::parse(bytes.begin(), bytes.end());
    const auto number = [&](const char* key) { return finding.at(key).get<std::int64_t>(); };
    return NonFiniteOrigin{.run = number("run"),
                           .microbatch = number("microbatch"),
                           .stage = number("stage"),
                           .order = number("order"),
                           .what = finding.at("what").get<std::string>()};
  };
  const checkpoint::Bytes verdict = agreement.agree(
      "finding the first bad tensor",
      [&] {
        if (!own) return checkpoint::Bytes{};
        const std::string text = nlohmann::json{
            {"run", own->run},
            {"microbatch", own->microbatch},
            {"stage", own->stage},
            {"order", own->order},
            {"what", own->what}}.dump();
        return checkpoint::Bytes(text.begin(), text.end());
      },
      [&](const std::vector<checkpoint::Bytes>& findings) {
        checkpoint::Bytes first;
        for (const checkpoint::Bytes& each : findings)
          if (const auto place = read(each); place && (first.empty() || place->is_before(*read(first))))
            first = each;
        return first;
      });
  return read(verdict);
}

OperatorWatch::OperatorWatch(const RankLayout& layout, const ModelStages& model)
    : replica_(replica_text(layout)), stages_(model.stages().front().count()) {
  const at::NoGradGuard no_grad;
  for (const optim::NamedParameter& parameter : model.parameters()) {
    const at::Tensor local = local_if_distributed(parameter.tensor, kDetach);
    if (local.has_storage()) parameters_.emplace(local.storage().unsafeGetStorageImpl(), parameter.name);
  }
}

void OperatorWatch::begin_run(std::int64_t run, std::int64_t runs) {
  run_ = run;
  runs_ = runs;
  microbatch_ = stage_ = -1;
}

OperatorWatch::Seen OperatorWatch::look(const at::Tensor& tensor) {
  const at::Tensor local = local_if_distributed(tensor, kDetach);
  if (!has_values(local) || at::isfinite(local).all().item<bool>()) return {};
  return {.bad = at::logical_or(local.isnan(), local.eq(kInfinity)).any().item<bool>(),
          .minus = local.eq(-kInfinity).any().item<bool>()};
}

std::string OperatorWatch::parameter_name(const at::Tensor& tensor) const {
  if (is_fake(tensor)) return {};
  const at::Tensor local = local_if_distributed(tensor, kDetach);
  if (!local.defined() || !local.has_storage()) return {};
  const auto found = parameters_.find(local.storage().unsafeGetStorageImpl());
  return found == parameters_.end() ? std::string() : found->second;
}

void OperatorWatch::enter(std::int64_t microbatch, std::int64_t stage) {
  if (microbatch == microbatch_ && stage == stage_) return;
  microbatch_ = microbatch;
  stage_ = stage;
  order_ = 0;
  last_parameter_.clear();
}

std::string OperatorWatch::place_text(const std::string& own_parameter) const {
  if (stage_ == stages_) return "in the loss";
  const std::string& near = own_parameter.empty() ? last_parameter_ : own_parameter;
  std::string text = fmt::format("in stage {}", stage_);
  constexpr std::string_view kBlocks = "blocks.";
  if (near.starts_with(kBlocks))
    text += fmt::format(", block {}",
                        near.substr(kBlocks.size(), near.find('.', kBlocks.size()) - kBlocks.size()));
  if (!own_parameter.empty()) return text + fmt::format(", with {}", own_parameter);
  return text + (near.empty() ? std::string(", before any of its weights") : fmt::format(", after {}", near));
}

void OperatorWatch::dispatch(const c10::OperatorHandle& op, Stack* stack) {
  const auto context = StepContext::current();
  if (!context->running || context->trial || !context->microbatch) return op.callBoxed(stack);
  // The loss is computed after the last stage.
  enter(*context->microbatch, StageScope::current().value_or(stages_));
  const NonFiniteOrigin here{
      .run = run_, .microbatch = microbatch_, .stage = stage_, .order = order_++, .what = {}};
  if (found_ && !here.is_before(*found_)) return op.callBoxed(stack);

  const at::NoGradGuard no_grad;
  const OperatorTraits& traits = traits_of(op);
  const std::size_t arguments = traits.arguments.size();
  const Stack inputs(stack->end() - static_cast<std::ptrdiff_t>(arguments), stack->end());
  Seen before;
  bool any_input = false;
  std::string own_parameter;
  const auto look_at = [&](const at::Tensor& tensor) {
    const Seen seen = look(tensor);
    before.bad |= seen.bad;
    before.minus |= seen.minus;
  };
  for (std::size_t i = 0; i < arguments; ++i) {
    for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      any_input = true;
      if (std::string name = parameter_name(tensor); !name.empty()) own_parameter = std::move(name);
      if (traits.arguments[i].written && !overwrites(traits.name))
        look_at(tensor);  // overwritten by the call
    });
  }
  op.callBoxed(stack);
  if (!any_input || returns_uninitialized_memory(traits.name)) return;

  Seen after;
  at::Tensor worst;
  const std::size_t results = traits.returns.size(), counted = only_first_result_counts(traits.name)
                                                                   ? std::min<std::size_t>(1, results)
                                                                   : results;
  for (std::size_t i = 0; i < counted; ++i) {
    for_each_tensor((*stack)[stack->size() - results + i], [&](const at::Tensor& tensor) {
      const Seen seen = look(tensor);
      if ((seen.bad || seen.minus) && !worst.defined()) worst = tensor;
      after.bad |= seen.bad;
      after.minus |= seen.minus;
    });
  }
  if (worst.defined()) {
    for (std::size_t i = 0; i < arguments; ++i)
      if (!traits.arguments[i].written) for_each_tensor(inputs[i], look_at);
    const bool begins =
        !before.bad && !writes_chosen_values(traits.name) && (after.bad || (after.minus && !before.minus));
    if (begins) {
      found_ = here;
      found_->what = fmt::format(
          "microbatch {} of {}{}{}: {} {} produced {} of {} values that are NaN or infinite from finite "
          "inputs",
          microbatch_, context->microbatches,
          runs_ > 1 ? fmt::format(" in run {} of {}", run_, runs_) : std::string(), replica_, traits.name,
          place_text(own_parameter), not_finite_values(worst), worst.numel());
    }
  }
  if (!own_parameter.empty()) last_parameter_ = own_parameter;
}

}  // namespace penstock::train
