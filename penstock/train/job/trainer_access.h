// What Penstock itself and its tests need of a Trainer beyond its public interface.
#pragma once

#include <filesystem>
#include <vector>

#include "penstock/checkpoint/files/output_file.h"
#include "penstock/observer.h"
#include "penstock/train/job/job.h"
#include "penstock/train_config.h"
#include "penstock/trainer.h"
#include "penstock/world.h"

namespace penstock::train {

struct TrainerAccess {
  // A Trainer whose checkpoint files pass through `fault`, for tests of full and broken disks.
  static Trainer with_write_fault(const comm::World& world, const TrainConfig& config,
                                  std::filesystem::path folder, std::vector<Observer*> observers,
                                  checkpoint::WriteFault fault);
  static TrainingJob& job(Trainer& trainer);
};

}  // namespace penstock::train
