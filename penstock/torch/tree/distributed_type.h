// How code that knows nothing of distributed tensors treats one rightly: whoever implements them registers
// here.
//
//   const DistributedTypeRegistration registration({
//       .name = "DTensor",
//       .holds = [](const at::Tensor& t) { return DTensor::is(t); },
//       .record = [](const at::Tensor& t) { return record_of_dtensor(t); },
//       .local = [](const at::Tensor& t) { return DTensor::to_local(t); }});
//
// Everything that reads records (tensor_record.h, tensor_meta.h) asks this list, so records of such tensors
// come out right as soon as the type is registered. Thread safe; the functions may be called from any thread,
// also at the same time. Without a registration every tensor is plain.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "penstock/torch/tree/detach_tag.h"

namespace penstock {

class DistributedRecord;

struct DistributedType {
  std::string name;  // for messages: "DTensor"
  // Whether a tensor is of this type. Called often: must not compute.
  std::function<bool(const at::Tensor&)> holds;
  // Its record, with the tensor's own requires_grad.
  std::function<DistributedRecord(const at::Tensor&)> record;
  // Its local part, connected to the graph.
  std::function<at::Tensor(const at::Tensor&)> local;
};

// Registered while it lives. Throws ValueError when a function is missing or the name is taken.
class DistributedTypeRegistration {
 public:
  explicit DistributedTypeRegistration(DistributedType type);
  ~DistributedTypeRegistration();
  DistributedTypeRegistration(const DistributedTypeRegistration&) = delete;
  DistributedTypeRegistration& operator=(const DistributedTypeRegistration&) = delete;

 private:
  std::shared_ptr<const DistributedType> type_;
};

// The type that holds this tensor; null for a plain or undefined one.
std::shared_ptr<const DistributedType> distributed_type_of(const at::Tensor& tensor);
bool is_distributed_tensor(const at::Tensor& tensor);

// The local part of a distributed tensor; any other tensor (an undefined one too) as it is. With kDetach the
// tensor is detached first, whatever its kind, so that backward never passes through the step from global to
// local.
at::Tensor local_if_distributed(const at::Tensor& tensor);
at::Tensor local_if_distributed(const at::Tensor& tensor, DetachTag);

}  // namespace penstock
