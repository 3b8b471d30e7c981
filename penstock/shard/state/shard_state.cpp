#include "penstock/shard/state/shard_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/shard/state/registry.h"
#include "penstock/shard/state/shard_context.h"
#include "penstock/shard/state/trigger.h"
#include "penstock/torch/dispatch/switch_data.h"

namespace penstock {

struct ShardState::Impl {
  // Only compared, never dereferenced.
  const torch::nn::Module* module = nullptr;
  std::vector<const torch::nn::Module*> inner_modules;
  std::string name;
  std::vector<std::unique_ptr<ShardGroup>> groups;
  ShardState* parent = nullptr;
  std::vector<ShardState*> subtree;

  bool holds_module(const torch::nn::Module& other) const {
    return std::find(inner_modules.begin(), inner_modules.end(), &other) != inner_modules.end();
  }
};

// Gives the functions of this file access to the members.
struct ShardStateAccess {
  static ShardState::Impl& of(const ShardState& state) { return *state.impl_; }
  static std::shared_ptr<ShardState> make() {
    return std::shared_ptr<ShardState>(new ShardState(std::make_unique<ShardState::Impl>()));
  }
};

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
  for (const ShardGroup* group : all_groups(state))
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
  for (const ShardGroup* group : own_groups(*state))
    for (const ShardedParameter& p : group->parameters())
      if (const at::Tensor* now = table.find(p.name);
          !now || now->sizes() != c10::IntArrayRef(p.placement.sharded->shape()))
        return nullptr;
  return state;
}

std::shared_ptr<ShardState> make_shard_state(torch::nn::Module& module, const ShardMesh& mesh,
                                             const ShardOptions& options) {
  install_trigger();
  if (find_shard_state(module))
    throw StateError(fmt::format("fully_shard: module '{}' is already sharded", module.name()));
  std::unordered_set<const void*> ignored, seen;
  for (const at::Tensor& tensor : options.ignored) ignored.insert(tensor.unsafeGetTensorImpl());
  const std::shared_ptr<ShardState> state = ShardStateAccess::make();
  auto& impl = ShardStateAccess::of(*state);
  impl.module = &module;
  impl.name = module.name();
  for (const auto& child : module.modules(/*include_self=*/false)) impl.inner_modules.push_back(child.get());
  // Sharded modules inside, in tree order.
  impl.subtree.push_back(state.get());
  std::vector<std::shared_ptr<ShardState>> inside;
  for (const auto& child : module.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    if (auto known = find_shard_state(*child.value());
        known && std::find(inside.begin(), inside.end(), known) == inside.end()) {
      inside.push_back(known);
      impl.subtree.push_back(known.get());
      for (ShardGroup* group : own_groups(*known))
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
      const ShardChoice choice =
          options.shard_placement ? options.shard_placement(item.key(), parameter) : ShardChoice();
      part_of(parts, choice).parameters.push_back({item.key(), parameter, choice.shard});
      all.push_back(parameter);
      continue;
    }
    all.push_back(parameter);
    // A tied parameter may belong to a sharded module elsewhere; a parameter taken by an outer module cannot
    // be taken back.
    if (const ShardState* owner = member.group->owner();
        owner && ShardStateAccess::of(*owner).holds_module(module))
      throw StateError(
          fmt::format("fully_shard: parameter '{}' of module '{}' belongs to an enclosing module that is "
                      "already sharded; shard inner modules before outer ones",
                      item.key(), module.name()));
  }
  for (Part& part : parts) {
    if (part.parameters.empty()) continue;
    std::string name = impl.name;
    if (&part != &parts.front()) name += fmt::format(" on {}", part.mesh.mesh().mesh().to_string());
    impl.groups.push_back(std::make_unique<ShardGroup>(std::move(name), std::move(part.mesh), options,
                                                       std::move(part.parameters)));
    impl.groups.back()->set_owner(state.get());
  }
  for (const auto& known : inside) {
    auto& inner = ShardStateAccess::of(*known);
    if (!inner.parent) inner.parent = state.get();
    for (const auto& group : inner.groups) group->set_context(nullptr);
  }
  for (const at::Tensor& parameter : all)
    if (parameter.is_floating_point() || parameter.is_complex()) tie_lifetime(parameter, state);
  const std::lock_guard lock(modules().mutex);
  modules().states[&module] = state;
  return state;
}

ShardState::ShardState(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

ShardState::~ShardState() {
  for (ShardState* outer = impl_->parent; outer; outer = outer->impl_->parent)
    std::erase(outer->impl_->subtree, this);
  for (ShardState* inner : impl_->subtree)
    if (inner != this && inner->impl_->parent == this) inner->impl_->parent = impl_->parent;
  for (const auto& group : impl_->groups) ShardContext::forget(*group);
  const std::lock_guard lock(modules().mutex);
  const auto found = modules().states.find(impl_->module);
  if (found != modules().states.end() && found->second.expired()) modules().states.erase(found);
}

ShardState& ShardState::root() {
  ShardState* state = this;
  while (state->impl_->parent) state = state->impl_->parent;
  return *state;
}

bool ShardState::contains(const ShardState& other) const {
  for (const ShardState* state = other.impl_->parent; state; state = state->impl_->parent)
    if (state == this) return true;
  return false;
}

const std::vector<ShardState*>& ShardState::all_states() const { return impl_->subtree; }

ShardGroup* first_group(const ShardState& state) {
  const auto& groups = ShardStateAccess::of(state).groups;
  return groups.empty() ? nullptr : groups.front().get();
}

std::vector<ShardGroup*> own_groups(const ShardState& state) {
  std::vector<ShardGroup*> groups;
  for (const auto& group : ShardStateAccess::of(state).groups) groups.push_back(group.get());
  return groups;
}

std::vector<ShardGroup*> all_groups(const ShardState& state) {
  std::vector<ShardGroup*> groups;
  for (const ShardState* inner : state.all_states())
    for (const auto& group : ShardStateAccess::of(*inner).groups) groups.push_back(group.get());
  return groups;
}

namespace {

template <class Set>
void for_groups(const ShardState& state, bool recurse, Set&& set) {
  for (ShardGroup* group : recurse ? all_groups(state) : own_groups(state)) set(*group);
}

// Null before the first forward.
ShardContext* root_context(ShardState& state) {
  const std::vector<ShardGroup*> groups = all_groups(state.root());
  return groups.empty() || !groups.front()->has_context() ? nullptr : &groups.front()->context();
}

}  // namespace

void ShardState::unshard(bool async) {
  for (const auto& group : impl_->groups) {
    if (group->in_trial()) continue;
    group->context();
    group->unshard();
  }
  if (!async) wait_for_unshard();
}

void ShardState::wait_for_unshard() {
  for (const auto& group : impl_->groups) group->wait_for_unshard();
}

void ShardState::reshard() {
  for (const auto& group : impl_->groups) group->reshard();
}

void ShardState::set_requires_gradient_sync(bool value, bool recurse) {
  for_groups(*this, recurse, [&](ShardGroup& group) { group.flags.reduce = value; });
}
void ShardState::set_requires_all_reduce(bool value, bool recurse) {
  for_groups(*this, recurse, [&](ShardGroup& group) { group.flags.all_reduce = value; });
}
void ShardState::set_reshard_after_backward(bool value, bool recurse) {
  for_groups(*this, recurse, [&](ShardGroup& group) { group.flags.reshard = value; });
}
void ShardState::set_reshard_after_forward(bool value, bool recurse) {
  for_groups(*this, recurse, [&](ShardGroup& group) { group.set_reshard_after_forward(value); });
}
void ShardState::set_is_last_backward(bool value) {
  for_groups(*this, true, [&](ShardGroup& group) { group.flags.last = value; });
}
void ShardState::set_gradient_divide_factor(double factor, bool recurse) {
  if (!(factor > 0))
    throw ValueError(describe("set_gradient_divide_factor", fmt::format("{}", factor), "a number above 0"));
  for_groups(*this, recurse, [&](ShardGroup& group) { group.gradient_divide_factor = factor; });
}

void ShardState::post_backward() {
  const std::vector<ShardGroup*> groups = all_groups(*this);
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) (*group)->post_backward();
}

void ShardState::final_callback() {
  const std::vector<ShardGroup*> groups = all_groups(*this);
  if (!groups.empty()) groups.front()->context().final_callback();
}

namespace {

std::vector<ShardGroup*> prefetched(const ShardState& self, ShardState& root,
                                    const std::vector<ShardState*>& states, const char* function) {
  if (!first_group(self))
    throw StateError(fmt::format("{}: the module has no parameters of its own to gather", function));
  std::vector<ShardGroup*> groups;
  for (ShardState* state : states) {
    if (!state || &state->root() != &root)
      throw ValueError(describe(function, state ? "a module under another root" : "a null state",
                                "sharded modules under the same outermost module"));
    for (ShardGroup* group : own_groups(*state)) groups.push_back(group);
  }
  return groups;
}

}  // namespace

void ShardState::set_modules_to_forward_prefetch(const std::vector<ShardState*>& states) {
  auto groups = prefetched(*this, root(), states, "set_modules_to_forward_prefetch");
  first_group(*this)->context().set_forward_prefetch(*first_group(*this), std::move(groups));
}

void ShardState::set_modules_to_backward_prefetch(const std::vector<ShardState*>& states) {
  auto groups = prefetched(*this, root(), states, "set_modules_to_backward_prefetch");
  first_group(*this)->context().set_backward_prefetch(*first_group(*this), std::move(groups));
}

void ShardState::set_automatic_prefetch(bool value) {
  const std::vector<ShardGroup*> groups = all_groups(root());
  if (!groups.empty()) groups.front()->context().prefetch = value;
}

void ShardState::set_own_streams(bool value) {
  const std::vector<ShardGroup*> groups = all_groups(root());
  if (!groups.empty()) groups.front()->context().own_streams = value;
}

std::optional<c10::Stream> ShardState::gather_stream() {
  ShardContext* context = root_context(*this);
  return context ? context->gather_stream(context->groups().front()->device()) : std::nullopt;
}

std::optional<c10::Stream> ShardState::reduce_stream() {
  ShardContext* context = root_context(*this);
  return context ? context->reduce_stream(context->groups().front()->device()) : std::nullopt;
}

std::int64_t ShardState::peak_gathered_bytes() {
  const ShardContext* context = root_context(*this);
  return context ? context->peak_gathered_bytes() : 0;
}

void ShardState::reset_peak() {
  if (ShardContext* context = root_context(*this)) context->reset_peak();
}

std::size_t ShardState::pool_allocations() {
  const ShardContext* context = root_context(*this);
  return context ? context->pool().allocations() : 0;
}

ShardTimes ShardState::times() {
  const ShardContext* context = root_context(*this);
  return context ? context->times : ShardTimes{};
}

void ShardState::reset_times() {
  if (ShardContext* context = root_context(*this)) context->times = {};
}

}  // namespace penstock
