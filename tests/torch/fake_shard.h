// A distributed tensor type for tests: any tensor created by a FakeShards counts as distributed, and this
// rank holds its first rows.
//
// It is recognized by its storage, so views of it (for example a detached one) are distributed too.
#pragma once

#include <torch/torch.h>

#include <set>
#include <utility>

#include "penstock/torch/tree/distributed_type.h"
#include "penstock/torch/tree/tensor_meta.h"

namespace penstock::test {

class FakeShards {
 public:
  explicit FakeShards(std::string name = "fake")
      : registration_(
            {.name = std::move(name),
             .holds =
                 [this](const at::Tensor& t) { return t.has_storage() && storages_.count(identity(t)) > 0; },
             .record = [this](const at::Tensor& t) { return record(t); },
             .local = [](const at::Tensor& t) { return t.narrow(0, 0, t.size(0) / 2).clone(); }}) {}

  // [rows, columns] over a mesh axis "tp" of two ranks, rows split.
  at::Tensor make(std::int64_t rows, std::int64_t columns, bool requires_grad = false) {
    at::Tensor tensor = at::arange(rows * columns, at::kFloat).view({rows, columns});
    storages_.insert(identity(tensor));
    return tensor.requires_grad_(requires_grad);
  }

  Placements placements = {Shard{0}};

 private:
  static const void* identity(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

  DistributedRecord record(const at::Tensor& tensor) const {
    const TensorRecord local({tensor.size(0) / 2, tensor.size(1)}, tensor.strides().vec(),
                             tensor.scalar_type(), tensor.requires_grad());
    return DistributedRecord(local, tensor.sizes().vec(), tensor.strides().vec(), placements,
                             MeshKey{{"tp"}, MeshLayout({2})});
  }

  std::set<const void*> storages_;
  DistributedTypeRegistration registration_;
};

}  // namespace penstock::test
