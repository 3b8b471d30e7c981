#include "penstock/train/plan/measure_memory.h"

#include <algorithm>
#include <utility>

#include "penstock/errors.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "penstock/torch/compat/device_memory.h"
#include "penstock/train/job/structure_metadata.h"

namespace penstock::train {

namespace {

constexpr int kStepsUnseen = 2;

class Meter {
 public:
  Meter(TrainingJob& job, std::int64_t batch_bytes)
      : job_(job), device_(job.device()), batch_bytes_(batch_bytes) {}

  void begin() {
    if (device_.is_cpu())
      reset_cpu_peak();
    else
      reset_peak_device_bytes(device_);
  }
  // There are no activations between steps.
  void begin_step() { floor_ = unaccounted_bytes(job_.held_memory()) + batch_bytes_; }

  void look() {
    const HeldMemory held = job_.held_memory();
    seen_.parameters = std::max(seen_.parameters, held.parameters);
    seen_.gathered = std::max(seen_.gathered, held.gathered_peak);
    reset_gathered_peaks(job_.model());
    seen_.gradients = std::max(seen_.gradients, held.gradients);
    seen_.optimizer = std::max(seen_.optimizer, held.optimizer);
    seen_.activations = std::max(seen_.activations, unaccounted_bytes(held) - floor_);
  }

  MeasuredMemory end() {
    seen_.together = device_.is_cpu() ? cpu_memory().peak : peak_device_bytes(device_);
    return seen_;
  }

 private:
  // Live memory in none of the known categories.
  std::int64_t unaccounted_bytes(const HeldMemory& held) const {
    return (device_.is_cpu() ? cpu_memory().live : live_device_bytes(device_)) - held.in_memory;
  }

  TrainingJob& job_;
  at::Device device_;
  std::int64_t batch_bytes_;
  std::int64_t floor_ = 0;
  MeasuredMemory seen_;
};

// Tokens, targets and, with a mask, documents of one run of the schedule, 64-bit integers, and metadata.
std::int64_t batch_bytes(const TrainConfig& config, const ModelStages& model) {
  const std::int64_t samples = config.layout.microbatches * config.layout.microbatch_size,
                     tensors = config.data.document_mask ? 3 : 2;
  return samples * config.model.context * tensors * static_cast<std::int64_t>(sizeof(std::int64_t)) +
         structure_bytes(structure_needs(config, model.own_parts()), samples, config.model.context);
}

}  // namespace

MeasuredMemory measure_memory(const comm::World& world, const TrainConfig& config, TrainingData data,
                              int steps) {
  TrainingJob job(world, config, std::move(data));
  if (job.device().is_cpu() && cpu_memory().allocations == 0)
    throw StateError("measure_memory: CPU memory is not being counted; call count_cpu_memory() first");
  for (int step = 0; step < kStepsUnseen; ++step) job.train_step();
  Meter meter(job, batch_bytes(config, job.model()));
  // When unsharded gradients have become those of the step.
  job.set_gradient_hook([&](const std::vector<optim::NamedParameter>&) { meter.look(); });
  meter.begin();
  for (int step = 0; step < steps; ++step) {
    meter.begin_step();
    job.pipeline().set_instruction_observer([&] { meter.look(); });
    job.train_step();
    job.pipeline().set_instruction_observer({});
  }
  job.set_gradient_hook({});
  return meter.end();
}

}  // namespace penstock::train
