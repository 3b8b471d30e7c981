// Builds a module without memory and allocates and initializes it later, as a whole or in parts.
//
//   DeferredInit deferred;
//   torch::nn::Sequential layers;
//   {
//     ModeGuard guard(deferred);
//     layers = torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::Linear(64, 8));   // fake
//   }
//   deferred.materialize(*layers[1]);      // memory and values of the second layer only
//   deferred.materialize(*layers);         // and of the rest
//
// Under this mode tensors are fake (fake.h), and the operators that would have filled them are recorded. To
// materialize a tensor is to run the operators that its values depend on, in their order. Materializing a
// whole module right after torch::manual_seed(s) gives bit for bit the values of building it right after
// torch::manual_seed(s). A part that is materialized alone draws random numbers for that part only; use
// random.h for values that must not depend on the order.
//
// Parameters keep their identity: handles in modules, containers and optimizers refer to the materialized
// tensor. Tied parameters stay tied, also if the parts are materialized one after another.
//
// A DeferredInit keeps what it materialized alive until it is destroyed; destroy it when the module is
// complete.
//
// Thread safety: one thread at a time.
#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "penstock/fake.h"
#include "penstock/tensor_subclass.h"

namespace penstock {

// Makes every tensor created in its scope fake and records how to initialize it. See ModeGuard.
class DeferredInit final : public Mode {
 public:
  // Without a record.
  DeferredInit() = default;
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;

  // Runs the operator on fake tensors and records it.
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override;

  // Materializes every fake parameter and buffer of a module and its submodules, on `device` (default: the
  // device on which each was created). Throws StateError for a fake tensor that was not created under this
  // mode.
  void materialize(torch::nn::Module& module, std::optional<at::Device> device = std::nullopt);
  // Materializes these tensors in place; tensors that are not fake are left unchanged. Throws as above.
  void materialize(const std::vector<at::Tensor>& tensors, std::optional<at::Device> device = std::nullopt);

  // Returns those of the tensors to which `materialize` would give the values of a real run. They depend only
  // on recorded operators that draw no random numbers, and on real tensors that no operator under this mode
  // would have written and that are still held outside of the record. A real tensor that nothing else holds
  // was replaced by what was computed from it (`count = count + 1`), and a real run must find it unchanged.
  std::vector<at::Tensor> replayable(const std::vector<at::Tensor>& tensors) const;

  // Number of operators in the record.
  std::size_t recorded_operators() const { return steps_.size(); }

 private:
  // An operator as it was called. Holds copies of the fake tensors, because those in the module will change.
  struct Step {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments, results;
  };

  class Holders;
  std::vector<bool> steps_needed(const std::vector<at::Tensor>& tensors) const;
  void replay(std::size_t step);
  at::Tensor real_of(const at::Tensor& tensor) const;

  FakeMode fake_;
  std::vector<Step> steps_;
  std::vector<bool> replayed_;
  std::unordered_map<const void*, at::Tensor> real_;  // by the payload of the fake tensor
  std::unordered_set<const void*> stale_;             // memory that a real run would have written
};

// Allocates every fake parameter and buffer of a module without initializing it, whatever made them fake, on
// `device` (default: the device of each). For modules whose values are then read from a checkpoint.
void materialize_empty(torch::nn::Module& module, std::optional<at::Device> device = std::nullopt);

}  // namespace penstock
