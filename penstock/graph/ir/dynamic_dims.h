// Dims of inputs whose size is not fixed by a capture: one graph for all batch sizes, or all lengths.
//
//   Compiled step(function, {.dynamic = {.dims = {{0, 0, "B"}, {0, 1, "T"}, {1, 0, "B"}}}});
//   step({torch::randn({8, 128, 64}), torch::randn({8, 10})});     // captured
//   step({torch::randn({3, 77, 64}), torch::randn({3, 10})});      // replayed
//   std::cout << to_text(step.joint(0).graph);                      // ... float32[B, T, 64] ...
//
//   auto fast = compile(net, {.dynamic = {.dims = {{"args[0]", 0, "B"}}}});
//
// How it works. The function is captured, in shape, at several sizes of each symbol. All captures must have the same operators; a number in
// which they differ (a size, a stride, an element of a list, a factor like 1/(B*T)) becomes an expression of the symbols. Sizes at which the
// function throws are left out. Then it is captured at the sizes of the call, and the graph is compared with that.
//
// Never a wrong result. A function may look at sizes and do something else for some of them, as LibTorch does for sizes 0 and 1. So the first time
// sizes come up the graph is compared with a capture at just these sizes, which costs as much as capturing, once. Where they differ these
// sizes get a capture of their own, as they do without dynamic dims (CompileOptions::recapture), or are a StateError that says what differs.
// A function that cannot be captured for all sizes at all is captured for each, with a warning that names the reason, or is a StateError.
//
// Limits: at most four symbols; an input with a dynamic dim must not overlap other inputs in memory; its strides are those of a dense tensor
// in the order that it has in the first call, or fixed where it has gaps; parameters and buffers have none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace penstock::graph {

// By its place among the inputs, or by its name ("args[0]", for modules).
class InputRef {
 public:
  InputRef(int place) : which_(static_cast<std::size_t>(place)) {}   // a negative one is refused when it is used
  InputRef(std::size_t place) : which_(place) {}
  InputRef(const char* name) : which_(std::string(name)) {}
  InputRef(std::string name) : which_(std::move(name)) {}
  const std::variant<std::size_t, std::string>& get() const { return which_; }

 private:
  std::variant<std::size_t, std::string> which_;
};

struct DynamicDim {
  InputRef input;
  std::int64_t dim = 0;              // negative: from the end
  std::string symbol = {};           // dims of one name have one size; empty: a symbol of its own, "s0", "s1", ...
  // The sizes for which the graph is meant; others are captured by themselves, and the function is not tried at them.
  // Entries of one symbol are joined: the largest min, the least max, a common multiple.
  std::int64_t min = 0;
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
  std::int64_t multiple_of = 1;
};

struct DynamicOptions {
  std::vector<DynamicDim> dims;      // of inputs that are tensors; an entry for an input that is none in a call is not used in it
  // The function does the same whatever the sizes: those larger than 1 are not checked when they come up.
  bool trust = false;
};

}  // namespace penstock::graph
