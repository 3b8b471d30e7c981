// Lets code that does not depend on distributed tensors handle them: implementations register here.
//
//   const DistributedTypeRegistration registration({
//       .name = "DTensor",
//       .holds = [](const at::Tensor& t) { return DTensor::is(t); },
//       .record = [](const at::Tensor& t) { return record_of_dtensor(t); },
//       .local = [](const at::Tensor& t) { return DTensor::to_local(t); }});
//
// Everything that reads records (tensor_record.h, tensor_meta.h) consults this list, so the records of such
// tensors are correct once the type is registered. Without a registration every tensor is plain. Thread
// safety: any thread; the functions may be called concurrently from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "penstock/pytree.h"

namespace penstock {

class DistributedRecord;

struct DistributedType {
  std::string name;  // for messages: "DTensor"
  // Returns whether a tensor is of this type. Called often: must not compute.
  std::function<bool(const at::Tensor&)> holds;
  // Returns its record, with the tensor's own requires_grad.
  std::function<DistributedRecord(const at::Tensor&)> record;
  // Returns its local part, connected to the graph.
  std::function<at::Tensor(const at::Tensor&)> local;
};

// Registers the type for the lifetime of the object. Throws ValueError if a function is missing or the name
// is taken.
class DistributedTypeRegistration {
 public:
  explicit DistributedTypeRegistration(DistributedType type);
  ~DistributedTypeRegistration();
  DistributedTypeRegistration(const DistributedTypeRegistration&) = delete;
  DistributedTypeRegistration& operator=(const DistributedTypeRegistration&) = delete;

 private:
  std::shared_ptr<const DistributedType> type_;
};

// Returns the type of this tensor, or null for a plain or undefined tensor.
std::shared_ptr<const DistributedType> distributed_type_of(const at::Tensor& tensor);
bool is_distributed_tensor(const at::Tensor& tensor);

// Returns the local part of a distributed tensor; any other tensor, including an undefined one, is returned
// unchanged. With kDetach the tensor is detached first, whatever its kind, so that backward never passes
// through the conversion from global to local.
at::Tensor local_if_distributed(const at::Tensor& tensor);
at::Tensor local_if_distributed(const at::Tensor& tensor, DetachTag);

}  // namespace penstock
