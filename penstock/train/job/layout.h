// The position of a rank: along the pipeline, among the data-parallel replicas and in the tensor-parallel
// group.
//
//   const RankLayout layout(world, config.layout);
//   layout.pp()                                          // position along the pipeline
//   layout.copies()                                      // the ranks that hold the same parameters
//
// The mesh is (pp, replicas, shard, ep, tp), row-major: tensor-parallel ranks, which communicate most, are
// adjacent, then those that exchange rows of experts; ranks of a host come first. The data-parallel dimension
// combines three axes: dp = replicas * shard * ep.
//
//                         replicas      shard        ep     who has a parameter
//   shard 1               dp / ep       1            ep     all dp ranks; an expert: dp / ep ranks
//   shard > 1             dp / shard    shard / ep   ep     sharded over shard * ep; an expert over shard
//
// A value type; see MeshGroups for thread safety.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "penstock/train_config.h"
#include "penstock/world.h"

namespace penstock::train {

// Whether a parameter is one of experts that are divided over expert-parallel ranks: its mesh has the axis
// "ep".
bool is_divided_expert(const at::Tensor& parameter);

class RankLayout {
 public:
  // No communication. Throws ConfigError unless the world has pp * dp * tp ranks.
  RankLayout(const comm::World& world, const LayoutConfig& config);

  const comm::World& world() const { return world_; }
  const comm::MeshGroups& mesh() const { return mesh_; }
  // Mesh for ModelStage::parallelize: those of the axes "ep" and "tp" that have several ranks. std::nullopt
  // if neither has.
  std::optional<comm::MeshGroups> split_mesh() const;
  // Mesh of the data-parallel ranks for fully_shard: one axis that shards, or (replicas, shard) if there are
  // several replicas. Experts are divided already: theirs lacks the axis ep.
  comm::MeshGroups shard_mesh() const;
  comm::MeshGroups expert_shard_mesh() const;
  // [collective on first use] The ranks that hold the same parameters if nothing is sharded: all
  // data-parallel ranks. Of experts: those along replicas.
  comm::Group copies() const;
  comm::Group expert_copies() const { return mesh_.group("replicas"); }

  int pp() const { return place_[0]; }
  int dp() const { return (place_[1] * size_[2] + place_[2]) * size_[3] + place_[3]; }
  int tp() const { return place_[4]; }
  int pp_size() const { return size_[0]; }
  int dp_size() const { return size_[1] * size_[2] * size_[3]; }
  int ep_size() const { return size_[3]; }
  int tp_size() const { return size_[4]; }
  bool is_sharded() const { return sharded_; }
  // Index among the ranks that hold the same values of a parameter, or of its shard.
  int copy_of(const at::Tensor& parameter) const;

  // Global ranks of this rank's pipeline, in pipeline order.
  std::vector<int> pipeline_ranks() const;

 private:
  comm::World world_;
  comm::MeshGroups mesh_;
  bool sharded_;
  int size_[5];
  int place_[5];
};

}  // namespace penstock::train
