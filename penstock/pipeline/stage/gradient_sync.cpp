#include "penstock/pipeline/stage/gradient_sync.h"

#include <algorithm>

namespace penstock {

GradientSyncs gradient_syncs_of(const StageModule& module) {
  GradientSyncs found;
  for (const auto& outer : module.modules())
    for (const auto& each : outer->modules(/*include_self=*/true))
      if (auto sync = std::dynamic_pointer_cast<GradientSync>(each);
          sync && std::find(found.begin(), found.end(), sync) == found.end())
        found.push_back(std::move(sync));
  return found;
}

NoGradientSync::NoGradientSync(const GradientSyncs& modules) {
  before_.reserve(modules.size());
  for (const auto& module : modules) before_.emplace_back(module, module->set_gradient_sync(false));
}

NoGradientSync::~NoGradientSync() {
  for (auto each = before_.rbegin(); each != before_.rend(); ++each)
    each->first->set_gradient_sync(each->second);
}

}  // namespace penstock
