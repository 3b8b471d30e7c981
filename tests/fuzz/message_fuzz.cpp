// Reads arbitrary bytes as a message with field types chosen by the input, and encodes the result again: the
// bytes must be the same, and only MismatchError may be thrown.
//
// Input: a byte of flags, a byte n, n bytes of field types, and the rest. Flag 1: the rest is a whole
// message. Otherwise it is a payload, for which a valid header is made here, since a mutation would never get
// the checksum right.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/comm/message/message.h"

namespace {

using namespace penstock;
using namespace penstock::comm;

constexpr MessageKind kKind("FUZZ");
constexpr std::size_t kMaxBytes = 1 << 16;

struct Point {
  std::int32_t x = 0;
  std::optional<double> weight;
  std::vector<std::string> names;
};
void encode(MessageWriter& writer, const Point& point) {
  writer.write(point.x).write(point.weight).write(point.names);
}
void decode(MessageReader& reader, Point& point) {
  reader.read(point.x).read(point.weight).read(point.names);
}

// One decoded value of any type that can be encoded again.
struct Field {
  virtual ~Field() = default;
  virtual void write(MessageWriter& writer) const = 0;
};
template <class T>
struct FieldOf final : Field {
  explicit FieldOf(MessageReader& reader) : value(reader.read<T>()) {}
  void write(MessageWriter& writer) const override { writer.write(value); }
  T value;
};

template <class T>
std::unique_ptr<Field> make(MessageReader& reader) {
  return std::make_unique<FieldOf<T>>(reader);
}

constexpr std::unique_ptr<Field> (*kFields[])(MessageReader&) = {
    make<std::uint8_t>,
    make<std::int16_t>,
    make<std::uint32_t>,
    make<std::int64_t>,
    make<bool>,
    make<float>,
    make<double>,
    make<std::string>,
    make<std::vector<std::uint8_t>>,
    make<std::vector<bool>>,
    make<std::vector<std::int64_t>>,
    make<std::optional<std::string>>,
    make<std::vector<std::optional<std::uint16_t>>>,
    make<std::pair<std::string, std::vector<double>>>,
    make<std::vector<std::vector<std::pair<int, std::string>>>>,
    make<Point>,
    make<std::vector<Point>>,
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "message_fuzz: %s\n", what);
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::uint8_t> input(data, size);
  if (size < 2 || input[1] > size - 2) return 0;
  const auto types = input.subspan(2, input[1]);
  const auto rest = input.subspan(2 + input[1]);

  std::vector<std::uint8_t> message(rest.begin(), rest.end());
  if ((input[0] & 1) == 0) {
    if (rest.size() > kMaxBytes - kMessageHeaderBytes) return 0;
    MessageWriter writer(kKind, 3, kMaxBytes);
    writer.append(rest);
    message = writer.finish();
  }

  std::vector<std::unique_ptr<Field>> fields;
  std::uint16_t version = 0;
  try {
    MessageReader reader(message, kKind, {1, 7}, kMaxBytes);
    version = reader.version();
    for (const std::uint8_t type : types) fields.push_back(kFields[type % std::size(kFields)](reader));
    reader.expect_end();
  } catch (const MismatchError&) {
    return 0;
  }

  if (version < 1 || version > 7) fail("a version outside the range was accepted");
  MessageWriter again(kKind, version, kMaxBytes);
  for (const auto& field : fields) field->write(again);
  if (again.finish() != message) fail("what was read does not encode to the same bytes");
  return 0;
}
