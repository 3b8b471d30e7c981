#include "penstock/comm/launch/launch_output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>

#include "penstock/errors.h"

namespace penstock::comm {

namespace {

constexpr std::size_t kQueueLimit = 1 << 20;
constexpr std::size_t kPumpAtOnce = 256 * 1024;  // so that the loop checks for signals in between

// A pipe that polls as writable accepts this much without blocking.
constexpr std::size_t kPipeChunk = 4096;
constexpr std::size_t kFileChunk = 64 * 1024;

bool same_file(int a, int b) {
  struct stat first = {}, second = {};
  return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

}  // namespace

void LineSplitter::feed(std::string_view bytes, const Emit& emit) {
  while (!bytes.empty()) {
    const std::size_t room = limit_ - partial_.size();
    const std::size_t end = bytes.substr(0, room + 1).find('\n');
    if (end != std::string_view::npos) {
      partial_.append(bytes.substr(0, end));
      emit({partial_, true, continued_});
      partial_.clear();
      continued_ = false;
      bytes.remove_prefix(end + 1);
    } else if (bytes.size() > room) {
      partial_.append(bytes.substr(0, room));
      emit({partial_, false, continued_});
      partial_.clear();
      continued_ = true;
      bytes.remove_prefix(room);
    } else {
      partial_.append(bytes);
      bytes = {};
    }
  }
}

void LineSplitter::finish(const Emit& emit) {
  if (!partial_.empty()) emit({partial_, false, continued_});
  partial_.clear();
  continued_ = false;
}

Terminal::Terminal(int out_fd, int err_fd) : shared_(same_file(out_fd, err_fd)) {
  const int fds[2] = {out_fd, err_fd};
  for (int i = 0; i < 2; ++i) {
    Target& target = targets_[i];
    target.fd = fds[i];
    struct stat info = {};
    target.regular = fstat(fds[i], &info) == 0 && S_ISREG(info.st_mode);
    target.tty = isatty(fds[i]) == 1;
    // O_NONBLOCK belongs to the open file description, which is shared with the shell; so a terminal is
    // opened again.
    if (target.tty)
      target.own = Fd(open(fmt::format("/proc/self/fd/{}", fds[i]).c_str(),
                           O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  }
}

void Terminal::write(Channel channel, std::string text) {
  const Target& target = targets_[static_cast<int>(channel)];
  if (text.empty() || target.failed) return;
  Queue& queue = queue_of(channel);
  queue.bytes += text.size();
  // Short texts are joined: one system call per line would be slower than many ranks print.
  if (!queue.texts.empty() && queue.texts.back().fd == target.fd &&
      queue.texts.back().bytes.size() < kFileChunk)
    queue.texts.back().bytes += text;
  else
    queue.texts.push_back({target.fd, std::move(text)});
}

bool Terminal::congested(Channel channel) const {
  return queues_[shared_ ? 0 : static_cast<int>(channel)].bytes > kQueueLimit;
}

bool Terminal::is_tty(Channel channel) const { return targets_[static_cast<int>(channel)].tty; }

bool Terminal::drained() const { return queues_[0].texts.empty() && queues_[1].texts.empty(); }

void Terminal::add_to_poll(std::vector<pollfd>& list) const {
  for (const Queue& queue : queues_)
    if (!queue.texts.empty()) list.push_back({queue.texts.front().fd, POLLOUT, 0});
}

void Terminal::pump() {
  for (Queue& queue : queues_) pump(queue);
}

void Terminal::pump(Queue& queue) {
  std::size_t done = 0;
  while (!queue.texts.empty() && done < kPumpAtOnce) {
    Text& text = queue.texts.front();
    Target& target = target_of(text.fd);
    const auto drop_front = [&] {
      queue.bytes -= text.bytes.size() - queue.written;
      queue.written = 0;
      queue.texts.pop_front();
    };
    if (target.failed) {
      drop_front();
      continue;
    }
    pollfd ready = {text.fd, POLLOUT, 0};
    if (poll(&ready, 1, 0) == 0) return;
    const std::size_t chunk =
        std::min(text.bytes.size() - queue.written, target.regular ? kFileChunk : kPipeChunk);
    const int fd = target.own ? target.own.get() : text.fd;
    const ssize_t wrote = ::write(fd, text.bytes.data() + queue.written, chunk);
    if (wrote < 0) {
      if (errno == EINTR || errno == EAGAIN) return;
      fail(target, errno);
      continue;
    }
    queue.written += static_cast<std::size_t>(wrote);
    queue.bytes -= static_cast<std::size_t>(wrote);
    done += static_cast<std::size_t>(wrote);
    if (queue.written == text.bytes.size()) drop_front();
  }
}

void Terminal::fail(Target& target, int error) {
  target.failed = true;
  if (error == EPIPE) {
    reader_gone_ = true;
  } else if (&target == &targets_[0]) {
    // A full disk must not end the training, but it is reported on standard error if possible. A failure of
    // standard error itself cannot be reported.
    write(Channel::Err,
          fmt::format(
              "[launch] standard output cannot be written: {}; further output of the ranks to it is lost\n",
              std::strerror(error)));
  }
}

LogFile::LogFile(const std::string& path) : path_(path) {
  std::error_code failure;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), failure);
  if (!failure) {
    fd_ = Fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666));
    if (!fd_) failure = std::error_code(errno, std::generic_category());
  }
  if (failure)
    throw ConfigError(
        fmt::format("launch: log file {} cannot be written: {}; set --log-dir to a writable folder", path,
                    failure.message()));
}

std::string LogFile::append(std::string_view bytes) {
  while (fd_ && !bytes.empty()) {
    const ssize_t wrote = ::write(fd_.get(), bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      const int error = errno;
      fd_.reset();
      return fmt::format("log file {} cannot be written: {}; further output of this rank is not logged",
                         path_, std::strerror(error));
    }
    bytes.remove_prefix(static_cast<std::size_t>(wrote));
  }
  return {};
}

std::string line_prefix(int rank, bool color) {
  if (!color) return fmt::format("[rank {}] ", rank);
  // Six colours that are readable on dark and light backgrounds, plain and then bold.
  static constexpr int kColors[] = {36, 33, 32, 35, 34, 31};
  const std::size_t index = static_cast<std::size_t>(rank) % (2 * std::size(kColors));
  return fmt::format("\x1b[{}{}m[rank {}]\x1b[0m ", index < std::size(kColors) ? "" : "1;",
                     kColors[index % std::size(kColors)], rank);
}

}  // namespace penstock::comm
