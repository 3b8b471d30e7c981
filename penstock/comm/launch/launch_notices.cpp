#include "penstock/comm/launch/launch_notices.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "penstock/base/number.h"

namespace penstock::comm {

NoticeBoard::NoticeBoard() : fd_(memfd_create("penstock-notices", MFD_CLOEXEC)) {}

NoticeBoard::~NoticeBoard() {
  if (fd_ >= 0) close(fd_);
}

std::string NoticeBoard::path() const { return fd_ < 0 ? "" : fmt::format("/proc/{}/fd/{}", getpid(), fd_); }

void NoticeBoard::post(int rank, const std::string& how) {
  if (fd_ < 0) return;
  std::string line = fmt::format("{} {}", rank, how);
  std::replace(line.begin(), line.end(), '\n', ' ');
  line += '\n';
  // One call for the whole line. A file in memory refuses it only if memory is short; the ranks then wait for
  // their deadline.
  [[maybe_unused]] const ssize_t written = write(fd_, line.data(), line.size());
}

LaunchNotices::LaunchNotices(const std::string& path, int own_rank)
    : fd_(path.empty() ? -1 : open(path.c_str(), O_RDONLY | O_CLOEXEC)), own_rank_(own_rank) {}

LaunchNotices::~LaunchNotices() {
  if (fd_ >= 0) close(fd_);
}

std::optional<LaunchNotices::Ended> LaunchNotices::first() const {
  if (fd_ < 0 || stopped_) return std::nullopt;
  char bytes[4096];
  const ssize_t got = pread(fd_, bytes, sizeof bytes, 0);
  if (got <= 0) return std::nullopt;
  std::istringstream lines(std::string(bytes, static_cast<std::size_t>(got)));
  for (std::string line; std::getline(lines, line) && !lines.eof();) {  // at the end of file: half a line
    const auto blank = line.find(' ');
    const auto rank = parse_integer(line.substr(0, blank));
    if (blank == std::string::npos || !rank || *rank < 0 || *rank > 1 << 20 || *rank == own_rank_) continue;
    return Ended{static_cast<int>(*rank), line.substr(blank + 1)};
  }
  return std::nullopt;
}

}  // namespace penstock::comm
