#include "penstock/stage_module.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unordered_set>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace detail {

void refuse_argument_count(std::size_t given, std::size_t taken) {
  throw ValueError(describe(
      "arguments of a stage's forward", fmt::format("{}", given), fmt::format("at most {}", taken),
      "make the module take as many tensors as the previous stage returns, and other values by keyword"));
}

void refuse_kwargs(const Tree& kwargs) {
  throw ValueError(describe("keyword arguments of a stage",
                            fmt::format("'{}'", fmt::join(kwargs.keys(), "', '")),
                            "none, because its forward takes none",
                            "add to forward a last parameter `const penstock::Tree& kwargs`"));
}

}  // namespace detail

namespace {

// What one block passes to the next.
Tree as_arguments(const Tree& result) {
  if (result.kind() == Tree::Kind::Tuple) return result;
  if (result.kind() == Tree::Kind::List) return Tree::tuple(result.entries());
  return Tree::tuple({result});
}

template <class Tensors>
std::vector<at::Tensor> each_once(const StageModule::Modules& modules, Tensors tensors_of_module) {
  std::vector<at::Tensor> found;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& module : modules)
    for (const at::Tensor& tensor : tensors_of_module(*module))
      if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) found.push_back(tensor);
  return found;
}

}  // namespace

StageModule StageModule::chain(std::vector<StageModule> blocks) {
  if (blocks.empty())
    throw ValueError(
        describe("a chain of blocks", "no blocks", "at least one", "pass the blocks of the stage"));
  Modules modules;
  bool takes_kwargs = false;
  for (const StageModule& block : blocks) {
    modules.insert(modules.end(), block.modules_.begin(), block.modules_.end());
    takes_kwargs |= block.takes_kwargs_;
  }
  auto shared = std::make_shared<const std::vector<StageModule>>(std::move(blocks));
  StageModule result(
      [shared, takes_kwargs](const Tree& args, const Tree& kwargs) {
        if (!takes_kwargs && kwargs.size() > 0) detail::refuse_kwargs(kwargs);
        Tree value;
        for (std::size_t i = 0; i < shared->size(); ++i) {
          const StageModule& block = (*shared)[i];
          value = block.forward(i == 0 ? args : as_arguments(value), block.takes_kwargs_ ? kwargs : Tree());
        }
        return value;
      },
      std::move(modules), takes_kwargs);
  result.blocks_ = std::move(shared);
  return result;
}

std::vector<at::Tensor> StageModule::parameters() const {
  return each_once(modules_, [](const torch::nn::Module& module) { return module.parameters(); });
}

std::vector<at::Tensor> StageModule::buffers() const {
  return each_once(modules_, [](const torch::nn::Module& module) { return module.buffers(); });
}

}  // namespace penstock
