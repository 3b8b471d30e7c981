// The payload of a distributed tensor: this rank's part, the spec and the mesh. For this folder and for
// shard/, which converts parameters to distributed and whole tensors in place; other code uses dtensor.h.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "penstock/dtensor/tensor/local_transfer.h"
#include "penstock/dtensor/tensor/spec.h"
#include "penstock/tensor_subclass.h"
#include "penstock/world.h"

namespace penstock {
struct ModuleBoundary;
}

namespace penstock::detail {

class DTensorPayload final : public Payload {
 public:
  static constexpr std::string_view kKind = "DTensor";
  // Above everything that computes on whole values; the local part of a distributed tensor may be of any
  // kind.
  static constexpr int kPriority = 100;

  DTensorPayload(at::Tensor local, SpecPtr spec, comm::MeshGroups mesh)
      : spec(std::move(spec)), mesh(std::move(mesh)), local_(std::move(local)) {}

  std::string_view kind() const override { return kKind; }
  int priority() const override { return kPriority; }
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override;
  std::vector<std::pair<std::string, at::Tensor>> inner_tensors() const override {
    return {{"local", local()}};
  }
  // The placements only; the mesh belongs to the process.
  c10::IValue context() const override { return to_string(spec->placements()); }

  at::Tensor rebuild(const std::vector<at::Tensor>& inner, const WrapperGeometry& geometry) const override;
  // Replicated where this tensor is Partial.
  at::Tensor rebuild_gradient(const std::vector<at::Tensor>& inner,
                              const WrapperGeometry& geometry) const override;
  bool same_context(const Payload& other) const override;
  // Redistributes, which is [collective].
  at::Tensor with_context_of(const at::Tensor& self, const Payload& other) const override;

  // Waits for a redistribution that is still in progress. Throws StateError for a copied view whose base has
  // changed.
  const at::Tensor& local() const {
    if (pending_ || copied_view) [[unlikely]]
      finish();
    return local_;
  }
  void set_local(at::Tensor local) { local_ = std::move(local); }
  void set_pending(PendingLocal pending, std::shared_ptr<const LocalTransfer> transfer);

  SpecPtr spec;
  comm::MeshGroups mesh;
  // Set for a view that had to be redistributed and therefore does not share memory with its base: writes to
  // it would be lost, and writes to the base would not be seen.
  bool copied_view = false;
  void mark_copied(const at::Tensor& viewed);
  // Of a parameter of a parallelized module: the layouts of the module's inputs and outputs.
  std::shared_ptr<const ModuleBoundary> boundary;
  // This tensor as a module boundary last prepared it, while that result is alive.
  struct Prepared {
    Placements placements;
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    std::uint32_t version;  // of this tensor; every write increments it
  };
  std::unique_ptr<Prepared> prepared;

 private:
  struct Pending {
    PendingLocal local;
    std::shared_ptr<const LocalTransfer> transfer;  // owns the data that `local` finishes with
  };
  void finish() const;

  mutable at::Tensor local_;
  mutable std::unique_ptr<Pending> pending_;
  // Of a copied view: the version of its base at the time of the copy, and the base's version counter.
  c10::VariableVersion original_version_;
  std::uint32_t copied_version_ = 0;
};

inline DTensorPayload* dtensor_payload(const at::Tensor& tensor) {
  return payload_as<DTensorPayload>(tensor);
}

// Throws TypeError naming `function` if the tensor is not distributed.
DTensorPayload& require_dtensor(const at::Tensor& tensor, std::string_view function);

// Registers the type with the records of penstock/torch, once per process.
void register_dtensor_type();

// Like to_local, for a tensor that nobody else uses: the result may be written.
at::Tensor take_local(const at::Tensor& tensor);

// Checks only the shape of the local part. `offset` is the storage offset of a view in the memory that the
// whole tensor would have; autograd uses it to describe views.
at::Tensor make_dtensor(at::Tensor local, SpecPtr spec, const comm::MeshGroups& mesh,
                        const at::Tensor* viewed = nullptr, std::int64_t offset = 0);

}  // namespace penstock::detail
