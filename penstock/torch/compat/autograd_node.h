// Creates and holds custom autograd nodes the same way on every LibTorch version.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace penstock {

// NodePtr is std::shared_ptr or c10::intrusive_ptr, depending on the LibTorch version; WeakNodePtr is the
// non-owning counterpart.
using NodePtr = decltype(torch::autograd::Edge::function);
using WeakNodePtr = decltype(torch::autograd::AutogradMeta::grad_accumulator_);

// Marks a node that computes only gradients which nothing waits for, from what the node before it left for
// it: a schedule that splits the backward may run it later (pipeline/backward/split_backward.h).
class LaterPart {
 public:
  virtual ~LaterPart() = default;
};
inline bool is_later_part(const torch::autograd::Node& node) {
  return dynamic_cast<const LaterPart*>(&node) != nullptr;
}

template <class T, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>)
    // deleteNode destroys long chains of nodes in a loop; plain destructors would recurse. Found by ADL.
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](T* node) { deleteNode(node); });
  else
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
}

// Returns an owning pointer to a node that is already owned by its graph.
template <class T, class Pointer = NodePtr>
Pointer held(T& node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return node.shared_from_this();
  else
    return Pointer::reclaim_copy(&node);
}

// Returns the number of hooks on a node: its own, and those of the tensors that it has computed.
template <class N>
std::size_t count_hooks(N& node) {
  std::size_t count = node.pre_hooks().size() + node.post_hooks().size();
  if constexpr (requires { node.tensor_pre_hooks(); })  // before LibTorch 2.0 they are among the others
    count += node.tensor_pre_hooks().size() + node.retains_grad_hooks().size();
  return count;
}

}  // namespace penstock
