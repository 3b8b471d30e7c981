// The collectives of Group. They use the backend's own implementation if it has one, else compositions of
// point-to-point transfers that move the minimal number of bytes: a reduce-scatter sends each part directly
// to its owner, a gather sends each input directly to every member.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/comm/group/checked_transfer.h"
#include "penstock/comm/group/staging.h"
#include "penstock/comm/group/trial_run.h"
#include "penstock/comm/group/work_state.h"
#include "penstock/errors.h"
#include "penstock/group.h"

namespace penstock::comm {

namespace {

using State = std::shared_ptr<WorkState>;
using Tensors = std::vector<at::Tensor>;

// Below this size a two-phase composition costs more in messages than it saves in bytes, and half-precision
// values are summed as float32.
constexpr std::int64_t kSmallHalfBytes = 32 * 1024;

std::uint64_t total_bytes(const Tensors& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const at::Tensor& t) { return sum + t.nbytes(); });
}

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

void require(bool holds, const char* operation, const std::string& what, const std::string& actual,
             const std::string& expected) {
  if (!holds) throw ValueError(describe(fmt::format("{}: {}", operation, what), actual, expected));
}

void check_reduction(const at::Tensor& tensor, ReduceOp op, const char* operation) {
  const auto type = tensor.scalar_type();
  if (op == ReduceOp::Avg && !at::isFloatingType(type) && !at::isComplexType(type))
    throw ValueError(describe(fmt::format("{}: avg of {}", operation, c10::toString(type)), "",
                              "a floating point tensor", "use sum and divide the result"));
  if ((op == ReduceOp::Min || op == ReduceOp::Max) && at::isComplexType(type))
    throw ValueError(fmt::format("{}: complex numbers have no order; use sum or avg", operation));
  if ((op == ReduceOp::Sum) && type == at::kBool)
    throw ValueError(
        fmt::format("{}: sum of bool is not defined; use max for 'any' and min for 'all'", operation));
}

bool on_device(const GroupState& group, const at::Tensor& tensor) { return tensor.is_cuda() && group.cuda; }

Backend& backend_for(GroupState& group, bool device) {
  if (device) return *group.cuda;
  if (!group.cpu)
    throw StateError(fmt::format(
        "group {} cannot transfer CPU tensors: this build has no Gloo; install libgloo-dev and rebuild",
        group.name));
  return *group.cpu;
}

// Sends parts[i] to member i and receives buffers[i] from it. Skips empty tensors and the own position.
void exchange(WorkState& work, const Tensors& parts, const Tensors& buffers, int tag) {
  const GroupState& group = work.group();
  const int size = static_cast<int>(group.ranks.size());
  // Each member starts with its neighbour, so that they do not all send to the same member first.
  for (int step = 1; step < size; ++step) {
    const int from = (group.axis_rank - step + size) % size;
    const at::Tensor& buffer = buffers[static_cast<std::size_t>(from)];
    if (buffer.numel() > 0) start_receive(work, buffer, from, tag);
  }
  for (int step = 1; step < size; ++step) {
    const int to = (group.axis_rank + step) % size;
    const at::Tensor& part = parts[static_cast<std::size_t>(to)];
    if (part.numel() > 0) start_send(work, part, to, tag);
  }
}

// contributions[i] is member i's value. Combines them in that order, independent of the order of arrival.
// Half-precision values are accumulated in float32.
void reduce_in_order(const at::Tensor& output, const Tensors& contributions, ReduceOp op) {
  const bool wide = is_half(output.scalar_type());
  at::Tensor sum = wide ? contributions[0].to(at::kFloat, false, true) : output;
  if (!wide) sum.copy_(contributions[0]);
  for (std::size_t i = 1; i < contributions.size(); ++i) {
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Avg:
        sum.add_(contributions[i]);
        break;
      case ReduceOp::Min:
        at::minimum_out(sum, sum, wide ? contributions[i].to(at::kFloat) : contributions[i]);
        break;
      case ReduceOp::Max:
        at::maximum_out(sum, sum, wide ? contributions[i].to(at::kFloat) : contributions[i]);
        break;
    }
  }
  if (op == ReduceOp::Avg) sum.div_(static_cast<double>(contributions.size()));
  if (wide) output.copy_(sum);
}

// At debug level "detail" every member announces its next collective to all others; a difference throws on
// all of them before any data is transferred.
void check_agreement(WorkState& work, const std::string& description) {
  GroupState& group = work.group();
  if (group.debug != DebugLevel::Detail || group.ranks.size() == 1 || !group.cpu || group.world->fake) return;
  constexpr std::int64_t kBytes = 256;
  at::Tensor own = at::zeros({kBytes}, at::kByte);
  std::memcpy(own.data_ptr(), description.data(), std::min<std::size_t>(description.size(), kBytes - 1));
  Tensors descriptions(group.ranks.size());
  for (auto& description : descriptions) description = at::empty({kBytes}, at::kByte);
  descriptions[static_cast<std::size_t>(group.axis_rank)] = own;
  auto check = std::make_shared<WorkState>(group.shared_from_this(), "agreement", work.label(), std::nullopt,
                                           kBytes, std::nullopt);
  exchange(*check, Tensors(descriptions.size(), own), descriptions, group.internal_tag(group.sequence++, 3));
  check->wait();
  std::string report;
  bool differ = false;
  for (std::size_t i = 0; i < descriptions.size(); ++i) {
    const std::string theirs(static_cast<const char*>(descriptions[i].data_ptr()));
    differ = differ || theirs != std::string(static_cast<const char*>(own.data_ptr()));
    report += fmt::format("{}rank {}: {}", i > 0 ? "; " : "", group.ranks[i], theirs);
  }
  if (differ)
    throw MismatchError(
        fmt::format("the members of group {} started different collectives: {}", group.name, report));
}

std::string signature(const char* operation, const at::Tensor& tensor, const std::string& more = {}) {
  std::string shape;
  for (const auto size : tensor.sizes()) shape += fmt::format("{}{}", shape.empty() ? "" : ",", size);
  return fmt::format("{} {}[{}]{}{}", operation, c10::toString(tensor.scalar_type()), shape,
                     more.empty() ? "" : " ", more);
}

State begin(const std::shared_ptr<GroupState>& group, const char* operation, std::uint64_t bytes,
            const OpOptions& options) {
  return std::make_shared<WorkState>(group, operation, options.label, std::nullopt, bytes, options.timeout);
}

template <class Start>
Work started(State work, Start start) {
  work->group().started(*work, [&] { start(*work); });
  return Work(std::move(work));
}

// ------------------------------------------------------------------------------------------------ all_reduce

// Every member reduces its part of the elements in rank order and sends the result to the others.
void reduce_directly(WorkState& work, const at::Tensor& host, ReduceOp op) {
  GroupState& group = work.group();
  const auto size = static_cast<std::int64_t>(group.ranks.size());
  const auto own = static_cast<std::size_t>(group.axis_rank);
  const at::Tensor flat = host.view({-1});
  Tensors chunks, buffers;
  for (std::int64_t i = 0, from = 0; i < size; ++i) {
    const std::int64_t count = flat.numel() / size + (i < flat.numel() % size ? 1 : 0);
    chunks.push_back(flat.narrow(0, from, count));
    from += count;
  }
  for (std::int64_t i = 0; i < size; ++i) buffers.push_back(at::empty_like(chunks[own]));
  buffers[own] = chunks[own];
  const std::uint32_t sequence = group.sequence++;
  exchange(work, chunks, buffers, group.internal_tag(sequence, 0));
  work.continues_in_steps();
  work.then([=](WorkState& self) {
    at::Tensor result = at::empty_like(chunks[own]);
    reduce_in_order(result, buffers, op);
    chunks[own].copy_(result);
    exchange(self, Tensors(chunks.size(), chunks[own]), chunks, self.group().internal_tag(sequence, 1));
  });
}

void start_all_reduce(WorkState& work, const at::Tensor& tensor, ReduceOp op) {
  GroupState& group = work.group();
  check_agreement(work, signature(work.operation(), tensor, to_string(op)));
  if (tensor.numel() == 0) return;
  if (on_device(group, tensor)) {
    const at::Tensor data = tensor.contiguous();
    work.add(group.cuda->all_reduce(data, op));
    work.keep(data);
    if (!data.is_same(tensor)) work.then([data, tensor](WorkState&) { tensor.copy_(data); });
    return;
  }
  Backend& backend = backend_for(group, false);
  const HostCopy copy(tensor, HostCopy::Direction::InOut);
  const at::Tensor host = copy.host();
  const auto type = host.scalar_type();
  const auto members = static_cast<double>(group.ranks.size());
  work.keep(host);
  const bool large_halves =
      is_half(type) && !group.cpu_can.half_sums && static_cast<std::int64_t>(host.nbytes()) > kSmallHalfBytes;
  // Gloo compares with std::max and std::min, which lose NaN.
  const bool extreme_floats = (op == ReduceOp::Min || op == ReduceOp::Max) && at::isFloatingType(type);
  if ((large_halves || extreme_floats) && group.ranks.size() > 1 && !group.world->fake) {
    reduce_directly(work, host, op);
  } else {
    // Types that the backend cannot add are converted to a wider type, or viewed as a type that it can add.
    at::Tensor wire = host;
    if (!group.cpu_can.half_sums && is_half(type)) wire = host.to(at::kFloat);
    if (type == at::kShort) wire = host.to(at::kInt);
    if (type == at::kBool) wire = as_bytes(host);
    if (at::isComplexType(type)) wire = at::view_as_real(host);
    const bool divide = op == ReduceOp::Avg && !group.cpu_can.average;
    work.add(backend.all_reduce(wire, divide ? ReduceOp::Sum : op));
    work.keep(wire);
    const bool converted = wire.scalar_type() != type && type != at::kBool && !at::isComplexType(type);
    if (divide || converted)
      work.then([=](WorkState&) {
        if (divide) wire.div_(members);
        if (converted) host.copy_(wire);
      });
  }
  if (copy.copied()) work.then([copy](WorkState&) { copy.write_back(); });
}

// ------------------------------------------------------------------------------------------- gather, scatter

void start_all_gather_uneven(WorkState& work, const Tensors& outputs, const at::Tensor& input) {
  GroupState& group = work.group();
  const auto own = static_cast<std::size_t>(group.axis_rank);
  if (on_device(group, input)) {
    // Every member broadcasts its part, in one batch: NCCL has no uneven gather.
    const at::Tensor data = input.contiguous();
    outputs[own].copy_(data);
    Tensors contiguous;
    if (group.cuda_can.needs_batch) group.cuda->begin_batch();
    std::vector<TransferPtr> parts;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      contiguous.push_back(outputs[i].contiguous());
      if (contiguous[i].numel() > 0)
        parts.push_back(group.cuda->broadcast(contiguous[i], static_cast<int>(i)));
    }
    if (group.cuda_can.needs_batch) parts = {group.cuda->end_batch()};
    for (auto& part : parts) work.add(std::move(part));
    for (const auto& tensor : contiguous) work.keep(tensor);
    work.then([=](WorkState&) {
      for (std::size_t i = 0; i < outputs.size(); ++i)
        if (!contiguous[i].is_same(outputs[i])) outputs[i].copy_(contiguous[i]);
    });
    return;
  }
  const at::Tensor data = to_host(input.contiguous());
  std::vector<HostCopy> copies;
  Tensors hosts;
  for (const auto& output : outputs) {
    copies.emplace_back(output, HostCopy::Direction::Out);
    hosts.push_back(copies.back().host());
  }
  if (!group.world->fake)
    exchange(work, Tensors(outputs.size(), data), hosts, group.internal_tag(group.sequence++, 0));
  hosts[own].copy_(data.view(hosts[own].sizes()));
  work.then([copies](WorkState&) {
    for (const auto& copy : copies)
      if (copy.copied()) copy.write_back();
  });
}

void start_reduce_scatter_uneven(WorkState& work, const at::Tensor& output, const Tensors& inputs,
                                 ReduceOp op) {
  GroupState& group = work.group();
  const auto own = static_cast<std::size_t>(group.axis_rank);
  const HostCopy copy(output, HostCopy::Direction::Out);
  Tensors parts, buffers;
  for (const auto& input : inputs) {
    parts.push_back(to_host(input.contiguous()));
    buffers.push_back(at::empty_like(copy.host()));
  }
  buffers[own] = parts[own].view(copy.host().sizes());
  if (!group.world->fake) exchange(work, parts, buffers, group.internal_tag(group.sequence++, 0));
  const bool fake = group.world->fake;
  work.then([copy, buffers, op, own, fake](WorkState&) {
    reduce_in_order(copy.host(), fake ? Tensors{buffers[own]} : buffers, op);
    if (copy.copied()) copy.write_back();
  });
}

// Splits flat storage into equal consecutive parts, one per member.
Tensors equal_parts(const at::Tensor& whole, std::size_t count) {
  const auto parts = whole.reshape({static_cast<std::int64_t>(count), -1}).unbind(0);
  return Tensors(parts.begin(), parts.end());
}

void start_all_gather(WorkState& work, const at::Tensor& output, const at::Tensor& input) {
  GroupState& group = work.group();
  const bool device = on_device(group, input);
  const auto& can = device ? group.cuda_can : group.cpu_can;
  if (!output.is_contiguous() || (!device && input.is_cuda())) {
    const at::Tensor whole = at::empty(output.sizes(), output.options().requires_grad(false));
    start_all_gather_uneven(work, equal_parts(whole, group.ranks.size()), input.reshape({-1}));
    work.then([whole, output](WorkState&) { output.copy_(whole); });
    return;
  }
  if (!can.all_gather || group.ucx_within_hosts)
    return start_all_gather_uneven(work, equal_parts(output, group.ranks.size()), input.reshape({-1}));
  const at::Tensor data = input.contiguous();
  // Viewed as bytes on the host, so that every dtype works; unchanged on a device.
  work.add(backend_for(group, device)
               .all_gather(device ? output : as_bytes(output), device ? data : as_bytes(data)));
  work.keep(data);
  work.keep(output);
}

void start_reduce_scatter(WorkState& work, const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  GroupState& group = work.group();
  const bool device = on_device(group, input);
  if (device || (group.cpu_can.reduce_scatter && output.is_contiguous() && !input.is_cuda())) {
    const at::Tensor data = input.contiguous();
    const at::Tensor out = output.contiguous();
    work.add(backend_for(group, device).reduce_scatter(out, data, op));
    work.keep(data);
    work.keep(out);
    if (!out.is_same(output)) work.then([out, output](WorkState&) { output.copy_(out); });
    return;
  }
  start_reduce_scatter_uneven(work, output, equal_parts(input.contiguous(), group.ranks.size()), op);
}

// Indices of tensors by dtype, in order of first appearance: coalesced forms move one buffer per dtype.
std::vector<std::vector<std::size_t>> by_type(const Tensors& tensors) {
  std::vector<std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto found = std::find_if(groups.begin(), groups.end(), [&](const auto& g) {
      return tensors[g.front()].scalar_type() == tensors[i].scalar_type() &&
             tensors[g.front()].device() == tensors[i].device();
    });
    if (found == groups.end()) {
      groups.push_back({i});
    } else {
      found->push_back(i);
    }
  }
  return groups;
}

}  // namespace

Work Group::all_reduce(const at::Tensor& tensor, ReduceOp op, const OpOptions& options) const {
  member("all_reduce");
  if (skipped_in_trial()) return {};
  check_transferable(tensor, "all_reduce");
  check_reduction(tensor, op, "all_reduce");
  return started(begin(state_, "all_reduce", tensor.nbytes(), options),
                 [&](WorkState& work) { start_all_reduce(work, tensor, op); });
}

Work Group::all_reduce_coalesced(const std::vector<at::Tensor>& tensors, ReduceOp op,
                                 const OpOptions& options) const {
  member("all_reduce_coalesced");
  if (skipped_in_trial()) return {};
  check_transferable(tensors, "all_reduce_coalesced");
  auto parent = begin(state_, "all_reduce_coalesced", total_bytes(tensors), options);
  parent->continues_in_steps();
  for (const auto& indices : by_type(tensors)) {
    Tensors flats;
    for (const auto i : indices) flats.push_back(tensors[i].reshape({-1}));
    const at::Tensor flat = at::cat(flats);
    parent->then([work = all_reduce(flat, op, options), flat, indices, tensors](WorkState&) mutable {
      work.wait();
      std::int64_t from = 0;
      for (const auto i : indices) {
        tensors[i].copy_(flat.narrow(0, from, tensors[i].numel()).view(tensors[i].sizes()));
        from += tensors[i].numel();
      }
    });
  }
  return Work(std::move(parent));
}

Work Group::broadcast(const at::Tensor& tensor, int from, const OpOptions& options) const {
  GroupState& group = member("broadcast");
  if (skipped_in_trial()) return {};
  check_transferable(tensor, "broadcast");
  const auto found = std::find(group.ranks.begin(), group.ranks.end(), from);
  require(found != group.ranks.end(), "broadcast", "source", fmt::format("rank {}", from),
          fmt::format("a member of group {} (ranks {})", group.name, format_list(group.ranks)));
  const int source = static_cast<int>(found - group.ranks.begin());
  return started(begin(state_, "broadcast", tensor.nbytes(), options), [&](WorkState& work) {
    check_agreement(work, signature("broadcast", tensor, fmt::format("from {}", from)));
    if (tensor.numel() == 0) return;
    if (on_device(group, tensor)) {
      const at::Tensor data = tensor.contiguous();
      work.add(group.cuda->broadcast(data, source));
      work.keep(data);
      if (!data.is_same(tensor)) work.then([data, tensor](WorkState&) { tensor.copy_(data); });
      return;
    }
    const HostCopy copy(tensor, HostCopy::Direction::InOut);
    work.add(backend_for(group, false).broadcast(as_bytes(copy.host()), source));
    work.keep(copy.host());
    if (copy.copied()) work.then([copy](WorkState&) { copy.write_back(); });
  });
}

Work Group::all_gather(const at::Tensor& output, const at::Tensor& input, const OpOptions& options) const {
  member("all_gather");
  if (skipped_in_trial({output})) return {};
  check_transferable({output, input}, "all_gather");
  require(output.scalar_type() == input.scalar_type(), "all_gather", "dtype of output",
          c10::toString(output.scalar_type()), c10::toString(input.scalar_type()));
  require(output.numel() == input.numel() * size(), "all_gather", "elements of output",
          fmt::format("{}", output.numel()),
          fmt::format("{} x {} = {}", size(), input.numel(), size() * input.numel()));
  return started(begin(state_, "all_gather", output.nbytes(), options), [&](WorkState& work) {
    check_agreement(work, signature("all_gather", input));
    if (input.numel() > 0) start_all_gather(work, output, input);
  });
}

Work Group::all_gather_uneven(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                              const OpOptions& options) const {
  GroupState& group = member("all_gather_uneven");
  if (skipped_in_trial(outputs)) return {};
  check_transferable(input, "all_gather_uneven");
  check_transferable(outputs, "all_gather_uneven");
  require(static_cast<int>(outputs.size()) == size(), "all_gather_uneven", "number of outputs",
          fmt::format("{}", outputs.size()), fmt::format("{}, one per member", size()));
  for (const auto& output : outputs)
    require(output.scalar_type() == input.scalar_type(), "all_gather_uneven", "dtype of an output",
            c10::toString(output.scalar_type()), c10::toString(input.scalar_type()));
  const at::Tensor& own = outputs[static_cast<std::size_t>(group.axis_rank)];
  require(own.numel() == input.numel(), "all_gather_uneven", "elements of the own output",
          fmt::format("{}", own.numel()), fmt::format("{}, as in the input", input.numel()));
  return started(begin(state_, "all_gather_uneven", total_bytes(outputs), options), [&](WorkState& work) {
    std::string sizes;
    for (const auto& output : outputs) sizes += fmt::format("{} ", output.numel());
    check_agreement(work, fmt::format("all_gather_uneven {} {}", c10::toString(input.scalar_type()), sizes));
    start_all_gather_uneven(work, outputs, input);
  });
}

Work Group::all_gather_coalesced(const std::vector<at::Tensor>& outputs,
                                 const std::vector<at::Tensor>& inputs, const OpOptions& options) const {
  member("all_gather_coalesced");
  if (skipped_in_trial(outputs)) return {};
  check_transferable(outputs, "all_gather_coalesced");
  check_transferable(inputs, "all_gather_coalesced");
  require(outputs.size() == inputs.size(), "all_gather_coalesced", "number of outputs",
          fmt::format("{}", outputs.size()), fmt::format("{}, one per input", inputs.size()));
  auto parent = begin(state_, "all_gather_coalesced", total_bytes(outputs), options);
  parent->continues_in_steps();
  for (const auto& indices : by_type(inputs)) {
    Tensors flats;
    for (const auto i : indices) {
      require(outputs[i].numel() == inputs[i].numel() * size(), "all_gather_coalesced",
              fmt::format("elements of output {}", i), fmt::format("{}", outputs[i].numel()),
              fmt::format("{}", inputs[i].numel() * size()));
      flats.push_back(inputs[i].reshape({-1}));
    }
    const at::Tensor flat = at::cat(flats);
    const at::Tensor whole = at::empty({size(), flat.numel()}, flat.options());
    parent->then([work = all_gather(whole, flat, options), whole, indices, outputs, inputs,
                  members = size()](WorkState&) mutable {
      work.wait();
      std::int64_t from = 0;
      for (const auto i : indices) {
        outputs[i].copy_(whole.narrow(1, from, inputs[i].numel()).reshape(outputs[i].sizes()));
        from += inputs[i].numel();
      }
    });
  }
  return Work(std::move(parent));
}

Work Group::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                           const OpOptions& options) const {
  member("reduce_scatter");
  if (skipped_in_trial({output})) return {};
  check_transferable({output, input}, "reduce_scatter");
  check_reduction(input, op, "reduce_scatter");
  require(output.scalar_type() == input.scalar_type(), "reduce_scatter", "dtype of output",
          c10::toString(output.scalar_type()), c10::toString(input.scalar_type()));
  require(input.numel() == output.numel() * size(), "reduce_scatter", "elements of input",
          fmt::format("{}", input.numel()),
          fmt::format("{} x {} = {}", size(), output.numel(), size() * output.numel()));
  return started(begin(state_, "reduce_scatter", input.nbytes(), options), [&](WorkState& work) {
    check_agreement(work, signature("reduce_scatter", input, to_string(op)));
    if (input.numel() > 0) start_reduce_scatter(work, output, input, op);
  });
}

Work Group::reduce_scatter_uneven(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                  ReduceOp op, const OpOptions& options) const {
  GroupState& group = member("reduce_scatter_uneven");
  if (skipped_in_trial({output})) return {};
  check_transferable(output, "reduce_scatter_uneven");
  check_transferable(inputs, "reduce_scatter_uneven");
  check_reduction(output, op, "reduce_scatter_uneven");
  require(static_cast<int>(inputs.size()) == size(), "reduce_scatter_uneven", "number of inputs",
          fmt::format("{}", inputs.size()), fmt::format("{}, one per member", size()));
  for (const auto& input : inputs)
    require(output.scalar_type() == input.scalar_type(), "reduce_scatter_uneven", "dtype of an input",
            c10::toString(input.scalar_type()), c10::toString(output.scalar_type()));
  const at::Tensor& own = inputs[static_cast<std::size_t>(group.axis_rank)];
  require(own.numel() == output.numel(), "reduce_scatter_uneven", "elements of output",
          fmt::format("{}", output.numel()), fmt::format("{}, as in the own input", own.numel()));
  return started(begin(state_, "reduce_scatter_uneven", total_bytes(inputs), options), [&](WorkState& work) {
    std::string sizes;
    for (const auto& input : inputs) sizes += fmt::format("{} ", input.numel());
    check_agreement(work,
                    fmt::format("reduce_scatter_uneven {} {}", c10::toString(output.scalar_type()), sizes));
    if (!on_device(group, output)) return start_reduce_scatter_uneven(work, output, inputs, op);
    // On a device: pads to the largest part and uses NCCL's reduce-scatter. This moves the padding but avoids
    // the host.
    std::int64_t largest = 0;
    for (const auto& input : inputs) largest = std::max(largest, input.numel());
    const at::Tensor whole = at::zeros({size(), largest}, output.options());
    for (std::size_t i = 0; i < inputs.size(); ++i)
      whole[static_cast<std::int64_t>(i)].narrow(0, 0, inputs[i].numel()).copy_(inputs[i].reshape({-1}));
    const at::Tensor part = at::empty({largest}, output.options());
    work.add(group.cuda->reduce_scatter(part, whole, op));
    work.keep(whole);
    work.then(
        [part, output](WorkState&) { output.copy_(part.narrow(0, 0, output.numel()).view(output.sizes())); });
  });
}

Work Group::reduce_scatter_coalesced(const std::vector<at::Tensor>& outputs,
                                     const std::vector<at::Tensor>& inputs, ReduceOp op,
                                     const OpOptions& options) const {
  member("reduce_scatter_coalesced");
  if (skipped_in_trial(outputs)) return {};
  check_transferable(outputs, "reduce_scatter_coalesced");
  check_transferable(inputs, "reduce_scatter_coalesced");
  require(outputs.size() == inputs.size(), "reduce_scatter_coalesced", "number of outputs",
          fmt::format("{}", outputs.size()), fmt::format("{}, one per input", inputs.size()));
  auto parent = begin(state_, "reduce_scatter_coalesced", total_bytes(inputs), options);
  parent->continues_in_steps();
  for (const auto& indices : by_type(inputs)) {
    Tensors rows;
    for (const auto i : indices) {
      require(inputs[i].numel() == outputs[i].numel() * size(), "reduce_scatter_coalesced",
              fmt::format("elements of input {}", i), fmt::format("{}", inputs[i].numel()),
              fmt::format("{}", outputs[i].numel() * size()));
      rows.push_back(inputs[i].reshape({size(), -1}));
    }
    const at::Tensor whole = at::cat(rows, 1);
    const at::Tensor part = at::empty({whole.size(1)}, whole.options());
    parent->then(
        [work = reduce_scatter(part, whole, op, options), part, indices, outputs](WorkState&) mutable {
          work.wait();
          std::int64_t from = 0;
          for (const auto i : indices) {
            outputs[i].copy_(part.narrow(0, from, outputs[i].numel()).view(outputs[i].sizes()));
            from += outputs[i].numel();
          }
        });
  }
  return Work(std::move(parent));
}

Work Group::all_to_all(const at::Tensor& output, const at::Tensor& input,
                       const std::vector<std::int64_t>& output_splits,
                       const std::vector<std::int64_t>& input_splits, const OpOptions& options) const {
  GroupState& group = member("all_to_all");
  if (skipped_in_trial({output})) return {};
  check_transferable({output, input}, "all_to_all");
  const auto splits_of = [&](const at::Tensor& tensor, const std::vector<std::int64_t>& splits,
                             const char* name) {
    require(tensor.dim() > 0, "all_to_all", fmt::format("dims of {}", name), "0", "at least 1");
    if (splits.empty()) {
      require(tensor.size(0) % size() == 0, "all_to_all", fmt::format("rows of {}", name),
              fmt::format("{}", tensor.size(0)),
              fmt::format("a multiple of {} if no splits are given", size()));
      return std::vector<std::int64_t>(static_cast<std::size_t>(size()), tensor.size(0) / size());
    }
    require(static_cast<int>(splits.size()) == size(), "all_to_all", fmt::format("splits of {}", name),
            fmt::format("{}", splits.size()), fmt::format("{}, one per member", size()));
    const auto sum = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
    require(sum == tensor.size(0) && *std::min_element(splits.begin(), splits.end()) >= 0, "all_to_all",
            fmt::format("sum of the splits of {}", name), fmt::format("{}", sum),
            fmt::format("its {} rows, none negative", tensor.size(0)));
    return splits;
  };
  auto out_splits = splits_of(output, output_splits, "output");
  auto in_splits = splits_of(input, input_splits, "input");
  require(output.scalar_type() == input.scalar_type(), "all_to_all", "dtype of output",
          c10::toString(output.scalar_type()), c10::toString(input.scalar_type()));
  const auto own = static_cast<std::size_t>(group.axis_rank);
  require(out_splits[own] == in_splits[own], "all_to_all", "rows kept by this rank, according to the output",
          fmt::format("{}", out_splits[own]), fmt::format("{}, according to the input", in_splits[own]));
  const std::int64_t row_in = input.size(0) > 0 ? input.numel() / input.size(0) : 0;
  const std::int64_t row_out = output.size(0) > 0 ? output.numel() / output.size(0) : 0;
  require(row_in == row_out || input.size(0) == 0 || output.size(0) == 0, "all_to_all",
          "elements per row of output", fmt::format("{}", row_out),
          fmt::format("{}, as in the input", row_in));
  return started(begin(state_, "all_to_all", input.nbytes(), options), [&](WorkState& work) {
    if (on_device(group, input)) {
      const at::Tensor data = input.contiguous();
      const at::Tensor out = output.contiguous();
      work.add(group.cuda->all_to_all(out, data, out_splits, in_splits));
      work.keep(data);
      work.keep(out);
      if (!out.is_same(output)) work.then([out, output](WorkState&) { output.copy_(out); });
      return;
    }
    // Directly to each owner: members that have nothing for each other exchange nothing, and any dtype works.
    const HostCopy copy(output, HostCopy::Direction::Out);
    const at::Tensor data = to_host(input.contiguous());
    const auto parts = data.split_with_sizes(in_splits, 0);
    const auto buffers = copy.host().split_with_sizes(out_splits, 0);
    if (group.world->fake) {
      copy.host().zero_();
    } else {
      exchange(work, Tensors(parts.begin(), parts.end()), Tensors(buffers.begin(), buffers.end()),
               group.internal_tag(group.sequence++, 0));
      buffers[own].copy_(parts[own]);
    }
    if (copy.copied()) work.then([copy](WorkState&) { copy.write_back(); });
  });
}

Work Group::barrier(const OpOptions& options) const {
  GroupState& group = member("barrier");
  if (skipped_in_trial()) return {};
  return started(begin(state_, "barrier", 0, options), [&](WorkState& work) {
    check_agreement(work, "barrier");
    work.add(backend_for(group, !group.cpu && group.cuda).barrier());
  });
}

}  // namespace penstock::comm
