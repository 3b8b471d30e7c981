#include "penstock/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/gradients.h"
#include "penstock/torch/tree/distributed_type.h"

namespace penstock::optim {
namespace {

void check_number(std::string_view what, double value, std::string_view remedy) {
  if (!(value >= 0) || !std::isfinite(value))
    throw ValueError(describe(what, fmt::format("{}", value), "a number that is not negative", remedy));
}

void check_steps(const NamedSteps& entry) {
  if (entry.steps < 0)
    throw ValueError(describe(fmt::format("state of an optimizer: {}", entry.name),
                              fmt::format("{}", entry.steps), "0 or more",
                              "the record is damaged; use another checkpoint"));
}

}  // namespace

Optimizer::Optimizer(std::vector<ParameterGroup> groups, double lr, double weight_decay, Kernels kernels,
                     std::vector<std::string> kinds)
    : kernels_(kernels), kinds_(std::move(kinds)) {
  set_lr(lr);
  check_number("optimizer: weight_decay", weight_decay, "0 disables decay");
  std::vector<NamedParameter> all;
  std::map<const void*, std::size_t> group_of;
  for (std::size_t index = 0; index < groups.size(); ++index) {
    const ParameterGroup& group = groups[index];
    check_number(fmt::format("optimizer: lr_scale of group {}", index), group.lr_scale,
                 "1 is the optimizer's own rate");
    check_number(fmt::format("optimizer: weight_decay of group {}", index), group.weight_decay.value_or(0),
                 "0 disables decay");
    groups_.push_back({group.lr_scale, group.weight_decay.value_or(weight_decay)});
    for (const NamedParameter& parameter : group.parameters) {
      all.push_back(parameter);
      if (!parameter.tensor.defined()) continue;  // without_ties reports it
      const auto [first, added] = group_of.emplace(parameter.tensor.unsafeGetTensorImpl(), index);
      const GroupNumbers &there = groups_[first->second], &here = groups_[index];
      if (!added && (there.lr != here.lr || there.weight_decay != here.weight_decay))
        throw ValueError(
            describe(fmt::format("optimizer: tied parameter {}", parameter.name),
                     fmt::format("groups {} and {} with different options", first->second, index),
                     "one group, or equal options",
                     "leave the name out of one of the groups; a tied parameter is stepped once"));
    }
  }
  parameters_ = without_ties(all);
  for (const NamedParameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    if (!at::isFloatingType(tensor.scalar_type()) || !tensor.is_leaf())
      throw ValueError(
          describe(fmt::format("optimizer: parameter {}", parameter.name),
                   tensor.is_leaf() ? c10::toString(tensor.scalar_type()) : "the result of an operator",
                   "a leaf of a floating-point type",
                   "list the parameters of modules, not what is computed from them"));
    if (is_dtensor(tensor) && std::any_of(placements_of(tensor).begin(), placements_of(tensor).end(),
                                          [](const Placement& placement) { return placement.is_partial(); }))
      throw ValueError(describe(fmt::format("optimizer: parameter {}", parameter.name),
                                to_string(placements_of(tensor)), "placements without Partial",
                                "redistribute it before the optimizer is made"));
    slots_.push_back({.group = group_of.at(tensor.unsafeGetTensorImpl())});
  }
}

void Optimizer::set_lr(double lr) {
  check_number("optimizer: lr", lr, "common values are 1e-4 to 1e-2");
  lr_ = lr;
}

void Optimizer::zero_grad(bool to_undefined) {
  const at::NoGradGuard no_grad;
  for (NamedParameter& parameter : parameters_) {
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (!gradient.defined()) continue;
    if (to_undefined)
      gradient.reset();
    else
      gradient.detach_().zero_();
  }
}

std::string Optimizer::state_name(std::size_t index, const std::string& kind) const {
  return fmt::format("optimizer.{}.{}", parameters_[index].name, kind);
}

void Optimizer::make_state(std::size_t index) {
  Slot& slot = slots_[index];
  if (slot.state.size() == kinds_.size()) return;
  ensure_sharded(parameters_[index].tensor);  // state has the layout and dtype of the shard
  const at::Tensor parameter = parameters_[index].tensor.detach();
  for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
    slot.state.push_back(at::zeros_like(parameter, at::MemoryFormat::Preserve));
    slot.local.push_back(local_if_distributed(slot.state.back(), kDetach));
  }
}

void Optimizer::ensure_state() {
  const at::NoGradGuard no_grad;
  for (std::size_t index = 0; index < slots_.size(); ++index) make_state(index);
}

std::vector<Optimizer::Bucket> Optimizer::buckets() {
  std::vector<Bucket> result;
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    const at::Tensor& tensor = parameters_[index].tensor;
    const at::Tensor whole_gradient = tensor.grad();
    if (!whole_gradient.defined()) continue;
    make_state(index);
    Slot& slot = slots_[index];
    ++slot.steps;
    const bool distributed = is_dtensor(tensor);
    const at::Tensor parameter = distributed ? local_if_distributed(tensor, kDetach) : tensor;
    at::Tensor gradient = distributed ? local_if_distributed(whole_gradient, kDetach) : whole_gradient;
    if (parameter.numel() == 0) continue;
    // All lists need the same order of elements; autograd almost always provides it.
    if (gradient.strides() != parameter.strides())
      gradient = at::empty_like(parameter, at::MemoryFormat::Preserve).copy_(gradient);
    auto bucket = std::find_if(result.begin(), result.end(), [&](const Bucket& other) {
      return other.group == slot.group && other.step == slot.steps &&
             other.parameters[0].scalar_type() == parameter.scalar_type() &&
             other.parameters[0].device() == parameter.device();
    });
    if (bucket == result.end()) {
      const GroupNumbers& group = groups_[slot.group];
      bucket = result.insert(result.end(), Bucket{slot.group,
                                                  slot.steps,
                                                  {lr_ * group.lr, group.weight_decay},
                                                  {},
                                                  {},
                                                  std::vector<std::vector<at::Tensor>>(kinds_.size())});
    }
    bucket->parameters.push_back(parameter);
    bucket->gradients.push_back(std::move(gradient));
    for (std::size_t kind = 0; kind < kinds_.size(); ++kind) bucket->state[kind].push_back(slot.local[kind]);
    // The version counter must change, so that autograd detects a saved parameter that was modified,
    // whichever kernel writes it.
    tensor.unsafeGetTensorImpl()->bump_version();
  }
  return result;
}

void Optimizer::step() {
  const at::NoGradGuard no_grad;
  settle_gradients(parameters_);
  const std::vector<Bucket> work = buckets();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const Bucket& bucket : work) {
    if (kernels_ == Kernels::Auto && update_fused(bucket)) continue;
    if (!bucket.parameters[0].is_cpu()) {
      update_lists(bucket);
      continue;
    }
    // On the CPU an operator on a list runs tensor by tensor anyway; short lists keep intermediate
    // results in the cache.
    constexpr std::int64_t kPieceElements = 1 << 14;
    for (std::size_t begin = 0; begin < bucket.parameters.size();) {
      std::size_t end = begin;
      for (std::int64_t elements = 0; end < bucket.parameters.size() && elements < kPieceElements; ++end)
        elements += bucket.parameters[end].numel();
      const auto piece = [&](const std::vector<at::Tensor>& list) {
        return std::vector<at::Tensor>(list.begin() + static_cast<std::ptrdiff_t>(begin),
                                       list.begin() + static_cast<std::ptrdiff_t>(end));
      };
      Bucket part{
          bucket.group, bucket.step, bucket.numbers, piece(bucket.parameters), piece(bucket.gradients), {}};
      for (const auto& list : bucket.state) part.state.push_back(piece(list));
      update_lists(part);
      begin = end;
    }
  }
}

OptimizerState Optimizer::state() const {
  OptimizerState result;
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    const Slot& slot = slots_[index];
    if (slot.state.size() != kinds_.size() || (kinds_.empty() && slot.steps == 0)) continue;
    for (std::size_t kind = 0; kind < kinds_.size(); ++kind)
      result.tensors.push_back({state_name(index, kinds_[kind]), slot.state[kind]});
    result.steps.push_back({state_name(index, "step"), slot.steps});
  }
  return result;
}

void Optimizer::load_state(const OptimizerState& state) {
  const at::NoGradGuard no_grad;
  for (const NamedParameter& parameter : parameters_) ensure_sharded(parameter.tensor);
  struct Given {
    std::vector<at::Tensor> tensors;
    std::optional<std::int64_t> steps;
  };
  std::vector<Given> given(slots_.size());
  std::map<std::string, std::pair<std::size_t, std::size_t>>
      places;  // parameter and kind; the last kind is the count
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    given[index].tensors.resize(kinds_.size());
    for (std::size_t kind = 0; kind < kinds_.size(); ++kind)
      places[state_name(index, kinds_[kind])] = {index, kind};
    places[state_name(index, "step")] = {index, kinds_.size()};
  }
  std::set<std::string> seen;
  const auto place_of = [&](const std::string& name, bool count) {
    const auto place = places.find(name);
    if (place == places.end() || (place->second.second == kinds_.size()) != count)
      throw ValueError(describe("state of an optimizer: name", name,
                                fmt::format("optimizer.<parameter>.{} of a parameter of this rank",
                                            count ? "step" : fmt::format("<{}>", fmt::join(kinds_, "|"))),
                                "load the state of the same model and kind of optimizer, and pass to each "
                                "rank the names of its own parameters"));
    if (!seen.insert(name).second)
      throw ValueError(describe(fmt::format("state of an optimizer: {}", name), "given twice", "once",
                                "leave one of them out"));
    return place->second;
  };
  for (const NamedTensor& entry : state.tensors) {
    const auto [index, kind] = place_of(entry.name, false);
    const at::Tensor& parameter = parameters_[index].tensor;
    if (!entry.tensor.defined() || entry.tensor.sizes() != parameter.sizes())
      throw ValueError(describe(fmt::format("state of an optimizer: shape of {}", entry.name),
                                entry.tensor.defined()
                                    ? fmt::format("[{}]", fmt::join(entry.tensor.sizes(), ", "))
                                    : "an undefined tensor",
                                fmt::format("[{}]", fmt::join(parameter.sizes(), ", ")),
                                "load the state of a model of the same size"));
    if (is_dtensor(entry.tensor) &&
        (!is_dtensor(parameter) || !(mesh_of(entry.tensor) == mesh_of(parameter))))
      throw ValueError(describe(fmt::format("state of an optimizer: {}", entry.name),
                                describe_dtensor(entry.tensor),
                                is_dtensor(parameter) ? "a tensor of the parameter's mesh" : "a plain tensor",
                                "pass the whole tensor (full_tensor) if layouts differ"));
    given[index].tensors[kind] = entry.tensor;
  }
  for (const NamedSteps& entry : state.steps) {
    check_steps(entry);
    given[place_of(entry.name, true).first].steps = entry.steps;
  }
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    const auto& [tensors, steps] = given[index];
    const bool some = steps || std::any_of(tensors.begin(), tensors.end(),
                                           [](const at::Tensor& tensor) { return tensor.defined(); });
    for (std::size_t kind = 0; kind <= kinds_.size(); ++kind)
      if (some && !(kind < kinds_.size() ? tensors[kind].defined() : steps.has_value()))
        throw ValueError(
            describe("state of an optimizer",
                     fmt::format("no {} beside other state of {}",
                                 state_name(index, kind < kinds_.size() ? kinds_[kind] : "step"),
                                 parameters_[index].name),
                     "all of a parameter's state or none",
                     "the record is damaged or of another kind of optimizer; use another checkpoint"));
  }
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    const auto& [tensors, steps] = given[index];
    slot.steps = steps.value_or(0);
    if (!steps) {
      slot.state.clear();
      slot.local.clear();
      continue;
    }
    make_state(index);
    for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
      const at::Tensor& target = slot.state[kind];
      at::Tensor source = tensors[kind].detach();
      if (is_dtensor(target)) {
        source = source.to(target.options().dtype(target.scalar_type()));
        source = is_dtensor(source) ? redistribute(source, placements_of(target))
                                    : distribute_tensor(source, mesh_of(target), placements_of(target),
                                                        {.source_axis_rank = std::nullopt});
      }
      slot.local[kind].copy_(local_if_distributed(source, kDetach));
    }
  }
}

void Optimizer::set_steps(const std::vector<NamedSteps>& steps) {
  std::map<std::string, std::size_t> places;
  for (std::size_t index = 0; index < slots_.size(); ++index) places[state_name(index, "step")] = index;
  for (const NamedSteps& entry : steps) {
    check_steps(entry);
    if (!places.count(entry.name))
      throw ValueError(describe("state of an optimizer: name", entry.name,
                                "optimizer.<parameter>.step of a parameter of this rank",
                                "pass to each rank the names of its own parameters"));
  }
  for (const NamedSteps& entry : steps) slots_[places.at(entry.name)].steps = entry.steps;
}

}  // namespace penstock::optim
