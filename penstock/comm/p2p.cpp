// Point-to-point transfers of Group: checked on arrival, on every backend.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "penstock/base/errors.h"
#include "penstock/base/text.h"
#include "penstock/comm/checked_transfer.h"
#include "penstock/comm/group.h"
#include "penstock/comm/staging.h"
#include "penstock/comm/work_state.h"

namespace penstock::comm {

namespace {

int position_of(const GroupState& group, Rank peer, int tag, const char* operation, bool self_allowed) {
  if (tag < 0 || tag > Group::kMaxTag)
    throw ValueError(describe(fmt::format("{}: tag", operation), fmt::format("{}", tag), fmt::format("0 to {}", Group::kMaxTag)));
  for (std::size_t i = 0; i < group.ranks.size(); ++i)
    if (group.ranks[i] == peer.value()) {
      if (static_cast<int>(i) == group.axis_rank && !self_allowed)
        throw ValueError(fmt::format("{}: rank {} cannot exchange with itself; hand the tensor over in the program", operation, peer.value()));
      return static_cast<int>(i);
    }
  throw ValueError(describe(fmt::format("{}: peer", operation), fmt::format("rank {}", peer.value()),
                            fmt::format("a member of group {} (ranks {})", group.name, format_list(group.ranks)),
                            "give a global rank of this group"));
}

void check_dense(const at::Tensor& tensor, const char* operation) {
  if (!tensor.defined() || tensor.layout() != at::kStrided)
    throw TypeError(fmt::format("{}: expected a dense tensor, got {}; convert it with to_dense()", operation,
                                tensor.defined() ? "a sparse one" : "an undefined one"));
}

// The contract of a (peer, tag) over NCCL, where data carries no type and size: told through the store by the sender,
// checked by the receiver. Once, or per transfer at debug level detail.
void exchange_contract(GroupState& group, const Contract& own, bool sender, int peer, WorkState& work) {
  if (own.number > 0 && group.debug != DebugLevel::Detail) return;
  const int from = sender ? group.own_rank() : peer;
  const int to = sender ? peer : group.own_rank();
  const std::string key = fmt::format("contract/{}/{}-{}/{}.{}", group.common_name(), from, to, own.tag, own.number);
  if (sender) {
    group.world->store.set(key, own.to_bytes());
    return;
  }
  const Contract sent = Contract::from_bytes(group.world->store.get(key, Clock::now() + group.timeout, fmt::format("rank {} to announce its transfer", peer)));
  if (!sent.matches(own)) throw PipeliningMetadataError(describe_mismatch(from, sent, to, own, work.label()));
}

std::shared_ptr<WorkState> start(const std::shared_ptr<GroupState>& group, const P2POp& op, bool in_batch) {
  const bool sends = op.kind == P2POp::Kind::Send;
  const char* operation = sends ? "send" : "recv";
  const bool on_device = op.tensor.defined() && op.tensor.is_cuda() && group->cuda;
  const int tag = op.options.tag;
  const int position = position_of(*group, op.peer, tag, operation,
                                   on_device ? group->cuda_can.self_transfer && in_batch : group->cpu_can.self_transfer);
  check_dense(op.tensor, operation);
  auto work = std::make_shared<WorkState>(group, operation, op.options.label, op.peer.value(), op.tensor.nbytes(), op.options.timeout, tag);
  if (on_device) {
    if (!sends && !op.tensor.is_contiguous())
      throw ValueError("recv: a CUDA tensor must be contiguous to be received into; give a contiguous buffer");
    const at::Tensor data = op.tensor.contiguous();
    const Contract contract = Contract::of(data, tag, group->next_number(sends, position, tag));
    if (!group->world->fake) exchange_contract(*group, contract, sends, op.peer.value(), *work);
    TransferPtr transfer = sends ? group->cuda->send(data, position, contract.key()) : group->cuda->recv(data, position, contract.key());
    if (!in_batch) work->add(std::move(transfer));
    work->keep(data);
    return work;
  }
  if (sends) {
    start_send(*work, to_host(op.tensor.contiguous()), position, tag);
    return work;
  }
  const HostCopy target(op.tensor, HostCopy::Direction::Out);
  start_receive(*work, target.host(), position, tag);
  if (target.copied()) work->then([target](WorkState&) { target.write_back(); });
  return work;
}

}  // namespace

Work Group::isend(const at::Tensor& tensor, Rank to, const P2POptions& options) const {
  member("send");
  return Work(start(state_, P2POp::send(tensor, to, options), false));
}

Work Group::irecv(const at::Tensor& tensor, Rank from, const P2POptions& options) const {
  member("recv");
  return Work(start(state_, P2POp::recv(tensor, from, options), false));
}

void Group::send(const at::Tensor& tensor, Rank to, const P2POptions& options) const { isend(tensor, to, options).wait(); }

void Group::recv(const at::Tensor& tensor, Rank from, const P2POptions& options) const { irecv(tensor, from, options).wait(); }

std::vector<Work> Group::batch_isend_irecv(const std::vector<P2POp>& ops) const {
  GroupState& group = member("batch");
  const bool bracket = group.cuda && group.cuda_can.needs_batch &&
                       std::any_of(ops.begin(), ops.end(), [](const P2POp& op) { return op.tensor.defined() && op.tensor.is_cuda(); });
  std::vector<std::shared_ptr<WorkState>> states(ops.size());
  // Contracts are exchanged by the sender first, so that two ranks that exchange do not wait for each other in the store.
  if (bracket) group.cuda->begin_batch();
  try {
    for (const auto kind : bracket ? std::array{P2POp::Kind::Send, P2POp::Kind::Recv} : std::array{P2POp::Kind::Recv, P2POp::Kind::Send})
      for (std::size_t i = 0; i < ops.size(); ++i)
        if (ops[i].kind == kind) states[i] = start(state_, ops[i], bracket);
  } catch (...) {
    if (bracket) group.cuda->end_batch();
    throw;
  }
  const TransferPtr all = bracket ? group.cuda->end_batch() : nullptr;
  std::vector<Work> works;
  for (std::size_t i = 0; i < ops.size(); ++i) {
    if (all && ops[i].tensor.is_cuda()) states[i]->add(all);
    works.emplace_back(std::move(states[i]));
  }
  return works;
}

}  // namespace penstock::comm
