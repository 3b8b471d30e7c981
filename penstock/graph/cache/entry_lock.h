// The lock of a cache entry: of several processes that need the same entry, one makes it and the others wait.
//
//   EntryLock lock = EntryLock::acquire("cache/0123.lock", 300s, [&] { return
//   file_exists("cache/0123.entry"); }); if (lock.held()) ... make the entry ...
//
// The lock is the kernel's (flock) on a file that names its owner: process, host, start time. It ends with
// the process, also with one that is killed. If a child of a dead owner keeps it (a forked process inherits
// it), a waiter on the same host finds that the owner is gone and replaces the file. A lock on another host
// is waited for, and for no longer than the limit: a host that died may leave one behind. Two processes may
// therefore hold the "same" lock in rare cases; the work is then done twice, which is harmless because
// entries are renamed into place. Thread safety: any thread; threads of one process exclude each other as
// well.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace penstock::graph {

struct LockOwner {
  std::int64_t pid = 0;
  std::string host;
  std::uint64_t started = 0;  // of the process, in the kernel's ticks since the host booted; 0: unknown

  static LockOwner self();
  // Returns std::nullopt for text that is none.
  static std::optional<LockOwner> parse(const std::string& text);
  std::string text() const;  // "pid 12 host build3 started 345"
  // Whether this is a process of this host that no longer exists.
  bool is_dead() const;
  bool operator==(const LockOwner&) const = default;
};

class EntryLock {
 public:
  enum class Outcome : std::uint8_t {
    Held,      // by this process: make the entry, then release
    Done,      // `done` returned true while it waited
    TimedOut,  // somebody else has held it for the whole limit
    Failed     // the file system cannot lock, or the file cannot be made
  };

  EntryLock() = default;
  ~EntryLock() { release(); }
  EntryLock(EntryLock&& other) noexcept;
  EntryLock& operator=(EntryLock&& other) noexcept;

  // Waits until it holds the lock, `done` returns true, or `limit` has passed. Never throws for what the file
  // system does; why() says what it was.
  static EntryLock acquire(const std::filesystem::path& file, std::chrono::milliseconds limit,
                           const std::function<bool()>& done);

  Outcome outcome() const { return outcome_; }
  bool held() const { return descriptor_ >= 0; }
  // Whether it had to wait for another process or thread.
  bool waited() const { return waited_; }
  // For TimedOut and Failed: "process 12 on host build3 has held the lock for 100.0 s", "Permission denied".
  const std::string& why() const { return why_; }
  // Removes the file and ends the lock.
  void release() noexcept;

 private:
  std::filesystem::path file_;
  int descriptor_ = -1;
  Outcome outcome_ = Outcome::Failed;
  bool waited_ = false;
  std::string why_;
};

}  // namespace penstock::graph
