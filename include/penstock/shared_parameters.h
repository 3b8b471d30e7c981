// Parameters that several stages of a pipeline use, such as an embedding that is also the head, or a table of
// biases of which every stage has a copy. Each use accumulates its own gradient; the gradients of all uses
// are added before the update, so that all copies stay equal.
//
//   PipelineStage stage(block, world.rank(), world.size(), at::kCPU);
//   Schedule1F1B pipeline(stage, 8, mse_loss, {world});
//   SharedParameters shared(
//       {tie({"embed.weight", "head.weight"}), tie({"relations.weight"})}, parameter_uses({stage}), {world});
//   shared.copy_values();                                       // all uses begin with equal values
//   optim::AdamW optimizer(shared.each_once(named));
//   pipeline.step(Tree::tuple({x}), {}, y);
//   shared.sum_gradients();                                     // then clip, with counts()
//   optimizer.step();
//   shared.share_values();                                      // to further uses on this rank
//
// A tie lists names; the parameters with one of these names, on any stage, are its uses. Uses on one rank
// that are not sharded share memory, and adding their gradients needs no communication. Otherwise the ranks
// that have uses, and no others, communicate. Parameters may be plain, sharded (fully_shard.h) or
// tensor-parallel (dtensor.h), on all stages alike.
//
// The sum of two gradients has the same bits in every layout. Three and more are added in the order of the
// stages if they are small (1 MiB of gradients in all), whichever ranks the stages are on; else first on
// each rank, then over the ranks. Either way all ranks get the same bits, and so do repeated runs. A use
// without a gradient counts as zeros; if no use has one, all stay without, and optimizers skip the parameter.
//
// In a bidirectional pipeline each use exists twice, with equal gradients. Ranks that together have every use
// once form a group, so that none counts twice.
//
// Thread safety: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "penstock/optimizer.h"
#include "penstock/stage.h"
#include "penstock/stage_placement.h"
#include "penstock/world.h"

namespace penstock {

// Declares that all parameters with these names, on any stage, are one parameter.
struct ParameterTie {
  std::vector<std::string> names;  // the first one names the parameter in optimizers and checkpoints
};

// Returns a tie of these names. One name ties the copies that several stages have under it.
ParameterTie tie(std::vector<std::string> names);

// A parameter of a stage of this rank. Those that no tie names are ignored.
struct ParameterUse {
  std::string name;      // in the whole model; two uses of one stage may have the same
  int stage = 0;         // position of the stage in the model
  at::Tensor parameter;  // an autograd leaf of its own
};

// Returns the parameters of these stages under the names of named_parameters(). If a stage has several
// modules, names begin with the index of the module: "0.weight".
std::vector<ParameterUse> parameter_uses(const std::vector<PipelineStage>& stages);
// The same for the stages of a bidirectional schedule: both copies of a part have the position of the part.
std::vector<ParameterUse> parameter_uses(const std::vector<PipelineStage>& stages,
                                         const schedule::StageMap& map);

// Options of SharedParameters. `world` has no default.
struct SharedParameterOptions {
  comm::World world;            // the processes
  std::vector<int> ranks = {};  // ranks of the pipeline in order; empty: all ranks of the world
};

// The shared parameters of one pipeline, seen from one of its ranks.
class SharedParameters {
 public:
  // [collective over the pipeline] Every rank passes the same ties. Uses on this rank that are not sharded
  // share memory afterwards: that of the first one. Throws ValueError that names the tie, with the same text
  // on every rank: for ties that differ between ranks, a tie without names or with a name of another tie, a
  // name that no stage has, and uses that differ in shape, dtype, placements or requires_grad.
  SharedParameters(const std::vector<ParameterTie>& ties, const std::vector<ParameterUse>& uses,
                   const SharedParameterOptions& options);
  // Releases it; not collective.
  ~SharedParameters();
  // Moved-from objects can only be destroyed.
  SharedParameters(SharedParameters&&) noexcept;

  // [collective over the ranks with uses of a tie] Gives every use the values of the first one.
  void copy_values();
  // [collective over the ranks with uses of a tie, and over the meshes of distributed parameters] Adds the
  // gradients of all uses. Afterwards the first use of each rank has the sum, and its further uses have no
  // gradient. Call it once per step, before gradients are averaged over replicas, clipped or applied.
  void sum_gradients();
  // Copies the values of the first use on this rank to its further uses, unless they share memory. Call it
  // after an update and after loading a checkpoint. No communication.
  void share_values();
  // Discards the gradients of further uses, which optimizers do not know.
  void clear_gradients();

  // Returns whether this tensor is a use of a tie that has several uses, on this rank or others.
  bool is_shared(const at::Tensor& parameter) const;
  // Returns whether another use on this rank comes first and represents it in optimizers and checkpoints.
  bool is_further_use(const at::Tensor& parameter) const;
  // For norms over the ranks of a pipeline (ClipOptions::counts): returns false for all uses of a tie but
  // one. A tensor that is not shared counts.
  bool counts(const at::Tensor& parameter) const;
  // Returns the further uses of this rank.
  std::vector<at::Tensor> further_uses() const;
  // Returns the parameters for an optimizer or a checkpoint: without further uses, and with the first name of
  // their tie, under which other ranks list their copies too.
  std::vector<optim::NamedParameter> each_once(const std::vector<optim::NamedParameter>& parameters) const;

  // Describes each tie of several uses in one line: its uses and the ranks that add their gradients. Empty
  // for a pipeline of one rank.
  std::vector<std::string> report() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock
