// Flight recorder: keeps the last operations of this process for diagnosis: what ran, with which peer, since
// when.
//
//   const auto id = recorder.begin(
//       {.operation = "send", .group = "pp.forward", .label = "2F0", .bytes = n, .peer = 3});
//   ...
//   recorder.end(id, OperationState::Done);
//
// A ring buffer: the newest entry replaces the oldest. Recording takes no lock and allocates nothing; an
// entry costs about as much as reading the clock twice. Totals per kind of operation are kept separately and
// never wrap.
//
// Thread safety: every function may be called from any thread at any time. `write_from_signal_handler` may
// also run in a signal handler. Readers see whole entries: each slot has a version that is odd while the slot
// is being written.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "penstock/comm/record/json_writer.h"
#include "penstock/comm/record/operation_totals.h"
#include "penstock/comm/record/short_text.h"

namespace penstock::comm {

enum class OperationState : std::uint8_t { Running, Done, Failed, TimedOut };

// "running", "done", "failed", "timed out".
std::string_view to_text(OperationState state);

// Description of an operation, given by the caller.
struct Operation {
  OperationName operation{};  // kind: "all_reduce", "send", ...; totals are kept by it
  ShortText<32> group{};      // name of the group
  ShortText<48> label{};      // free text, "2F0 -> stage 3"; cut after 47 bytes
  std::int64_t tag = 0;
  std::uint64_t sequence = 0;  // number of operations the group had started before
  std::uint64_t bytes = 0;
  std::optional<std::int32_t> peer{};  // global rank on the other side, for point-to-point
};

// An operation with the fields that the recorder adds.
struct OperationRecord : Operation {
  std::uint64_t id = 0;       // 1, 2, ... over the whole process
  std::int64_t begin_ns = 0;  // steady clock
  std::int64_t end_ns = 0;    // steady clock; 0 while running
  std::int32_t thread = 0;    // kernel thread id of the thread that began it
  OperationState state = OperationState::Running;
};

class Recorder {
 public:
  static constexpr std::size_t kDefaultEntries = 4096;

  explicit Recorder(std::size_t entries = kDefaultEntries);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // The recorder of this process, with PENSTOCK_RECORDER_SIZE entries. Never destroyed.
  static Recorder& global();

  // Starts an entry and counts it in the totals. Returns the id for `end`, or 0 if nothing was recorded.
  std::uint64_t begin(const Operation& operation) noexcept;

  // Only the first end of an entry counts. Later ones, and ends of entries that the ring has dropped, have no
  // effect.
  void end(std::uint64_t id, OperationState state) noexcept;

  // Returns the entries, oldest first. Entries that begin or are replaced during the call may be missing.
  std::vector<OperationRecord> snapshot() const;

  std::map<std::string, OperationTotals> totals() const;
  void reset_totals() noexcept { totals_.reset(); }

  // Identifies this process in dumps; unknown until set.
  void set_rank(int rank) noexcept { rank_ = rank; }
  void set_world_size(int world_size) noexcept { world_size_ = world_size; }
  std::optional<int> rank() const noexcept;

  // Returns one JSON object, described in docs/recorder.md. `reason` says why it was requested.
  std::string to_json(std::string_view reason) const;
  // Writes the JSON object to a file atomically. Throws ConfigError if the file cannot be written.
  void dump(const std::string& path, std::string_view reason) const;
  // Writes the same object from a signal handler, without allocation or locks. While it runs, operations of
  // other threads are counted but not recorded, so that they do not overwrite what led to the signal.
  void write_from_signal_handler(ByteSink& sink, std::string_view reason);

 private:
  static constexpr std::size_t kWords = sizeof(Operation) / sizeof(std::uint64_t);
  static_assert(std::is_trivially_copyable_v<Operation> &&
                sizeof(Operation) == kWords * sizeof(std::uint64_t));

  // Aligned so that neighbours, written by different threads, share no cache line.
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> version = 0;  // odd: being written, by one writer alone
    std::atomic<std::uint64_t> id = 0;       // 0: never used
    std::atomic<std::int64_t> begin_ns = 0;
    std::atomic<std::int64_t> end_ns = 0;
    std::atomic<std::int32_t> thread = 0;
    std::atomic<OperationState> state = OperationState::Done;
    std::array<std::atomic<std::uint64_t>, kWords> operation{};  // the bytes of an Operation

    void lock() noexcept;
    void unlock() noexcept;
    // Returns false if the slot was being written at each of `attempts` attempts.
    bool read(OperationRecord& record, int attempts) const noexcept;
  };

  // The division costs as much as the rest of the bookkeeping; the default size avoids it.
  Slot& slot_of(std::uint64_t id) const noexcept { return slots_[mask_ ? id & *mask_ : id % entries_]; }
  // Calls `seen(const OperationRecord&)` oldest first; returns the number of slots that could not be read.
  template <class Seen>
  std::size_t visit(int attempts, Seen seen) const;
  // `entries(seen)` calls `seen` for each entry to be written.
  template <class Entries>
  void write_json(ByteSink& sink, std::string_view reason, Entries entries) const;

  std::size_t entries_;
  std::optional<std::uint64_t> mask_;  // entries - 1 where that is a power of two
  std::unique_ptr<Slot[]> slots_;
  std::atomic<std::uint64_t> next_ = 1;
  std::atomic<bool> frozen_ = false;
  std::atomic<std::uint64_t> running_dropped_ = 0;  // entries replaced before they ended
  OperationTotalsTable totals_;
  std::atomic<int> rank_ = -1;
  std::atomic<int> world_size_ = -1;
  std::array<char, 256> host_{};
  std::int64_t anchor_steady_ns_;  // the same moment on both clocks
  std::int64_t anchor_wall_ns_;
};

}  // namespace penstock::comm
