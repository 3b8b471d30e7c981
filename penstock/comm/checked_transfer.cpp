#include "penstock/comm/checked_transfer.h"

#include <fmt/format.h>

#include <cstring>

#include "penstock/base/errors.h"
#include "penstock/comm/group.h"
#include "penstock/comm/staging.h"

namespace penstock::comm {

namespace {

// Headers and payloads travel under tags of their own, so that a mismatch is seen in a header and never overwrites a
// buffer.
int header_tag(int tag) { return tag * 2; }
int payload_tag(int tag) { return tag * 2 + 1; }

Backend& cpu_backend(GroupState& group) {
  if (!group.cpu)
    throw StateError(fmt::format("group {} cannot move CPU tensors: this build has no Gloo; install libgloo-dev and build again", group.name));
  return *group.cpu;
}

void receive_by_ucx(WorkState& work, const at::Tensor& data, const TransferHeader& expected, int position, int tag) {
  // UCX reports size and kind of what arrived: no header needed.
  const int source = work.group().ranks[static_cast<std::size_t>(position)];
  auto transfer = work.group().ucx->recv(data.data_ptr(), data.nbytes(), position, static_cast<std::uint32_t>(tag));
  work.add(transfer);
  work.then([transfer, expected, source](WorkState& self) {
    TransferHeader sent = expected;
    sent.source = source;
    sent.dtype = static_cast<std::int8_t>(transfer->arrival().kind);
    sent.bytes = transfer->arrival().bytes;
    if (sent.matches(expected)) return;
    const bool known = sent.dtype >= 0 && sent.dtype < static_cast<int>(at::ScalarType::NumOptions);
    sent.dims = 1;
    sent.shape[0] = static_cast<std::int64_t>(sent.bytes / (known ? c10::elementSize(static_cast<at::ScalarType>(sent.dtype)) : 1));
    throw_mismatch(self, sent, expected);
  });
}

}  // namespace

void throw_mismatch(const WorkState& work, const TransferHeader& sent, const TransferHeader& expected) {
  throw PipeliningMetadataError(fmt::format(
      "transfer mismatch: rank {} sent {} with tag {}, rank {} expected {} with tag {}{}; make both sides agree on dtype and size",
      sent.source, sent.describe(), sent.tag, expected.source, expected.describe(), expected.tag,
      work.label().empty() ? "" : fmt::format(" (label \"{}\")", work.label())));
}

void start_send(WorkState& work, const at::Tensor& data, int position, int tag) {
  GroupState& group = work.group();
  if (group.world->fake) return;  // nobody is there
  TransferHeader header = TransferHeader::of(data, group.own_rank(), tag);
  if (group.ucx) {
    work.add(group.ucx->send(data.data_ptr(), data.nbytes(), position, static_cast<std::uint32_t>(tag), static_cast<std::uint16_t>(header.dtype)));
    work.keep(data);
    return;
  }
  Backend& backend = cpu_backend(group);
  const bool inline_data = header.bytes <= Group::kInlineBytes;
  header.payload_follows = inline_data ? 0 : 1;
  at::Tensor message = at::empty({static_cast<std::int64_t>(sizeof header + (inline_data ? header.bytes : 0))}, at::kByte);
  auto* bytes = static_cast<std::uint8_t*>(message.data_ptr());
  std::memcpy(bytes, &header, sizeof header);
  if (inline_data && header.bytes > 0) std::memcpy(bytes + sizeof header, data.data_ptr(), header.bytes);
  work.add(backend.send(message, position, header_tag(tag)));
  work.keep(std::move(message));
  if (inline_data) return;
  work.add(backend.send(as_bytes(data), position, payload_tag(tag)));
  work.keep(data);
}

void start_receive(WorkState& work, const at::Tensor& data, int position, int tag) {
  GroupState& group = work.group();
  if (group.world->fake) return;  // leaves the buffer as it is
  const TransferHeader expected = TransferHeader::of(data, group.own_rank(), tag);
  work.keep(data);
  if (group.ucx) return receive_by_ucx(work, data, expected, position, tag);
  Backend& backend = cpu_backend(group);
  // Large enough for any message that carries its data, so that a short or long one can be told from its header.
  at::Tensor message = group.borrow_staging();
  work.add(backend.recv(message, position, header_tag(tag)));
  work.keep(message);
  // Posted ahead of its header's arrival: the data then moves without a further round trip.
  TransferPtr payload;
  if (expected.bytes > Group::kInlineBytes) payload = backend.recv(as_bytes(data), position, payload_tag(tag));
  const int source = group.ranks[static_cast<std::size_t>(position)];
  work.then([message, data, expected, payload, source](WorkState& self) {
    TransferHeader sent;
    const auto* bytes = static_cast<const std::uint8_t*>(message.data_ptr());
    std::memcpy(&sent, bytes, sizeof sent);
    const auto keep_posted = [&] {
      if (payload) self.group().bury({payload}, {data});  // still posted: lives as long as the failed group
    };
    if (sent.magic != TransferHeader::kMagic) {
      keep_posted();
      throw PipeliningMetadataError(fmt::format("rank {} sent bytes that are no Penstock transfer; every rank must run the same build", source));
    }
    if (!sent.matches(expected)) {
      keep_posted();
      throw_mismatch(self, sent, expected);
    }
    if (payload) {
      self.wait_for(*payload);
    } else if (sent.bytes > 0) {
      std::memcpy(data.data_ptr(), bytes + sizeof sent, sent.bytes);
    }
    self.group().return_staging(message);
  });
}

}  // namespace penstock::comm
