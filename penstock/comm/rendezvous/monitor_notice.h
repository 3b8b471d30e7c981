// What ranks tell each other through the monitor, and how it is written in bytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace penstock::comm {

enum class NoticeKind : std::uint8_t {
  Alive = 1,  // nothing else to say
  Left,       // `rank` has closed its world
  Failed,     // `rank` reports an error of its own
  Lost,       // `rank` has disappeared
  Silent,     // from rank 0: nothing was heard from `rank` for some seconds, a number in the text
  Heard       // from rank 0: `rank` is heard again
};

struct Notice {
  NoticeKind kind = NoticeKind::Alive;
  int rank = 0;
  std::string text;  // the reason, cut to kMaxNoticeText

  std::string to_bytes() const;
  // Throws MismatchError for bytes that are no notice, or one about a rank outside [0, world_size).
  static Notice from_bytes(std::string_view bytes, int world_size);
};

inline constexpr std::size_t kMaxNoticeText = std::size_t{16} << 10;
inline constexpr std::size_t kMaxNotice = kMaxNoticeText + 1024;

}  // namespace penstock::comm
