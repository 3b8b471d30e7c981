// What fully_shard and replicate (fully_shard.h) let you choose, apart from the mesh: dtypes, where each
// parameter is cut, what happens after forward, CPU offload, and how shards are encoded when they are sent.
//
//   ShardOptions options{.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
//   options.reshard_after_forward = false;                   // keep parameters gathered until backward
//   options.shard_placement = [](const std::string& name, const at::Tensor& parameter) {
//     return ShardChoice(Shard{name.ends_with("down.weight") && parameter.dim() == 2 ? 1 : 0});
//   };
//   options.extension = [](const std::string&, const at::Tensor& parameter) {
//     return parameter.dim() >= 2 ? int8_gather() : nullptr;        // matrices are sent as 8-bit integers
//   };
//
// Options are values; fully_shard copies them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/placement.h"
#include "penstock/world.h"

namespace penstock {

// The dtypes of gathered parameters, gradients and activations. std::nullopt means no cast. Parameters that
// are not floating point keep their dtype.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype;   // of the gathered parameter, and of the bytes sent
  std::optional<at::ScalarType> reduce_dtype;  // for reducing gradients; default: the dtype of the gradient
  std::optional<at::ScalarType> output_dtype;  // of what ForwardScope::output returns
  // Casts floating point inputs of the operators that take a parameter, and of ForwardScope::input.
  bool cast_forward_inputs = true;
};

// Where shards are stored.
struct OffloadPolicy {
  bool to_cpu = false;     // shards, their gradients and therefore the optimizer state are in CPU memory
  bool pin_memory = true;  // page-locked, if there is a CUDA device
};

// After forward, keep this rank's part of the gathered parameters among `ranks` neighbours, so that the
// gather of backward uses fewer links.
struct ReshardTo {
  int ranks;  // divides the size of the shard axis
};

// After forward: true frees the gathered parameters, false keeps them until backward, ReshardTo keeps a part.
using ReshardAfterForward = std::variant<bool, ReshardTo>;

// Where one parameter is cut, and over which ranks.
struct ShardChoice {
  ShardChoice() = default;                    // dim 0
  ShardChoice(std::nullopt_t) {}              // dim 0
  ShardChoice(Shard shard) : shard(shard) {}  // this dim
  // This dim, or dim 0 if there is none.
  ShardChoice(const std::optional<Shard>& shard) : shard(shard.value_or(Shard{0})) {}
  // This dim, over the ranks of another mesh.
  ShardChoice(Shard shard, comm::MeshGroups mesh) : shard(shard), mesh(std::move(mesh)) {}

  Shard shard{0};  // the dim
  // Replaces the mesh passed to fully_shard, for parameters that fewer ranks share, such as those of experts:
  // one axis that shards, or two, the first of which replicates. Gradients are averaged over this mesh alone.
  // Parameters of one module with the same mesh form a group.
  std::optional<comm::MeshGroups> mesh;
};

// Called with the parameter's name and value. All ranks of a returned mesh must return it for the same
// parameters.
using ShardPlacementFunction =
    std::function<ShardChoice(const std::string& name, const at::Tensor& parameter)>;

class AllGatherExtension;

// Called with the parameter's name and value; null means that the parameter is gathered without an extension.
using ExtensionFunction = std::function<std::shared_ptr<const AllGatherExtension>(
    const std::string& name, const at::Tensor& parameter)>;

// The options of fully_shard and replicate.
struct ShardOptions {
  // Default: true, but false for the outermost module, whose parameters backward needs first.
  std::optional<ReshardAfterForward> reshard_after_forward;
  ShardPlacementFunction shard_placement;  // where each parameter is cut; default: dim 0, on the given mesh
  MixedPrecision mixed_precision;          // dtypes; default: no casts
  OffloadPolicy offload;                   // to CPU memory; default: off
  ExtensionFunction extension;             // encodes what is sent; default: none
  std::vector<at::Tensor> ignored;         // parameters that are not sharded
  // Axes of the mesh along which parameters are cut, by name. Default: the axis of a one-dim mesh, or the
  // second of two. If names are given, the mesh may have further axes, those of tensor-parallel parameters.
  std::vector<std::string> shard_axes;
  // Axes along which parameters are repeated, by name. Default: the first of two axes.
  std::vector<std::string> replicate_axes;
};

// One gathered parameter as the ranks encoded it.
struct GatheredBytes {
  // [ranks, encoded_bytes]; filled by every gather; has no memory between gathers.
  at::Tensor rows;
  std::vector<std::int64_t> shape;                      // of the gathered parameter
  std::int64_t dim = 0;                                 // along which the pieces of the ranks are joined
  at::ScalarType dtype;                                 // of the gathered parameter
  std::shared_ptr<const AllGatherExtension> extension;  // decodes the rows
};

// Customizes how a parameter's shard is sent to the other ranks, and what the gathered parameter is:
// quantized gathers (int8_gather), compression, custom formats. Derive from it, and attach it by
// ShardOptions::extension.
//
// Each rank encodes its shard into bytes and decodes the bytes of every rank into its piece of the gathered
// parameter. All ranks send the same number of bytes, so this number depends only on the padded size of a
// shard, which every rank knows; shorter shards (the dim does not divide evenly) are padded with zeros before
// they are encoded. An error in `encode` fails on this rank and is reported to every other rank.
//
// While gathered, the parameter is a plain decoded tensor or, with keeps_encoded(), a tensor subclass over
// the received bytes: a gathered group then uses only the memory of its encoded form. Its gradient is a
// plain tensor in both cases.
// Thread safety: const; called by the thread that runs forward or backward.
class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  // The number of bytes for a padded shard of `numel` elements; the same on every rank.
  virtual std::int64_t encoded_bytes(std::int64_t numel, at::ScalarType dtype) const = 0;

  // `shard`: [numel], the padded shard in the parameter's own dtype. `bytes`: [encoded_bytes], to be filled
  // completely.
  virtual void encode(const at::Tensor& shard, const at::Tensor& bytes) const = 0;

  // `bytes`: what one rank encoded. `piece`: [numel] elements of the gathered parameter's dtype; padding is
  // cut off afterwards.
  virtual void decode(const at::Tensor& bytes, const at::Tensor& piece) const = 0;

  // Whether the gathered parameter keeps the received bytes. The same on every rank. Not for distributed
  // parameters.
  virtual bool keeps_encoded() const { return false; }

  // With keeps_encoded(), called once per parameter: returns the tensor that represents the gathered
  // parameter, a subclass (tensor_subclass.h) of the given shape and dtype. Its payload must return parts
  // of `rows` from inner_tensors(), and its views must be made with `viewed`, so that backward finds the
  // group they belong to.
  // Default: a subclass that decodes the bytes for each operator and cannot be written to.
  virtual at::Tensor make_gathered(const GatheredBytes& bytes) const;
};

// Options of int8_gather.
struct Int8GatherOptions {
  std::int64_t block = 128;  // number of values that share a scale
  // The gathered parameter stays in 8 bits: it uses less memory, but each operator decodes it.
  bool keep_encoded = false;
};

// Gathers parameters as 8-bit integers with one scale per block: a quarter of the bytes of float32, half of
// those of bfloat16. A block of values v is sent as round(v / s) with s = max|v| / 127 in float32: the
// error of the gathered parameter is at most s/2. The shard itself, and so the optimizer, stays exact.
// Every rank computes with the same gathered values, including its own shard.
// Throws ValueError for a block smaller than 1.
std::shared_ptr<const AllGatherExtension> int8_gather(const Int8GatherOptions& options);
// The same with this block size and otherwise default options.
std::shared_ptr<const AllGatherExtension> int8_gather(std::int64_t block = 128);

}  // namespace penstock
