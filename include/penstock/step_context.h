// What a module can find out about the step that is running: its number, the microbatch, whether this is a
// trial run or a recomputation, the loss scale, and the keys of its random numbers.
//
//   at::Tensor forward_of_a_module(const at::Tensor& x) {
//     const auto context = StepContext::current();
//     if (context->trial) return torch::empty_like(x);
//     return keyed_dropout(x, 0.1, context->key(layer_from_name("blocks.3.mlp"), purpose::kDropout));
//   }
//   StepContext step;
//   step.seed = 42, step.step = 7, step.microbatch = 3, step.microbatches = 8;
//   {
//     StepGuard guard(step);             // the pipeline runtime does this around each forward and backward
//     y = forward_of_a_module(x);
//   }
//
// A context is an immutable snapshot that belongs to a scope of a thread; threads do not see each other's
// contexts. It propagates wherever LibTorch propagates its thread-local state: to autograd's worker threads
// (the context of the thread that called backward()), to at::launch, and to threads that take over an
// at::ThreadLocalState, but not into at::parallel_for.
//
// Code that computes a forward again during backward keeps the snapshot of the first time and runs under
// StepGuard(snapshot->recomputation()). Keys, and with them dropout masks, are then the same.
//
// The context is stored in c10::ThreadLocalDebugInfo under PRODUCER_INFO. Code that uses that kind itself
// cannot run within a step.
//
// Thread safety: any number of threads may read a snapshot. A guard is created and destroyed on one thread,
// innermost first.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "penstock/random.h"

namespace penstock {

// The rows of a microbatch that this process works on, when data-parallel ranks share one: [first, first +
// count).
struct BatchRows {
  std::int64_t global = 0;  // rows of the whole microbatch
  std::int64_t first = 0;   // the first row of this process
  std::int64_t count = 0;   // number of rows of this process

  // Whether all members are equal.
  bool operator==(const BatchRows&) const = default;
};

// What is known about the running step.
struct StepContext {
  bool running = true;                     // false outside of any step
  std::uint64_t seed = 0;                  // of the run
  std::int64_t step = 0;                   // number of optimizer steps before this one
  std::optional<std::int64_t> microbatch;  // empty: work of the whole step
  std::int64_t microbatches = 1;           // number of microbatches of this step
  std::optional<BatchRows> rows;           // empty: this process has every row of the microbatch
  bool trial = false;                      // shapes or memory are being measured; results are discarded
  bool recompute = false;                  // this forward has been computed before
  bool recorded = false;                   // the device will replay this step without the host
  // This forward is captured as a graph that other steps replay (compiled_stage.h). Seed, step, microbatch
  // and loss scale are not those of the replays: key() returns a key that each replay completes with its own.
  bool captured = false;
  double loss_scale = 1.0;  // the loss is multiplied by this before backward

  // Returns the context of this scope; outside of any step, a context with running == false and default
  // values. Never null; valid as long as it is held. Throws StateError if other code uses PRODUCER_INFO.
  static std::shared_ptr<const StepContext> current();

  // Returns the key of the random numbers of this step and microbatch for a layer and purpose. Trial runs and
  // recomputations have the keys of the real run. While a graph is captured, the key stands for that of the
  // step in which an operator with it runs. Throws StateError outside of any step, where every call
  // would return the same numbers, and in a recorded step, where every replay would.
  RandomKey key(std::int64_t layer, std::int64_t purpose) const;

  // Returns this context with recompute == true.
  StepContext recomputation() const;

  // Returns the box of a tensor whose dim 0 consists of the rows of the microbatch, or of a multiple of them
  // (rows and tokens merged), as `rows` says; the whole tensor if `rows` is empty. While a pipeline is traced
  // (trace_pipeline.h), the box stands for that of the step in which an operator with it runs. Throws
  // ValueError if dim 0 is not a multiple of rows->count.
  GlobalBox box_of(at::IntArrayRef sizes) const;
};

// Makes a context current for a scope. Guards nest: the innermost one is current, and the previous one is
// restored when it is destroyed.
class StepGuard {
 public:
  // Throws ValueError for an inconsistent context: not running (unless recompute), a microbatch or rows out
  // of range, a loss scale that is not a finite number above 0.
  explicit StepGuard(StepContext context);
  // As above, for a snapshot. Throws ValueError for a null pointer too.
  explicit StepGuard(std::shared_ptr<const StepContext> context);
  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;

 private:
  c10::DebugInfoGuard guard_;
};

}  // namespace penstock
