#include "penstock/dtensor/dtensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>

#include "penstock/base/env.h"
#include "penstock/base/errors.h"
#include "penstock/dtensor/composites.h"
#include "penstock/dtensor/dtensor_payload.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/torch/dtype.h"

namespace penstock {
namespace {

using detail::DTensorPayload;
using detail::make_dtensor;
using detail::require_dtensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Numbers = std::vector<std::int64_t>;

// A gradient of a term is that of the sum.
Placements gradient_placements(const Placements& placements) {
  Placements result = placements;
  for (Placement& placement : result)
    if (placement.is_partial()) placement = Replicate{};
  return result;
}

at::Tensor redistributed(const at::Tensor& tensor, const SpecPtr& to, bool async, PartialTarget partial_target) {
  DTensorPayload& payload = require_dtensor(tensor, "redistribute");
  auto transfer = detail::transfer_between(payload.spec, to, partial_target);
  if (!async) return make_dtensor(transfer->run(payload.mesh, payload.local()), to, payload.mesh);
  detail::PendingLocal pending = transfer->start(payload.mesh, payload.local());
  at::Tensor result = make_wrapper(c10::make_intrusive<DTensorPayload>(at::Tensor(), to, payload.mesh), geometry_of(tensor));
  detail::dtensor_payload(result)->set_pending(std::move(pending), std::move(transfer));
  return result;
}

// What arrives in backward must be distributed; a plain zero can stand for nothing else.
at::Tensor gradient_in(const at::Tensor& gradient, const Placements& placements) {
  DTensorPayload& payload = require_dtensor(gradient, "the gradient of a distributed tensor");
  return redistributed(gradient, payload.spec->with_placements(placements), false, PartialTarget::Allow);
}

// The state of a node is a spec and a mesh: held by the node itself, so forward passes it through the context.
struct Saved : torch::CustomClassHolder {
  Saved(Placements placements, SpecPtr spec, comm::MeshGroups mesh)
      : placements(std::move(placements)), spec(std::move(spec)), mesh(std::move(mesh)) {}
  Placements placements;
  SpecPtr spec;
  comm::MeshGroups mesh;
};

void save(AutogradContext* context, Placements placements, const SpecPtr& spec, const comm::MeshGroups& mesh) {
  context->saved_data["state"] =
      c10::IValue::make_capsule(c10::make_intrusive<Saved>(std::move(placements), spec, mesh));
}

const Saved& saved(AutogradContext* context) {
  return *static_cast<const Saved*>(context->saved_data.at("state").toCapsule().get());
}

struct FromLocal : torch::autograd::Function<FromLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local, const SpecPtr& spec, const comm::MeshGroups& mesh) {
    save(context, gradient_placements(spec->placements()), spec, mesh);
    return make_dtensor(local.view_as(local), spec, mesh);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    return {to_local(gradient_in(gradients[0], saved(context).placements)), at::Tensor(), at::Tensor()};
  }
};

struct ToLocal : torch::autograd::Function<ToLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const Placements& grad_placements) {
    DTensorPayload& payload = require_dtensor(tensor, "to_local");
    save(context, grad_placements, payload.spec, payload.mesh);
    return payload.local().view_as(payload.local());
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    const Saved& state = saved(context);
    GlobalGeometry geometry = state.spec->geometry();
    geometry.dtype = gradients[0].scalar_type();
    const SpecPtr spec = DTensorSpec::get(*state.spec, state.placements, geometry);
    if (gradients[0].sizes() != c10::IntArrayRef(spec->local_shape()))
      throw ValueError(describe("to_local: the local gradient", fmt::format("shape [{}]", fmt::join(gradients[0].sizes(), ", ")),
                                fmt::format("[{}], this rank's part of {}", fmt::join(spec->local_shape(), ", "), spec->to_string()),
                                "give grad_placements that fit the local tensor"));
    return {from_local(gradients[0], state.mesh, state.placements, {.shape = geometry.shape, .stride = geometry.stride, .check = false}),
            at::Tensor()};
  }
};

struct Redistribute : torch::autograd::Function<Redistribute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const SpecPtr& to, bool async) {
    DTensorPayload& payload = require_dtensor(tensor, "redistribute");
    save(context, gradient_placements(payload.spec->placements()), payload.spec, payload.mesh);
    return redistributed(tensor, to, async, PartialTarget::Refuse);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    return {gradient_in(gradients[0], saved(context).placements), at::Tensor(), at::Tensor()};
  }
};

void check_plain(const at::Tensor& tensor, std::string_view function) {
  if (!tensor.defined()) throw ValueError(fmt::format("{}: the tensor is undefined", function));
  if (is_dtensor(tensor))
    throw TypeError(describe(function, "a distributed tensor", "a plain one", "use redistribute() to change its placements"));
}

void check_member(const comm::MeshGroups& mesh, std::string_view function) {
  if (mesh.coordinate().empty() && !mesh.shape().empty())
    throw ValueError(describe(function, fmt::format("rank {}, which is not in {}", mesh.mesh().this_rank().value(), mesh.mesh().to_string()),
                              "a rank of the mesh", "ask mesh.contains(rank) first"));
}

// The whole shape, when every rank holds as much as this one.
Numbers shape_from_even(const at::Tensor& local, const comm::MeshGroups& mesh, const Placements& placements) {
  Numbers shape = local.sizes().vec();
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (placements[axis].splits()) shape[static_cast<std::size_t>(placements[axis].dim())] *= mesh.shape()[axis];
  return shape;
}

// A dense layout of the whole tensor whose dims lie in memory in the order of the local ones.
Numbers stride_like(const at::Tensor& local, const Numbers& shape) {
  Numbers order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return local.stride(a) > local.stride(b); });
  Numbers stride(shape.size());
  std::int64_t next = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const auto dim = static_cast<std::size_t>(order[i]);
    stride[dim] = next;
    next *= std::max<std::int64_t>(shape[dim], 1);
  }
  return stride;
}

// Every rank tells every rank along each axis what it holds; all find the same culprit.
void check_shapes_over_ranks(const at::Tensor& local, const SpecPtr& spec, const comm::MeshGroups& mesh) {
  Numbers mine{local.dim(), static_cast<std::int64_t>(local.scalar_type())};
  Numbers sizes(16, -1);
  for (std::int64_t dim = 0; dim < std::min<std::int64_t>(local.dim(), 8); ++dim) {
    sizes[static_cast<std::size_t>(dim)] = local.size(dim);
    sizes[static_cast<std::size_t>(dim) + 8] = dim < spec->ndim() ? spec->shape()[static_cast<std::size_t>(dim)] : -1;
  }
  mine.insert(mine.end(), sizes.begin(), sizes.end());
  const auto width = static_cast<std::int64_t>(mine.size());
  at::Tensor rows = at::tensor(mine, at::kLong).view({1, width}).to(local.device());
  for (int axis = 0; axis < static_cast<int>(mesh.shape().size()); ++axis) {
    const comm::Group group = mesh.group(axis);
    at::Tensor all = rows.new_empty({rows.size(0) * group.size(), width});
    group.all_gather(all, rows, {.label = "from_local check"}).wait();
    rows = all;
  }
  const at::Tensor table = rows.to(at::kCPU).contiguous();
  const std::int64_t* values = table.data_ptr<std::int64_t>();
  // Gathered axis by axis: the last axis varies slowest.
  for (std::int64_t row = 0; row < table.size(0); ++row) {
    Numbers coordinate(mesh.shape().size());
    std::int64_t rest = row;
    for (std::size_t axis = 0; axis < coordinate.size(); ++axis) {
      coordinate[axis] = rest % mesh.shape()[axis];
      rest /= mesh.shape()[axis];
    }
    const std::int64_t* entry = values + row * width;
    const auto who = fmt::format("from_local: the rank at ({}) of {}", fmt::join(coordinate, ", "), mesh.mesh().to_string());
    if (entry[1] != static_cast<std::int64_t>(spec->geometry().dtype))
      throw ValueError(describe(who, fmt::format("dtype {}", dtype_name(static_cast<at::ScalarType>(entry[1]))), dtype_name(spec->geometry().dtype),
                                "give every rank's part the same dtype"));
    const Numbers expected = local_shape_and_offset(spec->shape(), mesh.shape(), coordinate, spec->placements()).shape;
    const Numbers theirs(entry + 2, entry + 2 + std::clamp<std::int64_t>(entry[0], 0, 8));
    const Numbers theirs_global(entry + 10, entry + 10 + std::clamp<std::int64_t>(entry[0], 0, 8));
    if (theirs != expected || theirs_global != Numbers(spec->shape().begin(), spec->shape().begin() + std::min<std::ptrdiff_t>(8, spec->ndim())))
      throw ValueError(describe(who, fmt::format("a local part of [{}] of a whole of [{}]", fmt::join(theirs, ", "), fmt::join(theirs_global, ", ")),
                                fmt::format("[{}], its part of {}", fmt::join(expected, ", "), spec->to_string()),
                                "give `shape` of the whole tensor where shards are uneven, and equal arguments on all ranks"));
  }
}

thread_local bool implicit_replication = false;

}  // namespace

namespace detail {

DTensorPayload& require_dtensor(const at::Tensor& tensor, std::string_view function) {
  DTensorPayload* payload = tensor.defined() ? dtensor_payload(tensor) : nullptr;
  if (!payload)
    throw TypeError(describe(function, tensor.defined() ? "a plain tensor" : "an undefined tensor", "a distributed tensor",
                             "make one with distribute_tensor() or from_local()"));
  return *payload;
}

at::Tensor make_dtensor(at::Tensor local, SpecPtr spec, const comm::MeshGroups& mesh, const at::Tensor* viewed, std::int64_t offset) {
  link_composites();
  const GlobalGeometry& whole = spec->geometry();
  if (local.sizes() != c10::IntArrayRef(spec->local_shape()) || local.scalar_type() != whole.dtype) [[unlikely]]
    throw ValueError(describe("the local part of a distributed tensor",
                              fmt::format("{}[{}]", dtype_name(local.scalar_type()), fmt::join(local.sizes(), ", ")),
                              fmt::format("[{}], this rank's part of {}", fmt::join(spec->local_shape(), ", "), spec->to_string())));
  WrapperGeometry geometry;
  geometry.sizes.assign(whole.shape.begin(), whole.shape.end());
  geometry.strides.assign(whole.stride.begin(), whole.stride.end());
  geometry.dtype = whole.dtype;
  geometry.device = whole.device;
  geometry.storage_offset = offset;
  return make_wrapper(c10::make_intrusive<DTensorPayload>(std::move(local), std::move(spec), mesh), geometry, viewed);
}

void DTensorPayload::set_pending(PendingLocal pending, std::shared_ptr<const LocalTransfer> transfer) {
  pending_ = std::make_unique<Pending>(Pending{std::move(pending), std::move(transfer)});
}

void DTensorPayload::finish() const {
  if (pending_) {
    local_ = pending_->local.get();
    pending_.reset();
  }
  if (copied_view && original_version_.enabled() && original_version_.current_version() != copied_version_)
    throw StateError(fmt::format("a view {} of a distributed tensor: it had to be redistributed, so it is a copy, and what it views has been written since; take the "
                                 "view after the write, or redistribute what it views first",
                                 spec->to_string()));
}

void DTensorPayload::mark_copied(const at::Tensor& viewed) {
  copied_view = true;
  original_version_ = viewed.unsafeGetTensorImpl()->version_counter();
  if (original_version_.enabled()) copied_version_ = original_version_.current_version();
}

}  // namespace detail

at::Tensor distribute_tensor(const at::Tensor& tensor, const comm::MeshGroups& mesh, const Placements& placements,
                             const DistributeOptions& options) {
  check_plain(tensor, "distribute_tensor");
  check_member(mesh, "distribute_tensor");
  GlobalGeometry geometry = global_geometry_of(tensor);
  const SpecPtr target = DTensorSpec::get(mesh, placements, geometry);
  if (target->has_partial())
    throw ValueError(describe("distribute_tensor: placements", to_string(placements), "Shard, StridedShard or Replicate",
                              "terms of a sum are made with from_local()"));
  for (const std::int64_t size : mesh.shape())
    if (options.source_axis_rank && (*options.source_axis_rank < 0 || *options.source_axis_rank >= size))
      throw ValueError(describe("distribute_tensor: source_axis_rank", std::to_string(*options.source_axis_rank),
                                fmt::format("0 to {}, a position on every axis of ({})", size - 1, fmt::join(mesh.shape(), ", "))));
  at::Tensor local = tensor.detach().contiguous();
  const at::Tensor given = local;
  // From whole to split, one axis after the other: each axis's source sends to the ranks along it.
  const Placements whole(placements.size());
  const RedistributePlan plan = plan_redistribute({geometry.shape, 1}, mesh.shape(), whole, target->placements());
  std::vector<bool> scattered(placements.size());
  const auto scatter = [&](const RedistributeStep& step) {
    scattered[static_cast<std::size_t>(step.axis)] = true;
    const SpecPtr before = target->with_placements(step.before), after = target->with_placements(step.after);
    if (!options.source_axis_rank || mesh.shape()[static_cast<std::size_t>(step.axis)] == 1) {
      local = detail::transfer_between(before, after, PartialTarget::Refuse)->run(mesh, local);
      return;
    }
    const comm::Group group = mesh.group(step.axis);
    const int source = *options.source_axis_rank;
    std::vector<comm::P2POp> ops;
    std::vector<at::Tensor> pieces;
    if (group.axis_rank() == source) {
      for (int member = 0; member < group.size(); ++member) {
        Numbers coordinate = mesh.coordinate();
        coordinate[static_cast<std::size_t>(step.axis)] = member;
        const auto have = local_segments(geometry.shape, mesh.shape(), mesh.coordinate(), step.before);
        const auto want = local_segments(geometry.shape, mesh.shape(), coordinate, step.after);
        const auto dim = static_cast<std::size_t>(step.to.dim());
        // Positions of the wanted indices among those here.
        std::vector<at::Tensor> parts;
        std::int64_t base = 0;
        for (const Segment& held : have[dim]) {
          for (const Segment& wanted : want[dim]) {
            const std::int64_t begin = std::max(held.offset, wanted.offset);
            const std::int64_t end = std::min(held.offset + held.length, wanted.offset + wanted.length);
            if (begin < end) parts.push_back(local.narrow(step.to.dim(), base + begin - held.offset, end - begin));
          }
          base += held.length;
        }
        at::Tensor piece = parts.empty() ? local.narrow(step.to.dim(), 0, 0) : at::cat(parts, step.to.dim());
        pieces.push_back(piece.contiguous());
        if (member != source && piece.numel() > 0)
          ops.push_back(comm::P2POp::send(pieces.back(), group.rank_at(member), {.label = "distribute_tensor"}));
      }
      std::vector<comm::Work> works = group.batch_isend_irecv(ops);
      comm::wait_all(works);
      local = pieces[static_cast<std::size_t>(source)];
    } else {
      local = local.new_empty(after->local_shape());
      if (local.numel() > 0) group.recv(local, group.rank_at(source), {.label = "distribute_tensor"});
    }
  };
  // Axes that replicate first, while the source still has everything; then each split.
  if (options.source_axis_rank)
    for (std::size_t axis = 0; axis < placements.size(); ++axis) {
      if (target->placements()[axis].splits() || mesh.shape()[axis] == 1) continue;
      const comm::Group group = mesh.group(static_cast<int>(axis));
      local = local.clone(at::MemoryFormat::Contiguous);
      group.broadcast(local, group.rank_at(*options.source_axis_rank), {.label = "distribute_tensor"}).wait();
    }
  for (const RedistributeStep& step : plan.steps) scatter(step);
  // The part must not be the caller's memory: the distributed tensor is a tensor of its own.
  if (local.is_alias_of(given)) local = local.clone(at::MemoryFormat::Contiguous);
  at::Tensor result = make_dtensor(std::move(local), target, mesh);
  result.set_requires_grad(tensor.requires_grad());
  return result;
}

at::Tensor from_local(const at::Tensor& local, const comm::MeshGroups& mesh, const Placements& placements, const FromLocalOptions& options) {
  check_plain(local, "from_local");
  check_member(mesh, "from_local");
  const Placements normalized = normalize_placements(placements, static_cast<int>(mesh.shape().size()), local.dim());
  GlobalGeometry geometry = global_geometry_of(local);
  geometry.shape = options.shape.value_or(shape_from_even(local, mesh, normalized));
  geometry.stride = options.stride.value_or(stride_like(local, geometry.shape));
  if (geometry.shape.size() != static_cast<std::size_t>(local.dim()) || geometry.stride.size() != geometry.shape.size())
    throw ValueError(describe("from_local: shape and stride of the whole", fmt::format("[{}] and [{}]", fmt::join(geometry.shape, ", "), fmt::join(geometry.stride, ", ")),
                              fmt::format("{} numbers each, as the local part has dims", local.dim())));
  const SpecPtr spec = DTensorSpec::get(mesh, normalized, geometry);
  if (options.check.value_or(debug_level() == DebugLevel::Detail)) check_shapes_over_ranks(local, spec, mesh);
  if (local.sizes() != c10::IntArrayRef(spec->local_shape()))
    throw ValueError(describe("from_local: the local part", fmt::format("[{}]", fmt::join(local.sizes(), ", ")),
                              fmt::format("[{}], this rank's part of {}", fmt::join(spec->local_shape(), ", "), spec->to_string()),
                              "give `shape` of the whole tensor, or the part that belongs to this rank"));
  return FromLocal::apply(local, spec, mesh);
}

at::Tensor to_local(const at::Tensor& tensor, const ToLocalOptions& options) {
  DTensorPayload& payload = require_dtensor(tensor, "to_local");
  const Placements gradients = options.grad_placements
                                   ? normalize_placements(*options.grad_placements, static_cast<int>(payload.mesh.shape().size()), tensor.dim())
                                   : gradient_placements(payload.spec->placements());
  return ToLocal::apply(tensor, gradients);
}

at::Tensor redistribute(const at::Tensor& tensor, const Placements& placements, const RedistributeOptions& options) {
  DTensorPayload& payload = require_dtensor(tensor, "redistribute");
  const SpecPtr target = payload.spec->with_placements(placements);
  if (target == payload.spec) return tensor;
  return Redistribute::apply(tensor, target, options.async);
}

at::Tensor full_tensor(const at::Tensor& tensor, const ToLocalOptions& options) {
  return to_local(redistribute(tensor, Placements(placements_of(tensor).size())), options);
}

bool is_dtensor(const at::Tensor& tensor) { return tensor.defined() && detail::dtensor_payload(tensor) != nullptr; }

const Placements& placements_of(const at::Tensor& tensor) { return require_dtensor(tensor, "placements_of").spec->placements(); }

const comm::MeshGroups& mesh_of(const at::Tensor& tensor) { return require_dtensor(tensor, "mesh_of").mesh; }

std::vector<std::int64_t> local_shape_of(const at::Tensor& tensor) { return require_dtensor(tensor, "local_shape_of").spec->local_shape(); }

std::string describe_dtensor(const at::Tensor& tensor) {
  const DTensorPayload& payload = require_dtensor(tensor, "describe_dtensor");
  return fmt::format("DTensor({}[{}] as {}, local [{}] at ({}) of {})", dtype_name(payload.spec->geometry().dtype),
                     fmt::join(payload.spec->shape(), ", "), to_string(payload.spec->placements()), fmt::join(payload.spec->local_shape(), ", "),
                     fmt::join(payload.mesh.coordinate(), ", "), payload.mesh.mesh().to_string());
}

ImplicitReplicationGuard::ImplicitReplicationGuard() : before_(std::exchange(implicit_replication, true)) {}
ImplicitReplicationGuard::~ImplicitReplicationGuard() { implicit_replication = before_; }
bool ImplicitReplicationGuard::active() { return implicit_replication; }

}  // namespace penstock
