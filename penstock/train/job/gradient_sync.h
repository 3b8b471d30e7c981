// What happens to the gradients of a step before they are used: means over data-parallel replicas, and sums over the two uses of a
// tied weight.
//
//   ReplicaGradientSync sync(layout, stages, true);
//   ... pipeline.step(), which calls sync.stage_done(stage) where the schedule has REDUCE_GRAD ...
//   sync.finish();                         // waits; .grad() is that of the whole batch on every rank
//
// Sharded parameters are reduced by their modules, where the schedule says so (pipeline/sharded_modules.h).
// The sum over replicas of a stage begins when its last backward has run, and continues while other stages compute. Gradients are
// divided by the number of replicas: losses are means over a rank's samples. A gradient that some rank lacks counts as zeros there; one
// that all of them lack stays undefined (replica_gradients.h). The same holds for the two uses of a tied weight.
// Thread rule: one thread. [collective] over the replicas and the two ranks of a tied weight, in the same order on all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "penstock/group.h"
#include "penstock/train/job/layout.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/train/job/replica_gradients.h"

namespace penstock::train {

class ReplicaGradientSync {
 public:
  // [collective over the replicas, and over the two ranks of a tied weight] Without `overlap` finish() does all of it: for gradients that
  // several runs of the schedule add up. Throws ValueError, on every rank, that names the first parameter in which the ranks differ.
  ReplicaGradientSync(const RankLayout& layout, const ModelStages& stages, bool overlap);

  void stage_done(int stage);
  void finish();
  // Of gradients on their way.
  std::int64_t buffer_bytes() const;

 private:
  void add_tied();

  const ModelStages& stages_;
  bool overlap_;
  std::optional<ReplicaGradients> replicas_;  // none without replicas
  std::map<int, std::size_t> part_of_;        // by stage
  std::optional<comm::Group> tied_group_;
};

}  // namespace penstock::train
