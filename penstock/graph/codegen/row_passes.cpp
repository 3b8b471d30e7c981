#include "penstock/graph/codegen/row_passes.h"

#include <algorithm>
#include <cstdint>
#include <set>

namespace penstock::graph {
namespace {

constexpr std::int64_t kScratchBytes = 1 << 18;  // on the stack of a thread, in total
constexpr int kCheapToRepeat = 4;                // cost of what is computed again instead of kept

}  // namespace

RowPasses::RowPasses(const LoopKernel& of) : kernel(of), varies(varies_in_row(of)), depth(varies.size(), 0) {
  for (std::size_t i = 0; i < depth.size(); ++i) {
    const LoopInstruction& instruction = kernel.instructions[i];
    for (std::size_t o = 0; o < operand_count(instruction.op); ++o)
      depth[i] = std::max(depth[i], depth[static_cast<std::size_t>(instruction.operands[o])]);
    if (is_reduction(instruction.op)) ++depth[i];
    passes = std::max(passes, depth[i] + 1);
  }
  reductions.resize(passes);
  stores.resize(passes);
  for (std::size_t i = 0; i < depth.size(); ++i)
    if (is_reduction(kernel.instructions[i].op)) reductions[depth[i] - 1].push_back(i);
  for (const LoopStore& store : kernel.stores) {
    const auto value = static_cast<std::size_t>(store.value);
    const LoopBuffer& buffer = kernel.buffers[store.buffer];
    const bool moves =
        std::any_of(buffer.strides.begin() + static_cast<std::ptrdiff_t>(kernel.first_inner_dim()),
                    buffer.strides.end(), [](std::int64_t stride) { return stride != 0; });
    if (moves)
      stores[depth[value]].push_back(store);
    else
      once.push_back(store);
  }
  choose_kept();
}

std::vector<std::size_t> RowPasses::computed_in(std::size_t pass, bool with_kept) const {
  std::vector<char> needed(depth.size(), 0);
  const auto need = [&](int value) {
    if (value != kNoOperand && varies[static_cast<std::size_t>(value)])
      needed[static_cast<std::size_t>(value)] = 1;
  };
  for (const std::size_t reduction : reductions[pass]) need(kernel.instructions[reduction].operands[0]);
  for (const LoopStore& store : stores[pass]) need(store.value);
  for (std::size_t i = depth.size(); i-- > 0;) {
    if (!needed[i] || (with_kept && is_kept_before(i, pass))) continue;
    const LoopInstruction& instruction = kernel.instructions[i];
    for (std::size_t o = 0; o < operand_count(instruction.op); ++o) need(instruction.operands[o]);
  }
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < needed.size(); ++i)
    if (needed[i]) order.push_back(i);
  return order;
}

// Cost of computing a varying value from what does not vary and from loads.
int RowPasses::cost_to_repeat(std::size_t instruction) const {
  std::set<std::size_t> seen;
  std::vector<std::size_t> open{instruction};
  int cost = 0;
  while (!open.empty()) {
    const std::size_t i = open.back();
    open.pop_back();
    if (!varies[i] || !seen.insert(i).second) continue;
    const LoopInstruction& each = kernel.instructions[i];
    if (each.op != LoopOp::Load) cost += cost_of(each.op);
    for (std::size_t o = 0; o < operand_count(each.op); ++o)
      open.push_back(static_cast<std::size_t>(each.operands[o]));
  }
  return cost;
}

// Values that a later pass uses, and that are expensive to compute again, are kept in memory of the thread.
void RowPasses::choose_kept() {
  const std::int64_t row = kernel.product(kernel.first_inner_dim(), kernel.sizes.size());
  std::int64_t bytes = 0;
  std::vector<std::size_t> kept(depth.size(), kNotKept);
  for (std::size_t pass = 0; pass + 1 < passes; ++pass) {
    const std::vector<std::size_t> here = computed_in(pass, false);
    const std::set<std::size_t> in_pass(here.begin(), here.end());
    for (std::size_t later = pass + 1; later < passes; ++later) {
      std::set<std::size_t> used;  // of this pass, by what only the later one computes
      for (const std::size_t i : computed_in(later, false)) {
        if (in_pass.contains(i)) continue;
        const LoopInstruction& each = kernel.instructions[i];
        for (std::size_t o = 0; o < operand_count(each.op); ++o)
          used.insert(static_cast<std::size_t>(each.operands[o]));
      }
      for (const std::size_t reduction : reductions[later])
        used.insert(static_cast<std::size_t>(kernel.instructions[reduction].operands[0]));
      for (const LoopStore& store : stores[later]) used.insert(static_cast<std::size_t>(store.value));
      for (const std::size_t i : used) {
        if (!in_pass.contains(i) || !varies[i] || kept[i] < pass + 1) continue;
        const std::int64_t needed = row * static_cast<std::int64_t>(bytes_of(kernel.instructions[i].type));
        if (cost_to_repeat(i) < kCheapToRepeat || bytes + needed > kScratchBytes) continue;
        bytes += needed;
        kept[i] = pass;
      }
    }
  }
  kept_in = std::move(kept);
  drop_unused();
}

// What is kept must be computed by the pass that keeps it, and used by a later one; keeping another value
// may have changed that.
void RowPasses::drop_unused() {
  for (bool changed = true; changed;) {
    changed = false;
    std::set<std::size_t> loaded, computed_by_keeper;
    for (std::size_t pass = 0; pass < passes; ++pass)
      for (const std::size_t i : computed_in(pass)) {
        if (is_kept_before(i, pass)) loaded.insert(i);
        if (is_kept_by(i, pass)) computed_by_keeper.insert(i);
      }
    for (std::size_t i = 0; i < kept_in.size(); ++i) {
      if (kept_in[i] == kNotKept || (loaded.contains(i) && computed_by_keeper.contains(i))) continue;
      kept_in[i] = kNotKept;
      changed = true;
    }
  }
}

bool may_share_memory(const LoopKernel& kernel, std::size_t read, std::size_t written, bool with_kept) {
  const LoopBuffer &from = kernel.buffers.at(read), &to = kernel.buffers.at(written);
  if (from.written || !to.written || from.type != to.type || from.strides != to.strides) return false;
  for (std::size_t d = 0; d < kernel.sizes.size(); ++d)
    if (to.strides[d] == 0 && kernel.sizes[d] > 1) return false;
  if (kernel.form == LoopForm::Elements) return true;
  if (kernel.form == LoopForm::Columns) return false;
  const RowPasses passes(kernel);
  std::size_t writing = passes.passes;
  for (std::size_t pass = 0; pass < passes.passes; ++pass)
    for (const LoopStore& store : passes.stores[pass])
      if (store.buffer == written) writing = pass;
  if (writing == passes.passes) return false;  // one number for each row
  for (std::size_t pass = writing + 1; pass < passes.passes; ++pass)
    for (const std::size_t i : passes.computed_in(pass, with_kept))
      if (kernel.instructions[i].op == LoopOp::Load && kernel.instructions[i].buffer == read &&
          !(with_kept && passes.is_kept_before(i, pass)))
        return false;
  return true;
}

}  // namespace penstock::graph
