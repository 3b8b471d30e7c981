// Interface of a communication library that a Group uses: raw, contiguous, unchecked operations that start
// and return a Transfer. Group adds checks, deadlines, records, staging, and compositions for operations that
// a backend lacks.
//
// Ranks here are positions within the group. Collectives must be started in the same order on every member.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/comm/rendezvous/store.h"
#include "penstock/comm/secure/sha256.h"
#include "penstock/comm/transport/transfer.h"
#include "penstock/reduce_op.h"

namespace penstock::comm {

using TransferPtr = std::shared_ptr<Transfer>;

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;

  // Which operations the backend implements itself; Group composes the others. Queried once, when a group is
  // created.
  struct Abilities {
    bool all_gather = false;      // into one tensor
    bool reduce_scatter = false;  // with a result that does not depend on timing
    bool average = false;         // ReduceOp::Avg
    bool half_sums = false;       // float16 and bfloat16 sums accumulated in float32 or better
    bool self_transfer = false;   // send to and receive from the own rank within one batch
    bool needs_batch = false;  // several point-to-point operations must be bracketed by begin_batch/end_batch
  };
  virtual Abilities abilities() const = 0;

  // Transfers match by (peer, key) in order. NCCL matches by peer alone.
  virtual TransferPtr send(const at::Tensor& tensor, int peer, std::uint64_t key) = 0;
  virtual TransferPtr recv(const at::Tensor& tensor, int peer, std::uint64_t key) = 0;
  virtual void begin_batch() {}
  virtual TransferPtr end_batch() { return nullptr; }

  virtual TransferPtr all_reduce(const at::Tensor& tensor, ReduceOp op) = 0;
  virtual TransferPtr broadcast(const at::Tensor& tensor, int source) = 0;
  virtual TransferPtr all_gather(const at::Tensor& output, const at::Tensor& input) = 0;
  virtual TransferPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) = 0;
  // Splits count elements of dim 0, one entry per member.
  virtual TransferPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                                 std::vector<std::int64_t> output_splits,
                                 std::vector<std::int64_t> input_splits) = 0;
  virtual TransferPtr barrier() = 0;

  // Called once, after a failure. Afterwards nothing may wait for running operations, not even the
  // destructor.
  virtual void abandon() noexcept {}
};

struct BackendOptions {
  int axis_rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};
  std::string address = "127.0.0.1";  // Gloo: where this rank listens, unless GLOO_SOCKET_IFNAME is set
  int device_index = 0;               // NCCL: the GPU of this rank
  // Gloo: what the member at position `from` sends to the one at `to` when they have connected, and nobody
  // else knows. Not set: nothing is sent, and whoever has connected is believed.
  std::function<Digest(int from, int to)> proof;
  bool new_device = false;  // Gloo: do not share the sockets' thread with the groups that there are
};

// Gloo, for CPU tensors. Collective over the members of the group that `store` belongs to, and whose timeout
// limits how long they wait there.
bool gloo_available();
std::shared_ptr<Backend> make_gloo_backend(const Store& store, const BackendOptions& options);

// NCCL, for CUDA tensors, one GPU per rank.
bool nccl_available();
std::string nccl_version();
// Returns a string that identifies the GPU of the rank with this local rank among the GPUs of the host, and
// sets `index` to its index in this process. Returns "" if the rank has no GPU.
std::string gpu_identity(int local_rank, int& index);
std::shared_ptr<Backend> make_nccl_backend(const Store& store, const BackendOptions& options);

// A backend without peers: transfers complete at once. A gather returns copies of the own input, a reduction
// the own input alone, and a receive leaves its buffer unchanged.
std::shared_ptr<Backend> make_fake_backend(const BackendOptions& options);

}  // namespace penstock::comm
