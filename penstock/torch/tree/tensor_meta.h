// Records of distributed tensors, and a variant type that covers plain and distributed records.
//
//   TensorMeta meta = meta_of(tensor);                     // by dynamic type
//   const TensorRecord& buffer = local_record(meta);       // what is sent, for both kinds
//   if (const auto* record = std::get_if<DistributedRecord>(&meta)) find_mesh(record->mesh_key());
//
// A DistributedRecord describes the local part by a plain record and adds its relation to the whole: global
// shape and stride, placements, and the key by which the receiver finds its mesh. The mesh itself is not
// stored: it belongs to a process, while records are sent between processes. A key identifies a mesh only
// among processes whose meshes are derived from the same list of ranks (see MeshKey). Immutable values;
// equality and hash as for plain records.
//
// Dynamic types are registered through distributed_type.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "penstock/mesh_layout.h"
#include "penstock/placement.h"
#include "penstock/torch/tree/tensor_record.h"

namespace penstock {

class DistributedRecord {
 public:
  DistributedRecord() = default;  // no dims, no placements, no mesh

  // Throws ValueError for inconsistent parts: a different number of dims than the local part, a number of
  // placements other than the number of mesh axes, a shard of a dim that does not exist. Does not check
  // whether the local shape is this rank's part: the record does not know the rank.
  DistributedRecord(TensorRecord local, std::vector<std::int64_t> global_shape,
                    std::vector<std::int64_t> global_stride, Placements placements, MeshKey mesh_key);

  const TensorRecord& local() const { return local_; }
  const std::vector<std::int64_t>& global_shape() const { return global_shape_; }
  const std::vector<std::int64_t>& global_stride() const { return global_stride_; }
  const Placements& placements() const { return placements_; }
  const MeshKey& mesh_key() const { return mesh_key_; }
  bool requires_grad() const { return local_.requires_grad(); }

  DistributedRecord with_requires_grad(bool requires_grad) const;
  bool operator==(const DistributedRecord&) const = default;
  std::size_t hash() const;

 private:
  TensorRecord local_;
  std::vector<std::int64_t> global_shape_;
  std::vector<std::int64_t> global_stride_;
  Placements placements_;
  MeshKey mesh_key_;
};

using TensorMeta = std::variant<TensorRecord, DistributedRecord>;
using TensorMetas = std::vector<TensorMeta>;
using OptionalTensorMetas = std::vector<std::optional<TensorMeta>>;  // of gradients: an entry may be missing

// By dynamic type. Throws PipeliningMetadataError for tensors without a record (see record_of).
TensorMeta meta_of(const at::Tensor& tensor);
// Throws PipeliningMetadataError for a plain tensor (use record_of or meta_of).
DistributedRecord distributed_record_of(const at::Tensor& tensor);

bool is_distributed(const TensorMeta& meta);
const TensorRecord& local_record(const TensorMeta& meta);
bool requires_grad(const TensorMeta& meta);

// Returns a tensor of this layout on this device; for a distributed record, its local part (wrapping it needs
// a mesh).
at::Tensor make_raw_tensor(const TensorMeta& meta, at::Device device);

// As for plain records; for distributed ones also global shape, global stride, placements, mesh axes and mesh
// layout. If the kinds differ: the differences of the local parts and one line for the kind.
std::vector<std::string> differences(const DistributedRecord& expected, const DistributedRecord& actual);
std::vector<std::string> differences(const TensorMeta& expected, const TensorMeta& actual);
std::vector<std::string> requires_grad_differences(const TensorMeta& expected, const TensorMeta& actual);

// "a plain tensor", "a distributed tensor".
std::string kind_text(const TensorMeta& meta);

// "float32[2, 3] of [4, 3], placements [S(0)], mesh ('tp') (2):(1)"
std::string to_string(const DistributedRecord& record);
std::string to_string(const TensorMeta& meta);
std::string to_string(const std::optional<TensorMeta>& meta);  // "nothing" when empty

}  // namespace penstock

template <>
struct std::hash<penstock::DistributedRecord> {
  std::size_t operator()(const penstock::DistributedRecord& record) const { return record.hash(); }
};
