// What a pipeline stage computes: a module or a function of tensors.
//
//   torch::nn::Linear head(16, 4);
//   StageModule from_module(head);
//   StageModule from_function([head](at::Tensor x) mutable { return head->forward(x.relu()); },
//       {head.ptr()});
//   StageModule chained = StageModule::chain({StageModule(block), from_function});
//   PipelineLoss loss([](at::Tensor output,
//       at::Tensor target) { return output.sub(target).square().mean(); });
//
// The arguments of `forward` are the positional inputs of the stage, in order: tensors, and on the first
// stage also numbers, strings and Trees. Missing trailing tensors are undefined. If the last parameter is a
// Tree, it gets the keyword arguments as a dictionary. A function of two Trees gets all positional arguments
// as a tuple, and the keyword arguments. The result may be anything that converts to a Tree: a tensor, a
// std::tuple, a vector. A `forward` that is overloaded or a template is used with one tensor; wrap it in a
// function for anything else.
//
// The modules determine which parameters and buffers belong to the stage.
//
// A StageModule is a handle: copies share the modules. Thread safety: that of the modules.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "penstock/pytree.h"

namespace penstock {

namespace detail {

[[noreturn]] void refuse_argument_count(std::size_t given, std::size_t taken);
[[noreturn]] void refuse_kwargs(const Tree& kwargs);

// An argument of `forward` out of a leaf.
template <class T>
std::decay_t<T> argument_as(const Tree& value) {
  using Plain = std::decay_t<T>;
  if constexpr (std::same_as<Plain, Tree>) {
    return value;
  } else if constexpr (std::same_as<Plain, at::Tensor>) {
    return value.is_none() ? at::Tensor() : value.tensor();
  } else if constexpr (std::same_as<Plain, bool>) {
    return value.boolean();
  } else if constexpr (std::integral<Plain>) {
    return static_cast<Plain>(value.integer());
  } else if constexpr (std::floating_point<Plain>) {
    return static_cast<Plain>(value.number());
  } else if constexpr (std::same_as<Plain, std::string>) {
    return value.text();
  } else {
    static_assert(std::same_as<Plain, Tree>,
                  "a stage's forward takes tensors, numbers, texts and Trees; wrap others in a function of "
                  "(const Tree& args, const Tree& kwargs)");
  }
}

template <class... Parameters>
struct ParameterList {
  static constexpr std::size_t kCount = sizeof...(Parameters);
  template <std::size_t i>
  using At = std::tuple_element_t<i, std::tuple<Parameters...>>;
  static constexpr bool takes_kwargs() {
    if constexpr (kCount == 0) {
      return false;
    } else {
      return std::same_as<std::decay_t<At<kCount - 1>>, Tree>;
    }
  }
  static constexpr bool takes_trees() {
    if constexpr (kCount != 2) {
      return false;
    } else {
      return std::same_as<std::decay_t<At<0>>, Tree> && std::same_as<std::decay_t<At<1>>, Tree>;
    }
  }
  static constexpr std::size_t kPositional = kCount - (takes_kwargs() ? 1 : 0);
};

template <class Signature>
struct ParametersOf;
template <class Class, class Result, class... Parameters>
struct ParametersOf<Result (Class::*)(Parameters...)> : ParameterList<Parameters...> {};
template <class Class, class Result, class... Parameters>
struct ParametersOf<Result (Class::*)(Parameters...) const> : ParameterList<Parameters...> {};
template <class Result, class... Parameters>
struct ParametersOf<Result (*)(Parameters...)> : ParameterList<Parameters...> {};

// Calls `function` with the arguments that its parameter list asks for.
template <class Parameters, class Function>
Tree call_with_trees(Function& function, const Tree& args, const Tree& kwargs) {
  if constexpr (Parameters::takes_trees()) {
    return Tree(function(args, kwargs));
  } else {
    const auto& given = args.entries();
    if (given.size() > Parameters::kPositional) refuse_argument_count(given.size(), Parameters::kPositional);
    const Tree none;
    const auto call = [&]<std::size_t... i>(std::index_sequence<i...>) {
      if constexpr (Parameters::takes_kwargs()) {
        return Tree(function(
            argument_as<typename Parameters::template At<i>>(i < given.size() ? given[i] : none)..., kwargs));
      } else {
        if (kwargs.size() > 0) refuse_kwargs(kwargs);
        return Tree(function(
            argument_as<typename Parameters::template At<i>>(i < given.size() ? given[i] : none)...));
      }
    };
    return call(std::make_index_sequence<Parameters::kPositional>{});
  }
}

template <class Module>
concept HasOneForward = requires {
  &Module::forward;
};

}  // namespace detail

// A module, a function with its modules, or a chain of these.
class StageModule {
 public:
  // The general form of `forward`: positional arguments as a tuple, keyword arguments as a dictionary or
  // None.
  using Function = std::function<Tree(const Tree& args, const Tree& kwargs)>;
  // Modules that own the parameters and buffers of the stage.
  using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

  // Calls `forward` of a module.
  template <std::derived_from<torch::nn::Module> Module>
  StageModule(std::shared_ptr<Module> module)
      : StageModule(function_of(module), Modules{module}, takes_kwargs_of<Module>()) {}
  // The same for a module holder.
  template <class Module>
  StageModule(const torch::nn::ModuleHolder<Module>& holder) : StageModule(holder.ptr()) {}
  // The same for a holder that TORCH_MODULE has defined, such as torch::nn::Linear.
  template <class Holder>
  requires std::derived_from<Holder, torch::nn::ModuleHolder<typename Holder::ContainedType>> StageModule(
      const Holder& holder)
      : StageModule(holder.ptr()) {}

  // Calls a function object whose call operator is neither overloaded nor a template. `modules` are those
  // that it uses.
  template <class Callable>
  requires(!std::derived_from<std::decay_t<Callable>, StageModule> &&
           requires { &std::decay_t<Callable>::operator(); }) StageModule(Callable function, Modules modules)
      : StageModule(Function([function = std::move(function)](const Tree& args, const Tree& kwargs) mutable {
                      return detail::call_with_trees<
                          detail::ParametersOf<decltype(&std::decay_t<Callable>::operator())>>(function, args,
                                                                                               kwargs);
                    }),
                    std::move(modules), takes_kwargs_of_call<std::decay_t<Callable>>()) {}

  // Returns a module that runs the blocks one after the other: the result of one becomes the arguments of the
  // next, a tuple or list as several. Keyword arguments are passed to every block that takes them. The
  // runtime may interleave the blocks of a chain with those of a different one. Throws ValueError if there
  // are no blocks.
  static StageModule chain(std::vector<StageModule> blocks);

  // Runs the module. Throws ValueError for more positional arguments than it takes, and for keyword arguments
  // if it takes none.
  Tree forward(const Tree& args, const Tree& kwargs) const { return function_(args, kwargs); }
  // Returns whether `forward` has a parameter for keyword arguments.
  bool takes_kwargs() const { return takes_kwargs_; }

  // Returns the blocks of a chain; empty for a module that is not a chain.
  const std::vector<StageModule>& blocks() const { return *blocks_; }
  // Returns the number of blocks; 1 for a module that is not a chain.
  std::size_t block_count() const { return blocks_->empty() ? 1 : blocks_->size(); }
  // Returns a block, with an index less than block_count(); the only block of a module that is not a chain is
  // the module itself.
  const StageModule& block(std::size_t index) const { return blocks_->empty() ? *this : (*blocks_)[index]; }

  // Returns the modules as given; those of all blocks for a chain.
  const Modules& modules() const { return modules_; }
  // Returns the parameters of all modules, each tensor once.
  std::vector<at::Tensor> parameters() const;
  // Returns the buffers of all modules, each tensor once.
  std::vector<at::Tensor> buffers() const;

 private:
  StageModule(Function function, Modules modules, bool takes_kwargs)
      : function_(std::move(function)),
        modules_(std::move(modules)),
        takes_kwargs_(takes_kwargs),
        blocks_(std::make_shared<const std::vector<StageModule>>()) {}

  template <class Parameters>
  static constexpr bool takes_kwargs_in() {
    return Parameters::takes_kwargs() || Parameters::takes_trees();
  }
  template <class Callable>
  static constexpr bool takes_kwargs_of_call() {
    return takes_kwargs_in<detail::ParametersOf<decltype(&Callable::operator())>>();
  }
  template <class Module>
  static constexpr bool takes_kwargs_of() {
    if constexpr (detail::HasOneForward<Module>) {
      return takes_kwargs_in<detail::ParametersOf<decltype(&Module::forward)>>();
    } else {
      return false;
    }
  }

  template <class Module>
  static Function function_of(const std::shared_ptr<Module>& module) {
    if constexpr (detail::HasOneForward<Module>) {
      using Parameters = detail::ParametersOf<decltype(&Module::forward)>;
      return [module](const Tree& args, const Tree& kwargs) {
        const auto forward = [&](auto&&... each) {
          return module->forward(std::forward<decltype(each)>(each)...);
        };
        return detail::call_with_trees<Parameters>(forward, args, kwargs);
      };
    } else {
      static_assert(
          requires(at::Tensor x) {
            { module->forward(x) } -> std::convertible_to<at::Tensor>;
          },
          "forward of this module is overloaded or a template: pass a function that calls it, and the "
          "module");
      return [module](const Tree& args, const Tree& kwargs) {
        const auto forward = [&](const at::Tensor& x) -> at::Tensor { return module->forward(x); };
        return detail::call_with_trees<detail::ParameterList<at::Tensor>>(forward, args, kwargs);
      };
    }
  }

  Function function_;
  Modules modules_;
  bool takes_kwargs_ = false;
  std::shared_ptr<const std::vector<StageModule>> blocks_;  // of a chain; else empty
};

// The loss of one microbatch: a function of the result of the last stage and the target. Both parameters may
// be tensors, numbers, strings or Trees. It returns a tensor with one element.
class PipelineLoss {
 public:
  // No loss: the pipeline can only run forward.
  PipelineLoss() = default;
  // Calls a function, or a function object whose call operator is neither overloaded nor a template.
  template <class Callable>
  requires(!std::derived_from<std::decay_t<Callable>, PipelineLoss> && !std::is_null_pointer_v<Callable>)
      PipelineLoss(Callable function)
      : function_(wrap(std::move(function))) {}

  // Returns whether there is a loss.
  explicit operator bool() const { return static_cast<bool>(function_); }
  // Returns the loss. Throws std::bad_function_call if there is none.
  at::Tensor operator()(const Tree& output, const Tree& target) const { return function_(output, target); }

 private:
  using Function = std::function<at::Tensor(const Tree&, const Tree&)>;

  template <class Parameters, class Callable>
  static Function wrap_with(Callable function) {
    static_assert(Parameters::kCount == 2, "a loss takes the output and the target");
    return [function = std::move(function)](const Tree& output, const Tree& target) -> at::Tensor {
      return function(detail::argument_as<typename Parameters::template At<0>>(output),
                      detail::argument_as<typename Parameters::template At<1>>(target));
    };
  }
  template <class Callable>
  static Function wrap(Callable function) {
    if constexpr (std::is_pointer_v<Callable>) {
      return wrap_with<detail::ParametersOf<Callable>>(function);
    } else {
      return wrap_with<detail::ParametersOf<decltype(&Callable::operator())>>(std::move(function));
    }
  }

  Function function_;
};

}  // namespace penstock
