// What distinguishes captured functions from each other in the cache, besides their inputs.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "penstock/graph/cache/byte_stream.h"
#include "penstock/graph/trace/analyze.h"

namespace penstock::graph {

struct FunctionCapture;

struct FunctionIdentity {
  std::string text;  // types and structure of the arguments
  // What running the function records outside of its results, which a caller needs (structures of results).
  std::function<Bytes()> save = {};
  // Restores it instead of running the function. Returns false if that contradicts what has been recorded in
  // this process.
  std::function<bool(std::span<const std::uint8_t>)> restore = {};
  // Called with every new capture, before it is compiled and kept. Throws for a function that must not be
  // captured; nothing is kept then.
  std::function<void(const FunctionCapture& capture, const Values& inputs)> check = {};
  // Called before each run of a capture, a new one, an earlier one or a loaded one. Throws for inputs that it
  // must not be called with.
  std::function<void(const FunctionCapture& capture)> check_run = {};
};

}  // namespace penstock::graph
