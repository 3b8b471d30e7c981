// What AdamW and SGD share: parameters in groups, the step over lists of tensors, state by name.
//
//   AdamW optimizer(decay_groups(named), {.lr = 3e-4});
//   for (...) {
//     optimizer.zero_grad();
//     ... backward ...
//     clip_grad_norm(optimizer.parameters(), 1.0);
//     optimizer.set_lr(lr_at(schedule, step));
//     optimizer.step();
//   }
//
// Semantics
// - One pass over lists of local tensors, bucketed by group, dtype, device and step count. A kernel that does everything at once is
//   taken where there is one (penstock/torch/kernels/fused_steps.h), _foreach_ operators otherwise.
// - Parameters without a gradient are skipped: neither they nor their state nor their step count change.
// - Distributed parameters are worked on in place, each rank its part; their state lies as they do. The gradients of a step are
//   brought to their placements first (settle_gradients), which is all that communicates.
// - A tensor that is listed twice (a tied parameter) is stepped once, under its first name.
// - Nothing waits for the device.
//
// State by name: "optimizer.<parameter>.<kind>", tensors of the shape and placements of the parameter, and
// "optimizer.<parameter>.step", how many steps it has made. Names and shapes do not depend on the layout, so one layout can write
// what another reads:
//
//   optimizer.ensure_state();                                            // tensors to read into, also on a new optimizer
//   for (const NamedTensor& entry : optimizer.state().tensors) read_into(entry.name, entry.tensor);
//   optimizer.set_steps(steps_read);
//
// Thread rule: one thread at a time. All ranks of a mesh step together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/optim/update/parameters.h"

namespace penstock::optim {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

struct NamedSteps {
  std::string name;
  std::int64_t steps;
  friend bool operator==(const NamedSteps&, const NamedSteps&) = default;
};

struct OptimizerState {
  std::vector<NamedTensor> tensors;  // the optimizer's own, not copies
  std::vector<NamedSteps> steps;
};

enum class Kernels {
  Auto,    // fused where there is one
  Foreach  // always single operators: on the CPU the bits of torch::optim
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // [collective over the meshes of the parameters] Throws what settle_gradients throws.
  void step();

  double lr() const { return lr_; }
  // Throws ValueError for a rate that is negative or not finite.
  void set_lr(double lr);

  // Undefined gradients cost nothing in the next backward; zeros keep their memory.
  void zero_grad(bool to_undefined = true);

  // Each tensor once, in the order of the groups.
  const std::vector<NamedParameter>& parameters() const { return parameters_; }

  // Makes the state that the first step would make: zeros.
  void ensure_state();
  // Of the parameters that have state.
  OptimizerState state() const;
  // Values are copied; a distributed tensor of other placements is redistributed, a plain one is the whole on every rank
  // [collective over the meshes then]. A parameter of which nothing is given becomes as before its first step. Throws ValueError for a
  // name that is no state of a parameter here, one that is given twice, state of which a part is missing, a shape that differs and a
  // negative count: nothing has changed then.
  void load_state(const OptimizerState& state);
  // Of the parameters that are given. Throws ValueError as load_state.
  void set_steps(const std::vector<NamedSteps>& steps);

 protected:
  // What one group asks of a step.
  struct GroupNumbers {
    double lr, weight_decay;
  };
  // Local tensors that one call can take: of one group, dtype, device and step count.
  struct Bucket {
    std::size_t group;
    std::int64_t step;  // that this is, from 1
    GroupNumbers numbers;
    std::vector<at::Tensor> parameters, gradients;
    std::vector<std::vector<at::Tensor>> state;  // one list for each kind
  };

  // `kinds`: of state tensors, in the order of Bucket::state. Throws ValueError for bad groups.
  Optimizer(std::vector<ParameterGroup> groups, double lr, double weight_decay, Kernels kernels, std::vector<std::string> kinds);
  // Both are called below autograd and write in place. By one kernel; false, and nothing changed, if there is none.
  virtual bool update_fused(const Bucket& bucket) = 0;
  // By _foreach_ operators.
  virtual void update_lists(const Bucket& bucket) = 0;

 private:
  struct Slot {
    std::size_t group;
    std::int64_t steps = 0;
    std::vector<at::Tensor> state;  // empty before the first step
    std::vector<at::Tensor> local;  // their local parts
  };

  void make_state(std::size_t index);
  std::vector<Bucket> buckets();
  std::string state_name(std::size_t index, const std::string& kind) const;

  double lr_;
  Kernels kernels_;
  std::vector<GroupNumbers> groups_;  // lr is the scale here
  std::vector<std::string> kinds_;
  std::vector<NamedParameter> parameters_;
  std::vector<Slot> slots_;           // one for each parameter
};

}  // namespace penstock::optim
