// Operators that are replaced by others while a function is recorded (CompileOptions::decompositions).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <string>
#include <unordered_map>

#include "penstock/compile_options.h"

namespace penstock::graph {

class DecompositionTable {
 public:
  // Throws ValueError for an operator that does not exist, is composite (recorded as its parts anyway),
  // writes an argument, or returns anything but new tensors.
  explicit DecompositionTable(const std::map<std::string, Decomposition>& decompositions);

  // Null if the operator is recorded as it is.
  const Decomposition* find(const c10::OperatorHandle& op) const;

 private:
  std::unordered_map<c10::OperatorName, Decomposition> table_;
};

}  // namespace penstock::graph
