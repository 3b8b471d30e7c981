// Averages the gradients of data-parallel replicas: ranks that hold copies of the same parameters and compute with other samples.
//
//   ReplicaGradients replicas(group, {{"stage 0", parameters0}, {"stage 1", parameters1}});
//   ... backward ...
//   replicas.begin(1);       // the gradients of part 1 are complete: their sum starts while others are still computed
//   ... backward ...
//   replicas.finish();       // starts the rest and waits; .grad() is the mean over the replicas, the same bits on all of them
//
// Gradients travel in buckets of one dtype. Which parameter has which place in which bucket is decided once, from the parameters that
// require gradients, and compared over the replicas; it never depends on which gradients exist. A rank without a gradient contributes
// zeros, and one mark per parameter travels beside the values, so that every rank knows whether anybody had one:
//   - some replica has a gradient: all of them have the mean afterwards, and an optimizer steps all copies alike;
//   - none has: none has one afterwards, and an optimizer skips the parameter everywhere.
// Parameters are plain or distributed over ranks that are not replicas; sharded ones reduce their gradients themselves.
// Thread rule: one thread. All replicas call begin for the same parts in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/group.h"
#include "penstock/optim/update/parameters.h"

namespace penstock::train {

class ReplicaGradients {
 public:
  struct Part {
    std::string name;  // for messages
    std::vector<optim::NamedParameter> parameters;
  };

  // [collective over the group] Throws ValueError, on every rank, that names the first parameter whose name, dtype, shape, placements
  // or requires_grad differ between the ranks.
  ReplicaGradients(comm::Group group, std::vector<Part> parts);

  // [collective, asynchronous] Starts the sums of one part. Throws StateError if they are on their way already, for a parameter whose
  // requires_grad is not what it was at construction, and for a gradient on a frozen parameter.
  void begin(std::size_t part);
  // [collective] Starts the parts that have not begun, in order, and waits for all of them.
  void finish();
  // Of gradients on their way.
  std::int64_t buffer_bytes() const;

 private:
  struct Bucket {
    std::vector<at::Tensor> parameters;
    std::vector<bool> present;  // whether this rank has a gradient
    std::int64_t elements = 0;  // of the gradients, local; the marks follow
    at::Tensor flat;            // while they are on their way
    comm::Work work;
  };
  struct State {
    Part part;
    std::vector<bool> trainable;  // of its parameters, at construction
    std::vector<Bucket> buckets;
    bool begun = false;
  };
  void start(Bucket& bucket) const;
  void write(Bucket& bucket) const;

  comm::Group group_;
  std::vector<State> parts_;
};

}  // namespace penstock::train
