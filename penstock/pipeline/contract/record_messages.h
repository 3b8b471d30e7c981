// Tensor records as typed messages: stages use them to announce what they will send.
//
//   std::vector<std::uint8_t> bytes = to_message(StageForwardMeta(outputs));
//   StageForwardMeta inputs = from_message<StageForwardMeta>(bytes);
//
// Equal records produce equal bytes on every machine and with every LibTorch: element types, placements and
// reductions have numbers of their own. from_message throws PipeliningMetadataError, with a remedy, for a
// message of another version, a number unknown to this build, an element type that this LibTorch lacks, or
// fields that no tensor can have. The fields are specified in docs/messages.md; `write` and `read` of
// message.h accept all these types as parts of other messages.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "penstock/comm/message/message.h"
#include "penstock/mesh_layout.h"
#include "penstock/pipeline/contract/stage_meta.h"
#include "penstock/placement.h"
#include "penstock/torch/tree/tensor_meta.h"

namespace penstock::comm {

// Version of the fields of all these kinds, which share their parts.
inline constexpr std::uint16_t kRecordVersion = 1;

template <class T>
struct RecordMessage;
template <>
struct RecordMessage<TensorMeta> {
  static constexpr MessageKind kKind{"TMET"};
};
template <>
struct RecordMessage<StageMeta> {
  static constexpr MessageKind kKind{"SMET"};
};
template <>
struct RecordMessage<StageForwardMeta> {
  static constexpr MessageKind kKind{"FMET"};
};
template <>
struct RecordMessage<StageBackwardMeta> {
  static constexpr MessageKind kKind{"BMET"};
};
template <>
struct RecordMessage<MeshKey> {
  static constexpr MessageKind kKind{"MKEY"};
};

void encode(MessageWriter& writer, at::ScalarType dtype);
void decode(MessageReader& reader, at::ScalarType& dtype);
void encode(MessageWriter& writer, const Placement& placement);
void decode(MessageReader& reader, Placement& placement);
void encode(MessageWriter& writer, const MeshLayout& layout);
void decode(MessageReader& reader, MeshLayout& layout);
void encode(MessageWriter& writer, const MeshKey& key);
void decode(MessageReader& reader, MeshKey& key);
void encode(MessageWriter& writer, const TensorRecord& record);
void decode(MessageReader& reader, TensorRecord& record);
void encode(MessageWriter& writer, const DistributedRecord& record);
void decode(MessageReader& reader, DistributedRecord& record);
void encode(MessageWriter& writer, const TensorMeta& meta);
void decode(MessageReader& reader, TensorMeta& meta);
void encode(MessageWriter& writer, const StageMeta& meta);
void decode(MessageReader& reader, StageMeta& meta);
void encode(MessageWriter& writer, const StageForwardMeta& meta);
void decode(MessageReader& reader, StageForwardMeta& meta);
void encode(MessageWriter& writer, const StageBackwardMeta& meta);
void decode(MessageReader& reader, StageBackwardMeta& meta);

// One value as a whole message: a TensorMeta, StageMeta, StageForwardMeta, StageBackwardMeta or MeshKey.
template <class T>
std::vector<std::uint8_t> to_message(const T& value) {
  return MessageWriter(RecordMessage<T>::kKind, kRecordVersion).write(value).finish();
}
template <class T>
T from_message(std::span<const std::uint8_t> bytes) {
  MessageReader reader(bytes, RecordMessage<T>::kKind, {kRecordVersion, kRecordVersion});
  T value = reader.read<T>();
  reader.expect_end();
  return value;
}

}  // namespace penstock::comm
