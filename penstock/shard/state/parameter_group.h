// Parameters that are gathered and reduced together, in one collective each.
//
// States of a group, and so of each of its parameters (which stay the same tensor objects through all of them):
//
//   Sharded             the parameter is a distributed tensor; this rank holds its shard. Nothing else takes memory.
//   Unsharded           the parameter is the whole tensor (or the tensor-parallel one it was), in the compute dtype.
//   ShardedPostForward  as Sharded; beside it this rank keeps a slice of the gathered bytes, for a gather among fewer ranks.
//
//            unshard, wait_for_unshard                     reshard
//   Sharded ---------------------------> Unsharded -------------------> Sharded
//   ShardedPostForward ----------------> Unsharded -- reshard_after_forward(ReshardTo) --> ShardedPostForward
//
// Memory. The shards of a group lie in one flat buffer, each padded to the size of the first rank's; an all-gather sends that
// buffer as it is unless dtypes are cast. The gathered parameters lie in one storage, which is filled and emptied, never replaced:
// what autograd saved of them is valid again after the next gather. Who uses such a saved tensor triggers the gather (trigger.cpp).
//
// Gradients come from autograd as whole tensors and are held here until they are reduced; `grad()` of a parameter is always its
// sharded gradient.
// Thread rule: one thread at a time; backward may run on another thread than forward.
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

#include "penstock/comm/group/work.h"
#include "penstock/shard/pieces/buffer_pool.h"
#include "penstock/shard/pieces/policies.h"
#include "penstock/shard/pieces/shard_mesh.h"
#include "penstock/torch/dispatch/gradient_sink.h"
#include "penstock/random.h"

namespace penstock {

class ShardContext;
class ShardState;
struct ShardTimes;

enum class ShardGroupState { Sharded, ShardedPostForward, Unsharded };
std::string_view to_text(ShardGroupState state);

// One parameter of a group. Tensors here are templates that share memory with the parameter.
struct ShardedParameter {
  std::string name;                   // in the module that was sharded
  std::string path;                   // in the outermost module that was sharded around it
  c10::weak_intrusive_ptr<c10::TensorImpl> handle;
  ParameterPlacement placement;
  at::ScalarType dtype;               // of the shard
  at::ScalarType compute_dtype;       // of the gathered parameter
  std::shared_ptr<const AllGatherExtension> extension;
  bool keeps_encoded = false;         // gathered in the form of the extension

  std::int64_t shard_byte = 0;        // where its padded shard begins in the flat buffer
  std::int64_t row_byte = 0, row_bytes = 0;  // its part of what a rank sends
  std::int64_t whole_byte = 0;        // where it begins in the gathered storage

  at::Tensor padded;                  // [padded_numel], a view of the flat buffer
  at::Tensor sharded;                 // distributed
  at::Tensor whole;                   // plain, over the gathered storage; of a kept encoding: [ranks, row_bytes] bytes
  at::Tensor unsharded;               // `whole`, or distributed as the parameter was, or what the extension makes of the bytes

  at::Tensor gradient;                // whole, of the backwards since the last reduction
  bool gradient_owned = false;        // made here, so it may be added to in place
  bool arrived = false;               // in the backward that runs
  bool replaced = false;              // set_data gave the parameter other data, which is not taken over yet
  // The gathered parameter cast by `to`, where that rounds otherwise than a cast of the shard would: Module::to is about to set it.
  struct Cast {
    c10::weak_intrusive_ptr<c10::TensorImpl> result;
    std::uint32_t version;            // of the result: who writes it means other values
    at::ScalarType dtype;             // asked for; the shard's if none was
  };
  std::optional<Cast> cast;
  std::optional<at::ScalarType> recast;  // what replaced it is such a cast: the shard takes this dtype and keeps its values

  at::Tensor parameter() const;       // undefined when the module is gone
  const ShardLayout& layout() const { return placement.layout; }
  std::string to_string() const;      // "'blocks.0.weight' float32[12, 5] as [S(0)]", with the whole size, for errors
};

struct ShardGroupParameter {
  std::string name;
  at::Tensor tensor;
  Shard shard{0};
};

// What backward does with gradients; all on by default.
struct BackwardFlags {
  bool reduce = true;                 // else gradients stay whole and are added up
  bool all_reduce = true;             // over replicas (HSDP); else the reduced shards are added up on this rank
  bool reshard = true;                // after backward
  bool last = true;                   // wait for reductions at the end of backward
};

class ShardGroup final : public GradientSink {
 public:
  // Shards the parameters where they stand. Fake ones get their layout and wait for materialize().
  ShardGroup(std::string name, ShardMesh mesh, ShardOptions options, std::vector<ShardGroupParameter> parameters);
  ~ShardGroup() override;
  ShardGroup(const ShardGroup&) = delete;
  ShardGroup& operator=(const ShardGroup&) = delete;

  const std::string& name() const { return name_; }
  ShardGroupState state() const { return state_; }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  const ShardMesh& mesh() const { return mesh_; }
  const ShardOptions& options() const { return options_; }

  // [collective over the shard axis] Starts the gather; nothing to do where it runs or has been done.
  void unshard();
  // Ends it: parameters are whole afterwards. Starts it where nobody has.
  void wait_for_unshard();
  bool unshard_pending() const { return gather_.has_value(); }
  // Frees the gathered memory. Nothing to do in a sharded state. A gather that is on its way is waited for.
  void reshard();
  // As the options say: free, keep, or keep a slice.
  void reshard_after_forward();
  // [collective] What follows when all gradients of a backward are there: reshard, and reduce or keep. Called by backward itself;
  // a pipeline calls it by hand.
  void post_backward();

  BackwardFlags flags;
  // Gradients are summed and divided by this. Default: the number of data-parallel ranks.
  std::optional<double> gradient_divide_factor;
  bool reshards_after_forward() const;
  void set_reshard_after_forward(ReshardAfterForward value);

  // While it is held forward does not free it: who holds it says when (the schedule of a pipeline).
  void set_held(bool held) { held_ = held; }
  // Gives up the gradients of backwards that are not reduced yet, and what is known of their uses.
  void forget_gradients();

  // ---- trial runs (StepContext::trial) ----
  // Until end_trial the parameters have the shape, dtype and placements of gathered ones but not their values: they are fake, or else zeros.
  // Inputs are cast as in a real run; nothing is gathered, freed or reduced, and no gradient is taken. Trials nest.
  void begin_trial(bool fake);
  void end_trial();
  bool in_trial() const { return !trials_.empty(); }

  // Writes into gathered parameters are kept (else they are refused): between, the group is Unsharded.
  void begin_writes();
  void end_writes();  // takes this rank's part of what was written
  bool writable() const { return writable_; }

  // After the shard of a parameter was replaced from outside (a load that set new data): takes it over. Nothing to do where the
  // parameter still holds this group's memory.
  void reset_sharded_parameter(std::size_t index);
  // Makes another tensor object the parameter: it is sharded where it stands, with its own value. The old object is a parameter no more.
  void adopt_object(std::size_t index, const at::Tensor& object);

  // Somebody calls set_data on a parameter (so does Module::to): the next use of it takes the data over.
  void note_replaced(std::size_t slot, const at::Tensor& data);
  // `result` is what casting the gathered parameter gave. `dtype`: asked for.
  void note_cast(std::size_t slot, const at::Tensor& result, std::optional<at::ScalarType> dtype);
  bool is_replaced(std::size_t slot) const { return parameters_[slot].replaced; }
  // Takes over what set_data put in the place of parameters: whole values, equal on all ranks, or distributed ones that lie as the
  // shard or as the parameter before fully_shard did. A dtype that changed is the parameter's from now on. The group is Sharded afterwards,
  // unless it is being written. Throws ValueError for another shape, layout or device: such a parameter cannot be used.
  void adopt_replaced();

  bool materialized() const { return materialized_; }
  // Memory for shards of fake parameters, then `fill(parameter, piece, box)` for each: no rank ever holds a whole parameter.
  using ShardInitializer = std::function<void(const std::string& name, const at::Tensor& shard, const GlobalBox& box)>;
  void materialize(const ShardInitializer& fill, at::Device device);

  // Bytes that the group takes now: shards, gathered parameters and buffers, whole gradients.
  struct Memory {
    std::int64_t shards = 0, gathered = 0, gradients = 0;
  };
  Memory memory() const;
  std::int64_t gathered_bytes() const;

  // Before somebody writes shards: gives up a gather that was started ahead, as its values will be old, and waits until the device
  // has read offloaded shards, which it does from CPU memory while the CPU continues.
  void before_shards_change();

  // ---- for the other parts of this folder ----
  void take(std::size_t slot, at::Tensor gradient) override;
  // A forward that records gradients uses the group.
  void note_use() { recorded_ = true; }
  void forget_use() { recorded_ = false; }
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
  bool recorded() const { return recorded_; }  // whether one has, since the last backward ended
  bool has_arrivals() const;  // gradients that post_backward has not seen
  // Whether nobody has chosen what happens after forward; then the place of the module decides.
  bool reshard_is_default() const { return reshard_is_default_; }
  void set_reshard_default(bool value) { reshard_after_forward_ = value; }
  // Says what all ranks must have alike.
  std::uint64_t fingerprint() const;
  std::vector<at::Tensor> partial_reductions;  // reduced over shards, not yet over replicas

 private:
  struct Gather {
    at::Tensor sent, received;  // bytes; received: [ranks, row bytes]
    comm::Work work;
    bool from_slice = false;
    std::optional<c10::Stream> stream;  // that it was started on, if not the computing one
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

  at::Tensor flat_;                     // bytes: every padded shard, by item size
  std::int64_t flat_bytes_ = 0, row_bytes_ = 0, whole_bytes_ = 0;
  bool row_is_flat_ = false;            // what is sent is the flat buffer itself
  bool whole_is_flat_ = false;          // one shard, no cast: the gathered storage is the flat buffer's memory
  c10::intrusive_ptr<c10::StorageImpl> whole_;
  at::Tensor slice_;                    // of the gathered bytes, in ShardedPostForward
  std::optional<Gather> gather_;
  // What the parameters are in a trial, one list for each that has begun.
  std::vector<std::vector<at::Tensor>> trials_;
  std::vector<const void*> trial_memory_;  // registered as this group's until the last trial ends
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> retired_;  // gathered storages of earlier dtypes: graphs may still look at them
  std::optional<c10::Stream> reads_;    // on which shards may still be read from CPU memory
  bool writable_ = false;
  bool replaced_ = false;               // some parameter is
  bool held_ = false;
  bool recorded_ = false;
  bool materialized_ = true;

  ShardState* owner_ = nullptr;
  std::shared_ptr<ShardContext> context_;
  BufferPool pool_;
};

}  // namespace penstock
