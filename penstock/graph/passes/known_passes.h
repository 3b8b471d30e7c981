// All passes of the process: those of the library and those that the program has registered.
// Private to this folder. Thread safety: any thread.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph/passes/standard_passes.h"

namespace penstock::graph {

class KnownPasses {
 public:
  static KnownPasses& instance();
  // Throws ValueError for a name that is taken, and for an unknown `before`.
  void add(PassPointer pass, std::string_view before);
  std::vector<PassPointer> in_order() const;

 private:
  KnownPasses();
  mutable std::mutex mutex_;
  std::map<std::string, PassPointer, std::less<>> by_name_;
};

}  // namespace penstock::graph
