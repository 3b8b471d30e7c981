#include "penstock/torch/recompute/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

thread_local const MakeSavedTensorHooks* current_hooks = nullptr;

class HookedEngine final : public Engine {
 public:
  // The threads of devices must end before the object does.
  ~HookedEngine() override { stop(); }
  HookedEngine(const HookedEngine&) = delete;
  HookedEngine& operator=(const HookedEngine&) = delete;

  static Engine& instance() {
    static HookedEngine engine;
    return engine;
  }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    return current_hooks != nullptr ? (*current_hooks)() : nullptr;
  }

 private:
  // LibTorch starts the threads of devices at the first backward of each engine, newer versions at the first
  // one of the process, which another engine may have run: this one would have none then. Without devices
  // there is nothing to start, and starting it twice does nothing.
  HookedEngine() {
    initialize_device_threads_pool();
    if (device_ready_queues_.empty()) start_device_threads();
  }
};

void require_hooked_engine() {
  static const bool installed = [] {
    if (&Engine::get_default_engine() != &Engine::get_base_engine()) return false;
    torch::autograd::set_default_engine_stub(&HookedEngine::instance);
    return true;
  }();
  if (!installed || &Engine::get_default_engine() != &HookedEngine::instance())
    throw StateError(describe("recomputation of activations", "an autograd engine of another library",
                              "the engine of LibTorch", "use it in programs without Python"));
}

}  // namespace

SavedTensorHooks::SavedTensorHooks(MakeSavedTensorHooks make)
    : make_(std::move(make)), previous_(current_hooks) {
  require_hooked_engine();
  current_hooks = &make_;
}

SavedTensorHooks::~SavedTensorHooks() { current_hooks = previous_; }

}  // namespace penstock
