#include "tests/chaos/trial.h"

#include <fmt/format.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/base/files.h"
#include "penstock/errors.h"
#include "tests/chaos/run_files.h"
#include "tests/chaos/strike.h"

namespace penstock::chaos {

namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr auto kStep = 3ms;              // between two looks at the job
constexpr auto kUndisturbedLimit = 90s;  // for a start that nothing disturbs, on a busy machine
constexpr auto kCleanUpLimit = 3s;       // for what ends after its launcher

bool eventually(std::chrono::milliseconds limit, const std::function<bool()>& condition) {
  for (const auto until = Clock::now() + limit; !condition();) {
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(kStep);
  }
  return true;
}

bool needs_own_disk(Fault fault) { return fault == Fault::DiskFull || fault == Fault::DiskReadOnly; }
bool needs_preload(Fault fault) { return fault == Fault::DiskSlow || fault == Fault::ClockJump; }

// A file system in memory, for the checkpoints of one trial.
class Disk {
 public:
  explicit Disk(fs::path folder) : folder_(std::move(folder)) {
    if (::mount("tmpfs", folder_.c_str(), "tmpfs", 0, "size=64m") != 0)
      throw StateError(fmt::format("chaos: a disk at {}: {}", folder_.string(), std::strerror(errno)));
  }
  ~Disk() { ::umount2(folder_.c_str(), MNT_DETACH); }
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

 private:
  fs::path folder_;
};

class Trial {
 public:
  Trial(const Settings& settings, const Plan& plan, const fs::path& folder)
      : settings_(settings),
        plan_(plan),
        folder_(folder),
        files_{.text = settings.work / "text", .run = folder / "run", .checkpoints = folder / "disk"},
        mark_(fmt::format("PENSTOCK_CHAOS_TRIAL={}.{}.{}", ::getpid(), name_of(plan.fault), plan.seed)) {
    remove_tree(folder);
    fs::create_directories(folder / "tmp");
    fs::create_directories(files_.checkpoints);
    if (!fs::exists(files_.text)) write_text(files_.text);
    if (needs_own_disk(plan.fault)) disk_ = std::make_unique<Disk>(files_.checkpoints);
    if (needs_preload(plan.fault)) injected_path_ = folder / "injected";
    injected_ = std::make_unique<InjectedFile>(folder / "injected");
  }

  ~Trial() {
    // What a failed trial has left running must not disturb the next one.
    for (const test::Process& process : test::processes_of(mark_)) ::kill(process.pid, SIGKILL);
  }

  Outcome run(Expectation& expected) {
    Outcome outcome;
    if (plan_.fault == Fault::CheckpointDamaged) prepare_damage(outcome, expected);
    disturbed_start(outcome, expected);
    const bool finished = std::all_of(outcome.first.begin(), outcome.first.end(),
                                      [](const CommandEnd& end) { return end.exit_code == 0; });
    if (!finished) second_start(outcome);
    const RunProgress progress = read_progress(files_.run);
    outcome.losses = progress.losses;
    if (!finished) outcome.continued_after = progress.continued_after;
    for (std::string& left : unfinished_saves(files_.checkpoints))
      outcome.left_temporary.push_back(std::move(left));
    return outcome;
  }

 private:
  fs::path write_configuration(const std::string& name, bool fallback) {
    Plan plan = plan_;
    plan.fallback = fallback;
    const bool by_hand = settings_.gloo_by_hand && plan.start == Start::Hosts;
    std::ofstream(folder_ / name) << configuration(plan, files_, by_hand ? "gloo" : "auto");
    return folder_ / name;
  }

  // Two checkpoints, of which the newer one is damaged.
  void prepare_damage(Outcome& outcome, Expectation& expected) {
    {
      Job job(settings_, plan_, mark_, folder_);
      job.start("before", write_configuration("before.toml", true), {});
      const bool ready = eventually(kUndisturbedLimit, [&] {
        return job.all_ended() || (read_progress(files_.run).last_step >= plan_.strike_step &&
                                   read_checkpoints(files_.checkpoints).size() >= 2);
      });
      if (!ready || job.all_ended())
        throw StateError("chaos: the start before the damage did not come to two checkpoints");
      job.signal_all(SIGKILL);
      if (!eventually(10s, [&] { return job.all_ended() && job.processes().empty(); }))
        throw StateError("chaos: the start before the damage could not be killed");
    }
    empty_temporary_folder();
    Checkpoints checkpoints = read_checkpoints(files_.checkpoints);
    const std::string newest = checkpoints.rbegin()->first;
    const std::string file = damage_checkpoint(files_.checkpoints / newest, plan_.damage, plan_.seed);
    checkpoints.erase(newest);
    kept_ = std::move(checkpoints);
    damaged_ = newest;
    expected.culprits = expected.reports = {file, newest};
    outcome.struck = true;
  }

  void disturbed_start(Outcome& outcome, const Expectation& expected) {
    Job job(settings_, plan_, mark_, folder_);
    const auto started = Clock::now();
    job.start("first", write_configuration("first.toml", plan_.fallback), injected_path_);
    auto struck = started;
    Strike strike(plan_, job, files_.checkpoints, *injected_);
    if (plan_.fault != Fault::CheckpointDamaged) {
      await_moment(job, started);
      outcome.struck = !job.all_ended();
      struck = Clock::now();
      if (outcome.struck) strike.begin();
    }
    const auto limit = struck + std::chrono::duration_cast<Clock::duration>(
                                    std::chrono::duration<double>(expected.deadline_s + 10));
    while (!job.others_ended() && Clock::now() < limit) {
      strike.end_if_over();
      std::this_thread::sleep_for(kStep);
    }
    // The launcher is gone: what it started has as long as any other has to notice a death.
    if (expected.silent)
      eventually(std::chrono::milliseconds(static_cast<int>(expected.deadline_s * 1000)),
                 [&] { return job.processes().empty(); });
    strike.end();
    if (has_strangers(plan_.fault)) outcome.struck = outcome.struck && (**injected_).strangers > 0;
    // What was stopped continues now, alone, and has to end, too.
    eventually(std::chrono::milliseconds(static_cast<int>(expected.deadline_s * 1000)),
               [&] { return job.all_ended(); });
    for (Job::Command& command : job.commands()) outcome.first.push_back(job.end_of(command, struck));
    inspect(job, outcome.first, outcome);
    check_checkpoints(outcome);
  }

  void second_start(Outcome& outcome) {
    kept_ = read_checkpoints(files_.checkpoints);
    for (const auto& [name, state] : kept_)
      if (name != damaged_) outcome.newest_checkpoint = std::max(outcome.newest_checkpoint, step_of(name));
    Job job(settings_, plan_, mark_, folder_);
    const auto started = Clock::now();
    job.start("second", write_configuration("second.toml", true), {});
    eventually(kUndisturbedLimit, [&] { return job.all_ended(); });
    for (Job::Command& command : job.commands()) outcome.second.push_back(job.end_of(command, started));
    inspect(job, outcome.second, outcome);
    kept_.erase(damaged_);  // written again under the same name
    check_checkpoints(outcome);
  }

  void await_moment(Job& job, Clock::time_point started) {
    if (plan_.strike_after) {
      std::this_thread::sleep_until(started + *plan_.strike_after);
      return;
    }
    std::uintmax_t known = 0;
    const fs::path metrics = files_.run / "metrics.jsonl";
    const bool reached = eventually(kUndisturbedLimit, [&] {
      if (job.all_ended()) return true;
      add_new_checkpoints(files_.checkpoints, kept_);
      std::error_code error;
      const auto size = fs::file_size(metrics, error);
      if (error || size == known) return false;
      known = size;
      return read_progress(files_.run).last_step >= plan_.strike_step;
    });
    if (!reached) throw StateError(fmt::format("chaos: the run did not come to step {}", plan_.strike_step));
  }

  // What is left when all commands have ended; it is removed, so that it is counted once.
  void inspect(Job& job, const std::vector<CommandEnd>& ends, Outcome& outcome) {
    eventually(kCleanUpLimit, [&] { return job.processes().empty(); });
    for (const test::Process& process : job.processes())
      outcome.left_processes.push_back(fmt::format("{} {}", process.pid, process.command));
    job.signal_all(SIGKILL);
    for (std::string& left : job.shared_memory()) outcome.left_memory.push_back(std::move(left));
    for (const auto& entry : fs::recursive_directory_iterator(folder_ / "tmp")) {
      const std::string name = entry.path().filename().string();
      const bool of_host = name == "0" || name == "1";  // one folder for each host
      // A report that an error points to is there to be read.
      const bool named = std::any_of(ends.begin(), ends.end(), [&](const CommandEnd& end) {
        return end.output.find(entry.path().string()) != std::string::npos;
      });
      if (!of_host && !named)
        outcome.left_temporary.push_back(entry.path().lexically_relative(folder_).string());
    }
    empty_temporary_folder();
  }

  void check_checkpoints(Outcome& outcome) {
    for (std::string& lost : lost_checkpoints(kept_, read_checkpoints(files_.checkpoints)))
      outcome.lost_checkpoints.push_back(std::move(lost));
  }

  void empty_temporary_folder() {
    remove_tree(folder_ / "tmp");
    fs::create_directories(folder_ / "tmp");
  }

  const Settings& settings_;
  const Plan plan_;
  const fs::path folder_;
  const RunFiles files_;
  const std::string mark_;
  std::unique_ptr<Disk> disk_;
  fs::path injected_path_;  // empty: nothing is preloaded
  std::unique_ptr<InjectedFile> injected_;
  Checkpoints kept_;     // that must not be lost
  std::string damaged_;  // name of the damaged checkpoint
};

}  // namespace

std::string why_skipped(const Plan& plan, const Settings& settings) {
  if (needs_preload(plan.fault) && settings.preload.empty())
    return "the preloaded library is missing, or cannot be used with a sanitizer";
  if (settings.no_namespaces.empty()) return {};
  const bool one_host = plan.start != Start::Hosts && !needs_own_disk(plan.fault);
  return one_host ? std::string() : settings.no_namespaces;
}

Losses undisturbed_losses(const Settings& settings, Layout layout) {
  Plan plan;
  plan.layout = layout;
  plan.steps = longest_run();
  const fs::path folder = settings.work / (layout == Layout::Pipeline ? "undisturbed-pp" : "undisturbed-dp");
  const RunFiles files{.text = settings.work / "text", .run = folder / "run", .checkpoints = folder / "disk"};
  remove_tree(folder);
  fs::create_directories(folder / "tmp");
  write_text(files.text);
  std::ofstream(folder / "run.toml") << configuration(plan, files);
  Job job(settings, plan, fmt::format("PENSTOCK_CHAOS_TRIAL={}.undisturbed", ::getpid()), folder);
  job.start("run", folder / "run.toml", {});
  eventually(kUndisturbedLimit, [&] { return job.all_ended(); });
  const CommandEnd end = job.end_of(job.commands().front(), Clock::now());
  if (end.exit_code != 0)
    throw StateError(fmt::format("chaos: the undisturbed run ended with {}:\n{}", end.exit_code, end.output));
  const Losses losses = read_progress(files.run).losses;
  remove_tree(folder);
  return losses;
}

Outcome run_trial(const Settings& settings, const Plan& plan, const fs::path& folder, Expectation& expected) {
  return Trial(settings, plan, folder).run(expected);
}

}  // namespace penstock::chaos
