#include "penstock/group.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/comm/group/work_state.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

const GroupState& need(const std::shared_ptr<GroupState>& state) {
  if (!state)
    throw StateError("this Group handle is empty; get one from World::group() or World::new_group()");
  return *state;
}

}  // namespace

GroupState& Group::member(const char* operation) const {
  const GroupState& group = need(state_);
  if (group.axis_rank < 0)
    throw StateError(
        fmt::format("{}: rank {} is not a member of group {} (ranks {}); call it on members only", operation,
                    group.own_rank(), group.name, format_list(group.ranks)));
  return *state_;
}

bool Group::is_member() const { return state_ && state_->axis_rank >= 0; }
const std::string& Group::name() const { return need(state_).name; }
const std::vector<int>& Group::ranks() const { return need(state_).ranks; }
int Group::size() const { return static_cast<int>(need(state_).ranks.size()); }
int Group::axis_rank() const { return need(state_).axis_rank; }
int Group::rank_at(int axis_rank) const {
  const GroupState& group = need(state_);
  const auto members = static_cast<int>(group.ranks.size());
  if (axis_rank < 0 || axis_rank >= members)
    throw ValueError(describe(fmt::format("position in group {}", group.name), fmt::format("{}", axis_rank),
                              fmt::format("0 to {}", members - 1), "see size()"));
  return group.ranks[static_cast<std::size_t>(axis_rank)];
}
std::chrono::milliseconds Group::timeout() const { return need(state_).timeout; }

std::string Group::describe_backends() const {
  const GroupState& group = need(state_);
  const bool everywhere = std::none_of(group.ucx_position.begin(), group.ucx_position.end(),
                                       [](int position) { return position < 0; });
  return fmt::format("CPU {}{}, CUDA {}", group.cpu ? group.cpu->name() : "none",
                     !group.ucx_within_hosts ? ""
                     : everywhere            ? " (point-to-point ucx)"
                                             : " (point-to-point ucx within a host)",
                     group.cuda ? group.cuda->name() : "through host memory");
}

}  // namespace penstock::comm
