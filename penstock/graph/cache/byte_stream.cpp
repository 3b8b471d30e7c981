#include "penstock/graph/cache/byte_stream.h"

#include <fmt/format.h>

#include "penstock/base/checksum.h"
#include "penstock/errors.h"

namespace penstock::graph {

void ByteReader::fail(const std::string& why) const {
  throw ValueError(fmt::format("{}: byte {}: {}{}{}", name_, at_, why, remedy_.empty() ? "" : "; ", remedy_));
}

Bytes framed(const FileKind& kind, std::span<const std::uint8_t> fields) {
  ByteWriter out;
  out.bytes.reserve(kFrameBytes + fields.size());
  out.raw({reinterpret_cast<const std::uint8_t*>(kind.magic.data()), kind.magic.size()});
  out.number(kind.version);
  out.count(fields.size());
  out.number(checksum64(fields));
  out.raw(fields);
  return std::move(out.bytes);
}

std::span<const std::uint8_t> unframed(const FileKind& kind, std::span<const std::uint8_t> bytes,
                                       const std::string& name, const std::string& remedy) {
  ByteReader header(bytes, name, remedy);
  if (bytes.size() < kFrameBytes || std::memcmp(bytes.data(), kind.magic.data(), kind.magic.size()) != 0)
    header.fail(fmt::format("this is not {}", kind.text));
  header.take(kind.magic.size());
  if (const auto version = header.number<std::uint32_t>(); version != kind.version)
    header.fail(fmt::format(
        "version {}, expected {}{}", version, kind.version,
        version > kind.version ? "; it was written by a newer version of Penstock, which is needed to read it"
                               : "; it was written by an older version of Penstock"));
  const auto size = header.number<std::uint64_t>();
  const auto checksum = header.number<std::uint64_t>();
  if (size != header.remaining())
    header.fail(fmt::format("{} bytes follow the header, expected {}", header.remaining(), size));
  const std::span<const std::uint8_t> fields = bytes.subspan(kFrameBytes);
  if (checksum64(fields) != checksum) header.fail("checksum mismatch: the file is damaged");
  return fields;
}

}  // namespace penstock::graph
