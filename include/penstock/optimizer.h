// Optimizers: AdamW and SGD over named parameters, plain or distributed.
//
//   optim::AdamW adamw(optim::decay_groups(named), {.lr = 3e-4, .weight_decay = 0.1});
//   model->forward(x).sub(y).square().mean().backward();
//   optim::clip_grad_norm(adamw.parameters(), 1.0);
//   adamw.set_lr(1e-4);                                        // lr_schedule.h computes learning rates
//   adamw.step();
//   adamw.zero_grad();
//   optim::AdamW copy(optim::decay_groups(named));
//   copy.load_state(adamw.state());                            // moments and step counts, not options
//
// Parameters without a gradient are skipped: they, their state and their step count do not change. A tensor
// that is listed twice (a tied parameter) is updated once, under its first name.
//
// A distributed parameter is updated in place, each rank its local part; its state has the same placements.
// The only communication of a step is settle_gradients (gradients.h), which redistributes gradients to
// the placements of their parameters. A step does not wait for the device.
//
// A step processes lists of local tensors, bucketed by group, dtype, device and step count. It uses fused
// kernels where available (float32 on the CPU, CUDA with LibTorch 2.4 or newer), _foreach_ operators
// otherwise.
//
// State is named: "optimizer.<parameter>.<kind>" are tensors with the shape and placements of the parameter,
// "optimizer.<parameter>.step" is the number of steps it has made. Names and shapes do not depend on the
// layout, so state that was saved in one layout can be loaded in another. To read a checkpoint in place, call
// ensure_state(), read into the tensors of state(), and call set_steps().
//
// Thread safety: one thread at a time. All ranks of a mesh step together.
#pragma once

#include <ATen/core/Tensor.h>
#include <optional>

#include <cstdint>
#include <string>
#include <vector>

namespace penstock::optim {

// ---- Parameters ----

// A parameter and its name in the whole model, which is the same in every layout. A rank lists the parameters
// that it holds, for example from module->named_parameters().
struct NamedParameter {
  std::string name;   // must not be empty
  at::Tensor tensor;  // plain or distributed
};

// Parameters that share their options.
struct ParameterGroup {
  std::vector<NamedParameter> parameters;  // may be empty
  double lr_scale = 1;                     // multiplies the learning rate; 0 freezes the parameters
  std::optional<double> weight_decay;      // replaces the optimizer's weight decay
};

// Returns whether a parameter is usually excluded from weight decay: it has at most one dim, or a part of its
// dotted name is "bias" or contains "norm".
bool is_usually_undecayed(const NamedParameter& parameter);

// Returns two groups: parameters with the optimizer's weight decay, then those without
// (is_usually_undecayed), each in the given order. An empty group is omitted. Throws what without_ties
// throws.
std::vector<ParameterGroup> decay_groups(const std::vector<NamedParameter>& parameters);

// Returns every tensor once, a tied one under its first name. Throws ValueError for a name shared by two
// tensors, an empty name and an undefined tensor.
std::vector<NamedParameter> without_ties(const std::vector<NamedParameter>& parameters);

// ---- Optimizer ----

// A state tensor of an optimizer.
struct NamedTensor {
  std::string name;   // "optimizer.<parameter>.<kind>"
  at::Tensor tensor;  // has the shape of the parameter
};

// The step count of one parameter.
struct NamedSteps {
  std::string name;    // "optimizer.<parameter>.step"
  std::int64_t steps;  // number of steps that the parameter has made
  // Compares all members.
  friend bool operator==(const NamedSteps&, const NamedSteps&) = default;
};

// The state of an optimizer, without its options.
struct OptimizerState {
  std::vector<NamedTensor> tensors;  // from Optimizer::state(): the optimizer's own tensors, not copies
  std::vector<NamedSteps> steps;     // one for each parameter that has state
};

// Which kernels a step uses.
enum class Kernels {
  Auto,    // fused kernels where available
  Foreach  // always _foreach_ operators; on the CPU, results are bitwise equal to those of torch::optim
};

// What AdamW and SGD share.
class Optimizer {
 public:
  // Releases the state; does not communicate.
  virtual ~Optimizer() = default;
  // Not copyable: a copy would share parameters and state.
  Optimizer(const Optimizer&) = delete;
  // Not assignable.
  Optimizer& operator=(const Optimizer&) = delete;

  // [collective over the meshes of the parameters] Updates all parameters that have a gradient. Throws what
  // settle_gradients throws.
  void step();

  // Returns the learning rate of the next step, before it is multiplied by ParameterGroup::lr_scale.
  double lr() const { return lr_; }
  // Sets the learning rate. Throws ValueError for a rate that is negative or not finite.
  void set_lr(double lr);

  // Clears the gradients. Undefined gradients need no memory and no addition in the next backward; with
  // `to_undefined` = false they keep their memory and are set to zero.
  void zero_grad(bool to_undefined = true);

  // Returns each tensor once, in the order of the groups.
  const std::vector<NamedParameter>& parameters() const { return parameters_; }

  // Creates the state that the first step would create: zeros. Parameters that already have state keep it.
  void ensure_state();
  // Returns the state of the parameters that have any. The tensors are the optimizer's own: writing to them
  // changes it.
  OptimizerState state() const;
  // [collective over the meshes of the parameters if they are distributed] Copies the given state. A
  // distributed tensor with other placements is redistributed; a plain one for a distributed parameter must
  // be the whole tensor on every rank. A parameter without given state is reset to before its first step.
  // Throws ValueError, without changing anything, for a name that does not belong to a parameter here, a name
  // given twice, incomplete state of a parameter, a different shape, a tensor on a different mesh, a
  // distributed tensor for a plain parameter, and a negative step count.
  void load_state(const OptimizerState& state);
  // Sets the step counts of the given parameters and leaves the others unchanged. Throws ValueError, without
  // changing anything, for a name that does not belong to a parameter here and for a negative count.
  void set_steps(const std::vector<NamedSteps>& steps);

 protected:
  // The numbers of one group in a step.
  struct GroupNumbers {
    double lr;            // learning rate, lr_scale included
    double weight_decay;  // the group's own or the optimizer's
  };
  // Local tensors that one kernel call can process: of one group, dtype, device and step count.
  struct Bucket {
    std::size_t group;                           // index of the group
    std::int64_t step;                           // number of this step, from 1
    GroupNumbers numbers;                        // of the group
    std::vector<at::Tensor> parameters;          // local parts
    std::vector<at::Tensor> gradients;           // of `parameters`, with the same strides
    std::vector<std::vector<at::Tensor>> state;  // one list for each kind of state
  };

  // `kinds` are the names of the state tensors, in the order of Bucket::state. Throws ValueError for a
  // learning rate, scale or weight decay that is negative or not finite, for a tied parameter in groups with
  // different options, for a parameter that is not a floating-point leaf or has Partial placements, and what
  // without_ties throws.
  Optimizer(std::vector<ParameterGroup> groups, double lr, double weight_decay, Kernels kernels,
            std::vector<std::string> kinds);
  // Updates the bucket in place by one fused kernel. Returns false, without changing anything, if there is
  // none. Called below autograd.
  virtual bool update_fused(const Bucket& bucket) = 0;
  // Updates the bucket in place by _foreach_ operators. Called below autograd.
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
  std::vector<Slot> slots_;  // one for each parameter
};

// ---- AdamW ----

// Options of AdamW.
struct AdamWOptions {
  double lr = 1e-3;                 // learning rate, not negative
  double beta1 = 0.9;               // decay rate of the average of gradients, in [0, 1)
  double beta2 = 0.999;             // decay rate of the average of squared gradients, in [0, 1)
  double eps = 1e-8;                // added to the denominator, positive
  double weight_decay = 0.01;       // for groups without their own value, not negative
  Kernels kernels = Kernels::Auto;  // which kernels a step uses
};

// Adam with decoupled weight decay (Loshchilov and Hutter, 2019). In step t:
//
//   m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
//   p = p (1 - lr weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// State: exp_avg (m) and exp_avg_sq (v), in the dtype of the parameter.
class AdamW final : public Optimizer {
 public:
  // Throws ValueError for bad options, groups or parameters, and names them.
  explicit AdamW(std::vector<ParameterGroup> groups, const AdamWOptions& options = {});
  // All parameters in one group.
  explicit AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options = {});

 private:
  bool update_fused(const Bucket& bucket) override;
  void update_lists(const Bucket& bucket) override;
  AdamWOptions options_;
};

// ---- SGD ----

// Options of SGD.
struct SGDOptions {
  double lr = 1e-2;                 // learning rate, not negative
  double momentum = 0;              // in [0, 1)
  bool nesterov = false;            // Nesterov momentum; requires a momentum
  double weight_decay = 0;          // for groups without their own value, not negative
  bool decoupled = false;           // decoupled weight decay, as in AdamW
  Kernels kernels = Kernels::Auto;  // which kernels a step uses
};

// Stochastic gradient descent with momentum.
//
//   g = g + weight_decay p                 (coupled decay, as in torch::optim::SGD)
//   m = momentum m + g
//   p = p - lr (nesterov ? g + momentum m : m)
//
// With decoupled decay, p = p (1 - lr weight_decay) comes first and g is unchanged. State: momentum (m), in
// the dtype of the parameter; none if the momentum is 0.
class SGD final : public Optimizer {
 public:
  // Throws ValueError for bad options, groups or parameters, and names them.
  explicit SGD(std::vector<ParameterGroup> groups, const SGDOptions& options = {});
  // All parameters in one group.
  explicit SGD(std::vector<NamedParameter> parameters, const SGDOptions& options = {});

 private:
  bool update_fused(const Bucket& bucket) override;
  void update_lists(const Bucket& bucket) override;
  SGDOptions options_;
};

}  // namespace penstock::optim
