#include "penstock/dtensor/tensor/dtensor_record.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/dtensor/tensor/mesh_cache.h"
#include "penstock/errors.h"
#include "penstock/torch/tree/distributed_type.h"
#include "penstock/torch/tree/tensor_record.h"

namespace penstock {

namespace detail {

// The linker would drop a static initializer from a program that uses nothing else of this file, so creating
// the first distributed tensor calls this. Never unregistered: tensors may outlive every static object.
void register_dtensor_type() {
  [[maybe_unused]] static const auto& registration = *new DistributedTypeRegistration(
      {.name = "DTensor",
       .holds = [](const at::Tensor& tensor) { return dtensor_payload(tensor) != nullptr; },
       .record = [](const at::Tensor& tensor) { return record_of_dtensor(tensor); },
       .local = [](const at::Tensor& tensor) { return to_local(tensor); }});
}

}  // namespace detail

DistributedRecord record_of_dtensor(const at::Tensor& tensor) {
  const detail::DTensorPayload& payload = detail::require_dtensor(tensor, "record_of_dtensor");
  const GlobalGeometry& whole = payload.spec->geometry();
  return DistributedRecord(
      detail::record_of_attributes(payload.local()).with_requires_grad(tensor.requires_grad()), whole.shape,
      whole.stride, payload.spec->placements(), payload.mesh.mesh().key());
}

at::Tensor make_dtensor_from_record(const DistributedRecord& record, at::Device device,
                                    const comm::MeshGroups& mesh) {
  constexpr const char* kFunction = "make_dtensor_from_record";
  if (!answers(mesh, record.mesh_key()))
    throw PipeliningMetadataError(describe(
        fmt::format("{}: the mesh", kFunction), mesh.mesh().key().to_string(), record.mesh_key().to_string(),
        "find it by record.mesh_key(), in a MeshCache or with DeviceMesh::find"));
  if (!mesh.mesh().coordinate())
    throw PipeliningMetadataError(
        describe(kFunction,
                 fmt::format("rank {}, which is not in {}", mesh.mesh().this_rank(), mesh.mesh().to_string()),
                 "a rank of the mesh", "send the record only to ranks of the mesh"));
  at::Tensor local = make_raw_tensor(record.local(), device);
  const SpecPtr spec = DTensorSpec::get(
      mesh, record.placements(),
      {record.global_shape(), record.global_stride(), record.local().dtype(), local.device()});
  if (spec->local_shape() != record.local().shape())
    throw PipeliningMetadataError(
        describe(fmt::format("{}: the local shape", kFunction),
                 fmt::format("[{}]", fmt::join(record.local().shape(), ", ")),
                 fmt::format("[{}], the part of {} at ({})", fmt::join(spec->local_shape(), ", "),
                             spec->to_string(), fmt::join(mesh.coordinate(), ", ")),
                 "if shards are uneven, each rank has its own record: use the record of the rank at the same "
                 "coordinate of the sender's mesh"));
  at::Tensor whole = detail::make_dtensor(std::move(local), spec, mesh);
  whole.set_requires_grad(record.requires_grad());
  return whole;
}

}  // namespace penstock
