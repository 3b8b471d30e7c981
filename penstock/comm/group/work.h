// Communication that has started. Keeps its tensors alive, is waited for with a deadline, and reports its first error.
//
// Thread rule: one thread at a time uses a Work. For CUDA tensors on NCCL `wait` orders the current CUDA stream behind the
// transfer and returns at once; for everything else it blocks the calling thread.
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

  // Waits at most the time-out of the operation, else of its group. Throws
  //   PeerLostError            a rank died, failed or left; names it
  //   TimeoutError             the deadline passed; the group is unusable afterwards, and every rank is told
  //   PipeliningMetadataError  what arrived is not what was expected; names both sides
  //   CommError                anything else, in the backend's words
  // Waiting again returns, or throws the same error, at once.
  void wait();
  void wait(std::chrono::milliseconds timeout);

  // Whether `wait` would return without blocking. May be false for a finished transfer on backends that cannot tell.
  bool done();

 private:
  std::shared_ptr<WorkState> state_;
};

// Waits for all, then throws the first error in the order given.
void wait_all(std::vector<Work>& works);

}  // namespace penstock::comm
