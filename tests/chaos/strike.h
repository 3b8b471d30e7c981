// Lets a fault of a plan begin and end in a running job.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/chaos/host.h"
#include "tests/chaos/injected.h"
#include "tests/chaos/job.h"
#include "tests/chaos/plan.h"

namespace penstock::chaos {

// A file that the job maps, too.
class InjectedFile {
 public:
  explicit InjectedFile(const std::filesystem::path& path);
  ~InjectedFile();
  InjectedFile(const InjectedFile&) = delete;
  InjectedFile& operator=(const InjectedFile&) = delete;
  Injected& operator*() { return *place_; }

 private:
  Injected* place_ = nullptr;
};

class Strike {
 public:
  // `disk`: the folder of the checkpoints, a file system of its own for faults of disks.
  Strike(const Plan& plan, Job& job, const std::filesystem::path& disk, InjectedFile& injected)
      : plan_(plan), job_(job), disk_(disk), injected_(injected) {}
  ~Strike();
  Strike(const Strike&) = delete;
  Strike& operator=(const Strike&) = delete;

  void begin();
  // Ends what can end by itself: a cable is plugged in again, a stopped process continues. Faults that lasted
  // to the end of the start as well, so that the job can be started again.
  void end();
  // To be called again and again: ends a fault that lasts for less than the start when its time is over.
  void end_if_over();

 private:
  void hit(int rank_or_launcher);
  void stop(const std::vector<pid_t>& processes);
  void change_cable();
  void fill_disk();
  void let_strangers_in();
  Clock::duration length() const;

  const Plan plan_;
  Job& job_;
  const std::filesystem::path disk_;
  InjectedFile& injected_;
  std::vector<pid_t> stopped_;
  std::vector<std::unique_ptr<Helper>> strangers_;
  std::optional<Clock::time_point> ends_at_;  // std::nullopt: not before the start is over
  bool cable_changed_ = false, disk_filled_ = false, disk_covered_ = false, ended_ = false;
};

}  // namespace penstock::chaos
