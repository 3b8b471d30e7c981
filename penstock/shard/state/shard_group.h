// Parameters that are gathered and reduced together, in one collective each.
//
// States of a group and of each of its parameters (which remain the same tensor objects in all states):
//
//   Sharded             the parameter is a distributed tensor; this rank holds its shard and nothing else.
//   Unsharded           the parameter is the whole tensor (or the original tensor-parallel one), in the
//                       compute dtype.
//   ShardedPostForward  like Sharded, but this rank also keeps a slice of the gathered bytes, for a gather
//                       among fewer ranks.
//
//            unshard, wait_for_unshard                     reshard
//   Sharded ---------------------------> Unsharded -------------------> Sharded
//   ShardedPostForward ----------------> Unsharded -- reshard_after_forward(ReshardTo) --> ShardedPostForward
//
// Memory. The shards of a group are stored in one flat buffer, each padded to the size of the first rank's;
// an all-gather sends that buffer directly unless dtypes are cast. The gathered parameters are stored in one
// storage, which is filled and released but never replaced: tensors that autograd saved are valid again after
// the next gather. Using such a saved tensor triggers the gather (trigger.cpp).
//
// Gradients come from autograd as whole tensors and are held here until they are reduced; `grad()` of a
// parameter is always its sharded gradient.
// Thread safety: one thread at a time; backward may run on a different thread than forward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/fully_shard.h"
#include "penstock/group.h"
#include "penstock/random.h"
#include "penstock/shard/pieces/buffer_pool.h"
#include "penstock/shard/pieces/shard_mesh.h"
#include "penstock/shard_options.h"
#include "penstock/torch/dispatch/gradient_sink.h"

namespace penstock {

class ShardContext;

enum class ShardGroupState { Sharded, ShardedPostForward, Unsharded };
std::string_view to_text(ShardGroupState state);

// One parameter of a group. The tensors here are templates that share memory with the parameter.
struct ShardedParameter {
  std::string name;  // in the module that was sharded
  std::string path;  // in the outermost sharded module that contains it
  c10::weak_intrusive_ptr<c10::TensorImpl> handle;
  ParameterPlacement placement;
  at::ScalarType dtype;          // of the shard
  at::ScalarType compute_dtype;  // of the gathered parameter
  std::shared_ptr<const AllGatherExtension> extension;
  bool keeps_encoded = false;  // stays in the encoding of the extension when gathered

  std::int64_t shard_byte = 0;               // offset of its padded shard in the flat buffer
  std::int64_t row_byte = 0, row_bytes = 0;  // its part of what a rank sends
  std::int64_t whole_byte = 0;               // offset in the gathered storage

  at::Tensor padded;   // [padded_numel], a view of the flat buffer
  at::Tensor sharded;  // distributed
  // Plain, over the gathered storage; for a kept encoding: [ranks, row_bytes] bytes.
  at::Tensor whole;
  // `whole`, or distributed like the original parameter, or what the extension makes of the bytes.
  at::Tensor unsharded;

  at::Tensor gradient;          // whole, accumulated since the last reduction
  bool gradient_owned = false;  // allocated here, so it may be accumulated into in place
  bool arrived = false;         // in the current backward
  bool replaced = false;        // set_data gave the parameter other data, which is not adopted yet
  // The gathered parameter cast by `to`, if that rounds differently than a cast of the shard: Module::to is
  // about to set it as the parameter's data.
  struct Cast {
    c10::weak_intrusive_ptr<c10::TensorImpl> result;
    std::uint32_t version;  // of the result: a later write means that it holds other values
    at::ScalarType dtype;   // requested; the shard's if none was
  };
  std::optional<Cast> cast;
  // The replacement is such a cast: the shard takes this dtype and keeps its values.
  std::optional<at::ScalarType> recast;

  at::Tensor parameter() const;  // undefined if the module no longer exists
  const ShardLayout& layout() const { return placement.layout; }
  // "'blocks.0.weight' float32[12, 5] as [S(0)]", with the whole size, for errors.
  std::string to_string() const;
};

struct ShardGroupParameter {
  std::string name;
  at::Tensor tensor;
  Shard shard{0};
};

// What backward does with gradients; all on by default.
struct BackwardFlags {
  bool reduce = true;  // otherwise gradients stay whole and are accumulated
  // Over replicas (HSDP); otherwise the reduced shards are accumulated on this rank.
  bool all_reduce = true;
  bool reshard = true;  // after backward
  bool last = true;     // wait for reductions at the end of backward
};

class ShardGroup final : public GradientSink {
 public:
  // Shards the parameters in place. Fake ones get their layout and wait for materialize().
  ShardGroup(std::string name, ShardMesh mesh, ShardOptions options,
             std::vector<ShardGroupParameter> parameters);
  ~ShardGroup() override;
  ShardGroup(const ShardGroup&) = delete;
  ShardGroup& operator=(const ShardGroup&) = delete;

  const std::string& name() const { return name_; }
  ShardGroupState state() const { return state_; }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  const ShardMesh& mesh() const { return mesh_; }
  const ShardOptions& options() const { return options_; }

  // [collective over the shard axis] Starts the gather; does nothing if it is running or done.
  void unshard();
  // Waits for the gather, and starts it if necessary: the parameters are whole afterwards.
  void wait_for_unshard();
  bool unshard_pending() const { return gather_.has_value(); }
  // Frees the gathered memory. Does nothing in a sharded state. Waits for a gather that is in progress.
  void reshard();
  // Frees, keeps, or keeps a slice, according to the options.
  void reshard_after_forward();
  // [collective] Called when all gradients of a backward have arrived: reshards, and reduces or keeps the
  // gradients. Backward calls it itself; a pipeline calls it explicitly.
  void post_backward();

  BackwardFlags flags;
  // Gradients are summed and divided by this. Default: the number of data-parallel ranks.
  std::optional<double> gradient_divide_factor;
  bool reshards_after_forward() const;
  void set_reshard_after_forward(ReshardAfterForward value);

  // While held, the group is not freed by forward: the holder decides when (the schedule of a pipeline).
  void set_held(bool held) { held_ = held; }
  bool held() const { return held_; }
  // Discards gradients that are not reduced yet, and the record of which forwards used the group.
  void discard_gradients();

  // ---- trial runs (StepContext::trial) ----
  // Until end_trial the parameters have the shape, dtype and placements of gathered ones but not their
  // values: they are fake or zeros. Inputs are cast as in a real run; nothing is gathered, freed or reduced,
  // and gradients are ignored. Trials can be nested.
  void begin_trial(bool fake);
  void end_trial();
  bool in_trial() const { return !trials_.empty(); }

  // Between the two calls the group is Unsharded and writes into gathered parameters are kept; otherwise they
  // are rejected. Pairs of calls can be nested; the last end_writes ends the writing.
  void begin_writes();
  // Copies this rank's part of the written values. Where a gathered parameter is rounded (another dtype, an
  // extension), elements that still have their gathered value keep the exact value of the shard.
  void end_writes();
  bool writable() const { return writers_ > 0; }

  // Adopts the shard of a parameter that was replaced from outside (a load that set new data). Does nothing
  // if the parameter still holds this group's memory.
  void reset_sharded_parameter(std::size_t index);
  // Makes another tensor object the parameter: it is sharded in place, with its own value. The old object is
  // no longer a parameter.
  void adopt_object(std::size_t index, const at::Tensor& object);

  // Called when someone calls set_data on a parameter (as Module::to does): the next use of it adopts the
  // data.
  void note_replaced(std::size_t slot, const at::Tensor& data);
  // `result` is the gathered parameter after a cast. `dtype`: the requested one.
  void note_cast(std::size_t slot, const at::Tensor& result, std::optional<at::ScalarType> dtype);
  bool is_replaced(std::size_t slot) const { return parameters_[slot].replaced; }
  // Adopts data that set_data put in the place of parameters: whole values, equal on all ranks, or
  // distributed ones placed like the shard or like the parameter before fully_shard. A changed dtype becomes
  // the parameter's dtype. The group is Sharded afterwards, unless it is being written. Throws ValueError for
  // another shape, layout or device: such a parameter cannot be used.
  void adopt_replaced();

  bool materialized() const { return materialized_; }
  // Allocates shards of fake parameters, then calls `fill(parameter, piece, box)` for each: no rank ever
  // holds a whole parameter.
  void materialize(const ShardInitializer& fill, at::Device device);

  // The group's current bytes: shards, gathered parameters and buffers, whole gradients.
  struct Memory {
    std::int64_t shards = 0, gathered = 0, gradients = 0;
  };
  Memory memory() const;
  std::int64_t gathered_bytes() const;

  // Called before shards are written: cancels a gather that was started ahead and discards the slice kept
  // after forward, because their values will be outdated, and waits until the device has read offloaded
  // shards, which it does from CPU memory while the CPU continues.
  void before_shards_change();

  // ---- for the other parts of this folder ----
  void take(std::size_t slot, at::Tensor gradient) override;
  // Called when a forward that records gradients uses the group.
  void note_use() { recorded_ = true; }
  void clear_use() { recorded_ = false; }
  ShardContext& context();
  bool has_context() const { return context_ != nullptr; }
  ShardTimes* times() const;  // null before the first use
  void set_owner(ShardState* owner) { owner_ = owner; }
  ShardState* owner() const { return owner_; }
  void set_context(std::shared_ptr<ShardContext> context) { context_ = std::move(context); }
  const BufferPool& pool() const { return pool_; }
  void set_pool(const BufferPool& pool) { pool_ = pool; }
  at::Device device() const { return device_; }
  std::vector<ShardedParameter>& mutable_parameters() { return parameters_; }
  bool has_trainable() const;
  bool recorded() const { return recorded_; }  // since the last backward ended
  bool has_unprocessed_gradients() const;      // gradients that post_backward has not processed
  // Whether the behaviour after forward was not chosen explicitly; it then depends on the position of the
  // module.
  bool reshard_is_default() const { return reshard_is_default_; }
  void set_reshard_default(bool value) { reshard_after_forward_ = value; }
  // A hash of everything that must be the same on all ranks.
  std::uint64_t fingerprint() const;
  std::vector<at::Tensor> partial_reductions;  // reduced over shards, not yet over replicas

 private:
  struct Gather {
    at::Tensor sent, received;  // bytes; received: [ranks, row bytes]
    comm::Work work;
    bool from_slice = false;
    std::optional<c10::Stream> stream;  // it was started on, if not the compute stream
  };

  void plan_memory();
  void allocate_shards();  // zeros, where and how the offload policy says
  void make_templates();
  void fill_row(const at::Tensor& row);
  void end_gather(Gather& gather);
  void copy_out(const at::Tensor& received);
  void allocate_whole();
  void free_whole();
  void switch_all(bool to_unsharded);
  at::Tensor local_gradient(const ShardedParameter& parameter, const at::Tensor& gradient) const;
  void check_materialized() const;
  bool holds_own_data(const ShardedParameter& parameter, const at::Tensor& tensor) const;
  void check_replacement(const ShardedParameter& parameter, const at::Tensor& tensor) const;
  void change_dtypes(const std::vector<std::pair<ShardedParameter*, at::ScalarType>>& dtypes);
  at::Tensor own_shard(const ShardedParameter& parameter) const;  // of this rank, over the flat buffer

  std::string name_;
  ShardMesh mesh_;
  ShardOptions options_;
  ReshardAfterForward reshard_after_forward_ = true;
  bool reshard_is_default_ = true;
  std::vector<ShardedParameter> parameters_;
  ShardGroupState state_ = ShardGroupState::Sharded;
  at::Device device_ = at::kCPU;

  at::Tensor flat_;  // bytes: every padded shard, by item size
  std::int64_t flat_bytes_ = 0, row_bytes_ = 0, whole_bytes_ = 0;
  bool row_is_flat_ = false;    // what is sent is the flat buffer itself
  bool whole_is_flat_ = false;  // one shard, no cast: the gathered storage is the flat buffer's memory
  c10::intrusive_ptr<c10::StorageImpl> whole_;
  at::Tensor slice_;  // of the gathered bytes, in ShardedPostForward
  std::optional<Gather> gather_;
  // The parameters during trials, one list for each trial that has begun.
  std::vector<std::vector<at::Tensor>> trials_;
  std::vector<const void*> trial_memory_;  // registered as this group's until the last trial ends
  // Gathered storages of earlier dtypes, which autograd graphs may still refer to.
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> retired_;
  std::optional<c10::Stream> reads_;  // on which shards may still be read from CPU memory
  int writers_ = 0;                   // calls of begin_writes without their end_writes
  // While writable, by parameter: this rank's piece as it was gathered, if rounded; undefined otherwise.
  std::vector<at::Tensor> before_writes_;
  bool replaced_ = false;  // whether some parameter is replaced
  bool held_ = false;
  bool recorded_ = false;
  bool materialized_ = true;

  ShardState* owner_ = nullptr;
  std::shared_ptr<ShardContext> context_;
  BufferPool pool_;
};

}  // namespace penstock
