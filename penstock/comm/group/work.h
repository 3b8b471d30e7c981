// A communication operation in flight. Keeps its tensors alive, is waited for with a deadline, and reports
// its first error.
//
// Thread safety: use a Work from one thread at a time. For CUDA tensors on NCCL, `wait` makes the current
// CUDA stream wait for the transfer and returns at once; in all other cases it blocks the calling thread.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

namespace penstock::comm {

class WorkState;

class [[nodiscard]] Work {
 public:
  Work() = default;  // nothing to wait for
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  // Waits at most for the timeout of the operation, or of its group if it has none. Throws
  //   PeerLostError            a rank died, failed or left; names it
  //   TimeoutError             the deadline passed; the group becomes unusable, and every rank is notified
  //   PipeliningMetadataError  the received data does not match what was expected; names both sides
  //   CommError                any other failure, with the backend's message
  // Later calls return, or throw the same error, at once.
  void wait();
  void wait(std::chrono::milliseconds timeout);

  // Returns whether `wait` would return without blocking. May be false for a completed transfer on backends
  // that cannot tell.
  bool done();

 private:
  std::shared_ptr<WorkState> state_;
};

// Waits for all, then throws the first error in the given order.
void wait_all(std::vector<Work>& works);

}  // namespace penstock::comm
