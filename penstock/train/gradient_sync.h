// What happens to the gradients of a step before they are used: sums over data-parallel replicas, and over the two uses of a tied weight.
//
//   GradientSync sync(layout, stages, true);
//   ... pipeline.step(), which calls sync.stage_done(stage) where the schedule has REDUCE_GRAD ...
//   sync.finish();                         // waits; .grad() is that of the whole batch on every rank
//
// Parameters that are sharded are not this one's: their modules reduce them where the schedule says so (pipeline/sharded_modules.h).
// The sum over replicas of a stage begins when its last backward has run and goes on while other stages compute. Gradients travel in
// buckets of one dtype. They are divided by the number of replicas, as losses that are means over a rank's samples want it.
// Thread rule: one thread. [collective] over the replicas and the two ranks of a tied weight, in the same order on all.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "penstock/comm/group.h"
#include "penstock/optim/parameters.h"
#include "penstock/train/layout.h"
#include "penstock/train/model_stages.h"

namespace penstock::train {

class GradientSync {
 public:
  // Without `overlap` finish() does all of it: for gradients that several runs of the schedule add up.
  GradientSync(const RankLayout& layout, const ModelStages& stages, bool overlap);

  void stage_done(int stage);
  void finish();
  // Of gradients on their way.
  std::int64_t buffer_bytes() const;

 private:
  struct Bucket {
    std::vector<at::Tensor> gradients;  // local
    at::Tensor flat;
    comm::Work work;
  };
  void begin(const std::vector<optim::NamedParameter>& parameters);
  void add_tied();

  const ModelStages& stages_;
  int replicas_;
  std::optional<comm::Group> replica_group_;
  std::optional<comm::Group> tied_group_;
  bool overlap_;
  std::set<int> begun_;  // stages
  std::vector<Bucket> buckets_;
};

}  // namespace penstock::train
