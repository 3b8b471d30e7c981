#include "penstock/dtensor/tensor/local_transfer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/comm/group/operators.h"
#include "penstock/errors.h"
#include "penstock/tensor_subclass.h"

namespace penstock::detail {
namespace {

using Numbers = std::vector<std::int64_t>;
using Segments = std::vector<Segment>;

std::int64_t length_of(const Segments& segments) {
  std::int64_t length = 0;
  for (const Segment& segment : segments) length += segment.length;
  return length;
}

struct Common {
  std::vector<Run> runs;  // source: position in `a`, target: position in `b`
  std::int64_t length = 0;
};

// The indices that two ascending lists have in common.
Common intersect(const Segments& a, const Segments& b) {
  Common common;
  std::size_t i = 0, j = 0;
  std::int64_t at_a = 0, at_b = 0;
  while (i < a.size() && j < b.size()) {
    const std::int64_t begin = std::max(a[i].offset, b[j].offset);
    const std::int64_t end = std::min(a[i].offset + a[i].length, b[j].offset + b[j].length);
    if (begin < end) {
      const Run run{at_a + begin - a[i].offset, at_b + begin - b[j].offset, end - begin};
      if (!common.runs.empty() && common.runs.back().source + common.runs.back().length == run.source &&
          common.runs.back().target + common.runs.back().length == run.target)
        common.runs.back().length += run.length;
      else
        common.runs.push_back(run);
      common.length += run.length;
    }
    if (a[i].offset + a[i].length < b[j].offset + b[j].length)
      at_a += a[i++].length;
    else
      at_b += b[j++].length;
  }
  return common;
}

// The positions in the first list, concatenated: how a piece is packed.
std::vector<Run> packing(const std::vector<Run>& runs) {
  std::vector<Run> packed;
  std::int64_t next = 0;
  for (const Run& run : runs) {
    packed.push_back({run.source, next, run.length});
    next += run.length;
  }
  return packed;
}

// The positions in the second list: how a packed piece is unpacked.
std::vector<Run> unpacking(const std::vector<Run>& runs) {
  std::vector<Run> unpacked;
  std::int64_t next = 0;
  for (const Run& run : runs) {
    unpacked.push_back({next, run.target, run.length});
    next += run.length;
  }
  return unpacked;
}

// Returns a contiguous tensor of the chosen indices.
at::Tensor taken_runs(const at::Tensor& from, std::int64_t dim, const std::vector<Run>& runs,
                      const Numbers& shape) {
  if (runs.size() == 1) {
    // A whole tensor is not copied; the collectives read it in place.
    if (runs[0].length == from.size(dim)) return from.contiguous();
    return from.narrow(dim, runs[0].source, runs[0].length).contiguous();
  }
  at::Tensor piece = from.new_empty(shape);
  for (const Run& run : runs)
    piece.narrow(dim, run.target, run.length).copy_(from.narrow(dim, run.source, run.length));
  return piece;
}

void put(const at::Tensor& into, std::int64_t dim, const at::Tensor& piece, const std::vector<Run>& runs) {
  for (const Run& run : runs)
    into.narrow(dim, run.target, run.length).copy_(piece.narrow(dim, run.source, run.length));
}

comm::ReduceOp reduce_op(PartialOp op) {
  switch (op) {
    case PartialOp::Sum:
      return comm::ReduceOp::Sum;
    case PartialOp::Avg:
      return comm::ReduceOp::Avg;
    case PartialOp::Min:
      return comm::ReduceOp::Min;
    case PartialOp::Max:
      return comm::ReduceOp::Max;
    case PartialOp::Product:
      break;
  }
  PENSTOCK_INVARIANT(false, "products are reduced here");
}

std::int64_t element_count(const Numbers& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

std::vector<at::Tensor> empty_pieces(const std::vector<Numbers>& shapes, const at::Tensor& like) {
  std::vector<at::Tensor> pieces;
  for (const Numbers& shape : shapes) pieces.push_back(like.new_empty(shape));
  return pieces;
}

// Concatenates pieces along a dim, if nothing else is needed.
bool in_order(const std::vector<std::vector<Run>>& runs) {
  std::int64_t next = 0;
  for (const std::vector<Run>& piece : runs)
    for (const Run& run : piece) {
      if (run.target != next || run.source != piece[0].source + (run.target - piece[0].target)) return false;
      next += run.length;
    }
  return true;
}

at::Tensor join(const std::vector<at::Tensor>& pieces, std::int64_t dim,
                const std::vector<std::vector<Run>>& runs, const Numbers& shape) {
  if (in_order(runs)) {
    std::vector<at::Tensor> filled;
    for (const at::Tensor& piece : pieces)
      if (piece.numel() > 0) filled.push_back(piece);
    if (!filled.empty()) return at::cat(filled, dim);
  }
  at::Tensor result = pieces[0].new_empty(shape);
  for (std::size_t i = 0; i < pieces.size(); ++i) put(result, dim, pieces[i], runs[i]);
  return result;
}

// No backend has a product reduction: every rank gathers the factors and multiplies them in rank order.
at::Tensor product_of_all(const comm::Group& group, const at::Tensor& local) {
  const at::Tensor mine = local.contiguous();
  std::vector<at::Tensor> all =
      empty_pieces(std::vector<Numbers>(static_cast<std::size_t>(group.size()), mine.sizes().vec()), mine);
  group.all_gather_uneven(all, mine, {.label = "redistribute"}).wait();
  at::Tensor result = all[0];
  for (std::size_t i = 1; i < all.size(); ++i) result.mul_(all[i]);
  return result;
}

}  // namespace

at::Tensor cut(const at::Tensor& local, std::int64_t dim, const std::vector<Segment>& have,
               const std::vector<Segment>& want) {
  const Common common = intersect(have, want);
  Numbers shape = local.sizes().vec();
  shape[static_cast<std::size_t>(dim)] = common.length;
  return taken_runs(local, dim, packing(common.runs), shape);
}

at::Tensor PendingLocal::get() {
  work.wait();
  work = {};
  if (finish) {
    tensor = finish();
    finish = nullptr;
  }
  return tensor;
}

LocalTransfer::LocalTransfer(const DTensorSpec& from, const DTensorSpec& to, PartialTarget partial_target)
    : plan_(plan_redistribute(
          {from.shape(), static_cast<std::int64_t>(c10::elementSize(from.geometry().dtype))},
          from.mesh_shape(), from.placements(), to.placements(), {}, partial_target)) {
  PENSTOCK_INVARIANT(from.mesh_id() == to.mesh_id() && from.shape() == to.shape(),
                     "a redistribution keeps mesh and shape");
  for (const RedistributeStep& planned : plan_.steps)
    // For an axis of one rank only the placements change.
    if (from.mesh_shape()[static_cast<std::size_t>(planned.axis)] > 1)
      steps_.push_back(make_step(from, planned));
}

LocalTransfer::Step LocalTransfer::make_step(const DTensorSpec& from, const RedistributeStep& planned) const {
  const auto axis = static_cast<std::size_t>(planned.axis);
  const std::int64_t members = from.mesh_shape()[axis];
  const auto segments = [&](const Placements& placements, std::int64_t member) {
    Numbers coordinate = from.coordinate();
    coordinate[axis] = member;
    return local_segments(from.shape(), from.mesh_shape(), coordinate, placements);
  };
  const auto shape_of = [](const std::vector<Segments>& dims) {
    Numbers shape;
    for (const Segments& held : dims) shape.push_back(length_of(held));
    return shape;
  };
  Step step;
  step.kind = planned.kind;
  step.axis = planned.axis;
  const std::int64_t me = from.coordinate()[axis];
  const auto mine_before = segments(planned.before, me), mine_after = segments(planned.after, me);
  step.result_shape = shape_of(mine_after);
  if (planned.from.is_partial()) step.op = planned.from.partial_op();
  if (planned.to.is_partial()) step.op = planned.to.partial_op();
  const std::int64_t from_dim = planned.from.splits() ? planned.from.dim() : -1,
                     to_dim = planned.to.splits() ? planned.to.dim() : -1;
  step.dim = from_dim >= 0 ? from_dim : std::max<std::int64_t>(to_dim, 0);
  step.other_dim = to_dim >= 0 ? to_dim : step.dim;
  const auto d = static_cast<std::size_t>(step.dim), other = static_cast<std::size_t>(step.other_dim);
  switch (step.kind) {
    case RedistributeKind::Slice:
      step.take = {packing(intersect(mine_before[d], mine_after[d]).runs)};
      break;
    case RedistributeKind::Embed:
      step.put = {intersect(mine_before[d], mine_after[d]).runs};
      break;
    case RedistributeKind::AllGather: {
      std::int64_t next = 0;
      step.direct =
          step.dim == 0 || std::all_of(step.result_shape.begin(), step.result_shape.begin() + step.dim,
                                       [](std::int64_t n) { return n == 1; });
      for (std::int64_t member = 0; member < members; ++member) {
        const auto before = segments(planned.before, member);
        step.shapes.push_back(shape_of(before));
        step.put.push_back(intersect(before[d], mine_after[d]).runs);
        for (const Run& run : step.put.back()) {
          step.direct &= run.target == next;
          next += run.length;
        }
      }
      break;
    }
    case RedistributeKind::ReduceScatter: {
      std::int64_t next = 0;
      step.direct = step.dim == 0;
      for (std::int64_t member = 0; member < members; ++member) {
        const auto after = segments(planned.after, member);
        step.shapes.push_back(shape_of(after));
        const Common common = intersect(mine_before[d], after[d]);
        step.take.push_back(packing(common.runs));
        for (const Run& run : common.runs) {
          step.direct &= run.source == next;
          next += run.length;
        }
      }
      break;
    }
    case RedistributeKind::AllToAll:
      for (std::int64_t member = 0; member < members; ++member) {
        // Send each member what it will hold of this rank's part, along the split dim.
        step.take.push_back(
            packing(intersect(mine_before[other], segments(planned.after, member)[other]).runs));
        const auto theirs = segments(planned.before, member);
        // Receive its part along the joined dim.
        const Common common = intersect(theirs[d], mine_after[d]);
        step.put.push_back(unpacking(common.runs));
        Numbers shape = step.result_shape;
        shape[d] = common.length;
        step.shapes.push_back(std::move(shape));
      }
      break;
    case RedistributeKind::AllReduce:
    case RedistributeKind::Term:
      break;
  }
  step.even = std::all_of(step.shapes.begin(), step.shapes.end(),
                          [&](const Numbers& shape) { return shape == step.shapes[0]; });
  return step;
}

at::Tensor LocalTransfer::run_step_by_operators(const Step& step, const comm::Group& group,
                                                const at::Tensor& local) {
  using namespace comm::functional;
  const auto flat = [](const at::Tensor& tensor) { return tensor.contiguous().view({-1}); };
  const auto counts_of = [](const std::vector<Numbers>& shapes) {
    Numbers counts;
    for (const Numbers& shape : shapes) counts.push_back(element_count(shape));
    return counts;
  };
  const auto pieces_of = [](const at::Tensor& row, const std::vector<Numbers>& shapes) {
    std::vector<at::Tensor> pieces;
    std::int64_t next = 0;
    for (const Numbers& shape : shapes) {
      pieces.push_back(row.narrow(0, next, element_count(shape)).view(shape));
      next += element_count(shape);
    }
    return pieces;
  };
  const auto product_of_factors = [&] {
    const Numbers one = local.sizes().vec();
    const std::vector<at::Tensor> factors =
        pieces_of(wait_tensor(all_gather(flat(local), group)),
                  std::vector<Numbers>(static_cast<std::size_t>(group.size()), one));
    at::Tensor result = factors[0].clone();
    for (std::size_t i = 1; i < factors.size(); ++i) result.mul_(factors[i]);
    return result;
  };
  switch (step.kind) {
    case RedistributeKind::Slice:
    case RedistributeKind::Embed:
    case RedistributeKind::Term:
      break;  // nothing is sent
    case RedistributeKind::AllReduce:
      return step.op == PartialOp::Product ? product_of_factors()
                                           : wait_tensor(all_reduce(local, reduce_op(step.op), group));
    case RedistributeKind::AllGather: {
      const at::Tensor row = step.even
                                 ? wait_tensor(all_gather(flat(local), group))
                                 : wait_tensor(all_gather_flat(flat(local), counts_of(step.shapes), group));
      return step.direct ? row.view(step.result_shape)
                         : join(pieces_of(row, step.shapes), step.dim, step.put, step.result_shape);
    }
    case RedistributeKind::ReduceScatter: {
      const auto own = static_cast<std::size_t>(group.axis_rank());
      if (step.op == PartialOp::Product)
        return taken_runs(product_of_factors(), step.dim, step.take[own], step.result_shape);
      if (step.direct && step.even)
        return wait_tensor(reduce_scatter(flat(local), reduce_op(step.op), group)).view(step.result_shape);
      std::vector<at::Tensor> pieces;
      for (std::size_t i = 0; i < step.shapes.size(); ++i)
        pieces.push_back(taken_runs(local, step.dim, step.take[i], step.shapes[i]).view({-1}));
      return wait_tensor(
                 reduce_scatter_flat(at::cat(pieces), reduce_op(step.op), counts_of(step.shapes), group))
          .view(step.result_shape);
    }
    case RedistributeKind::AllToAll: {
      std::vector<at::Tensor> sent;
      Numbers sizes_out;
      for (const std::vector<Run>& runs : step.take) {
        Numbers shape = local.sizes().vec();
        std::int64_t length = 0;
        for (const Run& run : runs) length += run.length;
        shape[static_cast<std::size_t>(step.other_dim)] = length;
        sent.push_back(runs.empty() ? local.new_empty({0})
                                    : taken_runs(local, step.other_dim, runs, shape).view({-1}));
        sizes_out.push_back(sent.back().numel());
      }
      const at::Tensor row = wait_tensor(all_to_all(at::cat(sent), counts_of(step.shapes), sizes_out, group));
      return join(pieces_of(row, step.shapes), step.dim, step.put, step.result_shape);
    }
  }
  PENSTOCK_INVARIANT(false, "a step that sends nothing needs no operators");
}

PendingLocal LocalTransfer::start_step(const Step& step, const comm::Group& group, const at::Tensor& local) {
  const bool sends = step.kind != RedistributeKind::Slice && step.kind != RedistributeKind::Embed &&
                     step.kind != RedistributeKind::Term;
  if (sends && is_wrapper(local)) [[unlikely]]
    return {run_step_by_operators(step, group, local), {}, {}};
  const comm::OpOptions label{.label = "redistribute", .timeout = {}};
  switch (step.kind) {
    case RedistributeKind::Slice:
      return {taken_runs(local, step.dim, step.take[0], step.result_shape), {}, {}};
    case RedistributeKind::Embed: {
      at::Tensor result = local.new_zeros(step.result_shape);
      put(result, step.dim, local, step.put[0]);
      return {result, {}, {}};
    }
    case RedistributeKind::Term: {
      const bool keeps = group.axis_rank() == 0 || step.op == PartialOp::Avg || step.op == PartialOp::Min ||
                         step.op == PartialOp::Max;
      if (keeps) return {local, {}, {}};
      return {step.op == PartialOp::Product ? at::ones_like(local) : at::zeros_like(local), {}, {}};
    }
    case RedistributeKind::AllReduce: {
      if (step.op == PartialOp::Product) return {product_of_all(group, local), {}, {}};
      const at::Tensor result = local.clone(at::MemoryFormat::Contiguous);
      return {result, group.all_reduce(result, reduce_op(step.op), label), {}};
    }
    case RedistributeKind::AllGather: {
      const at::Tensor mine = local.contiguous();
      const at::Tensor result = local.new_empty(step.result_shape);
      if (step.direct && step.even) return {result, group.all_gather(result, mine, label), {}};
      std::vector<at::Tensor> pieces;
      if (step.direct) {
        // They arrive at their final position.
        std::int64_t next = 0;
        for (const Numbers& shape : step.shapes) {
          pieces.push_back(result.view({-1}).narrow(0, next, element_count(shape)));
          next += element_count(shape);
        }
        return {result, group.all_gather_uneven(pieces, mine.view({-1}), label), {}};
      }
      pieces = empty_pieces(step.shapes, local);
      comm::Work work = group.all_gather_uneven(pieces, mine, label);
      return {{}, std::move(work), [pieces, result, runs = step.put, dim = step.dim] {
                for (std::size_t i = 0; i < pieces.size(); ++i) put(result, dim, pieces[i], runs[i]);
                return result;
              }};
    }
    case RedistributeKind::ReduceScatter: {
      if (step.op == PartialOp::Product)
        return {taken_runs(product_of_all(group, local), step.dim,
                           step.take[static_cast<std::size_t>(group.axis_rank())], step.result_shape),
                {},
                {}};
      const at::Tensor result = local.new_empty(step.result_shape);
      if (step.direct && step.even)
        return {result, group.reduce_scatter(result, local.contiguous(), reduce_op(step.op), label), {}};
      std::vector<at::Tensor> pieces;
      for (std::size_t i = 0; i < step.shapes.size(); ++i)
        pieces.push_back(taken_runs(local, step.dim, step.take[i], step.shapes[i]));
      return {result, group.reduce_scatter_uneven(result, pieces, reduce_op(step.op), label), {}};
    }
    case RedistributeKind::AllToAll: {
      std::vector<at::Tensor> sent;
      std::vector<std::int64_t> sizes_out, sizes_in;
      for (const std::vector<Run>& runs : step.take) {
        Numbers shape = local.sizes().vec();
        std::int64_t length = 0;
        for (const Run& run : runs) length += run.length;
        shape[static_cast<std::size_t>(step.other_dim)] = length;
        sent.push_back(runs.empty() ? local.new_empty({0})
                                    : taken_runs(local, step.other_dim, runs, shape).reshape({-1}));
        sizes_out.push_back(sent.back().numel());
      }
      for (const Numbers& shape : step.shapes) sizes_in.push_back(element_count(shape));
      const at::Tensor input = at::cat(sent);
      const at::Tensor output =
          local.new_empty({std::accumulate(sizes_in.begin(), sizes_in.end(), std::int64_t{0})});
      comm::Work work = group.all_to_all(output, input, sizes_in, sizes_out, label);
      return {{}, std::move(work), [&step, output, input, sizes_in] {
                at::Tensor result = output.new_empty(step.result_shape);
                std::int64_t next = 0;
                for (std::size_t i = 0; i < sizes_in.size(); ++i) {
                  put(result, step.dim, output.narrow(0, next, sizes_in[i]).view(step.shapes[i]),
                      step.put[i]);
                  next += sizes_in[i];
                }
                return result;
              }};
    }
  }
  PENSTOCK_INVARIANT(false, "every kind of step is executed");
}

PendingLocal LocalTransfer::start(const comm::MeshGroups& mesh, const at::Tensor& local) const {
  PendingLocal pending{local, {}, {}};
  for (const Step& step : steps_) pending = start_step(step, mesh.group(step.axis), pending.get());
  return pending;
}

at::Tensor LocalTransfer::run(const comm::MeshGroups& mesh, const at::Tensor& local) const {
  return start(mesh, local).get();
}

std::shared_ptr<const LocalTransfer> transfer_between(const SpecPtr& from, const SpecPtr& to,
                                                      PartialTarget partial_target) {
  // The cache holds the specs, so their addresses are not reused.
  using Key = std::tuple<SpecPtr, SpecPtr, PartialTarget>;
  thread_local std::map<Key, std::shared_ptr<const LocalTransfer>> known;
  constexpr std::size_t kMost = 4096;
  const Key key{from, to, partial_target};
  if (const auto found = known.find(key); found != known.end()) return found->second;
  auto transfer = std::make_shared<const LocalTransfer>(*from, *to, partial_target);
  if (known.size() >= kMost) known.clear();
  known.emplace(key, transfer);
  return transfer;
}

}  // namespace penstock::detail
