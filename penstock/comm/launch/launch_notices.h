// How a launcher tells its ranks that another rank has ended, before they can know it from each other.
//
// Ranks that have met watch each other (comm/rendezvous/monitor.h). A rank that ends before would only be
// missed at the deadline; its launcher knows at once. The launcher writes one line for each rank that ends
// into a file in its memory, which ranks of the same host open by PENSTOCK_LAUNCH_NOTICES while they meet.
//
// Notices are an additional hint: where the file cannot be made or opened, the deadline still holds.
#pragma once

#include <atomic>
#include <optional>
#include <string>

namespace penstock::comm {

inline constexpr const char* kNoticesVariable = "PENSTOCK_LAUNCH_NOTICES";

// The launcher's side. Used from one thread.
class NoticeBoard {
 public:
  NoticeBoard();
  ~NoticeBoard();
  NoticeBoard(const NoticeBoard&) = delete;
  NoticeBoard& operator=(const NoticeBoard&) = delete;

  // Where processes of this host can read it; empty if the system has no such files.
  std::string path() const;

  // `how`: "killed by SIGKILL after 0.3 s". Also for ranks of other hosts, if the launcher hears of them.
  void post(int rank, const std::string& how);

 private:
  int fd_ = -1;
};

// The side of a rank. Thread safe.
class LaunchNotices {
 public:
  struct Ended {
    int rank = 0;
    std::string how;
  };

  // `path`: the value of the variable; empty: there is no launcher that posts notices.
  LaunchNotices(const std::string& path, int own_rank);
  ~LaunchNotices();
  LaunchNotices(const LaunchNotices&) = delete;
  LaunchNotices& operator=(const LaunchNotices&) = delete;

  // Returns the first other rank that has ended, or std::nullopt.
  std::optional<Ended> first() const;
  // From now on `first` returns nothing: the ranks have met, and one that ends may have done its work.
  void stop() { stopped_ = true; }

 private:
  int fd_ = -1;
  int own_rank_;
  std::atomic<bool> stopped_{false};
};

}  // namespace penstock::comm
