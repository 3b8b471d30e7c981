#include "penstock/comm/record/operation_totals.h"

#include <cstring>
#include <thread>

namespace penstock::comm {

bool OperationTotalsTable::Row::is(const KindWords& words) const noexcept {
  for (std::size_t i = 0; i < kKindWords; ++i)
    if (kind[i].load(std::memory_order_relaxed) != words[i]) return false;
  return true;
}

OperationName OperationTotalsTable::Row::load_kind() const noexcept {
  KindWords words;
  for (std::size_t i = 0; i < kKindWords; ++i) words[i] = kind[i].load(std::memory_order_relaxed);
  OperationName name;
  std::memcpy(static_cast<void*>(&name), words.data(), sizeof name);
  return name;
}

OperationTotals OperationTotalsTable::Row::load_totals() const noexcept {
  return {operations.load(std::memory_order_relaxed), bytes.load(std::memory_order_relaxed)};
}

OperationTotalsTable::Row& OperationTotalsTable::row_of(const OperationName& kind) noexcept {
  KindWords words;
  std::memcpy(words.data(), &kind, sizeof kind);
  std::uint64_t hash = 0;
  for (const std::uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  for (std::size_t probe = 0; probe < kCapacity; ++probe) {
    Row& row = rows_[((hash >> 32) + probe) % kCapacity];
    std::uint32_t state = row.state.load(std::memory_order_acquire);
    if (state == kEmpty && row.state.compare_exchange_strong(state, kClaimed, std::memory_order_acquire)) {
      for (std::size_t i = 0; i < kKindWords; ++i) row.kind[i].store(words[i], std::memory_order_relaxed);
      row.state.store(kReady, std::memory_order_release);
      return row;
    }
    // Another thread is writing a name here, perhaps the one looked for.
    while (row.state.load(std::memory_order_acquire) != kReady) std::this_thread::yield();
    if (row.is(words)) return row;
  }
  return others_;
}

void OperationTotalsTable::add(const OperationName& kind, std::uint64_t bytes) noexcept {
  Row& row = row_of(kind);
  row.operations.fetch_add(1, std::memory_order_relaxed);
  row.bytes.fetch_add(bytes, std::memory_order_relaxed);
}

void OperationTotalsTable::reset() noexcept {
  const auto clear = [](Row& row) {
    row.operations.store(0, std::memory_order_relaxed);
    row.bytes.store(0, std::memory_order_relaxed);
  };
  for (Row& row : rows_) clear(row);
  clear(others_);
}

}  // namespace penstock::comm
