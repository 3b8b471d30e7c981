#include "tests/chaos/strike.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "penstock/errors.h"
#include "tests/chaos/strangers.h"

namespace penstock::chaos {

namespace {

namespace fs = std::filesystem;

constexpr const char* kFiller = "filler";

// Runs a program in the network of a host.
void run_in(Host& host, const std::vector<std::string>& words) {
  host.run(Host::Enter::Network, words.front(), [&] { return run_program(words) ? 0 : 1; });
}

}  // namespace

InjectedFile::InjectedFile(const fs::path& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  void* memory = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, sizeof(Injected)) == 0)
    memory = mmap(nullptr, sizeof(Injected), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd >= 0) close(fd);
  if (memory == MAP_FAILED)
    throw StateError(fmt::format("chaos: {}: {}", path.string(), std::strerror(errno)));
  place_ = new (memory) Injected;
}

InjectedFile::~InjectedFile() { munmap(place_, sizeof(Injected)); }

Strike::~Strike() {
  try {
    end();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "chaos: a fault could not be ended: %s\n", error.what());
  }
}

// Marks the command that the fault hits itself: a rank's, or the launcher that was hit (-1).
void Strike::hit(int rank_or_launcher) {
  for (Job::Command& command : job_.commands())
    if (command.rank == rank_or_launcher) command.hit = true;
}

void Strike::stop(const std::vector<pid_t>& processes) {
  for (const pid_t process : processes)
    if (kill(process, SIGSTOP) == 0) stopped_.push_back(process);
}

void Strike::change_cable() {
  LinkQuality quality;
  switch (plan_.fault) {
    case Fault::Delay:
      quality.delay_ms = plan_.amount;
      quality.jitter_ms = plan_.amount / 4;
      break;
    case Fault::Loss:
      if (plan_.by_other_program && program_exists("nft")) {
        for (const auto& host : job_.hosts())
          run_in(
              *host,
              {"nft", fmt::format("add table inet chaos; add chain inet chaos in {{ type filter hook input "
                                  "priority 0; }}; add rule inet chaos in iifname {} numgen random mod 10000 "
                                  "< {:.0f} drop",
                                  Cable::kInterface, plan_.amount * 100)});
      } else {
        quality.loss = plan_.amount / 100;
      }
      break;
    case Fault::Reorder:
      quality.reorder = plan_.amount / 100;
      break;
    case Fault::Rate:
      if (plan_.by_other_program && program_exists("tc")) {
        for (const auto& host : job_.hosts())
          run_in(*host,
                 {"tc", "qdisc", "add", "dev", Cable::kInterface, "root", "tbf", "rate",
                  fmt::format("{:.0f}kbit", plan_.amount * 1000), "burst", "16kb", "latency", "250ms"});
      } else {
        quality.mbit_s = plan_.amount;
      }
      break;
    case Fault::CablePulled:
    case Fault::CableCut:
      quality.cut = true;
      if (plan_.by_other_program) job_.cable().set_carrier(false);
      break;
    default:
      throw StateError("chaos: not a fault of the cable");
  }
  job_.cable().set_quality(quality);
  cable_changed_ = true;
}

// Takes all space but some.
void Strike::fill_disk() {
  const int fd = open((disk_ / kFiller).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  struct statvfs info {};
  if (fd < 0 || statvfs(disk_.c_str(), &info) != 0)
    throw StateError(fmt::format("chaos: {}: {}", disk_.string(), std::strerror(errno)));
  disk_filled_ = true;
  const auto free = static_cast<std::int64_t>(info.f_bavail) * static_cast<std::int64_t>(info.f_frsize);
  const auto left = static_cast<std::int64_t>(plan_.amount * 1024);
  if (free > left && posix_fallocate(fd, 0, free - left) != 0) {
    // The job has written meanwhile: what there is.
    const std::string block(4096, 'x');
    while (write(fd, block.data(), block.size()) > 0) continue;
  }
  close(fd);
}

// On two hosts they come from the other one, and attack both: a rank may listen on no port, but not every
// rank.
void Strike::let_strangers_in() {
  const auto hosts = static_cast<int>(job_.hosts().size());
  for (int attacked = 0; attacked < hosts; ++attacked) {
    StrangerOptions options;
    options.fault = plan_.fault;
    options.seed = plan_.seed + static_cast<std::uint64_t>(attacked);
    options.connections = static_cast<int>(plan_.amount);
    options.reached = &(*injected_).strangers;
    options.reach = hosts == 2 ? Cable::address_of(attacked) : "127.0.0.1";
    // The sockets of the host that is attacked; those of the other are in another network.
    options.processes = [this, hosts, attacked]() -> std::vector<pid_t> {
      if (hosts == 1) return job_.process_ids();
      std::vector<pid_t> ids;
      for (const test::Process& process : job_.processes())
        if (process.has(fmt::format("RANK={}", attacked))) ids.push_back(process.pid);
      return ids;
    };
    Host& from = hosts == 2 ? job_.host(other_than(attacked)) : job_.host(0);
    strangers_.push_back(from.helper(Host::Enter::Network, [options] { return be_stranger(options); }));
  }
}

void Strike::begin() {
  for (Job::Command& command : job_.commands()) {
    std::error_code error;
    command.output_before = fs::file_size(command.log, error);
    if (error) command.output_before = 0;
  }
  const bool hosts = plan_.start == Start::Hosts;
  switch (plan_.fault) {
    case Fault::KillRank: {
      const pid_t process = job_.await_rank(plan_.victim);
      if (hosts) hit(plan_.victim);
      kill(process, SIGKILL);
      break;
    }
    case Fault::StopRank:
    case Fault::PauseRank: {
      const pid_t process = job_.await_rank(plan_.victim);
      if (hosts && plan_.fault == Fault::StopRank) hit(plan_.victim);
      stop({process});
      break;
    }
    case Fault::KillLauncher:
      hit(-1);
      kill(job_.commands().front().running->pid(), SIGKILL);
      break;
    case Fault::PauseLauncher:
      stop({job_.commands().front().running->pid()});
      break;
    case Fault::KillHost:
      hit(plan_.victim);
      job_.host(plan_.victim).end();
      break;
    case Fault::StopHost: {
      job_.await_rank(plan_.victim);
      hit(plan_.victim);
      std::vector<pid_t> processes;
      for (const test::Process& process : job_.processes())
        if (process.has(fmt::format("RANK={}", plan_.victim))) processes.push_back(process.pid);
      stop(processes);
      break;
    }
    case Fault::Delay:
    case Fault::Loss:
    case Fault::Reorder:
    case Fault::Rate:
    case Fault::CablePulled:
    case Fault::CableCut:
      change_cable();
      break;
    case Fault::DiskFull:
      fill_disk();
      break;
    case Fault::DiskReadOnly:
      // A read-only mount over it: open files keep working, as on a file system that its errors have made
      // read-only.
      for (const auto& host : job_.hosts())
        host->run(Host::Enter::NetworkAndMounts, "a read-only disk", [this] {
          const char* disk = disk_.c_str();
          return mount(disk, disk, nullptr, MS_BIND, nullptr) == 0 &&
                         mount(nullptr, disk, nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) == 0
                     ? 0
                     : 1;
        });
      disk_covered_ = true;
      break;
    case Fault::DiskSlow:
      (*injected_).write_delay_us = static_cast<std::int64_t>(plan_.amount * 1000);
      break;
    case Fault::ClockJump:
      (*injected_).rank = plan_.victim;
      (*injected_).clock_jump_ns = static_cast<std::int64_t>(plan_.amount * 1e9);
      break;
    case Fault::Garbage:
    case Fault::Flood:
    case Fault::HalfOpen:
      let_strangers_in();
      break;
    case Fault::CheckpointDamaged:
      break;  // between two starts
  }
  if (plan_.seconds > 0) ends_at_ = Clock::now() + length();
}

void Strike::end_if_over() {
  if (!ends_at_) return;
  // The time of strangers begins when a port is there for them.
  if (has_strangers(plan_.fault) && (*injected_).strangers == 0)
    ends_at_ = Clock::now() + length();
  else if (Clock::now() >= *ends_at_)
    end();
}

Clock::duration Strike::length() const {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(plan_.seconds));
}

void Strike::end() {
  if (std::exchange(ended_, true)) return;
  ends_at_.reset();
  for (const pid_t process : stopped_) kill(process, SIGCONT);
  strangers_.clear();
  if (cable_changed_) {
    job_.cable().set_quality({});
    if (plan_.by_other_program && (plan_.fault == Fault::CablePulled || plan_.fault == Fault::CableCut))
      job_.cable().set_carrier(true);
  }
  if (disk_filled_) fs::remove(disk_ / kFiller);
  if (disk_covered_)
    for (const auto& host : job_.hosts())
      host->run(Host::Enter::NetworkAndMounts, "the end of a read-only disk",
                [this] { return umount2(disk_.c_str(), MNT_DETACH) == 0 ? 0 : 1; });
  (*injected_).write_delay_us = 0;
}

}  // namespace penstock::chaos
