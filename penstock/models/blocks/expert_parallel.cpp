#include "penstock/models/blocks/expert_parallel.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/comm/group/operators.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/tensor_parallel.h"
#include "penstock/torch/experts/expert_rows.h"

namespace penstock::models {
namespace {

namespace functional = comm::functional;

// Numbers of rows that this rank sends and receives.
struct RowCounts {
  std::vector<std::int64_t> sent, received;  // to and from each rank
  at::Tensor experts;                        // int64 [rows received, 1]: the local expert of each
  std::int64_t total_sent = 0;
};

// [collective, waits for the device]
RowCounts exchange_counts(const ExpertOrder& order, const comm::Group& group) {
  const at::Tensor ends = order.ends.to(at::kLong);
  const at::Tensor begins = at::cat({at::zeros({1}, ends.options()), ends.narrow(0, 0, ends.numel() - 1)});
  const at::Tensor own = ends - begins;  // [experts]
  const at::Tensor others = functional::wait_in_turn(functional::all_to_all(own, {}, {}, group));
  const at::Tensor both = at::stack({own, others}).cpu();  // others: [source rank, local expert]
  const std::int64_t *sent = both.data_ptr<std::int64_t>(), *received = sent + ends.numel();

  RowCounts counts;
  std::vector<std::int64_t> expert_of_row;
  const std::int64_t local = ends.numel() / group.size();
  for (std::int64_t rank = 0; rank < group.size(); ++rank) {
    std::int64_t to = 0, from = 0;
    for (std::int64_t expert = 0; expert < local; ++expert) {
      to += sent[rank * local + expert];
      const std::int64_t rows = received[rank * local + expert];
      from += rows;
      expert_of_row.insert(expert_of_row.end(), static_cast<std::size_t>(rows), expert);
    }
    counts.sent.push_back(to);
    counts.received.push_back(from);
    counts.total_sent += to;
  }
  counts.experts = at::empty({static_cast<std::int64_t>(expert_of_row.size()), 1}, at::kLong);
  std::copy(expert_of_row.begin(), expert_of_row.end(), counts.experts.data_ptr<std::int64_t>());
  counts.experts = counts.experts.to(ends.device());
  return counts;
}

// The permutation from slots back to choices. For one choice per token only.
ExpertOrder inverse(const ExpertOrder& order) {
  return {.order = order.slot.flatten(),
          .slot = order.order.unsqueeze(1),
          .ends = order.ends,
          .counts = order.counts};
}

}  // namespace

void parallelize_experts(ExpertsImpl& experts, const comm::MeshGroups& mesh) {
  const std::vector<std::string>& names = mesh.mesh().names();
  ExpertAxes axes;
  Placements inner, outer;  // of gate and up, and of down
  for (const std::string& name : names) {
    const std::int64_t size = mesh.mesh().size(name);
    if (name == "ep") {
      experts.options().check_parallel(size);
      axes.experts = mesh.with_mesh(mesh.mesh()[name]);
      inner.push_back(Shard{0});
      outer.push_back(Shard{0});
    } else if (name == "tp") {
      experts.options().check_columns(size);
      axes.columns = mesh.with_mesh(mesh.mesh()[name]);
      inner.push_back(Shard{2});
      outer.push_back(Shard{1});
    } else {
      break;
    }
  }
  if (names.empty() || inner.size() != names.size())
    throw ValueError(describe("parallelize_experts: a mesh", mesh.mesh().to_string(),
                              "a mesh with the axes ep, tp, or both",
                              "use the slice of the mesh along these axes"));
  distribute_parameter(experts.gate, mesh, inner);
  distribute_parameter(experts.up, mesh, inner);
  distribute_parameter(experts.down, mesh, outer);
  experts.set_axes(std::move(axes));
}

at::Tensor compute_elsewhere(const at::Tensor& rows, const ExpertOrder& order, const comm::Group& group,
                             const ExpertComputation& compute) {
  // Without values nobody knows how many rows arrive; the result has as many as `rows`.
  if (is_fake(rows)) return compute(rows, order.ends.narrow(0, 0, order.ends.numel() / group.size()));
  const RowCounts counts = exchange_counts(order, group);
  const auto exchange = [&](const at::Tensor& out, const std::vector<std::int64_t>& from,
                            const std::vector<std::int64_t>& to) {
    return functional::wait_in_turn(functional::all_to_all(out, from, to, group));
  };
  const at::Tensor kept = rows.narrow(0, 0, counts.total_sent);
  const at::Tensor arrived = exchange(kept, counts.received, counts.sent);
  const ExpertOrder local = expert_order(counts.experts, order.ends.numel() / group.size());
  const at::Tensor results = compute(gather_rows(arrived, local), local.ends);
  const at::Tensor back = exchange(gather_rows(results, inverse(local)), counts.sent, counts.received);
  const std::int64_t dropped = rows.size(0) - counts.total_sent;
  return dropped == 0 ? back : at::constant_pad_nd(back, {0, 0, 0, dropped});
}

}  // namespace penstock::models
