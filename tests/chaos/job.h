// The job of a trial: the commands that train, on one or two hosts, and the processes that they start.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/chaos/cable.h"
#include "tests/chaos/host.h"
#include "tests/chaos/judge.h"
#include "tests/chaos/plan.h"
#include "tests/processes.h"

namespace penstock::chaos {

struct Settings {
  std::filesystem::path penstock;  // the command under test
  std::filesystem::path preload;   // the preloaded library; empty: slow disks and clock jumps are skipped
  std::filesystem::path work;      // folder of all trials
  std::string no_namespaces;       // why there are none; empty if they are allowed
  // Choose Gloo and its interface between hosts, for versions that do not do it themselves.
  bool gloo_by_hand = false;
};

class Job {
 public:
  // Makes the hosts. `mark`: NAME=value that the environment of all processes holds.
  Job(const Settings& settings, const Plan& plan, std::string mark, const std::filesystem::path& folder);

  // `name` is that of the log files. `preloaded`: the file of what is injected; empty: nothing is preloaded.
  void start(const std::string& name, const std::filesystem::path& configuration,
             const std::filesystem::path& preloaded);

  struct Command {
    std::string name;
    int rank = -1;  // -1: a launcher
    Host* host = nullptr;
    std::filesystem::path log;
    std::unique_ptr<Running> running;
    Clock::time_point ended{};
    bool hit = false;                  // by the fault
    std::uintmax_t output_before = 0;  // bytes of the log when the fault began
  };
  std::vector<Command>& commands() { return commands_; }
  // Notes which commands have ended. Returns whether all have that the fault has not hit.
  bool others_ended();
  bool all_ended();
  CommandEnd end_of(Command& command, Clock::time_point begin) const;

  std::vector<test::Process> processes() const { return test::processes_of(mark_); }
  std::vector<pid_t> process_ids() const;
  // The process of a rank; waits for up to 10 s until it exists, and throws StateError if it does not.
  pid_t await_rank(int rank) const;
  bool has_cable() const { return cable_ != nullptr; }
  Cable& cable() { return *cable_; }
  Host& host(int number) { return *hosts_.at(static_cast<std::size_t>(number)); }
  std::vector<std::unique_ptr<Host>>& hosts() { return hosts_; }
  std::vector<std::string> shared_memory() const;
  void signal_all(int signal) const;

 private:
  std::map<std::string, std::string> environment(const std::filesystem::path& preloaded) const;
  void start_one(Host& host, const std::string& log, Command command, std::vector<std::string> words,
                 std::map<std::string, std::string> environment);

  const Settings& settings_;
  const Plan plan_;
  const std::string mark_;
  const std::filesystem::path folder_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::unique_ptr<Cable> cable_;
  std::vector<Command> commands_;
};

}  // namespace penstock::chaos
