// Default hooks for the tensors that autograd saves, for programs without Python: LibTorch asks its engine
// for them, and only that of Python has any.
//
//   const SavedTensorHooks scope([] { return std::make_unique<MyHooks>(); });
//   y = x * x;                                 // the node saves x through MyHooks::call_pack_hook
//
// The first scope of a process replaces the engine by one that differs only in this. Scopes nest: the
// innermost applies. They concern one thread.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>

namespace penstock {

using MakeSavedTensorHooks = std::function<std::unique_ptr<torch::autograd::SavedVariableHooks>()>;

class SavedTensorHooks {
 public:
  // `make` is called for each saved tensor. Throws StateError if the engine belongs to another library.
  explicit SavedTensorHooks(MakeSavedTensorHooks make);
  ~SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;

 private:
  MakeSavedTensorHooks make_;
  const MakeSavedTensorHooks* previous_;
};

}  // namespace penstock
