#include "penstock/graph/stages/history_of_values.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>

#include "penstock/errors.h"
#include "penstock/torch/compat/autograd_node.h"

namespace penstock::graph {

using torch::autograd::Edge;
using AutogradNode = torch::autograd::Node;

namespace {

// Invalid for a tensor without history, also for a view that requires a gradient only because its base does.
Edge place_of(const at::Tensor& tensor) {
  return tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor) : Edge();
}

// A hook that was removed has left an empty function.
std::size_t count_tensor_hooks(const at::Tensor& tensor) {
  const torch::autograd::AutogradMeta* autograd = torch::autograd::impl::get_autograd_meta(tensor);
  if (!autograd || !autograd->cpp_hooks_list_) return 0;
  return static_cast<std::size_t>(std::count_if(autograd->cpp_hooks_list_->begin(),
                                                autograd->cpp_hooks_list_->end(),
                                                [](const auto& hook) { return hook != nullptr; }));
}

}  // namespace

void HistoryOfValues::make_room_for(ValueId value) {
  if (index_of(value) < handles_.size()) return;
  handles_.resize(index_of(value) + 1);
  requires_grad_.resize(handles_.size(), 0);
  has_history_.resize(handles_.size(), 0);
}

void HistoryOfValues::note_place(const at::Tensor& tensor, ValueId value) {
  if (!tensor.requires_grad()) return;
  requires_grad_[index_of(value)] = 1;
  Edge edge = place_of(tensor);
  if (!edge.is_valid()) return;
  has_history_[index_of(value)] = 1;
  if (value_at_.emplace(std::pair(edge.function.get(), edge.input_nr), value).second)
    held_.push_back(std::move(edge));
}

ValueId HistoryOfValues::note(const at::Tensor& tensor, ValueId noted) {
  ValueId value = noted;
  // A leaf whose requires_grad was off for a while is its own value again.
  if (const auto own = detached_.find(tensor.unsafeGetTensorImpl());
      own != detached_.end() && own->second.noted == noted && value_at(place_of(tensor)) != noted)
    value = own->second.value;
  make_room_for(value);
  // Without grad mode, a replay does not differentiate either.
  if (c10::GradMode::is_enabled()) {
    refuse_other_history(tensor, value);
    if (has_lost_history(tensor, value)) value = detach(tensor, noted, value);
  }
  if (!is_handle(tensor, value)) handles_[index_of(value)].push_back(tensor);
  note_place(tensor, value);
  return value;
}

void HistoryOfValues::finish() {
  // A tensor whose shape was changed in place is several values, and has the history of the last one.
  for (std::size_t i = handles_.size(); i-- > 0;)
    for (const at::Tensor& tensor : handles_[i]) {
      const ValueId value{static_cast<std::int32_t>(i)}, known = value_at(place_of(tensor));
      if (known == kNoValue || known == value) note_place(tensor, value);
    }
}

ValueId HistoryOfValues::value_at(const Edge& edge) const {
  const auto found = value_at_.find({edge.function.get(), edge.input_nr});
  return found == value_at_.end() ? kNoValue : found->second;
}

std::vector<AutogradNode*> HistoryOfValues::nodes() const {
  std::vector<AutogradNode*> found;
  std::unordered_set<AutogradNode*> known;
  const auto visit = [&](AutogradNode* node) {
    if (node && known.insert(node).second) found.push_back(node);
  };
  for (const Edge& place : held_) visit(place.function.get());
  for (std::size_t next = 0; next < found.size(); ++next)
    for (const Edge& edge : found[next]->next_edges()) visit(edge.function.get());
  return found;
}

// -------------------------------------------------------------------------------------------------------
// hooks

void HistoryOfValues::note_hooks() {
  for (const Edge& place : held_) hooks_before_[place.function.get()] = count_hooks(*place.function);
  for (const std::vector<at::Tensor>& handles : handles_)
    for (const at::Tensor& tensor : handles)
      hooks_before_[tensor.unsafeGetTensorImpl()] = count_tensor_hooks(tensor);
}

std::optional<ValueId> HistoryOfValues::hooked() const {
  const auto has_more = [&](const void* owner, std::size_t count) {
    const auto before = hooks_before_.find(owner);
    return count > (before == hooks_before_.end() ? 0 : before->second);
  };
  for (AutogradNode* node : nodes())
    if (has_more(node, count_hooks(*node))) {
      const auto first = value_at_.lower_bound({node, 0});
      return first != value_at_.end() && first->first.first == node ? first->second : kNoValue;
    }
  // The hooks of a leaf are not on a node in every version of LibTorch.
  for (std::size_t i = 0; i < handles_.size(); ++i)
    for (const at::Tensor& tensor : handles_[i])
      if (tensor.requires_grad() && !tensor.grad_fn() &&
          has_more(tensor.unsafeGetTensorImpl(), count_tensor_hooks(tensor)))
        return ValueId{static_cast<std::int32_t>(i)};
  return std::nullopt;
}

// -------------------------------------------------------------------------------------------------------
// lost history

bool HistoryOfValues::is_handle(const at::Tensor& tensor, ValueId value) const {
  const std::vector<at::Tensor>& handles = handles_[index_of(value)];
  return std::any_of(handles.begin(), handles.end(),
                     [&](const at::Tensor& handle) { return handle.is_same(tensor); });
}

void HistoryOfValues::refuse_other_history(const at::Tensor& tensor, ValueId value) const {
  if (is_handle(tensor, value)) return;
  const ValueId other = value_at(place_of(tensor));
  if (other == kNoValue || other == value) return;
  throw NotImplemented(
      fmt::format("graph: a tensor {} has the values of one tensor and the history of another (set_data), "
                  "which a replay cannot repeat; compute `history + (values - history).detach()` instead",
                  in_module(modules_.current())));
}

bool HistoryOfValues::has_lost_history(const at::Tensor& tensor, ValueId value) const {
  const Edge place = place_of(tensor);
  if (place.is_valid() && (tensor.grad_fn() || value_at(place) == value)) return false;
  if (has_history_[index_of(value)] != 0 || was_detached_in_place(tensor, value)) return true;
  const std::vector<at::Tensor>& handles = handles_[index_of(value)];
  return std::any_of(handles.begin(), handles.end(), [&](const at::Tensor& handle) {
    return !handle.is_same(tensor) && (place_of(handle).is_valid() || was_detached_in_place(handle, value));
  });
}

// Whether a tensor had a history that no operator has seen. detach_ leaves the metadata of autograd behind,
// which a tensor that never had a history lacks.
bool HistoryOfValues::was_detached_in_place(const at::Tensor& tensor, ValueId value) const {
  if (!torch::autograd::impl::get_autograd_meta(tensor) || tensor.is_view() || tensor.grad_fn()) return false;
  return std::any_of(graph_.nodes.begin(), graph_.nodes.end(), [&](const Node& node) {
    if (node.op.operator_name().name == "aten::detach") return false;
    bool makes = false, differentiable = false;
    for_each_value(node.results, [&](ValueId result) { makes |= result == value; });
    if (makes)
      for_each_value(node.arguments, [&](ValueId argument) { differentiable |= requires_grad(argument); });
    return differentiable;
  });
}

ValueId HistoryOfValues::detach(const at::Tensor& tensor, ValueId noted, ValueId value) {
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", "");
  const ValueId result = graph_.new_value(geometry_of(tensor), graph_[value].storage);
  Node node{op, {}, {}, Phase::Forward, true};
  node.arguments = {Operand::of(value)};
  node.results = {Operand::of(result)};
  graph_.nodes.push_back(std::move(node));
  make_room_for(result);
  // In a replay the value has its history, and the tensor is no longer the one that gets it.
  requires_grad_[index_of(value)] = has_history_[index_of(value)] = 1;
  std::vector<at::Tensor>& handles = handles_[index_of(value)];
  handles.erase(std::remove_if(handles.begin(), handles.end(),
                               [&](const at::Tensor& handle) { return handle.is_same(tensor); }),
                handles.end());
  handles_[index_of(result)].push_back(tensor);
  detached_.insert_or_assign(tensor.unsafeGetTensorImpl(), Detached{noted, result});
  return result;
}

}  // namespace penstock::graph
