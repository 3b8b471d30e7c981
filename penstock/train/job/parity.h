// Checks whether training in a layout matches training in one process. Both run on the same data; losses,
// gradients and parameters of every step are compared by their names in the whole model.
//
//   record_side(world, one_process(config), data, folder / "one", 3);                 // a world of one rank
//   record_side(world, config, data, folder / "layout", 3);                        // all ranks of the layout
//   const ParityReport report = compare_sides(folder / "one", folder / "layout", 3,
//       parity_tolerance(config));
//   report.ok()
//
// The sides are compared through checkpoints, which do not depend on the layout: no rank needs more than its
// own part, and the comparison holds two tensors at a time. Copies are compared as well: a tied weight at the
// head, those of every replica, and the second copy of a model in a bidirectional schedule.
//
// Expected results: pipelines, virtual stages and schedules change no bit on the CPU if the schedule
// accumulates the weight gradients of a stage in microbatch order; auxiliary losses, which are sums over
// stages, are equal to 1e-5. Replicas, tensor parallelism and the two copies of a bidirectional schedule sum
// in another order: equal up to rounding, relative to the largest element of a tensor. Parameters get ten
// times the tolerance of gradients, because AdamW divides a gradient by its own magnitude: for a gradient
// near zero, rounding moves the parameter by a fraction of the learning rate.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "penstock/train/job/job.h"
#include "penstock/train_config.h"
#include "penstock/world.h"

namespace penstock::train {

// Returns the configuration of the same training in one process: one stage, and one replica with the rows of
// all.
TrainConfig one_process(const TrainConfig& config);

// Returns whether every bit should equal that of one process. Throws ConfigError for a schedule that cannot
// be read.
bool expects_same_bits(const TrainConfig& config);

// Maximum differences relative to the largest element; 0: the same bits.
struct ParityTolerance {
  double gradients = 0;  // and losses
  double parameters = 0;
};
ParityTolerance parity_tolerance(const TrainConfig& config);

// [collective] Trains and writes a checkpoint of every step to `folder`: parameters, gradients before
// clipping, the loss. `before` is called on every rank before gradients are recorded.
void record_side(const comm::World& world, const TrainConfig& config, TrainingData data,
                 const std::filesystem::path& folder, int steps, TrainingJob::GradientHook before = {});

struct ParityRow {
  enum class Kind { Loss, Gradient, Parameter };
  int step = 0;  // from 1
  Kind kind = Kind::Loss;
  std::string tensor;     // name in the model, with a suffix for copies; "loss", "balance"
  double difference = 0;  // maximum; infinite for NaN, another shape, or a tensor on one side only
  double relative =
      0;  // to the largest element in one process, but at least a millionth of the largest of all tensors
  double tolerance = 0;
  std::string note;  // reason if it cannot be compared, else empty
  bool ok = true;
};

struct ParityReport {
  std::vector<ParityRow> rows;  // worst first
  bool ok() const;
};

// Throws CheckpointError for sides that cannot be read.
ParityReport compare_sides(const std::filesystem::path& one, const std::filesystem::path& layout, int steps,
                           const ParityTolerance& tolerance);

// Returns a table with the worst rows, or with all rows, and a line with the result.
std::string to_text(const ParityReport& report, bool all);

}  // namespace penstock::train
