// State of threads that a recomputed forward must find as the first one did, added by the code that owns it.
//
//   register_recomputed_state([] {
//     return [mine = current] { return std::make_shared<CurrentGuard>(mine); };
//   });
#pragma once

#include <functional>
#include <memory>

namespace penstock {

// Makes a state current until the result is destroyed, on the same thread.
using RestoreState = std::function<std::shared_ptr<void>()>;

// `capture` is called when a part begins, on its thread. For the whole program; call it once.
void register_recomputed_state(std::function<RestoreState()> capture);

}  // namespace penstock
