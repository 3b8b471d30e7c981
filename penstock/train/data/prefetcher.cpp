#include "penstock/train/data/prefetcher.h"

#include <fmt/format.h>

#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::train {

namespace {

PrefetchOptions checked(const PrefetchOptions& options) {
  if (options.stride < 1) throw ValueError(describe("samples per round", "0", "at least 1"));
  if (options.depth < 1) throw ValueError(describe("maximum number of ready batches", "0", "at least 1"));
  const auto samples = static_cast<std::uint64_t>(options.share.samples);
  if (options.share.samples < 1 || options.share.offset > options.stride ||
      samples > options.stride - options.share.offset)
    throw ValueError(describe("share of a round",
                              fmt::format("{} samples from {}", options.share.samples, options.share.offset),
                              fmt::format("a range within the {} samples of a round", options.stride),
                              "compute it with sample_share"));
  return options;
}

}  // namespace

Prefetcher::Prefetcher(std::shared_ptr<const Sampler> sampler, PrefetchOptions options)
    : Prefetcher(
          [sampler = std::move(sampler), share = options.share](std::uint64_t round, Batch& batch) {
            sampler->fill(round + share.offset, share.samples, batch);
          },
          options) {}

Prefetcher::Prefetcher(Fill fill, PrefetchOptions options)
    : options_(checked(options)), fill_(std::move(fill)), ring_(options_.depth), thread_([this] { run(); }) {}

Prefetcher::~Prefetcher() {
  stop();
  thread_.join();
}

void Prefetcher::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
}

void Prefetcher::run() {
  for (std::uint64_t index = 0;; ++index) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopped_ || index < taken_ + options_.depth; });
      if (stopped_) return;
    }
    std::exception_ptr error;
    try {
      fill_(options_.first + index * options_.stride, ring_[index % options_.depth]);
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      if (error) {
        error_ = error;
      } else {
        made_ = index + 1;
      }
    }
    changed_.notify_all();
    if (error) return;
  }
}

void Prefetcher::next(Batch& batch) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopped_ || made_ > taken_ || error_; });
    if (made_ <= taken_ && error_) std::rethrow_exception(error_);
    if (stopped_)
      throw StateError(
          describe("prefetcher", "next after stop", "", "create another prefetcher at its position()"));
    std::swap(batch, ring_[taken_ % options_.depth]);
    ++taken_;
  }
  changed_.notify_all();
}

std::uint64_t Prefetcher::position() const {
  const std::lock_guard lock(mutex_);
  return options_.first + taken_ * options_.stride;
}

}  // namespace penstock::train
