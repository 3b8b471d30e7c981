// A small hybrid model, trained by ranks that are threads: its options, one function that trains it in a
// layout and keeps what can be compared, and the comparisons.
//
//   const Options options = with(hybrid_blocks(), {"--depth_layers", "1,2"});
//   const TrainedJob one = train_job({.name = "one"}, options),
//                    two = train_job({.name = "pp2", .pp = 2}, options, {.keeps = {.parameters = true}});
//   EXPECT_EQ(two.losses(), one.losses());
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "penstock/observer.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/small_training.h"

namespace penstock::test {

using Options = std::vector<std::string>;  // of the command line: key, value, ...

Options with(Options options, const Options& more);

// A block of each letter but F, AEME, of a few thousand parameters.
const Options& hybrid_blocks();
// For every auxiliary loss that a model can have, at the first stages and at the last: routers, mixtures of
// depths, and multi-token prediction by experts.
const Options& hybrid_losses();

using NamedTensors = std::map<std::string, at::Tensor>;

struct TrainedJob {
  std::vector<train::StepOutcome> steps;  // those of this job, of rank 0
  double validation = 0;                  // the loss after the last step, if requested
  NamedTensors buffers;                   // state of the whole model that is not trained
  NamedTensors parameters;                // of the whole model, if requested
  // If requested: what each rank holds, "<rank> <name>", and its gradients, "<rank> gradient <step> <name>".
  NamedTensors local;

  std::vector<double> losses() const;
  std::vector<double> norms() const;
  // The job without its first steps, to be compared with one that continues after them.
  TrainedJob after(std::size_t steps) const;
};

struct JobRun {
  int steps = 3;
  const ScratchFolder* from = nullptr;  // continues its newest checkpoint
  const ScratchFolder* to = nullptr;    // saves the last state
  bool validates = false;               // after the last step
  bool validates_first = false;         // before the first step, without effect on it
  struct {
    bool parameters = false, local = false;
  } keeps = {};
};

// Copies of a parameter or buffer, on replicas, pipeline ranks or in both directions of a pipeline, must have
// the same bits.
TrainedJob train_job(const Layout& layout, const Options& options, const JobRun& run = {});

// ---- comparisons ----

void expect_equal_tensors(const NamedTensors& ours, const NamedTensors& theirs);
// Sums in another order: float32 rounding. Relative to the largest element of each tensor.
void expect_near_tensors(const NamedTensors& ours, const NamedTensors& theirs, double tolerance = 1e-3);
// Losses and gradient norms of the steps, relative.
void expect_near_steps(const TrainedJob& ours, const TrainedJob& theirs, double loss = 2e-5,
                       double norm = 2e-4);

}  // namespace penstock::test
