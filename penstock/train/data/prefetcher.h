// Prepares batches ahead of time: a thread fills a bounded ring while the trainer computes.
//
//   Prefetcher batches(sampler, {.first = position, .stride = 64, .share = sample_share(64, dp_rank, dp)});
//   Batch batch;
//   batches.next(batch);                  // waits only if no batch is ready
//   save(batches.position());             // a checkpoint made now continues with the next batch
//
// Batches arrive in order. `next` throws an error of the thread after the batches made before it, and in
// every later call. `next` and `position` are for one consumer; `stop` may be called by any thread, and a
// waiting `next` then throws StateError. The destructor stops the thread and waits for it, at most for the
// batch in progress.
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
  std::uint64_t first = 0;   // first global sample of the first round
  std::uint64_t stride = 1;  // global samples per round, over all data-parallel ranks
  SampleShare share{0, 1};   // this rank's samples in each round
  std::size_t depth = 4;     // maximum number of ready batches
};

class Prefetcher {
 public:
  // Fills the batch of the round that begins at global sample `round`.
  using Fill = std::function<void(std::uint64_t round, Batch& batch)>;

  // Throws ValueError for a stride or depth of 0 and for a share that exceeds the stride.
  Prefetcher(std::shared_ptr<const Sampler> sampler, PrefetchOptions options);
  // Uses any source of batches; the thread calls it, one call at a time.
  Prefetcher(Fill fill, PrefetchOptions options);
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Swaps the next batch in and reuses the former contents of `batch`.
  void next(Batch& batch);
  // The global sample after the rounds that `next` has returned.
  std::uint64_t position() const;
  void stop();

 private:
  void run();

  const PrefetchOptions options_;
  const Fill fill_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by the mutex. Batch i is in ring_[i % depth] from made_ > i until it is taken; the thread fills
  // the slot of batch made_ without the lock, if taken_ + depth > made_: the consumer does not touch it then.
  std::vector<Batch> ring_;
  std::uint64_t made_ = 0;
  std::uint64_t taken_ = 0;
  bool stopped_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // last member: it uses all others
};

}  // namespace penstock::train
