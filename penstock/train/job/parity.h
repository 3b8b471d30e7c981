// Is training in a layout the training of one process? Both are run on the same data; losses, gradients and parameters of every step are
// compared by their names in the whole model.
//
//   record_side(world, one_process(config), data, folder / "one", 3);                 // a world of one rank
//   record_side(world, config, data, folder / "layout", 3);                           // all ranks of the layout
//   const ParityReport report = compare_sides(folder / "one", folder / "layout", 3, parity_tolerance(config));
//   report.ok()
//
// The sides meet as checkpoints, which do not depend on the layout: no rank needs more than its own part, and the comparison holds two
// tensors at a time. Copies are compared, too: a tied weight's at the head, and those of every replica.
//
// What is expected. Pipelines, virtual stages and schedules change no bit on the CPU, as long as a schedule adds up the weight gradients
// of a stage in the order of the microbatches. Replicas and tensor parallelism sum in another order: equal up to rounding, relative to the
// largest element of a tensor. Parameters get ten times the tolerance of gradients, since AdamW divides a gradient by its own size: where it
// is nearly nothing, its rounding moves the parameter by a share of the learning rate.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "penstock/world.h"
#include "penstock/train_config.h"
#include "penstock/train/job/job.h"

namespace penstock::train {

// The same training in one process: one stage, one replica that has the rows of all.
TrainConfig one_process(const TrainConfig& config);

// Whether every bit should be that of one process. Throws ConfigError for a schedule that cannot be read.
bool expects_same_bits(const TrainConfig& config);

// Of differences relative to the largest element; 0: the same bits.
struct ParityTolerance {
  double gradients = 0;  // and losses
  double parameters = 0;
};
ParityTolerance parity_tolerance(const TrainConfig& config);

// [collective] Trains and leaves in `folder` a checkpoint of every step: parameters, gradients before clipping, the loss. `before` is called
// before gradients are recorded, on every rank.
void record_side(const comm::World& world, const TrainConfig& config, TrainingData data, const std::filesystem::path& folder, int steps, TrainingJob::GradientHook before = {});

struct ParityRow {
  enum class Kind { Loss, Gradient, Parameter };
  int step = 0;              // from 1
  Kind kind = Kind::Loss;
  std::string tensor;        // name in the model, with what makes it a copy; "loss"
  double difference = 0;     // largest; infinite for what is not a number, of another shape, or on one side alone
  double relative = 0;       // to the largest element of the one process, at least a millionth of the largest of all tensors
  double tolerance = 0;
  std::string note;          // why it cannot be compared; else empty
  bool ok = true;
};

struct ParityReport {
  std::vector<ParityRow> rows;  // worst first
  bool ok() const;
};

// Throws CheckpointError for sides that cannot be read.
ParityReport compare_sides(const std::filesystem::path& one, const std::filesystem::path& layout, int steps, const ParityTolerance& tolerance);

// A table with the worst rows, or with all of them, and a line that says how it ended.
std::string to_text(const ParityReport& report, bool all);

}  // namespace penstock::train
