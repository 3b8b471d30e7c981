// Counts the operations started of each kind and the bytes they moved, since the process began or since
// `reset`.
//
// Thread safety: any thread, at any time, without locks or allocation; `visit` may also run in a signal
// handler.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "penstock/comm/record/short_text.h"

namespace penstock::comm {

using OperationName = ShortText<24>;

struct OperationTotals {
  std::uint64_t operations = 0;
  std::uint64_t bytes = 0;
  bool operator==(const OperationTotals&) const = default;
};

class OperationTotalsTable {
 public:
  // Kinds beyond the capacity are counted together under "other kinds".
  static constexpr std::size_t kCapacity = 64;

  void add(const OperationName& kind, std::uint64_t bytes) noexcept;

  // Operations that start during the call may or may not be counted.
  void reset() noexcept;

  // Calls `seen(std::string_view kind, OperationTotals)` for each kind that was counted, in no particular
  // order.
  template <class Seen>
  void visit(Seen seen) const {
    for (const Row& row : rows_) {
      if (row.state.load(std::memory_order_acquire) != kReady) continue;
      const OperationName kind = row.load_kind();
      if (const OperationTotals totals = row.load_totals(); totals.operations > 0) seen(kind.view(), totals);
    }
    if (const OperationTotals totals = others_.load_totals(); totals.operations > 0)
      seen("other kinds", totals);
  }

 private:
  // A row is claimed once for one kind and keeps it: Empty -> Claimed (its name is being written) -> Ready.
  enum : std::uint32_t { kEmpty, kClaimed, kReady };
  static constexpr std::size_t kKindWords = sizeof(OperationName) / sizeof(std::uint64_t);
  static_assert(sizeof(OperationName) == kKindWords * sizeof(std::uint64_t));
  using KindWords = std::array<std::uint64_t, kKindWords>;

  struct Row {
    std::atomic<std::uint32_t> state = kEmpty;
    std::array<std::atomic<std::uint64_t>, kKindWords> kind{};
    std::atomic<std::uint64_t> operations = 0;
    std::atomic<std::uint64_t> bytes = 0;

    bool is(const KindWords& words) const noexcept;
    OperationName load_kind() const noexcept;
    OperationTotals load_totals() const noexcept;
  };

  Row& row_of(const OperationName& kind) noexcept;

  std::array<Row, kCapacity> rows_;
  Row others_;
};

}  // namespace penstock::comm
