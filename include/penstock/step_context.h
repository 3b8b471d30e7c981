// What a module may ask about the step that is running: its number, the microbatch, whether this is a trial run or a recomputation,
// the loss scale, and the key of its random numbers.
//
//   StepContext step;
//   step.seed = 42, step.step = 7, step.microbatch = 3, step.microbatches = 8;
//   {
//     StepGuard guard(step);                                  // the runtime, around one microbatch's forward or backward
//     y = model->forward(x);
//   }
//   ...
//   const auto context = StepContext::current();              // a module, in its forward
//   if (context->trial) return zeros_like_my_output(x);
//   y = keyed_dropout(x, 0.1, context->key(layer_from_name("blocks.3.mlp"), purpose::kDropout));
//
// The context is an immutable snapshot that belongs to a scope of a thread. It is not a global: threads do not see each other's. It goes
// where LibTorch carries its thread-local state: to autograd's worker threads (they see the context of the thread that called
// backward()), to at::launch, and to any thread that takes over an at::ThreadLocalState. It does not go into at::parallel_for.
//
// Recomputation: what computes a forward a second time, during a backward, keeps the snapshot of the first time and runs under
// StepGuard(snapshot->recomputation()). Keys are the same then, so are dropout masks.
//
// Thread rule: a snapshot may be read by any number of threads. A guard is made and destroyed on one thread, innermost first.
// Held in c10::ThreadLocalDebugInfo under PRODUCER_INFO; code that uses that kind for itself cannot be used within a step.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "penstock/random.h"

namespace penstock {

// Which rows of the whole microbatch this process works on, when data-parallel ranks share one: [first, first + count) of `global`.
struct BatchRows {
  std::int64_t global = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;

  bool operator==(const BatchRows&) const = default;
};

struct StepContext {
  bool running = true;                      // false only in the context outside of any step
  std::uint64_t seed = 0;                   // of the run
  std::int64_t step = 0;                    // optimizer steps done before this one
  std::optional<std::int64_t> microbatch;   // none: work of the whole step
  std::int64_t microbatches = 1;            // of this step
  std::optional<BatchRows> rows;            // none: every row of the microbatch is here
  bool trial = false;                       // shapes are being found out or memory measured: results are thrown away
  bool recompute = false;                   // this forward has been computed before
  bool recorded = false;                    // the device will repeat this step without the host: there is no key for later steps
  double loss_scale = 1.0;                  // the loss is multiplied by it before backward

  // The context of this scope, or outside of any step one with running = false and defaults else. Never null; stays valid as long as
  // it is held.
  static std::shared_ptr<const StepContext> current();

  // The key of random numbers of this step and microbatch at a place of the model. Throws StateError outside of any step, where
  // every call would give the same numbers, and in a recorded one, where every replay would. Trial runs and recomputations have the keys of the real, first run.
  RandomKey key(std::int64_t layer, std::int64_t purpose) const;

  // This context, as a recomputation.
  StepContext recomputation() const;

  // The box of a tensor whose dim 0 is rows of the microbatch, or whole multiples of rows (rows and tokens joined): what `rows` says,
  // and the whole tensor without it. Throws ValueError where dim 0 is no multiple of the rows here.
  GlobalBox box_of(at::IntArrayRef sizes) const;
};

// Makes a context current for a scope. Guards nest: the inner one counts, and the outer one is back when it ends, by an exception
// too. Throws ValueError for a context that contradicts itself.
class StepGuard {
 public:
  explicit StepGuard(StepContext context);
  explicit StepGuard(std::shared_ptr<const StepContext> context);
  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;

 private:
  c10::DebugInfoGuard guard_;
};

}  // namespace penstock
