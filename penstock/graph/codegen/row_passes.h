// The passes that a kernel of the form Rows makes over each of its rows: a reduction needs all elements of a
// row before anything can use its result, so that what depends on n reductions, one after the other, is
// computed in pass n. Private to this folder. Thread safety: that of a value.
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "penstock/graph/codegen/loop_kernel.h"

namespace penstock::graph {

inline constexpr std::size_t kNotKept = std::numeric_limits<std::size_t>::max();

// At which pass over its row an instruction is known, and what each pass computes.
struct RowPasses {
  // Of a kernel that outlives it.
  explicit RowPasses(const LoopKernel& of);

  bool has_loop(std::size_t pass) const { return !reductions[pass].empty() || !stores[pass].empty(); }

  // Varying instructions that a pass computes, in order; those that an earlier pass has kept are not
  // computed.
  std::vector<std::size_t> computed_in(std::size_t pass, bool with_kept = true) const;
  bool is_kept_before(std::size_t instruction, std::size_t pass) const {
    return kept_in.size() > instruction && kept_in[instruction] < pass;
  }
  bool is_kept_by(std::size_t instruction, std::size_t pass) const {
    return kept_in.size() > instruction && kept_in[instruction] == pass;
  }

  const LoopKernel& kernel;
  std::vector<char> varies;
  std::vector<std::size_t> depth;
  std::size_t passes = 1;
  std::vector<std::vector<std::size_t>> reductions;  // by pass
  std::vector<std::vector<LoopStore>> stores;        // the same
  std::vector<LoopStore> once;                       // one number for each row
  std::vector<std::size_t> kept_in;  // by instruction: the pass that keeps its values for later ones

 private:
  int cost_to_repeat(std::size_t instruction) const;
  void choose_kept();
  void drop_unused();
};

// Whether a written buffer may have the memory of a read one: each element is read before it is written, and
// not again. `with_kept`: values that a pass keeps are not loaded by later ones.
bool may_share_memory(const LoopKernel& kernel, std::size_t read, std::size_t written, bool with_kept);

}  // namespace penstock::graph
