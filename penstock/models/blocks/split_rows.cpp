#include "penstock/models/blocks/split_rows.h"

#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"

namespace penstock::models {

at::Tensor split_rows(const at::Tensor& own, const comm::MeshGroups& mesh) {
  return from_local(own, mesh, {Shard{1}}, {.check = false});
}

at::Tensor own_tokens_of(const at::Tensor& x) { return is_dtensor(x) ? to_local(x) : x; }

at::Tensor whole_rows(const at::Tensor& x) { return is_dtensor(x) ? full_tensor(x) : x; }

at::Tensor rows_like(const at::Tensor& like, const at::Tensor& whole) {
  if (!is_dtensor(like)) return whole;
  const Placements& placements = placements_of(like);
  return redistribute(from_local(whole, mesh_of(like), Placements(placements.size()), {.check = false}),
                      placements);
}

void check_split_length(const std::string& where, std::int64_t length, std::int64_t ranks) {
  if (length % ranks != 0)
    throw ValueError(describe(where, fmt::format("rows of {} tokens", length),
                              fmt::format("a multiple of the {} tensor-parallel ranks, over which sequence "
                                          "parallelism divides them",
                                          ranks),
                              "use another length, or set layout.sequence_parallel to false"));
}

}  // namespace penstock::models
