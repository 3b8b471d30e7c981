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

#include <optional>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>


namespace penstock::optim {

// Named parameters, in groups that share their options.
//
//   std::vector<NamedParameter> all;
//   for (const auto& item : module.named_parameters()) all.push_back({item.key(), item.value()});
//   AdamW optimizer(decay_groups(all), {.lr = 3e-4, .weight_decay = 0.1});
//
// Names are those of the whole model, the same in every layout; a rank lists the parameters that it holds. A
// tensor may be plain or distributed. Thread safety: as for tensors.

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

struct ParameterGroup {
  std::vector<NamedParameter> parameters;
  double lr_scale = 1;                 // multiplies the optimizer's learning rate; 0 freezes the parameters
  std::optional<double> weight_decay;  // instead of the optimizer's
};

// Returns whether a parameter is usually excluded from weight decay: at most one dim, or "bias" or "norm" in
// its path.
bool is_usually_undecayed(const NamedParameter& parameter);

// Two groups: parameters with the optimizer's decay and parameters without, in the order given. An empty
// group is omitted.
std::vector<ParameterGroup> decay_groups(const std::vector<NamedParameter>& parameters);

// Returns every tensor once: a tied one under its first name. Throws ValueError for a name shared by two
// tensors, an empty name and an undefined tensor.
std::vector<NamedParameter> without_ties(const std::vector<NamedParameter>& parameters);

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

// ---- AdamW ----
//
// AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
//
//   m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
//   p = p (1 - lr weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// State: exp_avg (m), exp_avg_sq (v), in the dtype of the parameter. See optimizer.h for everything else.

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;           // 0 .. 1, less than 1
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;   // for groups without their own value
  Kernels kernels = Kernels::Auto;
};

class AdamW final : public Optimizer {
 public:
  // Throws ValueError that names the option or the parameter.
  explicit AdamW(std::vector<ParameterGroup> groups, const AdamWOptions& options = {});
  explicit AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options = {});

 private:
  bool update_fused(const Bucket& bucket) override;
  void update_lists(const Bucket& bucket) override;
  AdamWOptions options_;
};

// ---- SGD ----
//
// Stochastic gradient descent with momentum.
//
//   g = g + weight_decay p                 (coupled decay, as in torch::optim::SGD)
//   m = momentum m + g
//   p = p - lr (nesterov ? g + momentum m : m)
//
// With decoupled decay, p = p (1 - lr weight_decay) comes first and g is unchanged, as in AdamW. State:
// momentum (m), none if the momentum is 0. See optimizer.h for everything else.

struct SGDOptions {
  double lr = 1e-2;
  double momentum = 0;        // 0 .. 1, less than 1
  bool nesterov = false;      // needs momentum
  double weight_decay = 0;    // for groups without their own value
  bool decoupled = false;
  Kernels kernels = Kernels::Auto;
};

class SGD final : public Optimizer {
 public:
  // Throws ValueError that names the option or the parameter.
  explicit SGD(std::vector<ParameterGroup> groups, const SGDOptions& options = {});
  explicit SGD(std::vector<NamedParameter> parameters, const SGDOptions& options = {});

 private:
  bool update_fused(const Bucket& bucket) override;
  void update_lists(const Bucket& bucket) override;
  SGDOptions options_;
};

}  // namespace penstock::optim
