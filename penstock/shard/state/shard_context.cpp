#include "penstock/shard/state/shard_context.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/shard/state/shard_state.h"
#include "penstock/torch/compat/streams.h"
#include "penstock/torch/dispatch/any_operator_hook.h"
#include "penstock/torch/dispatch/operator_hook.h"

namespace penstock {
namespace {

void check_equal(const comm::Group& group, std::uint64_t fingerprint, const std::string& name) {
  if (group.size() == 1) return;
  at::Tensor mine = at::empty({1}, at::kLong);
  mine[0] = static_cast<std::int64_t>(fingerprint);
  at::Tensor all = at::empty({group.size()}, at::kLong);
  group.all_gather(all, mine, {.label = "fully_shard: compare the parameters of all ranks"}).wait();
  const auto* values = all.data_ptr<std::int64_t>();
  for (int i = 1; i < group.size(); ++i)
    if (values[i] != values[0])
      throw ValueError(
          describe(fmt::format("fully_shard of '{}': names, shapes, dtypes, placements and requires_grad of "
                               "the parameters on rank {}",
                               name, group.rank_at(i)),
                   "different ones", fmt::format("those of rank {}", group.rank_at(0)),
                   "build the same module and call fully_shard with the same options on all ranks"));
}

}  // namespace

void ShardContext::prepare(ShardGroup& group) {
  PENSTOCK_INVARIANT(group.owner(), "a group must belong to a module");
  const NoAnyHookGuard no_hook;
  ShardState& root = group.owner()->root();
  auto context = std::make_shared<ShardContext>(all_groups(root));
  context->agree();
  for (ShardGroup* member : context->groups_) {
    member->set_pool(context->pool_);
    member->set_context(context);
    if (member->reshard_is_default()) member->set_reshard_default(member->owner() != &root);
  }
}

ShardContext::ShardContext(std::vector<ShardGroup*> groups)
    : groups_(std::move(groups)), ready_(groups_.size()), settled_(groups_.size()) {}

void ShardContext::agree() const {
  std::map<std::uint64_t, std::pair<const ShardGroup*, std::uint64_t>> by_mesh;
  for (const ShardGroup* group : groups_) {
    auto& entry = by_mesh.try_emplace(group->mesh().mesh().id(), group, 0).first->second;
    entry.second = entry.second * 31 + group->fingerprint();
  }
  // Meshes in the order of their first group, which is the same on all ranks.
  std::vector<std::uint64_t> seen;
  for (const ShardGroup* group : groups_) {
    const std::uint64_t id = group->mesh().mesh().id();
    if (std::find(seen.begin(), seen.end(), id) != seen.end()) continue;
    seen.push_back(id);
    if (group->mesh().shard_ranks() > 1)
      check_equal(group->mesh().gather_group(), by_mesh.at(id).second, group->name());
    if (group->mesh().replicas() > 1)
      check_equal(group->mesh().replicate_group(), by_mesh.at(id).second, group->name());
  }
}

std::optional<c10::Stream> ShardContext::stream(std::optional<c10::Stream>& slot, at::Device device) const {
  if (!own_streams || !device.is_cuda()) return std::nullopt;
  if (!slot) slot = side_stream(device);
  // If groups under one root are on several devices, those of the other devices use the compute stream.
  return slot->device() == device ? slot : std::nullopt;
}

void ShardContext::note_peak(std::int64_t more) {
  std::int64_t now = more;
  for (const ShardGroup* group : groups_) now += group->gathered_bytes();
  peak_ = std::max(peak_, now);
}

bool ShardContext::prefetch_chosen(const ShardGroup& group, const std::vector<Prefetch>& chosen) {
  const auto found = std::find_if(chosen.begin(), chosen.end(),
                                  [&](const Prefetch& entry) { return entry.group == &group; });
  if (found == chosen.end()) return false;
  for (ShardGroup* next : found->next) next->unshard();
  return true;
}

void ShardContext::begin_forward() {
  backward_ended_ = false;
  last_order_ = std::move(order_);
  order_.clear();
  for (ShardGroup* group : groups_) group->clear_use();
}

ShardGroup* ShardContext::group_after(const ShardGroup& group) const {
  for (const std::vector<ShardGroup*>* order : {&last_order_, &order_})
    if (const auto found = std::find(order->begin(), order->end(), &group); found != order->end())
      return found + 1 == order->end() ? nullptr : *(found + 1);
  return nullptr;
}

void ShardContext::use_in_forward(ShardGroup& group) {
  if (callback_queued_) {  // an earlier backward failed
    start_anew();
    backward_ended_ = true;
  }
  if (backward_ended_ && at::GradMode::is_enabled()) begin_forward();
  if (current_ == &group && group.state() == ShardGroupState::Unsharded) return;
  if (std::find(order_.begin(), order_.end(), &group) == order_.end()) order_.push_back(&group);
  // Other open groups are finished, except those of modules that contain this one.
  std::erase_if(open_, [&](ShardGroup* other) {
    if (other == &group || other->owner() == group.owner() || other->owner()->contains(*group.owner()))
      return false;
    if (other->reshards_after_forward()) other->reshard_after_forward();
    return true;
  });
  const bool kept = group.state() == ShardGroupState::Unsharded;
  group.wait_for_unshard();
  if (std::find(open_.begin(), open_.end(), &group) == open_.end()) open_.push_back(&group);
  current_ = &group;
  // A group that stayed gathered, like the outermost one at the end of forward, may be the last to be used.
  if (!prefetch_chosen(group, forward_prefetch_) && prefetch && !kept) {
    if (ShardGroup* next = group_after(group)) next->unshard();
  }
  note_peak();
}

void ShardContext::use_in_backward(ShardGroup& group) {
  note_backward();
  if (current_ == &group && group.state() == ShardGroupState::Unsharded) return;
  // Groups before it in the order are gathered first, whether needed here or not.
  const auto here =
      std::find(to_gather_.begin() + static_cast<std::ptrdiff_t>(gathered_), to_gather_.end(), &group);
  if (here != to_gather_.end())
    for (const auto end = static_cast<std::size_t>(here - to_gather_.begin()) + 1; gathered_ < end;
         ++gathered_)
      to_gather_[gathered_]->unshard();
  group.wait_for_unshard();
  current_ = &group;
  if (!prefetch_chosen(group, backward_prefetch_) && prefetch && gathered_ < to_gather_.size())
    to_gather_[gathered_++]->unshard();
  note_peak();
}

void ShardContext::before_use(ShardGroup& group) {
  if (in_backward())
    use_in_backward(group);
  else
    use_in_forward(group);
}

void ShardContext::after_forward(ShardGroup& group) {
  std::erase(open_, &group);
  if (current_ == &group) current_ = nullptr;
  if (!in_backward() && group.reshards_after_forward()) group.reshard_after_forward();
}

void ShardContext::note_backward() {
  if (callback_queued_ || !in_backward()) return;
  callback_queued_ = true;
  open_.clear();
  current_ = nullptr;
  gathered_ = 0;
  to_gather_.clear();
  for (auto group = order_.rbegin(); group != order_.rend(); ++group)
    if ((*group)->state() != ShardGroupState::Unsharded && (*group)->recorded()) to_gather_.push_back(*group);
  at_end_of_backward([self = weak_from_this()] {
    if (const auto context = self.lock()) context->final_callback();
  });
}

std::size_t ShardContext::position_of(const ShardGroup& group) const {
  const auto position =
      static_cast<std::size_t>(std::find(groups_.begin(), groups_.end(), &group) - groups_.begin());
  PENSTOCK_INVARIANT(position < groups_.size(), "the group must belong to this context");
  return position;
}

void ShardContext::note_settled(ShardGroup& group) { settled_[position_of(group)] = true; }

void ShardContext::ready_to_reduce(ShardGroup& group) {
  ready_[position_of(group)] = true;
  plan_reductions();
  for (; reduced_ < to_reduce_.size(); ++reduced_) {
    ShardGroup& next = *to_reduce_[reduced_];
    if (!next.flags.reduce || !next.has_trainable()) continue;
    const std::size_t at = position_of(next);
    if (!ready_[at]) return;
    ready_[at] = false;
    start_reduction(next);
  }
}

// The reverse order of forward; groups that forward did not use come last.
void ShardContext::plan_reductions() {
  if (!to_reduce_.empty()) return;
  to_reduce_.assign(order_.rbegin(), order_.rend());
  for (auto group = groups_.rbegin(); group != groups_.rend(); ++group)
    if (std::find(order_.begin(), order_.end(), *group) == order_.end()) to_reduce_.push_back(*group);
}

void ShardContext::finish(std::unique_ptr<GroupReduction>& reduction) {
  if (!reduction) return;
  reduction->finish();
  if (reduction->copying()) copying_.push_back(std::move(reduction));
  reduction.reset();
}

void ShardContext::start_reduction(ShardGroup& group) {
  if (scattering_) {
    scattering_->wait_for_shards();
    finish(replicating_);
    if (scattering_->group().mesh().replicas() > 1)
      replicating_ = std::move(scattering_);
    else
      finish(scattering_);
  }
  scattering_ = std::make_unique<GroupReduction>(group);
}

void ShardContext::final_callback() {
  const NoAnyHookGuard no_any_hook;
  const NoHooksGuard no_hooks;
  const at::NoGradGuard no_grad;
  callback_queued_ = false;
  for (; gathered_ < to_gather_.size(); ++gathered_) to_gather_[gathered_]->unshard();
  // In the order of reductions, so that groups that wait for one this rank has not used can continue.
  plan_reductions();
  const std::vector<ShardGroup*> order = to_reduce_;
  for (ShardGroup* group : order) {
    // A forward recomputed inside backward may produce gradients for a group after it was settled.
    if (!settled_[position_of(*group)] || group->has_unprocessed_gradients())
      group->post_backward();
    else if (group->flags.reshard && !group->writable())
      group->reshard();
  }
  // Gradients that arrived after the reduction of their group had started.
  for (ShardGroup* group : order)
    if (ready_[position_of(*group)] && group->flags.reduce && group->has_trainable()) {
      ready_[position_of(*group)] = false;
      start_reduction(*group);
    }
  const bool wait = groups_.empty() || std::all_of(groups_.begin(), groups_.end(),
                                                   [](const ShardGroup* group) { return group->flags.last; });
  if (wait) {
    finish(replicating_);
    finish(scattering_);
    // Work that follows on the compute stream, such as an optimizer, sees the gradients.
    if (reduce_stream_) order_after(current_stream(reduce_stream_->device()), *reduce_stream_);
    for (const auto& reduction : copying_) reduction->settle();
    copying_.clear();
  }
  start_anew();
  backward_ended_ = true;
}

void ShardContext::start_anew() {
  callback_queued_ = false;
  ready_.assign(groups_.size(), false);
  settled_.assign(groups_.size(), false);
  to_reduce_.clear();
  reduced_ = 0;
  to_gather_.clear();
  gathered_ = 0;
  current_ = nullptr;
}

void ShardContext::forget(ShardGroup& group) {
  if (group.has_context()) group.context().remove(group);
}

void ShardContext::remove(ShardGroup& group) {
  std::erase(order_, &group);
  std::erase(last_order_, &group);
  std::erase(open_, &group);
  const auto named = [&](const Prefetch& entry) { return entry.group == &group; };
  std::erase_if(forward_prefetch_, named);
  std::erase_if(backward_prefetch_, named);
  for (std::vector<Prefetch>* list : {&forward_prefetch_, &backward_prefetch_})
    for (Prefetch& entry : *list) std::erase(entry.next, &group);
  if (scattering_ && &scattering_->group() == &group) scattering_.reset();
  if (replicating_ && &replicating_->group() == &group) replicating_.reset();
  std::erase_if(copying_, [&](const auto& reduction) { return &reduction->group() == &group; });
  std::erase(groups_, &group);
  start_anew();
}

void ShardContext::set_forward_prefetch(ShardGroup& group, std::vector<ShardGroup*> next) {
  std::erase_if(forward_prefetch_, [&](const Prefetch& entry) { return entry.group == &group; });
  forward_prefetch_.push_back({&group, std::move(next)});
}

void ShardContext::set_backward_prefetch(ShardGroup& group, std::vector<ShardGroup*> next) {
  std::erase_if(backward_prefetch_, [&](const Prefetch& entry) { return entry.group == &group; });
  backward_prefetch_.push_back({&group, std::move(next)});
}

}  // namespace penstock
