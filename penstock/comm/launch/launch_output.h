// Copies the ranks' output from their pipes to the terminal and the log files: whole lines, bounded memory,
// and no write that can block the launcher's loop.
#pragma once

#include <poll.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/comm/launch/launch_process.h"

namespace penstock::comm {

// Splits a stream of bytes into lines of at most `limit` bytes. The concatenated pieces equal the stream.
class LineSplitter {
 public:
  struct Line {
    std::string_view text;   // without its newline; valid during the call
    bool newline = false;    // false: a piece of a long line, or the unfinished end of the stream
    bool continued = false;  // continues a line whose beginning was emitted before
  };
  using Emit = std::function<void(const Line&)>;

  explicit LineSplitter(std::size_t limit) : limit_(limit) {}

  void feed(std::string_view bytes, const Emit& emit);
  void finish(const Emit& emit);  // emits the rest that has no newline

 private:
  std::size_t limit_;
  std::string partial_;
  bool continued_ = false;
};

// The launcher's own standard output and error.
//
// Text is queued and written only when the receiver has room, so a paused terminal or pager delays neither
// signals nor deadlines. Texts of one channel are never mixed, nor those of both channels if they are the
// same file. When a queue is full, `congested` tells the loop to leave the ranks' output in their pipes,
// which in turn makes the ranks wait.
class Terminal {
 public:
  enum class Channel { Out, Err };

  Terminal(int out_fd, int err_fd);
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  void write(Channel channel, std::string text);
  bool congested(Channel channel) const;
  bool is_tty(Channel channel) const;

  void add_to_poll(std::vector<pollfd>& list) const;  // descriptors `pump` waits to become writable
  void pump();                                        // writes as much as possible without blocking
  bool drained() const;

  // Whether the reader of a channel closed it. Further text for that channel is dropped.
  bool reader_gone() const { return reader_gone_; }

 private:
  struct Text {
    int fd;
    std::string bytes;
  };
  struct Queue {
    std::deque<Text> texts;
    std::size_t written = 0;  // of the front text
    std::size_t bytes = 0;
  };
  struct Target {
    int fd = -1;
    Fd own;  // a second, non-blocking descriptor of a terminal
    bool regular = false;
    bool tty = false;
    bool failed = false;
  };

  void pump(Queue& queue);
  void fail(Target& target, int error);
  Target& target_of(int fd) { return fd == targets_[0].fd ? targets_[0] : targets_[1]; }
  Queue& queue_of(Channel channel) { return queues_[shared_ ? 0 : static_cast<int>(channel)]; }

  Target targets_[2];
  Queue queues_[2];
  bool shared_ = false;  // both channels are the same file: one queue keeps their texts apart
  bool reader_gone_ = false;
};

// A rank's log file. An error ends the logging of this rank and is reported once.
class LogFile {
 public:
  LogFile() = default;
  explicit LogFile(const std::string& path);  // creates or truncates it; throws ConfigError

  // Returns the message to show if writing failed, else "".
  std::string append(std::string_view bytes);

 private:
  std::string path_;
  Fd fd_;
};

// "[rank 3] ", coloured by rank if `color` is set.
std::string line_prefix(int rank, bool color);

}  // namespace penstock::comm
