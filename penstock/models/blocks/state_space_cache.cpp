#include "penstock/models/blocks/state_space_cache.h"

namespace penstock::models {

void StateSpaceCache::clear() {
  length_ = 0;
  blocks_.clear();
}

}  // namespace penstock::models
