// Records of distributed tensors: what the next stage must know to receive one, and creating a tensor from a
// record.
//
//   TensorMeta meta = meta_of(activation);  // works for distributed tensors, see below
//   auto bytes = comm::to_message(meta);  // can be sent; comm/record_messages.h
//   ...                                                                  // on the other side:
//   const auto record = std::get<DistributedRecord>(comm::from_message<TensorMeta>(bytes));
//   at::Tensor buffer = make_dtensor_from_record(record, at::kCPU, meshes.get(record.mesh_key(), find_mesh));
//
// A record holds the layout of this rank's part, the global shape and stride, the placements, and the names
// and layout of the mesh, but not the mesh itself, which belongs to a process. The receiver finds its own
// mesh by that key (mesh_cache.h).
//
// The first distributed tensor of a process registers its type with penstock/torch, so meta_of, record_of,
// metas_of, check_metas and local_if_distributed handle such tensors correctly.
// Thread safety: as for tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "penstock/torch/tree/tensor_meta.h"
#include "penstock/world.h"

namespace penstock {

// With the tensor's own requires_grad. Waits for a redistribution that is still in progress, because the
// layout of the local part is only known then. Throws TypeError for a plain tensor, PipeliningMetadataError
// for a local part without a record.
DistributedRecord record_of_dtensor(const at::Tensor& tensor);

// Returns a leaf with uninitialized values: the local part has exactly the recorded shape and stride;
// requires_grad is set on the distributed tensor, so that no graph leads to the local part. Does not
// communicate, so nothing is compared between ranks, but checks what this rank knows: throws
// PipeliningMetadataError for a mesh that is not the recorded one, a rank outside of it, and a local shape
// that is not this rank's part of the whole (uneven shards: the record of another coordinate).
at::Tensor make_dtensor_from_record(const DistributedRecord& record, at::Device device,
                                    const comm::MeshGroups& mesh);

}  // namespace penstock
