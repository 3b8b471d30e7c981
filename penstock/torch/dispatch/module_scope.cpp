#include "penstock/module_scope.h"

#include "penstock/torch/dispatch/scope_listener.h"

namespace penstock {
namespace {

thread_local ScopeListener* current_listener = nullptr;

}  // namespace

ModuleScope::ModuleScope(const torch::nn::Module& module) : listener_(current_listener) {
  if (listener_) listener_->enter(module);
}

ModuleScope::~ModuleScope() {
  if (listener_) listener_->leave();
}

void pipe_split() {
  if (current_listener) current_listener->mark();
}

ScopeListenerGuard::ScopeListenerGuard(ScopeListener& listener) : before_(current_listener) {
  current_listener = &listener;
}

ScopeListenerGuard::~ScopeListenerGuard() { current_listener = before_; }

}  // namespace penstock
