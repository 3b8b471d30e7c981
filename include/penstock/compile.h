// A module of torch::nn that runs as a graph: what Compiled is for functions, with parameters and buffers as inputs of the graph.
//
//   torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8), torch::nn::ReLU());
//   auto fast = graph::compile(net);                 // a module with the same parameters, buffers and names
//   torch::optim::SGD optimizer(fast->parameters(), 0.1);
//   fast->forward(x).sum().backward();               // captured on the first call; gradients are in net's parameters
//   fast->forward(x2);                               // replayed
//   std::cout << to_text(fast->compiled(0).joint(0).graph);
//
// The module's code is not changed. While it is captured its parameters and buffers are fake for everybody who holds them, and real again
// afterwards. Inputs of the graph are named as the module names them ("0.weight", "1.running_mean"), arguments by their place ("args[0]");
// a tensor registered under several names is one input, and one that is a subclass (a DTensor of a parallelized module) as many as it holds
// ("up.weight.local"). What forward writes (running statistics) is written by a replay too.
//
// Arguments and results of forward may be tensors, numbers, texts, and std::tuple, std::vector and std::optional of these. An undefined
// tensor is allowed. A capture holds for calls as said in compiled.h, and for the training flags of all submodules; other settings of a
// module (the probability of a Dropout) must not change any more.
// Dynamic dims are marked by the names of arguments: `compile(net, {.dynamic = {.dims = {{"args[0]", 0, "B"}}}})` (dynamic_dims.h).
// Throws as Compiled does. Thread rule: as for the module, which must not be used while forward captures.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/module_state.h"
#include "penstock/pytree.h"
#include "penstock/torch/tree/pytree_convert.h"

namespace penstock::graph {

// What does not depend on the type of the module.
class CompiledModuleBase : public torch::nn::Module {
 public:
  void train(bool on = true) override { module_->train(on); }
  bool is_training() const noexcept override { return module_->is_training(); }
  void pretty_print(std::ostream& stream) const override;

  const ModuleState& state() const { return state_; }
  // One for each kind of arguments so far (types and nesting), each with one capture for each kind of call.
  std::size_t count() const { return entries_.size(); }
  const Compiled& compiled(std::size_t entry) const { return entries_.at(entry)->compiled; }
  const TreeSpec& arguments_spec(std::size_t entry) const { return entries_.at(entry)->spec; }
  const TreeSpec& results_spec(std::size_t entry, std::size_t capture) const;

 protected:
  using Forward = std::function<Tree(const Tree& args)>;
  CompiledModuleBase(std::shared_ptr<torch::nn::Module> module, const CompileOptions& options);
  // `types`: of the arguments, as C++ has them.
  Tree call(const Tree& args, std::type_index types, const Forward& forward);

 private:
  struct Entry {
    std::type_index types;
    TreeSpec spec;
    std::shared_ptr<std::vector<TreeSpec>> results;  // the structures that forward has returned so far
    Compiled compiled;
  };
  Entry& entry_for(std::type_index types, const TreeSpec& spec, const Forward& forward);
  std::string training_flags() const;

  std::shared_ptr<torch::nn::Module> module_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;  // all of them
  CompileOptions options_;
  ModuleState state_;
  Values state_values_;
  std::vector<std::unique_ptr<Entry>> entries_;
};

namespace detail {

// As tree_to, where nothing may stand for an undefined tensor.
template <class T>
struct ModuleValue {
  static T read(const Tree& tree, const char* root) { return tree_to<T>(tree, root); }
};
template <>
struct ModuleValue<at::Tensor> {
  static at::Tensor read(const Tree& tree, const char* root) { return tree.is_none() ? at::Tensor() : tree_to<at::Tensor>(tree, root); }
};
template <class... Ts>
struct ModuleValue<std::tuple<Ts...>> {
  static std::tuple<Ts...> read(const Tree& tree, const char* root) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return std::tuple<Ts...>{ModuleValue<Ts>::read(tree[I], root)...};
    }(std::index_sequence_for<Ts...>{});
  }
};

}  // namespace detail

template <class Impl>
class CompiledModule final : public CompiledModuleBase {
 public:
  CompiledModule(std::shared_ptr<Impl> module, const CompileOptions& options) : CompiledModuleBase(module, options), impl_(std::move(module)) {}

  // What the module's forward takes and gives.
  template <class... Args>
  auto forward(Args&&... args) {
    using Result = std::decay_t<decltype(impl_->forward(std::declval<std::decay_t<Args>>()...))>;
    static_assert(std::constructible_from<Tree, const Result&>, "forward must return tensors, numbers, texts, or tuples and vectors of them");
    const auto run = [impl = impl_](const Tree& in) -> Tree {
      return [&]<std::size_t... I>(std::index_sequence<I...>) {
        return Tree(impl->forward(detail::ModuleValue<std::decay_t<Args>>::read(in[I], "args")...));
      }(std::index_sequence_for<Args...>{});
    };
    const Tree result = call(Tree::tuple({Tree(args)...}), typeid(std::tuple<std::decay_t<Args>...>), run);
    return detail::ModuleValue<Result>::read(result, "result");
  }

 private:
  std::shared_ptr<Impl> impl_;
};

// For a module holder (torch::nn::Linear) or a shared pointer to a module.
template <std::derived_from<torch::nn::Module> Impl>
std::shared_ptr<CompiledModule<Impl>> compile(std::shared_ptr<Impl> module, const CompileOptions& options = {}) {
  return std::make_shared<CompiledModule<Impl>>(std::move(module), options);
}
template <class Impl>
std::shared_ptr<CompiledModule<Impl>> compile(const torch::nn::ModuleHolder<Impl>& module, const CompileOptions& options = {}) {
  return compile(module.ptr(), options);
}

}  // namespace penstock::graph
