// Completes the gradients of a step before they are used: sums over the uses of shared parameters
// (shared_parameters.h), and averages over data-parallel replicas.
//
//   ReplicaGradientSync sync(layout, stages, true);
//   ... pipeline.step(), which calls sync.stage_done(stage) at each REDUCE_GRAD of the schedule ...
//   sync.finish();                         // waits; .grad() is then that of the whole batch on every rank
//
// Sharded parameters are reduced by their modules, when the schedule says so (pipeline/sharded_modules.h).
// The sum over replicas of a stage starts when its last backward has run, and overlaps with the computation
// of other stages. Gradients are divided by the number of replicas, because losses are means over a rank's
// samples; gradients of experts that are divided over expert-parallel ranks contain the terms of these ranks,
// are summed over the others and divided by the same number. A gradient that is missing on some ranks counts
// as zeros there; one that is missing on all ranks stays undefined (replica_gradients.h). The same holds for
// the uses of a shared parameter.
// Thread safety: one thread. [collective] over the replicas and the ranks of shared parameters, in the same
// order on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "penstock/train/job/layout.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/train/job/replica_gradients.h"

namespace penstock::train {

class ReplicaGradientSync {
 public:
  // [collective over the replicas] Without `overlap`, finish() does
  // all the work: for gradients that are accumulated over several runs of the schedule. Throws ValueError, on
  // every rank, that names the first parameter that differs between ranks.
  ReplicaGradientSync(const RankLayout& layout, ModelStages& stages, bool overlap);

  void stage_done(int stage);
  void finish();
  // Bytes of gradients in flight.
  std::int64_t buffer_bytes() const;

 private:
  ModelStages& stages_;
  bool overlap_;
  std::optional<ReplicaGradients> copies_;   // std::nullopt without replicas
  std::optional<ReplicaGradients> experts_;  // of divided experts, which fewer ranks have
  std::map<int, std::size_t> part_of_;       // by stage
};

}  // namespace penstock::train
