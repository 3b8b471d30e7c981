// The position of a rank: along the pipeline, among the data-parallel replicas and in the tensor-parallel
// group.
//
//   const RankLayout layout(world, config.layout);
//   layout.pp()                                          // position along the pipeline
//   layout.mesh().group("replicas")                      // the ranks that hold the same parameters
//
// The mesh is (pp, replicas, shard, tp), row-major: tensor-parallel ranks, which communicate most, are
// adjacent; ranks of a host come first. The data-parallel dimension combines replicas and shard: dp =
// replicas * shard. A value type; see MeshGroups for thread safety.
#pragma once

#include <vector>

#include "penstock/train_config.h"
#include "penstock/world.h"

namespace penstock::train {

class RankLayout {
 public:
  // No communication. Throws ConfigError unless the world has pp * dp * tp ranks.
  RankLayout(const comm::World& world, const LayoutConfig& config);

  const comm::World& world() const { return world_; }
  const comm::MeshGroups& mesh() const { return mesh_; }
  // Mesh of the tensor-parallel ranks only.
  comm::MeshGroups tensor_mesh() const;
  // Mesh of the data-parallel ranks for fully_shard: (shard), or (replicas, shard) if there are several
  // replicas.
  comm::MeshGroups shard_mesh() const;

  int pp() const { return place_[0]; }
  int dp() const { return place_[1] * size_[2] + place_[2]; }
  int replica() const { return place_[1]; }  // index among ranks that hold the same parameters or shards
  int tp() const { return place_[3]; }
  int pp_size() const { return size_[0]; }
  int dp_size() const { return size_[1] * size_[2]; }
  int shard_size() const { return size_[2]; }
  int tp_size() const { return size_[3]; }

  // Groups for a sum over all data-parallel ranks: one over each in turn. Empty without data parallelism.
  std::vector<comm::Group> data_parallel_groups() const;

  // Global ranks of this rank's pipeline, in pipeline order.
  std::vector<int> pipeline_ranks() const;

 private:
  comm::World world_;
  comm::MeshGroups mesh_;
  int size_[4];
  int place_[4];
};

}  // namespace penstock::train
