// Random numbers on distributed tensors: uniform_(), normal_(), bernoulli(), dropout and related operators.
//
//   manual_seed(mesh, 42);                                   // on every rank
//   auto x = distribute_tensor(torch::empty({8, 16}), mesh, {Shard{0}});
//   x.normal_();  // the values of the whole tensor; each rank computes its part
//   auto y = torch::dropout(x, 0.1, true);
//
// The value of an element depends on the seed, on how many random operators ran before, and on the element's
// position in the whole tensor, but not on the placements, the mesh or the number of ranks. A run on one
// rank, or with everything replicated, has the same numbers. They are those of penstock/random.h, not those
// of a Generator; operators with a Generator argument are refused. Operators on plain tensors are not
// affected.
//
// Seeds:
// - Outside of a step: the seed of the mesh, set by manual_seed. Without it, the first random operator on the
//   mesh takes the seed of the default CPU generator of the mesh's first rank (torch::manual_seed, or one
//   drawn by the system) and broadcasts it, which is a collective; it is kept from then on.
// - Within a step (penstock/step_context.h): the seed of the run, with the step and the microbatch. Operators
// are
//   counted from zero in each microbatch. Meshes that work on different layers of one model, such as pipeline
//   stages, have separate counters and would draw the same numbers: give each a different number with
//   manual_seed, which also applies in steps.
//
// Recomputing a forward, as activation checkpointing does, must start with the same counter as the first
// time:
//
//   const RandomCursor start = random_cursor(mesh);          // before the first forward
//   ...
//   { const RandomReplay replay(mesh, start); again(); }  // draws the same; restores the counter afterwards
//
// All ranks of a mesh must run the same random operators in the same order, as for all operators.
// Thread safety: any thread. Create and destroy a RandomReplay on the same thread, innermost first.
#pragma once

#include <cstdint>

#include "penstock/random.h"
#include "penstock/world.h"

namespace penstock {

// All ranks of the mesh must pass the same seed. Resets the operator counter to zero.
void manual_seed(const comm::MeshGroups& mesh, std::uint64_t seed);

// Returns the number of the next random operator on this mesh, in the current step and microbatch.
struct RandomCursor {
  std::uint64_t count = 0;
  bool operator==(const RandomCursor&) const = default;
};
RandomCursor random_cursor(const comm::MeshGroups& mesh);

class RandomReplay {
 public:
  RandomReplay(const comm::MeshGroups& mesh, const RandomCursor& start);
  ~RandomReplay();
  RandomReplay(const RandomReplay&) = delete;
  RandomReplay& operator=(const RandomReplay&) = delete;

 private:
  std::uint64_t mesh_id_;
  RandomCursor before_;
};

namespace detail {
// Returns the key of a random operator on tensors of this mesh and advances the counter. `like` is a local
// tensor, on whose device seeds are exchanged if necessary. [collective] the first time on a mesh without a
// seed.
RandomKey next_random_key(const comm::MeshGroups& mesh, const at::Tensor& like, std::int64_t purpose);
}  // namespace detail

}  // namespace penstock
