// Nodes of our own in graphs of autograd: how they are made and held, in the same words for every LibTorch.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace penstock {

// std::shared_ptr or c10::intrusive_ptr, as the version has it; and what does not keep the node.
using NodePtr = decltype(torch::autograd::Edge::function);
using WeakNodePtr = decltype(torch::autograd::AutogradMeta::grad_accumulator_);

template <class T, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>)
    // deleteNode takes long chains of nodes down in a loop, where plain destructors would recurse. Found by its argument.
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](T* node) { deleteNode(node); });
  else
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
}

// A node as its graph holds it.
template <class T, class Pointer = NodePtr>
Pointer held(T& node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return node.shared_from_this();
  else
    return Pointer::reclaim_copy(&node);
}

}  // namespace penstock
