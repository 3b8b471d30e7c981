// Building a module without memory and giving it memory later.
//
//   penstock::DeferredInit deferred;
//   std::shared_ptr<Model> model;
//   {
//     penstock::ModeGuard guard(deferred);
//     model = std::make_shared<Model>(config);          // every parameter is fake: no memory, no random numbers
//   }
//   ...                                                 // look at shapes, plan, cut into stages
//   deferred.materialize(*model->layer3);               // memory and values for this part alone
//
// Under this mode tensors are fake (see fake.h), and the operators that would have filled them are written down. To
// materialize is to run those that a tensor's values depend on, in their order. Materializing a whole module right after
// torch::manual_seed(s) gives bit for bit what building it after torch::manual_seed(s) gives. A part alone draws the
// random numbers of that part alone; values that must not depend on the order come from keyed_random.h.
//
// Parameters keep their identity: handles in modules, containers and optimizers see the memory. What was tied stays tied,
// also when the parts are materialized one after the other.
// The object keeps what it materialized alive until it is destroyed; let it go when the module is complete.
// Thread rule: one thread at a time.
#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "penstock/fake.h"
#include "penstock/tensor_subclass.h"

namespace penstock {

class DeferredInit final : public Mode {
 public:
  DeferredInit() = default;
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;

  void dispatch(const c10::OperatorHandle& op, Stack* stack) override;

  // Every fake parameter and buffer of the module and its submodules. `device`: where to put them (default: where they were
  // declared). Throws StateError for a fake tensor that was not made under this mode.
  void materialize(torch::nn::Module& module, std::optional<at::Device> device = std::nullopt);
  // These tensors, in place; those that are not fake are left alone.
  void materialize(const std::vector<at::Tensor>& tensors, std::optional<at::Device> device = std::nullopt);

  // Those of the tensors that materialize() would give the values of a real run: they depend on nothing but recorded operators without random
  // numbers and on real tensors that no operator under this mode would have written, and that somebody still holds. One that nobody holds was
  // replaced by what was computed from it (`count = count + 1`), which a real run must find as it was.
  std::vector<at::Tensor> replayable(const std::vector<at::Tensor>& tensors) const;

  std::size_t recorded_operators() const { return steps_.size(); }

 private:
  // An operator as it was called. Fake tensors are held as copies of their own, because those in the module will change.
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
  std::unordered_set<const void*> stale_;             // memory of real tensors that a real run would have written
};

// Memory without values for every fake parameter and buffer, whoever made them fake: for a checkpoint that is read next.
void materialize_empty(torch::nn::Module& module, std::optional<at::Device> device = std::nullopt);

}  // namespace penstock
