#include "penstock/comm/group/checked_transfer.h"

#include <fmt/format.h>

#include "penstock/errors.h"

namespace penstock::comm {

namespace {

Backend& cpu_backend(GroupState& group) {
  if (!group.cpu)
    throw StateError(fmt::format(
        "group {} cannot transfer CPU tensors: this build has no Gloo; install libgloo-dev and rebuild",
        group.name));
  return *group.cpu;
}

void receive_by_ucx(WorkState& work, const at::Tensor& data, const Contract& expected, int position) {
  // UCX reports the size and kind of the received message.
  const int source = work.group().ranks[static_cast<std::size_t>(position)];
  GroupState& group = work.group();
  auto transfer =
      group.ucx->recv(data.data_ptr(), data.nbytes(), group.ucx_position[static_cast<std::size_t>(position)],
                      static_cast<std::uint32_t>(expected.tag));
  work.add(transfer);
  work.then([transfer, expected, source](WorkState& self) {
    Contract sent = expected;
    sent.dtype = static_cast<std::int8_t>(transfer->arrival().kind);
    sent.bytes = transfer->arrival().bytes;
    if (sent.matches(expected)) return;
    const bool known = sent.dtype >= 0 && sent.dtype < static_cast<int>(at::ScalarType::NumOptions);
    sent.dims = 1;
    sent.shape[0] = static_cast<std::int64_t>(
        sent.bytes / (known ? c10::elementSize(static_cast<at::ScalarType>(sent.dtype)) : 1));
    throw MismatchError(describe_mismatch(source, sent, self.group().own_rank(), expected, self.label()));
  });
}

}  // namespace

std::string describe_mismatch(int sender, const Contract& sent, int receiver, const Contract& expected,
                              const std::string& label) {
  return fmt::format(
      "transfer mismatch: rank {} sent {} with tag {}, rank {} expected {} with tag {}{}; make both sides "
      "agree on dtype and size",
      sender, sent.describe(), sent.tag, receiver, expected.describe(), expected.tag,
      label.empty() ? "" : fmt::format(" (label \"{}\")", label));
}

void start_send(WorkState& work, const at::Tensor& data, int position, int tag) {
  GroupState& group = work.group();
  if (group.world->fake) return;  // a fake world has no peers
  const Contract contract = Contract::of(data, tag, group.next_number(true, position, tag));
  work.keep(data);
  if (group.reaches_by_ucx(position)) {
    work.add(group.ucx->send(data.data_ptr(), data.nbytes(),
                             group.ucx_position[static_cast<std::size_t>(position)],
                             static_cast<std::uint32_t>(tag), static_cast<std::uint16_t>(contract.dtype)));
  } else {
    work.add(cpu_backend(group).send(data, position, contract.key()));
    work.expect({true, position, contract});
  }
}

void start_receive(WorkState& work, const at::Tensor& data, int position, int tag) {
  GroupState& group = work.group();
  if (group.world->fake) return;  // leaves the buffer unchanged
  const Contract contract = Contract::of(data, tag, group.next_number(false, position, tag));
  work.keep(data);
  if (group.reaches_by_ucx(position)) return receive_by_ucx(work, data, contract, position);
  work.add(cpu_backend(group).recv(data, position, contract.key()));
  work.expect({false, position, contract});
}

}  // namespace penstock::comm
