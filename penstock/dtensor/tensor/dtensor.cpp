#include "penstock/dtensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/dtensor/tensor/composites.h"
#include "penstock/dtensor/tensor/dtensor_codec.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/errors.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/mode.h"
#include "penstock/step_context.h"
#include "penstock/tensor_parallel.h"
#include "penstock/torch/compat/dtype.h"
#include "penstock/torch/dispatch/operator_hook.h"

namespace penstock {
namespace {

using detail::DTensorPayload;
using detail::make_dtensor;
using detail::require_dtensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Numbers = std::vector<std::int64_t>;

// The gradient of a partial value is that of the sum, so it is replicated.
Placements gradient_placements(const Placements& placements) {
  Placements result = placements;
  for (Placement& placement : result)
    if (placement.is_partial()) placement = Replicate{};
  return result;
}

// A slice of dense memory, or an axis of one rank, copies nothing. But the result may be written, and must
// not change its source.
at::Tensor with_own_memory(const at::Tensor& result, const at::Tensor& source) {
  const bool shared = result.has_storage() && source.has_storage() && result.is_alias_of(source);
  return shared ? result.clone() : result;
}

at::Tensor redistributed(const at::Tensor& tensor, const SpecPtr& to, bool async,
                         PartialTarget partial_target) {
  DTensorPayload& payload = require_dtensor(tensor, "redistribute");
  auto transfer = detail::transfer_between(payload.spec, to, partial_target);
  const at::Tensor source = payload.local();
  if (!async)
    return make_dtensor(with_own_memory(transfer->run(payload.mesh, source), source), to, payload.mesh);
  detail::PendingLocal pending = transfer->start(payload.mesh, source);
  if (pending.tensor.defined()) pending.tensor = with_own_memory(pending.tensor, source);
  at::Tensor result =
      make_wrapper(c10::make_intrusive<DTensorPayload>(at::Tensor(), to, payload.mesh), geometry_of(tensor));
  detail::dtensor_payload(result)->set_pending(std::move(pending), std::move(transfer));
  return result;
}

// The gradient that arrives in backward must be distributed; throws TypeError otherwise.
at::Tensor gradient_in(const at::Tensor& gradient, const Placements& placements) {
  DTensorPayload& payload = require_dtensor(gradient, "the gradient of a distributed tensor");
  const SpecPtr target = payload.spec->with_placements(placements);
  if (target == payload.spec) return gradient;
  return redistributed(gradient, target, false, PartialTarget::Allow);
}

// The state of a node is a spec and a mesh, which the node itself holds, so forward passes it through the
// context.
struct Saved : torch::CustomClassHolder {
  Saved(Placements placements, SpecPtr spec, comm::MeshGroups mesh)
      : placements(std::move(placements)), spec(std::move(spec)), mesh(std::move(mesh)) {}
  Placements placements;
  SpecPtr spec;
  comm::MeshGroups mesh;
};

void save(AutogradContext* context, Placements placements, const SpecPtr& spec,
          const comm::MeshGroups& mesh) {
  context->saved_data["state"] =
      c10::IValue::make_capsule(c10::make_intrusive<Saved>(std::move(placements), spec, mesh));
}

const Saved& saved(AutogradContext* context) {
  return *static_cast<const Saved*>(context->saved_data.at("state").toCapsule().get());
}

struct FromLocal : torch::autograd::Function<FromLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local, const SpecPtr& spec,
                            const comm::MeshGroups& mesh) {
    save(context, gradient_placements(spec->placements()), spec, mesh);
    return make_dtensor(local.view_as(local), spec, mesh);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    return {to_local(gradient_in(gradients[0], saved(context).placements)), at::Tensor(), at::Tensor()};
  }
};

struct ToLocal : torch::autograd::Function<ToLocal> {
  // A view may not be written, since the distributed tensor would change with it. A local tensor that nobody
  // else holds is taken over instead.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const Placements& grad_placements, bool take) {
    DTensorPayload& payload = require_dtensor(tensor, "to_local");
    save(context, grad_placements, payload.spec, payload.mesh);
    if (!take) return payload.local().view_as(payload.local());
    const at::AutoDispatchBelowADInplaceOrView untracked;
    return payload.local().view_as(payload.local());
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    const Saved& state = saved(context);
    GlobalGeometry geometry = state.spec->geometry();
    geometry.dtype = gradients[0].scalar_type();
    const SpecPtr spec = DTensorSpec::get(*state.spec, state.placements, geometry);
    if (gradients[0].sizes() != c10::IntArrayRef(spec->local_shape()))
      throw ValueError(describe("to_local: the local gradient",
                                fmt::format("shape [{}]", fmt::join(gradients[0].sizes(), ", ")),
                                fmt::format("[{}], this rank's part of {}",
                                            fmt::join(spec->local_shape(), ", "), spec->to_string()),
                                "pass grad_placements that match the local tensor"));
    return {from_local(gradients[0], state.mesh, state.placements,
                       {.shape = geometry.shape, .stride = geometry.stride, .check = false}),
            at::Tensor(), at::Tensor()};
  }
};

struct Redistribute : torch::autograd::Function<Redistribute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const SpecPtr& to,
                            bool async) {
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
    throw TypeError(describe(function, "a distributed tensor", "a plain one",
                             "use redistribute() to change its placements"));
}

void check_member(const comm::MeshGroups& mesh, std::string_view function) {
  if (mesh.coordinate().empty() && !mesh.shape().empty())
    throw ValueError(
        describe(function,
                 fmt::format("rank {}, which is not in {}", mesh.mesh().this_rank(), mesh.mesh().to_string()),
                 "a rank of the mesh", "check mesh.contains(rank) first"));
}

// The global shape if every rank holds as much as this one.
Numbers shape_from_even(const at::Tensor& local, const comm::MeshGroups& mesh, const Placements& placements) {
  Numbers shape = local.sizes().vec();
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (placements[axis].splits())
      shape[static_cast<std::size_t>(placements[axis].dim())] *= mesh.shape()[axis];
  return shape;
}

// Encodes the arguments of a rank's call as numbers, equally many on all ranks.
constexpr std::int64_t kMostDims = 64;

Numbers row_of(const at::Tensor& local, const DTensorSpec* spec, std::size_t axes) {
  Numbers row{spec != nullptr, static_cast<std::int64_t>(local.scalar_type()), local.dim()};
  const auto add = [&](at::IntArrayRef numbers, std::size_t most) {
    row.insert(row.end(), numbers.begin(), numbers.end());
    row.resize(row.size() + most - numbers.size(), -1);
  };
  for (std::size_t axis = 0; axis < axes; ++axis) {
    const Placement placement = spec ? spec->placements()[axis] : Placement();
    row.push_back(static_cast<std::int64_t>(placement.variant().index()));  // 0 R, 1 S, 2 _S, 3 P
    row.push_back(placement.splits()       ? placement.dim()
                  : placement.is_partial() ? static_cast<std::int64_t>(placement.partial_op())
                                           : 0);
    row.push_back(placement.is_strided_shard() ? placement.split_factor() : 0);
  }
  add(spec ? spec->shape() : Numbers(), kMostDims);
  add(spec ? spec->geometry().stride : Numbers(), kMostDims);
  add(spec ? local.sizes() : at::IntArrayRef(), kMostDims);
  return row;
}

// The tensor that a row describes: "float32[4, 3] with stride [3, 1] as [S(0)]".
std::string whole_text(const std::int64_t* row, std::size_t axes) {
  Placements placements(axes);
  for (std::size_t axis = 0; axis < axes; ++axis) {
    const std::int64_t* three = row + 3 + 3 * axis;
    if (three[0] == 1) placements[axis] = Shard{three[1]};
    if (three[0] == 2) placements[axis] = StridedShard{three[1], three[2]};
    if (three[0] == 3) placements[axis] = Partial{static_cast<PartialOp>(three[1])};
  }
  const std::int64_t* shape = row + 3 + 3 * axes;
  return fmt::format("{}[{}] with stride [{}] as {}", dtype_name(static_cast<at::ScalarType>(row[1])),
                     fmt::join(shape, shape + row[2], ", "),
                     fmt::join(shape + kMostDims, shape + kMostDims + row[2], ", "), to_string(placements));
}

// Rows are gathered axis by axis: the last axis varies slowest.
Numbers coordinate_of_row(std::int64_t row, const Numbers& mesh_shape) {
  Numbers coordinate;
  for (const std::int64_t size : mesh_shape) {
    coordinate.push_back(row % size);
    row /= size;
  }
  return coordinate;
}

// Every rank sends its arguments to every other, and all find the same faulty rank. `spec` is null on a rank
// whose own arguments are invalid: it takes part, so that the others do not wait for it, and then throws its
// own error.
void check_over_ranks(const at::Tensor& local, const SpecPtr& spec, const comm::MeshGroups& mesh) {
  const std::size_t axes = mesh.shape().size();
  const Numbers mine = row_of(local, spec.get(), axes);
  const auto width = static_cast<std::int64_t>(mine.size());
  at::Tensor rows = at::tensor(mine, at::kLong).view({1, width}).to(local.device());
  for (int axis = 0; axis < static_cast<int>(axes); ++axis) {
    const comm::Group group = mesh.group(axis);
    at::Tensor all = rows.new_empty({rows.size(0) * group.size(), width});
    group.all_gather(all, rows, {.label = "from_local check"}).wait();
    rows = all;
  }
  if (!spec) return;
  const at::Tensor table = rows.to(at::kCPU).contiguous();
  const std::int64_t* first = table.data_ptr<std::int64_t>();
  // Fields before the local shape: those that must be equal everywhere.
  const std::int64_t equal = width - kMostDims;
  const auto entry_of = [&](std::int64_t row) { return first + row * width; };
  const auto who = [&](std::int64_t row) {
    return fmt::format("from_local: the rank at ({}) of {}",
                       fmt::join(coordinate_of_row(row, mesh.shape()), ", "), mesh.mesh().to_string());
  };
  for (std::int64_t row = 0; row < table.size(0); ++row) {
    const std::int64_t* entry = entry_of(row);
    if (entry[0] == 0)
      throw ValueError(
          describe(who(row), "invalid arguments", "a part of the same tensor", "see the error of that rank"));
    if (!std::equal(entry, entry + equal, first))
      throw ValueError(
          describe(who(row), "a part of " + whole_text(entry, axes),
                   whole_text(first, axes) + ", as on the first rank",
                   "pass equal arguments on all ranks, and the global `shape` if shards are uneven"));
  }
  // All ranks describe the same tensor, so this rank's spec applies to all.
  for (std::int64_t row = 0; row < table.size(0); ++row) {
    const Numbers expected = local_shape_and_offset(spec->shape(), mesh.shape(),
                                                    coordinate_of_row(row, mesh.shape()), spec->placements())
                                 .shape;
    const Numbers theirs(entry_of(row) + equal, entry_of(row) + equal + entry_of(row)[2]);
    if (theirs != expected)
      throw ValueError(
          describe(who(row), fmt::format("a local part of [{}]", fmt::join(theirs, ", ")),
                   fmt::format("[{}], its part of {}", fmt::join(expected, ", "), spec->to_string()),
                   "pass the global `shape` if shards are uneven, and on each rank its own part"));
  }
}

SpecPtr spec_of_parts(const at::Tensor& local, const comm::MeshGroups& mesh, const Placements& placements,
                      const FromLocalOptions& options) {
  if (local.dim() > kMostDims)
    throw ValueError(describe("from_local: the local part", fmt::format("{} dims", local.dim()),
                              fmt::format("at most {}", kMostDims)));
  const Placements normalized =
      normalize_placements(placements, static_cast<int>(mesh.shape().size()), local.dim());
  GlobalGeometry geometry = global_geometry_of(local);
  geometry.shape = options.shape.value_or(shape_from_even(local, mesh, normalized));
  if (geometry.shape.size() == static_cast<std::size_t>(local.dim()))
    geometry.stride = options.stride.value_or(dense_stride(geometry.shape, local.strides().vec()));
  if (geometry.shape.size() != static_cast<std::size_t>(local.dim()) ||
      geometry.stride.size() != geometry.shape.size())
    throw ValueError(describe(
        "from_local: global shape and stride",
        fmt::format("[{}] and [{}]", fmt::join(geometry.shape, ", "), fmt::join(geometry.stride, ", ")),
        fmt::format("{} numbers each, one for each dim of the local part", local.dim())));
  return DTensorSpec::get(mesh, normalized, geometry);
}

thread_local bool implicit_replication = false;

// In this file, which every program with distributed tensors links: a stored call may make the first one of
// the process.
[[maybe_unused]] const bool has_codec = (detail::register_dtensor_codec(), true);

}  // namespace

namespace detail {

DTensorPayload& require_dtensor(const at::Tensor& tensor, std::string_view function) {
  DTensorPayload* payload = tensor.defined() ? dtensor_payload(tensor) : nullptr;
  if (!payload)
    throw TypeError(describe(function, tensor.defined() ? "a plain tensor" : "an undefined tensor",
                             "a distributed tensor", "create one with distribute_tensor() or from_local()"));
  return *payload;
}

at::Tensor make_dtensor(at::Tensor local, SpecPtr spec, const comm::MeshGroups& mesh,
                        const at::Tensor* viewed, std::int64_t offset) {
  register_dtensor_type();
  link_composites();
  const GlobalGeometry& whole = spec->geometry();
  if (local.sizes() != c10::IntArrayRef(spec->local_shape()) || local.scalar_type() != whole.dtype)
      [[unlikely]]
    throw ValueError(
        describe("the local part of a distributed tensor",
                 fmt::format("{}[{}]", dtype_name(local.scalar_type()), fmt::join(local.sizes(), ", ")),
                 fmt::format("[{}], this rank's part of {}", fmt::join(spec->local_shape(), ", "),
                             spec->to_string())));
  WrapperGeometry geometry;
  geometry.sizes.assign(whole.shape.begin(), whole.shape.end());
  geometry.strides.assign(whole.stride.begin(), whole.stride.end());
  geometry.dtype = whole.dtype;
  geometry.device = whole.device;
  geometry.storage_offset = offset;
  return make_wrapper(c10::make_intrusive<DTensorPayload>(std::move(local), std::move(spec), mesh), geometry,
                      viewed);
}

at::Tensor take_local(const at::Tensor& tensor) {
  return ToLocal::apply(tensor, gradient_placements(require_dtensor(tensor, "take_local").spec->placements()),
                        true);
}

at::Tensor DTensorPayload::rebuild(const std::vector<at::Tensor>& inner,
                                   const WrapperGeometry& geometry) const {
  at::Tensor result = make_dtensor(inner.at(0), spec, mesh, nullptr, geometry.storage_offset);
  DTensorPayload& payload = *dtensor_payload(result);
  payload.copied_view = copied_view;
  if (boundary) {
    payload.boundary = boundary;
    mark_hooked(result);
  }
  return result;
}

at::Tensor DTensorPayload::rebuild_gradient(const std::vector<at::Tensor>& inner,
                                            const WrapperGeometry&) const {
  return make_dtensor(inner.at(0), spec->with_placements(gradient_placements(spec->placements())), mesh);
}

bool DTensorPayload::same_context(const Payload& other) const {
  if (typeid(other) != typeid(DTensorPayload)) return false;
  const auto& theirs = static_cast<const DTensorPayload&>(other);
  const bool same_boundary =
      boundary == theirs.boundary || (boundary && theirs.boundary && *boundary == *theirs.boundary);
  return spec == theirs.spec && same_boundary && copied_view == theirs.copied_view && mesh == theirs.mesh;
}

at::Tensor DTensorPayload::with_context_of(const at::Tensor&, const Payload& other) const {
  if (typeid(other) != typeid(DTensorPayload)) return {};
  const auto& theirs = static_cast<const DTensorPayload&>(other);
  if (spec->mesh_id() != theirs.spec->mesh_id() || spec->shape() != theirs.spec->shape() ||
      spec->geometry().dtype != theirs.spec->geometry().dtype ||
      spec->geometry().device != theirs.spec->geometry().device)
    return {};
  const SpecPtr to = spec->with_placements(theirs.spec->placements());
  return make_dtensor(
      to == spec ? local() : transfer_between(spec, to, PartialTarget::Allow)->run(mesh, local()),
      theirs.spec, mesh);
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
    throw StateError(
        fmt::format("a view {} of a distributed tensor: it had to be redistributed, so it is a copy, and its "
                    "base has been written since; take the "
                    "view after the write, or redistribute its base first",
                    spec->to_string()));
}

void DTensorPayload::mark_copied(const at::Tensor& viewed) {
  copied_view = true;
  original_version_ = viewed.unsafeGetTensorImpl()->version_counter();
  if (original_version_.enabled()) copied_version_ = original_version_.current_version();
}

}  // namespace detail

at::Tensor distribute_tensor(const at::Tensor& tensor, const comm::MeshGroups& mesh,
                             const Placements& placements, const DistributeOptions& options) {
  check_plain(tensor, "distribute_tensor");
  check_member(mesh, "distribute_tensor");
  if (options.source_axis_rank && is_recording())
    throw NotImplemented(
        "distribute_tensor: the values of one rank cannot be sent to the others in a captured function; "
        "distribute before the call, or set "
        "source_axis_rank to std::nullopt if every rank has equal values");
  GlobalGeometry geometry = global_geometry_of(tensor);
  const SpecPtr target = DTensorSpec::get(mesh, placements, geometry);
  if (target->has_partial())
    throw ValueError(describe("distribute_tensor: placements", to_string(placements),
                              "Shard, StridedShard or Replicate", "create partial values with from_local()"));
  for (const std::int64_t size : mesh.shape())
    if (options.source_axis_rank && (*options.source_axis_rank < 0 || *options.source_axis_rank >= size))
      throw ValueError(describe(
          "distribute_tensor: source_axis_rank", std::to_string(*options.source_axis_rank),
          fmt::format("0 to {}, a position on every axis of ({})", size - 1, fmt::join(mesh.shape(), ", "))));
  at::Tensor local = tensor.detach().contiguous();
  const at::Tensor given = local;
  // From whole to split, one axis after the other: on each axis the source sends to the ranks along it.
  const Placements whole(placements.size());
  const RedistributePlan plan =
      plan_redistribute({geometry.shape, 1}, mesh.shape(), whole, target->placements());
  const auto scatter = [&](const RedistributeStep& step) {
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
        const auto dim = static_cast<std::size_t>(step.to.dim());
        const auto have = local_segments(geometry.shape, mesh.shape(), mesh.coordinate(), step.before);
        const auto want = local_segments(geometry.shape, mesh.shape(), coordinate, step.after);
        pieces.push_back(detail::cut(local, step.to.dim(), have[dim], want[dim]));
        if (member != source && pieces.back().numel() > 0)
          ops.push_back(
              comm::P2POp::send(pieces.back(), group.rank_at(member), {.label = "distribute_tensor"}));
      }
      std::vector<comm::Work> works = group.batch_isend_irecv(ops);
      comm::wait_all(works);
      local = pieces[static_cast<std::size_t>(source)];
    } else {
      local = local.new_empty(after->local_shape());
      if (local.numel() > 0) group.recv(local, group.rank_at(source), {.label = "distribute_tensor"});
    }
  };
  // First the axes that replicate, while the source still has everything; then the splits.
  if (options.source_axis_rank)
    for (std::size_t axis = 0; axis < placements.size(); ++axis) {
      if (target->placements()[axis].splits() || mesh.shape()[axis] == 1) continue;
      const comm::Group group = mesh.group(static_cast<int>(axis));
      local = local.clone(at::MemoryFormat::Contiguous);
      group.broadcast(local, group.rank_at(*options.source_axis_rank), {.label = "distribute_tensor"}).wait();
    }
  for (const RedistributeStep& step : plan.steps) scatter(step);
  // The part must not share the caller's memory: the distributed tensor is independent of it.
  if (local.is_alias_of(given)) local = local.clone(at::MemoryFormat::Contiguous);
  at::Tensor result = make_dtensor(std::move(local), target, mesh);
  result.set_requires_grad(tensor.requires_grad());
  return result;
}

at::Tensor from_local(const at::Tensor& local, const comm::MeshGroups& mesh, const Placements& placements,
                      const FromLocalOptions& options) {
  check_plain(local, "from_local");
  check_member(mesh, "from_local");
  // Nothing is sent during capture, shape-only runs and trial runs.
  const bool check = options.check.value_or(debug_level() == DebugLevel::Detail) && !is_wrapper(local) &&
                     !StepContext::current()->trial;
  SpecPtr spec;
  try {
    spec = spec_of_parts(local, mesh, placements, options);
  } catch (const ValueError&) {
    if (check) check_over_ranks(local, nullptr, mesh);
    throw;
  }
  if (check) check_over_ranks(local, spec, mesh);
  if (local.sizes() != c10::IntArrayRef(spec->local_shape()))
    throw ValueError(describe(
        "from_local: the local part", fmt::format("[{}]", fmt::join(local.sizes(), ", ")),
        fmt::format("[{}], this rank's part of {}", fmt::join(spec->local_shape(), ", "), spec->to_string()),
        "pass the global `shape`, or the part that belongs to this rank"));
  return FromLocal::apply(local, spec, mesh);
}

at::Tensor to_local(const at::Tensor& tensor, const ToLocalOptions& options) {
  DTensorPayload& payload = require_dtensor(tensor, "to_local");
  const Placements gradients =
      options.grad_placements
          ? normalize_placements(*options.grad_placements, static_cast<int>(payload.mesh.shape().size()),
                                 tensor.dim())
          : gradient_placements(payload.spec->placements());
  return ToLocal::apply(tensor, gradients, false);
}

at::Tensor redistribute(const at::Tensor& tensor, const Placements& placements,
                        const RedistributeOptions& options) {
  DTensorPayload& payload = require_dtensor(tensor, "redistribute");
  const SpecPtr target = payload.spec->with_placements(placements);
  if (target == payload.spec) return tensor;
  return Redistribute::apply(tensor, target, options.async);
}

at::Tensor full_tensor(const at::Tensor& tensor, const ToLocalOptions& options) {
  return to_local(redistribute(tensor, Placements(placements_of(tensor).size())), options);
}

bool is_dtensor(const at::Tensor& tensor) {
  return tensor.defined() && detail::dtensor_payload(tensor) != nullptr;
}

const Placements& placements_of(const at::Tensor& tensor) {
  return require_dtensor(tensor, "placements_of").spec->placements();
}

const comm::MeshGroups& mesh_of(const at::Tensor& tensor) { return require_dtensor(tensor, "mesh_of").mesh; }

std::vector<std::int64_t> local_shape_of(const at::Tensor& tensor) {
  return require_dtensor(tensor, "local_shape_of").spec->local_shape();
}

std::string describe_dtensor(const at::Tensor& tensor) {
  const DTensorPayload& payload = require_dtensor(tensor, "describe_dtensor");
  return fmt::format("DTensor({}[{}] as {}, local [{}] at ({}) of {})",
                     dtype_name(payload.spec->geometry().dtype), fmt::join(payload.spec->shape(), ", "),
                     to_string(payload.spec->placements()), fmt::join(payload.spec->local_shape(), ", "),
                     fmt::join(payload.mesh.coordinate(), ", "), payload.mesh.mesh().to_string());
}

ImplicitReplicationGuard::ImplicitReplicationGuard() : before_(std::exchange(implicit_replication, true)) {}
ImplicitReplicationGuard::~ImplicitReplicationGuard() { implicit_replication = before_; }
bool ImplicitReplicationGuard::active() { return implicit_replication; }

}  // namespace penstock
