#include "penstock/gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/torch/tree/distributed_type.h"

namespace penstock::optim {
namespace {

// Returns the axis along which a gradient is Partial and the parameter replicated, if that is the only
// difference.
std::optional<int> summed_axis(const Placements& gradient, const Placements& parameter) {
  std::optional<int> axis;
  for (std::size_t i = 0; i < parameter.size(); ++i) {
    if (gradient[i] == parameter[i]) continue;
    if (axis || !gradient[i].is_partial(PartialOp::Sum) || !parameter[i].is_replicate()) return std::nullopt;
    axis = static_cast<int>(i);
  }
  return axis;
}

// Sums of one dtype along one mesh axis.
struct Sums {
  comm::MeshGroups mesh;
  int axis;
  at::ScalarType dtype;
  std::vector<at::Tensor> owners, locals;
  std::vector<std::string> names;
};

// A small number derived from the names, exact in float32 even as a sum over many ranks.
double number_of(const std::vector<std::string>& names) {
  std::uint32_t hash = 2166136261u;
  for (const std::string& name : names)
    for (const char c : name + "\n") hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash % 4093;
}

// Whether a number sent with the sums can be read back exactly and without waiting for a device.
bool can_compare(const Sums& sums) {
  return sums.locals[0].is_cpu() && (sums.dtype == at::kFloat || sums.dtype == at::kDouble);
}

}  // namespace

void settle_gradients(const std::vector<NamedParameter>& parameters) {
  const at::NoGradGuard no_grad;
  for (const NamedParameter& parameter : parameters) ensure_sharded(parameter.tensor);
  std::vector<Sums> sums;  // in the order of the list, which all ranks of a mesh share
  std::set<const void*> seen;
  for (const NamedParameter& parameter : parameters) {
    const at::Tensor gradient = parameter.tensor.grad();
    if (!gradient.defined() || !seen.insert(parameter.tensor.unsafeGetTensorImpl()).second) continue;
    if (gradient.layout() != at::kStrided)
      throw NotImplemented(fmt::format("the sparse gradient of {}; use an embedding without sparse gradients",
                                       parameter.name));
    const bool distributed = is_dtensor(parameter.tensor);
    if (distributed != is_dtensor(gradient))
      throw TypeError(
          describe(fmt::format("gradient of {}", parameter.name),
                   distributed ? "a plain tensor" : "a distributed tensor",
                   distributed ? "a distributed tensor" : "a plain tensor",
                   "parameter and gradient must be of one kind; set .grad() with from_local or full_tensor"));
    if (!distributed) continue;
    if (!(mesh_of(gradient) == mesh_of(parameter.tensor)))
      throw ValueError(
          describe(fmt::format("gradient of {}", parameter.name), mesh_of(gradient).mesh().to_string(),
                   mesh_of(parameter.tensor).mesh().to_string(), "distribute both over one mesh"));
    const Placements& placements = placements_of(parameter.tensor);
    if (placements_of(gradient) == placements) continue;
    const auto axis = summed_axis(placements_of(gradient), placements);
    const at::Tensor local = local_if_distributed(gradient, kDetach);
    if (!axis || !local.is_contiguous()) {
      at::Tensor owner = parameter.tensor;
      owner.mutable_grad() = redistribute(gradient, placements).detach();
      continue;
    }
    const comm::MeshGroups& mesh = mesh_of(gradient);
    auto entry = std::find_if(sums.begin(), sums.end(), [&](const Sums& other) {
      return other.mesh == mesh && other.axis == *axis && other.dtype == gradient.scalar_type();
    });
    if (entry == sums.end())
      entry = sums.insert(sums.end(), Sums{mesh, *axis, gradient.scalar_type(), {}, {}, {}});
    entry->names.push_back(parameter.name);
    entry->owners.push_back(parameter.tensor);
    entry->locals.push_back(local);
  }
  for (Sums& entry : sums) {
    // If ranks summed different gradients of the same size, the result would be meaningless.
    const bool compare = can_compare(entry);
    const double own = number_of(entry.names);
    if (compare) entry.locals.push_back(at::full({1}, own, entry.locals[0].options()));
    entry.mesh.group(entry.axis)
        .all_reduce_coalesced(entry.locals, comm::ReduceOp::Sum, {.label = "gradients", .timeout = {}})
        .wait();
    if (compare && entry.locals.back().item<double>() != own * entry.mesh.group(entry.axis).size())
      throw StateError(describe("gradients of distributed parameters",
                                fmt::format("those of {} on this rank, others on another rank of the mesh",
                                            fmt::join(entry.names, ", ")),
                                "gradients of the same parameters on all ranks of a mesh",
                                "run the same operators on distributed tensors on every rank; branches may "
                                "depend only on values that are equal on all of them"));
    for (std::size_t i = 0; i < entry.owners.size(); ++i) {
      at::Tensor& owner = entry.owners[i];
      const at::Tensor gradient = owner.grad();
      owner.mutable_grad() =
          from_local(entry.locals[i], entry.mesh, placements_of(owner),
                     {.shape = gradient.sizes().vec(), .stride = gradient.strides().vec(), .check = false})
              .detach();
    }
  }
}

std::vector<std::string> non_finite_gradients(const std::vector<NamedParameter>& parameters) {
  const at::NoGradGuard no_grad;
  std::vector<std::string> names;
  for (const NamedParameter& parameter : parameters) {
    const at::Tensor gradient = parameter.tensor.grad();
    if (gradient.defined() && !at::isfinite(local_if_distributed(gradient, kDetach)).all().item<bool>())
      names.push_back(parameter.name);
  }
  return names;
}

}  // namespace penstock::optim
