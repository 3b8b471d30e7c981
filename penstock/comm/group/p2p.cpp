// Point-to-point transfers of Group, checked on arrival on every backend.
#include <fmt/format.h>

#include <algorithm>
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

int position_of(const GroupState& group, int peer, int tag, const char* operation, bool self_allowed) {
  if (tag < 0 || tag > Group::kMaxTag)
    throw ValueError(describe(fmt::format("{}: tag", operation), fmt::format("{}", tag),
                              fmt::format("0 to {}", Group::kMaxTag)));
  for (std::size_t i = 0; i < group.ranks.size(); ++i)
    if (group.ranks[i] == peer) {
      if (static_cast<int>(i) == group.axis_rank && !self_allowed)
        throw ValueError(
            fmt::format("{}: rank {} cannot exchange with itself; use the tensor directly", operation, peer));
      return static_cast<int>(i);
    }
  throw ValueError(
      describe(fmt::format("{}: peer", operation), fmt::format("rank {}", peer),
               fmt::format("a member of group {} (ranks {})", group.name, format_list(group.ranks)),
               "pass a global rank of this group"));
}

// Exchanges the contract of a (peer, tag) over NCCL, where data carries no type and size: the sender posts it
// in the store, the receiver checks it. Once, or per transfer at debug level "detail".
void exchange_contract(GroupState& group, const Contract& own, bool sender, int peer, WorkState& work) {
  if (own.number > 0 && group.debug != DebugLevel::Detail) return;
  const int from = sender ? group.own_rank() : peer;
  const int to = sender ? peer : group.own_rank();
  const std::string key =
      fmt::format("contract/{}/{}-{}/{}.{}", group.common_name(), from, to, own.tag, own.number);
  if (sender) {
    group.world->store.set(key, own.to_bytes());
    return;
  }
  const Contract sent = Contract::from_bytes(group.world->store.get(
      key, Clock::now() + group.timeout, fmt::format("rank {} to announce its transfer", peer)));
  if (!sent.matches(own)) throw MismatchError(describe_mismatch(from, sent, to, own, work.label()));
}

// One transfer, checked and announced but not yet started.
struct Prepared {
  std::shared_ptr<WorkState> work;
  int position = 0;
  bool on_device = false;
};

Prepared prepare(const std::shared_ptr<GroupState>& group, const P2POp& op, bool in_batch) {
  const bool sends = op.kind == P2POp::Kind::Send;
  const char* operation = sends ? "send" : "recv";
  Prepared prepared;
  prepared.on_device = op.tensor.defined() && op.tensor.is_cuda() && group->cuda;
  prepared.position = position_of(
      *group, op.peer, op.options.tag, operation,
      prepared.on_device ? group->cuda_can.self_transfer && in_batch : group->cpu_can.self_transfer);
  check_transferable(op.tensor, operation);
  if (prepared.on_device && !sends && !op.tensor.is_contiguous())
    throw ValueError("recv: a CUDA tensor must be contiguous to receive into; pass a contiguous buffer");
  prepared.work = std::make_shared<WorkState>(group, operation, op.options.label, op.peer, op.tensor.nbytes(),
                                              op.options.timeout, op.options.tag);
  return prepared;
}

// Posts or checks the contracts before any transfer of a batch has started: a mismatch must not leave half a
// batch behind.
void announce(const Prepared& prepared, const P2POp& op) {
  GroupState& group = prepared.work->group();
  if (!prepared.on_device || group.world->fake) return;
  const bool sends = op.kind == P2POp::Kind::Send;
  const Contract contract =
      Contract::of(op.tensor, op.options.tag, group.next_number(sends, prepared.position, op.options.tag));
  exchange_contract(group, contract, sends, op.peer, *prepared.work);
}

void post(const Prepared& prepared, const P2POp& op, bool in_batch) {
  const bool sends = op.kind == P2POp::Kind::Send;
  WorkState& work = *prepared.work;
  GroupState& group = work.group();
  if (prepared.on_device) {
    const at::Tensor data = op.tensor.contiguous();
    TransferPtr transfer =
        sends ? group.cuda->send(data, prepared.position, 0) : group.cuda->recv(data, prepared.position, 0);
    if (!in_batch) work.add(std::move(transfer));
    work.keep(data);
    return;
  }
  if (sends) return start_send(work, to_host(op.tensor.contiguous()), prepared.position, op.options.tag);
  const HostCopy target(op.tensor, HostCopy::Direction::Out);
  start_receive(work, target.host(), prepared.position, op.options.tag);
  if (target.copied()) work.then([target](WorkState&) { target.write_back(); });
}

Work start(const std::shared_ptr<GroupState>& group, const P2POp& op) {
  const Prepared prepared = prepare(group, op, false);
  group->started(*prepared.work, [&] {
    announce(prepared, op);
    post(prepared, op, false);
  });
  return Work(prepared.work);
}

}  // namespace

Work Group::isend(const at::Tensor& tensor, int to, const P2POptions& options) const {
  member("send");
  if (skipped_in_trial()) return {};
  return start(state_, P2POp::send(tensor, to, options));
}

Work Group::irecv(const at::Tensor& tensor, int from, const P2POptions& options) const {
  member("recv");
  if (skipped_in_trial({tensor})) return {};
  return start(state_, P2POp::recv(tensor, from, options));
}

void Group::send(const at::Tensor& tensor, int to, const P2POptions& options) const {
  isend(tensor, to, options).wait();
}

void Group::recv(const at::Tensor& tensor, int from, const P2POptions& options) const {
  irecv(tensor, from, options).wait();
}

std::vector<Work> Group::batch_isend_irecv(const std::vector<P2POp>& ops) const {
  GroupState& group = member("batch");
  if (StepContext::current()->trial) {
    for (const P2POp& op : ops)
      if (op.kind == P2POp::Kind::Recv) skipped_in_trial({op.tensor});
    return std::vector<Work>(ops.size());
  }
  const bool bracket =
      group.cuda && group.cuda_can.needs_batch && std::any_of(ops.begin(), ops.end(), [](const P2POp& op) {
        return op.tensor.defined() && op.tensor.is_cuda();
      });
  std::vector<Prepared> prepared;
  for (const P2POp& op : ops) prepared.push_back(prepare(state_, op, bracket));
  // Receives first, so that data finds its buffer. NCCL has no tags, only the order within the batch, so both
  // sides order by tag.
  std::vector<std::size_t> order(ops.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const bool a_sends = ops[a].kind == P2POp::Kind::Send, b_sends = ops[b].kind == P2POp::Kind::Send;
    if (a_sends != b_sends) return b_sends;
    return bracket && ops[a].options.tag < ops[b].options.tag;
  });
  // Posts all contracts before it checks any, so that two ranks that exchange do not wait for each other.
  for (const auto kind : {P2POp::Kind::Send, P2POp::Kind::Recv})
    for (const std::size_t i : order)
      if (ops[i].kind == kind) group.started(*prepared[i].work, [&] { announce(prepared[i], ops[i]); });
  if (bracket) group.cuda->begin_batch();
  for (const std::size_t i : order)
    group.started(*prepared[i].work, [&] { post(prepared[i], ops[i], bracket); });
  const TransferPtr all = bracket ? group.cuda->end_batch() : nullptr;
  std::vector<Work> works;
  for (const Prepared& one : prepared) {
    if (all && one.on_device) one.work->add(all);
    works.emplace_back(one.work);
  }
  return works;
}

}  // namespace penstock::comm
