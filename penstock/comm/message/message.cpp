#include "penstock/comm/message/message.h"

#include <fmt/format.h>

#include <cstring>
#include <limits>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"

namespace penstock::comm {

namespace {

// Offsets of the header fields; docs/messages.md is the specification.
constexpr std::array<std::uint8_t, 4> kMagic = {'P', 'N', 'S', 'K'};
constexpr std::uint16_t kFormat = 1;
constexpr std::size_t kFormatAt = 4;
constexpr std::size_t kVersionAt = 6;
constexpr std::size_t kKindAt = 8;
constexpr std::size_t kLengthAt = 12;
constexpr std::size_t kChecksumAt = 16;

constexpr const char* kDamaged =
    "the message was truncated or damaged, or these bytes are not a message; "
    "check that both sides agree on who sends what to whom";
constexpr const char* kOversize = "send less in one message, or raise the limit on both sides";
constexpr const char* kSameBuild = "run the same build of Penstock on all ranks";

template <class T>
void put(std::uint8_t* at, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) at[i] = static_cast<std::uint8_t>(value >> (8 * i));
}

template <class T>
T get(std::span<const std::uint8_t> bytes, std::size_t at) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i)
    value = static_cast<T>(value | static_cast<T>(bytes[at + i]) << (8 * i));
  return value;
}

// "SHAP", or the bytes in hex if they are not printable.
std::string show(std::span<const std::uint8_t> code) {
  std::string text;
  for (const std::uint8_t c : code)
    text += c > ' ' && c <= '~' ? std::string(1, static_cast<char>(c)) : fmt::format("\\x{:02x}", c);
  return '"' + text + '"';
}

[[noreturn]] void fail(MessageKind kind, std::size_t offset, std::string_view what, std::string_view actual,
                       std::string_view expected, std::string_view remedy) {
  throw MismatchError(describe(fmt::format("message \"{}\", byte {}: {}", kind.code(), offset, what), actual,
                               expected, remedy));
}

std::uint64_t frame_checksum(std::span<const std::uint8_t> message) {
  const std::uint64_t head = message_checksum(message.first(kChecksumAt));
  return message_checksum(message.subspan(kMessageHeaderBytes), head);
}

}  // namespace

std::uint64_t message_checksum(std::span<const std::uint8_t> bytes, std::uint64_t seed) {
  std::uint64_t hash = seed;
  for (const std::uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

MessageWriter::MessageWriter(MessageKind kind, std::uint16_t version, std::size_t max_bytes)
    : kind_(kind), version_(version), max_bytes_(max_bytes), bytes_(kMessageHeaderBytes) {
  constexpr std::size_t kLargest = kMessageHeaderBytes + std::numeric_limits<std::uint32_t>::max();
  if (max_bytes < kMessageHeaderBytes || max_bytes > kLargest)
    throw ValueError(describe("limit of a message in bytes", fmt::format("{}", max_bytes),
                              fmt::format("{} to {}", kMessageHeaderBytes, kLargest)));
}

void MessageWriter::append(std::span<const std::uint8_t> bytes) {
  if (finished_) throw StateError("MessageWriter: write after finish; create a new writer for each message");
  if (bytes.size() > max_bytes_ - bytes_.size())
    fail(kind_, bytes_.size(), "writing a message that is too large",
         fmt::format("{} bytes", bytes_.size() + bytes.size()),
         fmt::format("at most {} ({})", max_bytes_, format_bytes(max_bytes_)), kOversize);
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

void MessageWriter::append_count(std::size_t count) {
  if (count > std::numeric_limits<std::uint32_t>::max())
    fail(kind_, bytes_.size(), "writing too many elements", fmt::format("{}", count), "a count below 2^32",
         kOversize);
  write(static_cast<std::uint32_t>(count));
}

std::vector<std::uint8_t> MessageWriter::finish() {
  if (finished_)
    throw StateError("MessageWriter: finish was called twice; create a new writer for each message");
  finished_ = true;
  std::copy(kMagic.begin(), kMagic.end(), bytes_.begin());
  put(bytes_.data() + kFormatAt, kFormat);
  put(bytes_.data() + kVersionAt, version_);
  std::memcpy(bytes_.data() + kKindAt, kind_.code().data(), kind_.code().size());
  put(bytes_.data() + kLengthAt, static_cast<std::uint32_t>(bytes_.size() - kMessageHeaderBytes));
  put(bytes_.data() + kChecksumAt, frame_checksum(bytes_));
  return std::move(bytes_);
}

MessageReader::MessageReader(std::span<const std::uint8_t> bytes, MessageKind kind, VersionRange understood,
                             std::size_t max_bytes)
    : bytes_(bytes), kind_(kind), offset_(kMessageHeaderBytes) {
  if (understood.oldest > understood.newest)
    throw ValueError(describe(fmt::format("versions of message \"{}\"", kind.code()),
                              fmt::format("{} to {}", understood.oldest, understood.newest),
                              "the oldest first"));
  if (bytes.size() > max_bytes)
    fail(kind, 0, "the message is too large", fmt::format("{} bytes", bytes.size()),
         fmt::format("at most {} ({})", max_bytes, format_bytes(max_bytes)), kOversize);
  if (bytes.size() < kMessageHeaderBytes)
    fail(kind, bytes.size(), "the header is truncated", fmt::format("{} bytes", bytes.size()),
         fmt::format("at least {}", kMessageHeaderBytes), kDamaged);
  if (!std::equal(kMagic.begin(), kMagic.end(), bytes.begin()))
    fail(kind, 0, "these bytes are not a message", show(bytes.first(kMagic.size())), show(kMagic), kDamaged);

  // Check the format before everything it governs: another format may lay out the rest differently.
  if (const auto format = get<std::uint16_t>(bytes, kFormatAt); format != kFormat)
    fail(kind, kFormatAt, "the message format differs", fmt::format("format {}", format),
         fmt::format("format {}", kFormat), kSameBuild);
  if (const std::size_t length = get<std::uint32_t>(bytes, kLengthAt);
      length != bytes.size() - kMessageHeaderBytes)
    fail(kind, kLengthAt, "the length does not match the received bytes",
         fmt::format("{} bytes after the header", bytes.size() - kMessageHeaderBytes),
         fmt::format("{}, according to the header", length), kDamaged);
  // Checked before kind and version, so that damage to these is reported as damage and not as a build
  // mismatch.
  const auto carried = get<std::uint64_t>(bytes, kChecksumAt);
  if (const std::uint64_t computed = frame_checksum(bytes); computed != carried)
    fail(kind, kChecksumAt, "the checksum is wrong", fmt::format("{:016x} over the received bytes", computed),
         fmt::format("{:016x}, according to the header", carried), kDamaged);

  const auto code = bytes.subspan(kKindAt, kind.code().size());
  if (!std::equal(code.begin(), code.end(), kind.code().begin()))
    fail(kind, kKindAt, "another kind of message was received", show(code),
         fmt::format("\"{}\"", kind.code()),
         "ranks are at different points of the program; check that all of them make the same calls in the "
         "same order");
  version_ = get<std::uint16_t>(bytes, kVersionAt);
  if (version_ < understood.oldest || version_ > understood.newest)
    fail(kind, kVersionAt, "the sender's version of this message is not supported",
         fmt::format("version {}", version_),
         understood.oldest == understood.newest
             ? fmt::format("version {}", understood.newest)
             : fmt::format("version {} to {}", understood.oldest, understood.newest),
         kSameBuild);
}

std::span<const std::uint8_t> MessageReader::take(std::size_t count) {
  if (count > remaining())
    fail(kind_, offset_, "a field extends past the end", fmt::format("{} bytes left", remaining()),
         fmt::format("{}", count), kSameBuild);
  const auto bytes = bytes_.subspan(offset_, count);
  offset_ += count;
  return bytes;
}

std::size_t MessageReader::take_count(std::size_t minimum_bytes) {
  const std::size_t at = offset_;
  const std::size_t count = read<std::uint32_t>();
  const std::size_t most = remaining() / std::max<std::size_t>(minimum_bytes, 1);
  if (count > most)
    fail(kind_, at, "a count is larger than the bytes that follow allow", fmt::format("{} elements", count),
         fmt::format("at most {} in {} bytes", most, remaining()), kSameBuild);
  return count;
}

void MessageReader::expect_end() const {
  if (remaining() != 0)
    fail(kind_, offset_, "bytes are left over after the last field", fmt::format("{}", remaining()), "0",
         kSameBuild);
}

void MessageReader::refuse(std::size_t offset, std::string_view what, std::string_view actual,
                           std::string_view expected, std::string_view remedy) const {
  fail(kind_, offset, what, actual, expected, remedy.empty() ? std::string_view(kSameBuild) : remedy);
}

void decode(MessageReader& reader, bool& value) {
  const std::size_t at = reader.offset();
  const auto byte = reader.read<std::uint8_t>();
  if (byte > 1) reader.refuse(at, "this byte is not a bool", fmt::format("{}", byte), "0 or 1");
  value = byte == 1;
}

void decode(MessageReader& reader, float& value) {
  value = std::bit_cast<float>(reader.read<std::uint32_t>());
}

void decode(MessageReader& reader, double& value) {
  value = std::bit_cast<double>(reader.read<std::uint64_t>());
}

void encode(MessageWriter& writer, std::string_view text) {
  writer.append_count(text.size());
  writer.append({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

void decode(MessageReader& reader, std::string& text) {
  const auto bytes = reader.take(reader.take_count(1));
  text.assign(bytes.begin(), bytes.end());
}

}  // namespace penstock::comm
