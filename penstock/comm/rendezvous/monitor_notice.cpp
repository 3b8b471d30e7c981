#include "penstock/comm/rendezvous/monitor_notice.h"

#include <fmt/format.h>

#include <span>
#include <vector>

#include "penstock/comm/message/message.h"

namespace penstock::comm {

namespace {

constexpr MessageKind kNoticeKind("NOTE");
constexpr std::uint16_t kNoticeVersion = 1;

}  // namespace

std::string Notice::to_bytes() const {
  MessageWriter writer(kNoticeKind, kNoticeVersion, kMaxNotice);
  writer.write(static_cast<std::uint8_t>(kind)).write(static_cast<std::int32_t>(rank));
  writer.write(std::string_view(text).substr(0, kMaxNoticeText));
  const std::vector<std::uint8_t> bytes = writer.finish();
  return {bytes.begin(), bytes.end()};
}

Notice Notice::from_bytes(std::string_view bytes, int world_size) {
  MessageReader reader(std::span(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()),
                       kNoticeKind, {kNoticeVersion, kNoticeVersion}, kMaxNotice);
  Notice notice;
  std::size_t at = reader.offset();
  const auto kind = reader.read<std::uint8_t>();
  if (kind < static_cast<std::uint8_t>(NoticeKind::Alive) ||
      kind > static_cast<std::uint8_t>(NoticeKind::Heard))
    reader.refuse(at, "kind of a notice", fmt::format("{}", kind), "1 to 6");
  notice.kind = static_cast<NoticeKind>(kind);
  at = reader.offset();
  notice.rank = reader.read<std::int32_t>();
  if (notice.rank < 0 || notice.rank >= world_size)
    reader.refuse(at, "rank of a notice", fmt::format("{}", notice.rank),
                  fmt::format("0 to {}", world_size - 1));
  notice.text = reader.read<std::string>();
  reader.expect_end();
  return notice;
}

}  // namespace penstock::comm
