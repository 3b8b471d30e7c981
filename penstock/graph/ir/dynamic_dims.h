// Dims of inputs whose size a capture does not fix: one graph for all batch sizes or sequence lengths.
//
//   Compiled step(function, {.dynamic = {.dims = {{0, 0, "B"}, {0, 1, "T"}, {1, 0, "B"}}}});
//   step({torch::randn({8, 128, 64}), torch::randn({8, 10})});     // captured
//   step({torch::randn({3, 77, 64}), torch::randn({3, 10})});      // replayed
//   std::cout << to_text(step.joint(0).graph);                      // ... float32[B, T, 64] ...
//
//   auto fast = compile(net, {.dynamic = {.dims = {{"args[0]", 0, "B"}}}});
//
// How it works. The function is captured, on fake tensors, at several sizes of each symbol. All captures must
// have the same operators; a number in which they differ (a size, a stride, an element of a list, a factor
// like 1/(B*T)) becomes an expression of the symbols. Sizes at which the function throws are skipped. Finally
// the function is captured at the sizes of the call, and the graph is compared with that capture.
//
// Correctness. A function may inspect sizes and behave differently for some of them, as LibTorch does for
// sizes 0 and 1. Therefore, the first time a set of sizes occurs, the graph is compared with a capture at
// exactly these sizes; this costs as much as capturing, once. If they differ, these sizes get a capture of
// their own, as without dynamic dims (CompileOptions::recapture), or a StateError that reports the
// difference. A function that cannot be captured for all sizes is captured for each, with a warning that
// gives the reason, or is a StateError.
//
// Limits: at most four symbols; an input with a dynamic dim must not overlap other inputs in memory; its
// strides are those of a dense tensor in the dim order of the first call, or fixed if it has gaps; parameters
// and buffers have no dynamic dims.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace penstock::graph {

// An input, by its position among the inputs or by its name ("args[0]", for modules).
class InputRef {
 public:
  InputRef(int place) : which_(static_cast<std::size_t>(place)) {}   // a negative position is rejected on use
  InputRef(std::size_t place) : which_(place) {}
  InputRef(const char* name) : which_(std::string(name)) {}
  InputRef(std::string name) : which_(std::move(name)) {}
  const std::variant<std::size_t, std::string>& get() const { return which_; }

 private:
  std::variant<std::size_t, std::string> which_;
};

struct DynamicDim {
  InputRef input;
  std::int64_t dim = 0;              // negative: counted from the end
  // Dims with the same symbol have the same size; if empty, a new symbol: "s0", "s1", ...
  std::string symbol = {};
  // The sizes for which the graph is intended; other sizes are captured separately, and the function is not
  // tried at them. Entries for one symbol are combined: the largest min, the smallest max, a common multiple.
  std::int64_t min = 0;
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
  std::int64_t multiple_of = 1;
};

struct DynamicOptions {
  // Of tensor inputs; an entry is ignored in calls where that input is not a tensor.
  std::vector<DynamicDim> dims;
  // Asserts that the function does the same for all sizes: sizes larger than 1 are not checked when they
  // first occur.
  bool trust = false;
};

}  // namespace penstock::graph
