// Who hears of the module scopes and marks of this thread (module_scope.h): the code that captures a forward.
//
//   class Recorder final : public ScopeListener { ... };
//   Recorder recorder;
//   {
//     const ScopeListenerGuard listening(recorder);
//     model->forward(x);
//   }
//
// One listener at a time hears a thread: the innermost. A scope tells the listener that heard it begin.
// Thread safety: a guard is created and destroyed on one thread.
#pragma once

#include <torch/nn/module.h>

#include "penstock/module_scope.h"

namespace penstock {

class ScopeListener {
 public:
  virtual ~ScopeListener() = default;
  virtual void enter(const torch::nn::Module& module) = 0;
  // Must not throw: called by a destructor.
  virtual void leave() noexcept = 0;
  virtual void mark() = 0;
};

class ScopeListenerGuard {
 public:
  explicit ScopeListenerGuard(ScopeListener& listener);
  ~ScopeListenerGuard();
  ScopeListenerGuard(const ScopeListenerGuard&) = delete;
  ScopeListenerGuard& operator=(const ScopeListenerGuard&) = delete;

 private:
  ScopeListener* before_;
};

}  // namespace penstock
