// Reads arbitrary bytes as a message of records and encodes the result again: the bytes must be the same, and
// only MismatchError may be thrown.
//
// Input: a byte that selects the type, and the rest. Below 5 the rest is a payload, for which a valid header
// is made here, since a mutation would never get the checksum right; otherwise it is a whole message.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "penstock/pipeline/contract/record_messages.h"

namespace {

using namespace penstock;
using namespace penstock::comm;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "record_messages_fuzz: %s\n", what);
  std::abort();
}

// Typical uses of a received record: none may fail for an accepted record.
void use(const TensorMeta& meta) {
  if (to_string(meta).empty()) fail("a record without a text");
  if (!differences(meta, meta).empty()) fail("a record differs from itself");
  const TensorRecord& local = local_record(meta);
  if (local.shape().size() != local.stride().size() || local.numel() < 0 || local.storage_bytes() < 0)
    fail("an impossible record was accepted");
}
void use(const StageMeta& meta) {
  if (to_string(meta).empty()) fail("a stage without a text");
  if (meta.inputs)
    for (const auto& record : *meta.inputs) use(record);
  if (meta.output_grads)
    for (const auto& record : *meta.output_grads)
      if (record) use(*record);
}
void use(const StageForwardMeta& meta) {
  for (const auto& record : meta.outputs()) use(record);
}
void use(const StageBackwardMeta& meta) {
  for (const auto& record : meta.input_grads())
    if (record) use(*record);
}
void use(const MeshKey& key) {
  if (key.layout && key.layout->size() < 1) fail("an impossible layout was accepted");
  if (key.to_string().empty()) fail("a key without a text");
}

template <class T>
void run(std::span<const std::uint8_t> input, bool whole) {
  std::vector<std::uint8_t> message(input.begin(), input.end());
  if (!whole) {
    MessageWriter writer(RecordMessage<T>::kKind, kRecordVersion);
    writer.append(input);
    message = writer.finish();
  }
  std::optional<T> value;
  try {
    value = from_message<T>(message);
  } catch (const MismatchError&) {
    return;
  }
  use(*value);
  const auto again = to_message(*value);
  if (again != message) fail("what was read does not encode to the same bytes");
  if (from_message<T>(again) != *value) fail("equal bytes decode to different values");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span<const std::uint8_t> rest(data + 1, size - 1);
  const bool whole = data[0] % 10 >= 5;
  switch (data[0] % 5) {
    case 0:
      run<TensorMeta>(rest, whole);
      break;
    case 1:
      run<StageMeta>(rest, whole);
      break;
    case 2:
      run<StageForwardMeta>(rest, whole);
      break;
    case 3:
      run<StageBackwardMeta>(rest, whole);
      break;
    case 4:
      run<MeshKey>(rest, whole);
      break;
  }
  return 0;
}
