#include "penstock/fully_shard.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/errors.h"
#include "penstock/shard/state/group_internal.h"
#include "penstock/shard/state/registry.h"
#include "penstock/shard/state/shard_info.h"
#include "penstock/shard/state/shard_state.h"
#include "penstock/torch/dispatch/any_operator_hook.h"

namespace penstock {

std::shared_ptr<ShardState> fully_shard(torch::nn::Module& module, const comm::MeshGroups& mesh,
                                        const ShardOptions& options) {
  return make_shard_state(module, ShardMesh(mesh, options), options);
}

std::shared_ptr<ShardState> replicate(torch::nn::Module& module, const comm::MeshGroups& mesh,
                                      const ShardOptions& options) {
  if (!options.shard_axes.empty() || options.shard_placement)
    throw ValueError(
        "replicate: shard_axes and shard_placement are set, but replicate does not shard parameters; call "
        "fully_shard, or leave them out");
  return make_shard_state(module, ShardMesh::replicating(mesh), options);
}

ShardState* shard_state_of(const torch::nn::Module& module) { return find_shard_state(module).get(); }

std::optional<ShardInfo> shard_of(const at::Tensor& parameter) {
  if (!parameter.defined()) return std::nullopt;
  const detail::Membership member = detail::find_parameter(parameter);
  if (!member.group) return std::nullopt;
  if (member.group->is_replaced(static_cast<std::size_t>(member.parameter))) member.group->adopt_replaced();
  return ShardInfo{member.group, static_cast<std::size_t>(member.parameter)};
}

void ensure_sharded(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) ensure_sharded(parameter);
}

void ensure_sharded(const at::Tensor& parameter) {
  const auto info = shard_of(parameter);
  if (!info) return;
  if (info->state() != ShardGroupState::Sharded) info->group->reshard();
  info->group->before_shards_change();
}

namespace {

// Adopts tensor objects that have replaced parameters in the parameter table of the sharded module.
void adopt_new_objects(const torch::nn::Module& module) {
  const std::shared_ptr<ShardState> state = find_replaced_shard_state(module);
  if (!state) return;
  const auto table = module.named_parameters(/*recurse=*/true);
  for (ShardGroup* group : own_groups(*state))
    for (std::size_t i = 0; i < group->parameters().size(); ++i) {
      const ShardedParameter& p = group->parameters()[i];
      const at::Tensor* now = table.find(p.name);
      if (now && now->defined() && now->unsafeGetTensorImpl() != p.handle._unsafe_get_target() &&
          !shard_of(*now))
        group->adopt_object(i, *now);
    }
}

}  // namespace

void reset_sharded_parameters(torch::nn::Module& module) {
  adopt_new_objects(module);
  for (const auto& inner : module.modules(/*include_self=*/false)) adopt_new_objects(*inner);
  for (const at::Tensor& parameter : module.parameters())
    if (const auto info = shard_of(parameter)) info->group->reset_sharded_parameter(info->index);
}

void load_whole(const at::Tensor& parameter, const at::Tensor& whole) {
  const auto info = shard_of(parameter);
  if (!info)
    throw TypeError(describe("load_whole", "a tensor that is not a sharded parameter",
                             "a parameter of a module passed to fully_shard"));
  if (whole.sizes() != parameter.sizes())
    throw ValueError(describe(fmt::format("load_whole into {}", info->parameter().to_string()),
                              fmt::format("[{}]", fmt::join(whole.sizes(), ", ")),
                              fmt::format("[{}]", fmt::join(parameter.sizes(), ", "))));
  ensure_sharded(parameter);
  const NoAnyHookGuard no_hook;
  const at::NoGradGuard no_grad;
  detail::copy_part(whole, *info->parameter().placement.sharded,
                    detail::dtensor_payload(info->parameter().sharded)->local());
}

void materialize_shards(torch::nn::Module& module, const ShardInitializer& fill,
                        std::optional<at::Device> device) {
  std::vector<ShardGroup*> done;
  for (const at::Tensor& parameter : module.parameters())
    if (const auto info = shard_of(parameter);
        info && std::find(done.begin(), done.end(), info->group) == done.end()) {
      done.push_back(info->group);
      info->group->materialize(fill, device.value_or(info->group->device()));
    }
}

}  // namespace penstock
