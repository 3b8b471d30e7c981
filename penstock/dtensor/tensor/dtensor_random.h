// Random numbers of distributed tensors: uniform_(), normal_(), bernoulli(), dropout and their kin.
//
//   manual_seed(mesh, 42);                                   // on every rank
//   auto x = distribute_tensor(torch::empty({8, 16}), mesh, {Shard{0}});
//   x.normal_();                                             // the values of the whole tensor, each rank its own part
//   auto y = torch::dropout(x, 0.1, true);
//
// The value of an element depends on the seed, on how many random operators went before, and on where the element stands in the
// whole tensor: not on the placements, the mesh or the number of ranks. So a run on one rank, or with everything replicated,
// has the same numbers. They are those of penstock/random.h, not those of a Generator; operators with a Generator
// argument are refused. Operators on plain tensors are not affected.
//
// The seed
// - Outside of a step: that of the mesh, from manual_seed. Without it, the first random operator on the mesh takes the seed of
//   the default CPU generator of the mesh's first rank (torch::manual_seed, or one drawn by the system) and tells all others,
//   which is a collective; it is kept from then on.
// - Within a step (penstock/step_context.h): that of the run, with the step and the microbatch. Operators are counted
//   anew for each microbatch. Meshes that work on different layers of one model, as pipeline stages do, count for themselves
//   and would draw the same numbers: give each another number with manual_seed, it counts within steps as well.
//
// Computing a forward again, as activation checkpointing does, must start where the first time started:
//
//   const RandomCursor start = random_cursor(mesh);          // before the first forward
//   ...
//   { const RandomReplay replay(mesh, start); again(); }     // draws the same; afterwards counting goes on as if nothing happened
//
// All ranks of a mesh run the same random operators in the same order, as they do all operators.
// Thread rule: any thread. A RandomReplay is made and destroyed on one thread, innermost first.
#pragma once

#include <cstdint>

#include "penstock/mesh_groups.h"
#include "penstock/random.h"

namespace penstock {

// Every rank of the mesh gives the same seed. Operators are counted from zero again.
void manual_seed(const comm::MeshGroups& mesh, std::uint64_t seed);

// Which number the next random operator on this mesh has, in the step and microbatch of this scope.
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
// The key of a random operator on tensors of this mesh, which then counts. `like`: a local tensor, on whose device seeds are
// exchanged where they must be. [collective] the first time on a mesh without a seed.
RandomKey next_random_key(const comm::MeshGroups& mesh, const at::Tensor& like, std::int64_t purpose);
}  // namespace detail

}  // namespace penstock
