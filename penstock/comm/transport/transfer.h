// A transfer in flight, as a transport sees it. `Work` is built from these; not part of the user API.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace penstock::comm {

using Clock = std::chrono::steady_clock;

// How a wait ended. Failures of the transport itself (a closed connection, a truncated message) are thrown as
// std::exception.
enum class WaitResult { Done, TimedOut, Interrupted };

// Thread safety: one thread waits; any other thread may call `interrupt` at any time.
class Transfer {
 public:
  virtual ~Transfer() = default;

  // Blocks until the transfer is done, the deadline passes, or `interrupt` was called. After TimedOut or
  // Interrupted the transfer may still be running: its memory must stay valid until the transport is
  // destroyed.
  virtual WaitResult wait(Clock::time_point deadline) = 0;

  // Returns whether `wait` would return Done at once. May drive progress; never blocks.
  virtual bool done() = 0;

  // Whether `wait` may be called again after TimedOut. Not for Gloo's point-to-point transfers: a wait that
  // times out closes the connection.
  virtual bool resumable() const { return true; }

  // Makes a current or future `wait` return Interrupted unless the transfer is already done.
  virtual void interrupt() noexcept = 0;
};

}  // namespace penstock::comm
