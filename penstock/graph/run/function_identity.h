// What distinguishes captured functions from each other in the cache, besides their inputs.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "penstock/graph/cache/byte_stream.h"

namespace penstock::graph {

struct FunctionIdentity {
  std::string text;  // types and structure of the arguments
  // What running the function records outside of its results, which a caller needs (structures of results).
  std::function<Bytes()> save = {};
  // Restores it instead of running the function. Returns false if that contradicts what has been recorded in
  // this process.
  std::function<bool(std::span<const std::uint8_t>)> restore = {};
};

}  // namespace penstock::graph
