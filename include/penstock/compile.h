// Compiled modules: a torch::nn module whose forward and backward are captured as one graph on the first
// call and replayed after that, with the same results.
//
//   torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8), torch::nn::ReLU());
//   auto fast = graph::compile(net);                // a module with the same parameters, buffers and names
//   torch::optim::SGD sgd(fast->parameters(), 0.1);
//   fast->forward(torch::randn({2, 4})).sum().backward();  // captured; gradients are in net's parameters
//   fast->forward(torch::randn({2, 4}));                   // replayed
//   std::cout << fast->graph_text();
//
// The module's code does not change. While it is captured, its parameters and buffers are fake for every
// holder, and real again afterwards. Inputs of the graph are named like the parameters and buffers
// ("0.weight", "1.running_mean"); arguments are named by position ("args[0]"). A tensor registered under
// several names is one input, and a tensor subclass (a DTensor of a parallelized module) one input for each
// tensor inside ("up.weight.local"). What forward writes (running statistics) is also written by a replay.
//
// Arguments and results of forward may be tensors, numbers, strings, and std::tuple, std::vector and
// std::optional of these. An undefined tensor is allowed. A capture is valid for calls with the same types,
// sizes, strides, dtypes, devices, requires_grad, aliasing and non-tensor values, under the same grad mode
// and the same training flags of all submodules. Any other call captures again, or throws StateError if
// CompileOptions::recapture is false. Dims can be marked as dynamic (compile_options.h). Other settings of
// a module (the probability of a Dropout) must not change after the first call. A call after a submodule, a
// parameter or a buffer of the module was replaced (replace_module) throws StateError: compile it again.
//
// Backward can run once unless the graph is retained, as usual; differentiating it again (create_graph) runs
// the module itself again, with a warning (CompileOptions::second_derivatives). Random numbers are drawn from
// the default generators, in the order of the module. Thread safety: that of the module, which must not be
// used while forward captures; backward may run on any thread.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

#include "penstock/compile_options.h"
#include "penstock/pytree.h"
#include "penstock/pytree_convert.h"

namespace penstock::graph {

// The part of a compiled module that does not depend on the module's type. Created by `compile`.
class CompiledModuleBase : public torch::nn::Module {
 public:
  ~CompiledModuleBase() override;
  CompiledModuleBase(const CompiledModuleBase&) = delete;
  CompiledModuleBase& operator=(const CompiledModuleBase&) = delete;

  // Sets the training flag of the original module.
  void train(bool on = true) override;
  // Returns the training flag of the original module.
  bool is_training() const noexcept override;
  // Prints "compiled " and the original module.
  void pretty_print(std::ostream& stream) const override;

  // The number of captures so far: one for each kind of call.
  std::size_t captures() const;
  // The forward and backward graph of the latest capture as text; empty before the first call.
  std::string graph_text() const;
  // The wrappers around the graphs of the latest capture, outermost first, each with what it decided:
  // "duplicate inputs: input 1 is input 0". Empty before the first call.
  std::vector<std::string> wrappers() const;

 protected:
  // Runs the original module on arguments in a tree.
  using Forward = std::function<Tree(const Tree& args)>;
  // Throws ValueError for a null module.
  CompiledModuleBase(std::shared_ptr<torch::nn::Module> module, const CompileOptions& options);
  // Captures or replays. `types`: the C++ types of the arguments.
  Tree call(const Tree& args, std::type_index types, const Forward& forward);

 private:
  friend struct CompiledModuleAccess;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail {

// Like tree_to, but None also stands for an undefined tensor.
template <class T>
struct ModuleValue {
  static T read(const Tree& tree, const char* root) { return tree_to<T>(tree, root); }
};
template <>
struct ModuleValue<at::Tensor> {
  static at::Tensor read(const Tree& tree, const char* root) {
    return tree.is_none() ? at::Tensor() : tree_to<at::Tensor>(tree, root);
  }
};
template <class... Ts>
struct ModuleValue<std::tuple<Ts...>> {
  static std::tuple<Ts...> read(const Tree& tree, const char* root) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return std::tuple<Ts...>{ModuleValue<Ts>::read(tree[I], root)...};
    }
    (std::index_sequence_for<Ts...>{});
  }
};

}  // namespace detail

// A module of type ModuleType that runs as a graph. Its parameters, buffers, submodules and their names are
// those of the original module.
template <class ModuleType>
class CompiledModule final : public CompiledModuleBase {
 public:
  // Called by `compile`. Throws ValueError for a null module.
  CompiledModule(std::shared_ptr<ModuleType> module, const CompileOptions& options)
      : CompiledModuleBase(module, options), module_(std::move(module)) {}

  // Takes and returns what the forward of the original module does. Throws what that forward throws while
  // it is captured, StateError for a call that must not be captured again, and NotImplemented for what a
  // graph cannot represent.
  template <class... Args>
  auto forward(Args&&... args) {
    using Result = std::decay_t<decltype(module_->forward(std::declval<std::decay_t<Args>>()...))>;
    static_assert(std::constructible_from<Tree, const Result&>,
                  "forward must return tensors, numbers, strings, or tuples and vectors of them");
    const auto run = [module = module_](const Tree& in) -> Tree {
      return [&]<std::size_t... I>(std::index_sequence<I...>) {
        return Tree(module->forward(detail::ModuleValue<std::decay_t<Args>>::read(in[I], "args")...));
      }
      (std::index_sequence_for<Args...>{});
    };
    const Tree result = call(Tree::tuple({Tree(args)...}), typeid(std::tuple<std::decay_t<Args>...>), run);
    return detail::ModuleValue<Result>::read(result, "result");
  }

 private:
  std::shared_ptr<ModuleType> module_;
};

// Returns a module that runs as a graph, for a shared pointer to a module. Nothing is captured yet. Throws
// ValueError for a null pointer, and for a compiler in `options` that is not registered.
template <std::derived_from<torch::nn::Module> ModuleType>
std::shared_ptr<CompiledModule<ModuleType>> compile(std::shared_ptr<ModuleType> module,
                                                    const CompileOptions& options = {}) {
  return std::make_shared<CompiledModule<ModuleType>>(std::move(module), options);
}
// The same for a module holder (torch::nn::Linear).
template <class ModuleType>
std::shared_ptr<CompiledModule<ModuleType>> compile(const torch::nn::ModuleHolder<ModuleType>& module,
                                                    const CompileOptions& options = {}) {
  return compile(module.ptr(), options);
}

}  // namespace penstock::graph
