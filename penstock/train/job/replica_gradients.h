// Averages the gradients of data-parallel replicas: ranks with copies of the same parameters and different
// samples.
//
//   ReplicaGradients replicas(group, {{"stage 0", parameters0}, {"stage 1", parameters1}});
//   ... backward ...
//   replicas.begin(1);       // the gradients of part 1 are complete: starts their sum
//   ... backward ...
//   replicas.finish();  // starts the rest and waits; .grad() is then the mean, the same bits on all replicas
//
// Gradients are sent in buckets of one dtype. The position of each parameter in a bucket is decided once,
// from the parameters that require gradients, and compared over the replicas; it never depends on which
// gradients exist. A rank without a gradient contributes zeros, and one mark per parameter is sent with the
// values, so that every rank knows whether any rank had one:
//   - some replica has a gradient: all have the mean afterwards,
//       and the optimizer updates all copies equally;
//   - no replica has one: all stay without, and the optimizer skips the parameter everywhere.
// Parameters are plain or distributed over ranks that are not replicas; sharded parameters reduce their
// gradients themselves.
// Thread safety: one thread. All replicas must call begin for the same parts in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/group.h"
#include "penstock/optimizer.h"

namespace penstock::train {

class ReplicaGradients {
 public:
  struct Part {
    std::string name;  // for messages
    std::vector<optim::NamedParameter> parameters;
  };

  // [collective over the group] Throws ValueError, on every rank, that names the first parameter whose name,
  // dtype, shape, placements or requires_grad differ between the ranks. `divisor`: what the sums are divided
  // by; default: the number of replicas.
  ReplicaGradients(comm::Group group, std::vector<Part> parts, std::optional<int> divisor = std::nullopt);

  // [collective, asynchronous] Starts the sums of one part. Throws StateError if they are already in flight,
  // for a parameter whose requires_grad has changed since construction, and for a gradient on a frozen
  // parameter.
  void begin(std::size_t part);
  // [collective] Starts the remaining parts, in order, and waits for all of them.
  void finish();
  // Bytes of gradients in flight.
  std::int64_t buffer_bytes() const;

 private:
  struct Bucket {
    std::vector<at::Tensor> parameters;
    std::vector<bool> present;  // whether this rank has a gradient
    std::int64_t elements = 0;  // of the local gradients; the marks follow
    at::Tensor flat;            // while in flight
    comm::Work work;
  };
  struct State {
    Part part;
    std::vector<bool> trainable;  // per parameter, at construction
    std::vector<Bucket> buckets;
    bool begun = false;
  };
  void start(Bucket& bucket) const;
  void write(Bucket& bucket) const;

  comm::Group group_;
  int divisor_;
  std::vector<State> parts_;
};

}  // namespace penstock::train
