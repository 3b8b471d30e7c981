#include "penstock/shard/state/shard_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/shard/state/registry.h"
#include "penstock/shard/state/shard_context.h"
#include "penstock/shard/state/trigger.h"
#include "penstock/torch/dispatch/switch_data.h"

namespace penstock {
namespace {

// Modules by address. A module may be destroyed before its parameters; such entries no longer match.
struct Modules {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, std::weak_ptr<ShardState>> states;
};
Modules& modules() {
  static Modules& instance = *new Modules;
  return instance;
}

std::shared_ptr<ShardState> state_at(const torch::nn::Module& module) {
  const std::lock_guard lock(modules().mutex);
  const auto found = modules().states.find(&module);
  return found == modules().states.end() ? nullptr : found->second.lock();
}

bool holds_any(const torch::nn::Module& module, const ShardState& state) {
  std::unordered_set<const void*> own;
  for (const at::Tensor& parameter : module.parameters()) own.insert(parameter.unsafeGetTensorImpl());
  for (const ShardGroup* group : state.all_groups())
    for (const ShardedParameter& p : group->parameters())
      if (own.contains(p.handle._unsafe_get_target())) return true;
  return false;
}

// Parameters that form a group.
struct Part {
  ShardMesh mesh;
  std::vector<ShardGroupParameter> parameters;
};

// The part that a parameter belongs to according to ShardOptions::shard_placement.
Part& part_of(std::vector<Part>& parts, const ShardChoice& choice) {
  if (!choice.mesh) return parts.front();
  ShardMesh mesh(*choice.mesh, ShardOptions{});
  for (Part& part : parts)
    if (part.mesh.same_as(mesh)) return part;
  return parts.emplace_back(Part{std::move(mesh), {}});
}

}  // namespace

std::shared_ptr<ShardState> find_shard_state(const torch::nn::Module& module) {
  const std::shared_ptr<ShardState> state = state_at(module);
  return state && holds_any(module, *state) ? state : nullptr;
}

std::shared_ptr<ShardState> find_replaced_shard_state(const torch::nn::Module& module) {
  const std::shared_ptr<ShardState> state = state_at(module);
  if (!state || holds_any(module, *state)) return state;
  const auto table = module.named_parameters(/*recurse=*/true);
  for (const ShardGroup* group : state->groups())
    for (const ShardedParameter& p : group->parameters())
      if (const at::Tensor* now = table.find(p.name); !now || now->sizes() != c10::IntArrayRef(p.placement.sharded->shape())) return nullptr;
  return state;
}

std::shared_ptr<ShardState> make_shard_state(torch::nn::Module& module, const ShardMesh& mesh, const ShardOptions& options) {
  install_trigger();
  if (find_shard_state(module)) throw StateError(fmt::format("fully_shard: module '{}' is already sharded", module.name()));
  std::unordered_set<const void*> ignored, seen;
  for (const at::Tensor& tensor : options.ignored) ignored.insert(tensor.unsafeGetTensorImpl());
  std::shared_ptr<ShardState> state(new ShardState);
  state->module_ = &module;
  state->name_ = module.name();
  for (const auto& child : module.modules(/*include_self=*/false)) state->inner_modules_.push_back(child.get());
  // Sharded modules inside, in tree order.
  state->subtree_.push_back(state.get());
  std::vector<std::shared_ptr<ShardState>> inside;
  for (const auto& child : module.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    if (auto known = find_shard_state(*child.value()); known && std::find(inside.begin(), inside.end(), known) == inside.end()) {
      inside.push_back(known);
      state->subtree_.push_back(known.get());
      for (const auto& group : known->groups_)
        for (ShardedParameter& p : group->mutable_parameters()) p.path = child.key() + "." + p.name;
    }
  std::vector<Part> parts{{mesh, {}}};
  std::vector<at::Tensor> all;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    const at::Tensor& parameter = item.value();
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    if (ignored.contains(parameter.unsafeGetTensorImpl())) continue;
    const detail::Membership member = detail::find_parameter(parameter);
    if (!member.group) {
      const ShardChoice choice = options.shard_placement ? options.shard_placement(item.key(), parameter) : ShardChoice();
      part_of(parts, choice).parameters.push_back({item.key(), parameter, choice.shard});
      all.push_back(parameter);
      continue;
    }
    all.push_back(parameter);
    // A tied parameter may belong to a sharded module elsewhere; a parameter taken by an outer module cannot
    // be taken back.
    if (const ShardState* owner = member.group->owner(); owner && owner->holds_module(module))
      throw StateError(fmt::format("fully_shard: parameter '{}' of module '{}' belongs to an enclosing module that is already sharded; shard inner modules before outer ones",
                                   item.key(), module.name()));
  }
  for (Part& part : parts) {
    if (part.parameters.empty()) continue;
    std::string name = state->name_;
    if (&part != &parts.front()) name += fmt::format(" on {}", part.mesh.mesh().mesh().to_string());
    state->groups_.push_back(std::make_unique<ShardGroup>(std::move(name), std::move(part.mesh), options, std::move(part.parameters)));
    state->groups_.back()->set_owner(state.get());
  }
  for (const auto& known : inside) {
    if (!known->parent_) known->parent_ = state.get();
    for (const auto& group : known->groups_) group->set_context(nullptr);
  }
  for (const at::Tensor& parameter : all)
    if (parameter.is_floating_point() || parameter.is_complex()) tie_lifetime(parameter, state);
  const std::lock_guard lock(modules().mutex);
  modules().states[&module] = state;
  return state;
}

ShardState::~ShardState() {
  for (ShardState* outer = parent_; outer; outer = outer->parent_) std::erase(outer->subtree_, this);
  for (ShardState* inner : subtree_)
    if (inner != this && inner->parent_ == this) inner->parent_ = parent_;
  for (const auto& group : groups_) ShardContext::forget(*group);
  const std::lock_guard lock(modules().mutex);
  const auto found = modules().states.find(module_);
  if (found != modules().states.end() && found->second.expired()) modules().states.erase(found);
}

ShardState& ShardState::root() {
  ShardState* state = this;
  while (state->parent_) state = state->parent_;
  return *state;
}

bool ShardState::holds_module(const torch::nn::Module& module) const {
  return std::find(inner_modules_.begin(), inner_modules_.end(), &module) != inner_modules_.end();
}

bool ShardState::contains(const ShardState& other) const {
  for (const ShardState* state = other.parent_; state; state = state->parent_)
    if (state == this) return true;
  return false;
}

std::vector<ShardGroup*> ShardState::groups() const {
  std::vector<ShardGroup*> groups;
  for (const auto& group : groups_) groups.push_back(group.get());
  return groups;
}

std::vector<ShardGroup*> ShardState::all_groups() const {
  std::vector<ShardGroup*> groups;
  for (const ShardState* state : subtree_)
    for (const auto& group : state->groups_) groups.push_back(group.get());
  return groups;
}

template <class Set>
void ShardState::for_groups(bool recurse, Set&& set) {
  for (ShardState* state : subtree_)
    if (recurse || state == this)
      for (const auto& group : state->groups_) set(*group);
}

void ShardState::unshard(bool async) {
  for (const auto& group : groups_) {
    if (group->in_trial()) continue;
    group->context();
    group->unshard();
  }
  if (!async) wait_for_unshard();
}

void ShardState::wait_for_unshard() {
  for (const auto& group : groups_) group->wait_for_unshard();
}

void ShardState::reshard() {
  for (const auto& group : groups_) group->reshard();
}

void ShardState::set_requires_gradient_sync(bool value, bool recurse) {
  for_groups(recurse, [&](ShardGroup& group) { group.flags.reduce = value; });
}
void ShardState::set_requires_all_reduce(bool value, bool recurse) {
  for_groups(recurse, [&](ShardGroup& group) { group.flags.all_reduce = value; });
}
void ShardState::set_reshard_after_backward(bool value, bool recurse) {
  for_groups(recurse, [&](ShardGroup& group) { group.flags.reshard = value; });
}
void ShardState::set_reshard_after_forward(bool value, bool recurse) {
  for_groups(recurse, [&](ShardGroup& group) { group.set_reshard_after_forward(value); });
}
void ShardState::set_is_last_backward(bool value) {
  for_groups(true, [&](ShardGroup& group) { group.flags.last = value; });
}
void ShardState::set_gradient_divide_factor(double factor, bool recurse) {
  if (!(factor > 0)) throw ValueError(describe("set_gradient_divide_factor", fmt::format("{}", factor), "a number above 0"));
  for_groups(recurse, [&](ShardGroup& group) { group.gradient_divide_factor = factor; });
}

void ShardState::post_backward() {
  const std::vector<ShardGroup*> groups = all_groups();
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) (*group)->post_backward();
}

void ShardState::final_callback() {
  const std::vector<ShardGroup*> groups = all_groups();
  if (!groups.empty()) groups.front()->context().final_callback();
}

namespace {

std::vector<ShardGroup*> groups_of(const ShardState& self, ShardState& root, const std::vector<ShardState*>& states, const char* function) {
  if (!self.group()) throw StateError(fmt::format("{}: the module has no parameters of its own to gather", function));
  std::vector<ShardGroup*> groups;
  for (ShardState* state : states) {
    if (!state || &state->root() != &root)
      throw ValueError(describe(function, state ? "a module under another root" : "a null state", "sharded modules under the same outermost module"));
    for (ShardGroup* group : state->groups()) groups.push_back(group);
  }
  return groups;
}

}  // namespace

void ShardState::set_modules_to_forward_prefetch(const std::vector<ShardState*>& states) {
  auto groups = groups_of(*this, root(), states, "set_modules_to_forward_prefetch");
  group()->context().set_forward_prefetch(*group(), std::move(groups));
}

void ShardState::set_modules_to_backward_prefetch(const std::vector<ShardState*>& states) {
  auto groups = groups_of(*this, root(), states, "set_modules_to_backward_prefetch");
  group()->context().set_backward_prefetch(*group(), std::move(groups));
}

void ShardState::set_automatic_prefetch(bool value) {
  const std::vector<ShardGroup*> groups = root().all_groups();
  if (!groups.empty()) groups.front()->context().prefetch = value;
}

ShardContext* ShardState::root_context() {
  const std::vector<ShardGroup*> groups = root().all_groups();
  return groups.empty() || !groups.front()->has_context() ? nullptr : &groups.front()->context();
}

void ShardState::set_own_streams(bool value) {
  const std::vector<ShardGroup*> groups = root().all_groups();
  if (!groups.empty()) groups.front()->context().own_streams = value;
}

std::optional<c10::Stream> ShardState::gather_stream() {
  ShardContext* context = root_context();
  return context ? context->gather_stream(context->groups().front()->device()) : std::nullopt;
}

std::optional<c10::Stream> ShardState::reduce_stream() {
  ShardContext* context = root_context();
  return context ? context->reduce_stream(context->groups().front()->device()) : std::nullopt;
}

std::int64_t ShardState::peak_gathered_bytes() {
  const ShardContext* context = root_context();
  return context ? context->peak_gathered_bytes() : 0;
}

void ShardState::reset_peak() {
  if (ShardContext* context = root_context()) context->reset_peak();
}

std::size_t ShardState::pool_allocations() {
  const ShardContext* context = root_context();
  return context ? context->pool().allocations() : 0;
}

ShardTimes ShardState::times() {
  const ShardContext* context = root_context();
  return context ? context->times : ShardTimes{};
}

void ShardState::reset_times() {
  if (ShardContext* context = root_context()) context->times = {};
}

}  // namespace penstock
