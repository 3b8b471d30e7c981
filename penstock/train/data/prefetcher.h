// Makes batches ahead of time: a thread fills a bounded ring while the trainer computes.
//
//   Prefetcher batches(sampler, {.first = position, .stride = 64, .share = sample_share(64, dp_rank, dp)});
//   Batch batch;
//   batches.next(batch);                  // waits only when the thread is behind
//   save(batches.position());             // what was consumed: a checkpoint made now continues with the next batch
//
// Batches come in order. An error of the thread is thrown by `next` after the batches that were made before it, and by
// every later `next`. `next` and `position` are for one consumer; `stop` may be called by any thread, and a `next` that
// waits then throws StateError. The destructor stops and waits for the thread, at most for the batch it is making.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "penstock/train/data/sampler.h"

namespace penstock::train {

struct PrefetchOptions {
  std::uint64_t first = 0;   // global sample that the first batch's round begins with
  std::uint64_t stride = 1;  // global samples of a round, over all data-parallel ranks
  SampleShare share{0, 1};   // this rank's samples of each round
  std::size_t depth = 4;     // batches ready at most
};

class Prefetcher {
 public:
  // Fills the batch of the round that begins at global sample `round`.
  using Fill = std::function<void(std::uint64_t round, Batch& batch)>;

  // Throws ValueError for a stride or depth of 0 and for a share that reaches beyond the stride.
  Prefetcher(std::shared_ptr<const Sampler> sampler, PrefetchOptions options);
  // Any source of batches; it is called by the thread, one call at a time.
  Prefetcher(Fill fill, PrefetchOptions options);
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Swaps the next batch in; what `batch` held before is reused.
  void next(Batch& batch);
  // The global sample after the rounds that `next` has given out.
  std::uint64_t position() const;
  void stop();

 private:
  void run();

  const PrefetchOptions options_;
  const Fill fill_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by the mutex. Batch i is in ring_[i % depth] from made_ > i until it is taken; the thread fills the place of
  // batch made_ without the lock, when taken_ + depth > made_: the consumer does not touch it then.
  std::vector<Batch> ring_;
  std::uint64_t made_ = 0;
  std::uint64_t taken_ = 0;
  bool stopped_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // last: everything above is there when it starts
};

}  // namespace penstock::train
