#include "penstock/comm/launch/launch_attempt.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "penstock/base/text.h"
#include "penstock/comm/launch/launch_notices.h"
#include "penstock/comm/launch/node_session.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

using Clock = std::chrono::steady_clock;
using Channel = Terminal::Channel;
using namespace std::chrono_literals;

// How long a pipe may stay open after its rank ended because a process that the rank left behind holds it,
// and again after that process's group was killed.
constexpr auto kDrainTime = 500ms;
// Programs such as `timeout` signal a process and then its whole group: two signals within this time count as
// one request.
constexpr auto kSameRequestTime = 250ms;
constexpr auto kStuckNotice = 10s;
// How often the launcher looks whether the ranks that are left after a failure are stopped.
constexpr auto kStoppedCheckTime = 1s;

struct Stream {
  Fd fd;
  Channel channel;
  LineSplitter lines{kMaxShownLine};
};

// Alive -> Ended (a zombie, so its process group ID is not reused) -> GroupKilled -> Gone (reaped, pipes
// closed).
enum class Phase { Alive, Ended, GroupKilled, Gone };

struct RankState {
  Phase phase = Phase::Alive;
  RankOutcome outcome;
  Stream streams[2] = {{{}, Channel::Out}, {{}, Channel::Err}};
  LogFile log;
  Clock::time_point started, drain_until;

  bool drained() const { return !streams[0].fd && !streams[1].fd; }
};

// What is done to ranks that are still alive, and when the next step follows.
enum class Ending { None, Grace, Interrupted, Terminated, Killed };

class Attempt {
 public:
  Attempt(const LaunchContext& context, const AttemptPlan& plan)
      : context_(context), options_(context.options), plan_(plan) {}
  ~Attempt() { kill_everything(); }

  AttemptResult run();

 private:
  bool start();
  void loop();
  void take_signals();
  void take_news();
  void stop(int signal, const std::string& by);
  void end_because_of(const NodeMessage& news);
  void pass_on(int signal);
  void take_exits();
  void take_output();
  bool take_output(RankState& rank, Stream& stream);  // returns whether there may be more
  void show(RankState& rank, Channel channel, const LineSplitter::Line& line);
  void advance_ended_rank(RankState& rank);
  void next_step();
  void on_first_failure(const RankState& rank);
  void send(int signal);
  void kill_everything();
  int alive() const;
  bool only_stopped_ranks_are_left() const;
  std::chrono::milliseconds stop_grace() const { return options_.stop_grace.value_or(options_.grace); }
  std::optional<Clock::time_point> next_deadline() const;
  void summarize();

  const LaunchContext& context_;
  const LaunchOptions& options_;
  const AttemptPlan& plan_;
  NoticeBoard notices_;
  std::vector<RankState> ranks_;
  AttemptResult result_;
  Ending ending_ = Ending::None;
  std::optional<Clock::time_point> step_at_;
  Clock::time_point stopped_at_;
  std::set<int> passed_on_;
  bool color_[2] = {false, false};
  bool cleaned_ = false;
  bool explained_ = false;  // whether the caller explains the first failure; see LaunchOptions
};

std::string elapsed(double seconds) { return fmt::format("{:.1f} s", seconds); }

std::string count_ranks(int count) { return count == 1 ? "1 rank" : fmt::format("{} ranks", count); }

bool Attempt::start() {
  ranks_.reserve(static_cast<std::size_t>(plan_.ranks));
  std::vector<LogFile> logs;
  for (int local = 0; local < plan_.ranks && !options_.log_dir.empty(); ++local)
    logs.emplace_back(
        fmt::format("{}/attempt{}/rank{}.log", options_.log_dir, plan_.attempt, plan_.first_rank + local));
  for (int local = 0; local < plan_.ranks; ++local) {
    const int rank = plan_.first_rank + local;
    const auto started = Clock::now();
    SpawnedRank spawned =
        spawn_rank(context_.program_path, options_.command,
                   rank_environment(context_, plan_, local, notices_.path()), context_.guard);
    if (spawned.exec_errno != 0) {
      const int error = spawned.exec_errno;
      result_.start_code = error == ENOENT ? 127 : 126;
      const char* remedy =
          error == ENOEXEC
              ? "it is not a program for this machine; a script needs a first line such as #!/bin/sh"
          : error == ENOENT
              ? "the file exists, so its interpreter or loader is missing: check its #! line or run `file`"
          : error == E2BIG ? "shorten the arguments or the environment"
                           : "check the file, its permissions and the mount options";
      result_.error = fmt::format("program \"{}\" cannot be executed: {}; {}", context_.program_path,
                                  std::strerror(error), remedy);
      return false;
    }
    RankState& state = ranks_.emplace_back();
    state.started = started;
    state.outcome.rank = rank;
    state.outcome.pid = spawned.pid;
    state.streams[0].fd = std::move(spawned.out);
    state.streams[1].fd = std::move(spawned.err);
    if (!logs.empty()) state.log = std::move(logs[static_cast<std::size_t>(local)]);
  }
  return true;
}

AttemptResult Attempt::run() {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  const bool allowed =
      (no_color == nullptr || *no_color == '\0') && !(term != nullptr && std::strcmp(term, "dumb") == 0);
  for (const Channel channel : {Channel::Out, Channel::Err})
    color_[static_cast<int>(channel)] =
        options_.color == LaunchOptions::Color::Always ||
        (options_.color == LaunchOptions::Color::Auto && allowed && context_.terminal.is_tty(channel));
  if (!start()) {
    kill_everything();
    return result_;
  }
  loop();
  kill_everything();
  for (const RankState& rank : ranks_) result_.ranks.push_back(rank.outcome);
  summarize();
  return result_;
}

void Attempt::loop() {
  const auto all_gone = [&] {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const RankState& r) { return r.phase == Phase::Gone; });
  };
  std::vector<pollfd> list;
  while (true) {
    context_.signals.clear();
    take_signals();
    take_news();
    take_exits();
    take_output();
    for (RankState& rank : ranks_) advance_ended_rank(rank);
    context_.terminal.pump();
    next_step();
    if (all_gone()) return;

    list.assign(1, {context_.signals.wake_fd(), POLLIN, 0});
    for (const RankState& rank : ranks_)
      for (const Stream& stream : rank.streams)
        if (stream.fd && !context_.terminal.congested(stream.channel))
          list.push_back({stream.fd.get(), POLLIN, 0});
    context_.terminal.add_to_poll(list);
    if (context_.nodes != nullptr) context_.nodes->add_to_poll(list);
    int wait_ms = -1;
    if (const auto deadline = next_deadline()) {
      // One millisecond more than the rest, which is rounded down: otherwise the loop would spin until the
      // deadline.
      const auto rest =
          std::chrono::duration_cast<std::chrono::milliseconds>(*deadline - Clock::now()).count() + 1;
      wait_ms = static_cast<int>(std::clamp<long long>(rest, 0, 60'000));
    }
    poll(list.data(), list.size(), wait_ms);
  }
}

void Attempt::stop(int signal, const std::string& by) {
  result_.stopped_by = signal;
  stopped_at_ = Clock::now();
  print_launcher_line(
      context_.terminal,
      fmt::format("{} received{}: passed on to {}, killed if still running in {}; {}", signal_name(signal),
                  by, count_ranks(alive()), elapsed(std::chrono::duration<double>(stop_grace()).count()),
                  "a second SIGINT kills at once"));
  pass_on(signal);
  if (ending_ != Ending::Terminated && ending_ != Ending::Killed) {
    ending_ = Ending::Interrupted;
    step_at_ = stopped_at_ + stop_grace();
  }
}

void Attempt::take_signals() {
  while (const int signal = context_.signals.take_stop()) {
    const auto now = Clock::now();
    if (context_.nodes != nullptr) context_.nodes->report_stop(signal);
    if (result_.stopped_by == 0) {
      stop(signal, "");
    } else if (signal == SIGINT && now - stopped_at_ > kSameRequestTime && ending_ != Ending::Killed) {
      print_launcher_line(context_.terminal, fmt::format("second SIGINT: killing {}", count_ranks(alive())));
      ending_ = Ending::Interrupted;
      step_at_ = now;
    } else {
      pass_on(signal);  // a SIGTERM after a SIGINT may be the one that the ranks handle
    }
  }
  if (context_.terminal.reader_gone() && result_.stopped_by == 0) {
    result_.stopped_by = SIGPIPE;
    if (context_.nodes != nullptr) context_.nodes->report_stop(SIGTERM);
    stopped_at_ = Clock::now();
    send(SIGTERM);
    ending_ = Ending::Interrupted;
    step_at_ = stopped_at_ + stop_grace();
  }
}

// Failures and stops on other hosts.
void Attempt::take_news() {
  if (context_.nodes == nullptr) return;
  while (const auto news = context_.nodes->take()) {
    switch (news->kind) {
      case NodeMessage::Kind::Failed:
      case NodeMessage::Kind::Lost:
        result_.hub_lost = result_.hub_lost || (news->kind == NodeMessage::Kind::Lost && news->node == 0);
        end_because_of(*news);
        break;
      case NodeMessage::Kind::Stop:
        if (news->signal == SIGINT || news->signal == SIGTERM || news->signal == SIGHUP) {
          if (result_.stopped_by == 0) {
            stop(news->signal, " on " + news->host);
          } else {
            pass_on(news->signal);
          }
        }
        break;
      default:
        break;
    }
  }
}

void Attempt::end_because_of(const NodeMessage& news) {
  const bool first = !result_.first_failed_rank && !result_.failed_elsewhere;
  result_.failed_elsewhere = true;
  const int others = alive();
  // Ranks of this host that have not met the others yet hear it from here.
  if (news.kind == NodeMessage::Kind::Failed)
    notices_.post(news.rank, fmt::format("{} on {}", news.text, news.host));
  for (int i = 0; news.kind == NodeMessage::Kind::Lost && i < news.ranks; ++i)
    notices_.post(news.first_rank + i, fmt::format("its host {} is lost: {}", news.host, news.text));
  std::string text = describe_news(news);
  if (first && others > 0 && result_.stopped_by == 0)
    text += fmt::format("; {} still running here, ended by SIGTERM if still running in {}",
                        count_ranks(others), elapsed(std::chrono::duration<double>(options_.grace).count()));
  print_launcher_line(context_.terminal, text);
  if (!first || result_.stopped_by != 0) return;
  ending_ = Ending::Grace;
  step_at_ = Clock::now() + options_.grace;
}

// Passes on each kind once: the ranks must not take a duplicate signal for a second request either.
void Attempt::pass_on(int signal) {
  if (ending_ == Ending::Killed || !passed_on_.insert(signal).second) return;
  send(signal);
}

void Attempt::take_exits() {
  const RankState* first = nullptr;
  for (RankState& rank : ranks_) {
    if (rank.phase != Phase::Alive) continue;
    siginfo_t info = {};
    // WNOWAIT keeps the zombie, so that its process ID is not reused until the group has been killed.
    if (waitid(P_PID, static_cast<id_t>(rank.outcome.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
      if (errno == EINTR) continue;
      // ECHILD: other code of this process waited for all children. The rank is gone and its status unknown:
      // a failure.
    } else if (info.si_pid == 0) {
      continue;
    } else if (info.si_code == CLD_EXITED) {
      rank.outcome.exit_code = info.si_status;
    } else {
      rank.outcome.signal = info.si_status;
      rank.outcome.core_dumped = info.si_code == CLD_DUMPED;
    }
    rank.phase = Phase::Ended;
    rank.outcome.elapsed_s = std::chrono::duration<double>(Clock::now() - rank.started).count();
    rank.drain_until = Clock::now() + kDrainTime;
    notices_.post(rank.outcome.rank,
                  fmt::format("{} after {}", rank.outcome.describe(), elapsed(rank.outcome.elapsed_s)));
    // Its last output is shown before the launcher's message about it. A pipe usually holds 64 KiB, so this
    // ends even if others write.
    for (Stream& stream : rank.streams)
      for (int reads = 0; reads < 16 && take_output(rank, stream); ++reads) {
      }
    if (rank.outcome.ok()) continue;
    // Of ranks found dead together a killed one is the likelier cause: ranks that lose a peer exit by
    // themselves.
    if (first == nullptr || (first->outcome.signal == 0 && rank.outcome.signal != 0)) first = &rank;
  }
  if (first != nullptr && !result_.first_failed_rank) on_first_failure(*first);
}

void Attempt::on_first_failure(const RankState& rank) {
  result_.first_failed_rank = rank.outcome.rank;
  if (context_.nodes != nullptr && !result_.failed_elsewhere) {
    const std::vector<int>& final_codes = options_.final_exit_codes;
    const bool final =
        std::find(final_codes.begin(), final_codes.end(), rank.outcome.exit_code) != final_codes.end();
    context_.nodes->report_failure(
        rank.outcome.rank, rank.outcome.code(), final,
        fmt::format("{} after {}", rank.outcome.describe(), elapsed(rank.outcome.elapsed_s)));
  }
  if (result_.stopped_by != 0) return;   // it was asked to end; the summary reports how it did
  if (result_.failed_elsewhere) return;  // a consequence; the ranks of this host are being ended already
  const int others = alive();
  std::string text = fmt::format("rank {} failed first: {} after {}", rank.outcome.rank,
                                 rank.outcome.describe(), elapsed(rank.outcome.elapsed_s));
  if (rank.outcome.signal == SIGKILL) text += "; if nobody sent it, the system was out of memory (see dmesg)";
  if (others > 0)
    text += fmt::format("; {} still running, ended by SIGTERM if still running in {}", count_ranks(others),
                        elapsed(std::chrono::duration<double>(options_.grace).count()));
  explained_ = options_.explained && options_.explained(rank.outcome.rank);
  if (!explained_) print_launcher_line(context_.terminal, text);
  ending_ = Ending::Grace;
  step_at_ = Clock::now() + options_.grace;
}

void Attempt::take_output() {
  for (RankState& rank : ranks_)
    for (Stream& stream : rank.streams) take_output(rank, stream);
}

bool Attempt::take_output(RankState& rank, Stream& stream) {
  if (!stream.fd) return false;
  if (context_.terminal.congested(stream.channel)) {
    // Nobody reads the launcher's output. What the rank wrote stays in its pipe, and the time to empty the
    // pipe has not begun.
    rank.drain_until = std::max(rank.drain_until, Clock::now() + kDrainTime);
    return false;
  }
  const auto emit = [&](const LineSplitter::Line& line) { show(rank, stream.channel, line); };
  char bytes[64 * 1024];
  const ssize_t got = read(stream.fd.get(), bytes, sizeof bytes);
  if (got > 0) {
    stream.lines.feed({bytes, static_cast<std::size_t>(got)}, emit);
    // There may be more: the end of the pipe is reached only at EAGAIN or end of file.
    if (rank.phase != Phase::Alive) rank.drain_until = std::max(rank.drain_until, Clock::now() + 50ms);
  } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
    stream.fd.reset();
    stream.lines.finish(emit);
  }
  return got > 0;
}

void Attempt::show(RankState& rank, Channel channel, const LineSplitter::Line& line) {
  std::string text(line.text);
  if (line.newline) text += '\n';
  if (const std::string failure = rank.log.append(text); !failure.empty())
    print_launcher_line(context_.terminal, failure);
  if (line.continued && line.text.empty()) return;  // only the newline of a line already shown in full
  if (!line.newline) text += '\n';
  if (options_.prefix) text.insert(0, line_prefix(rank.outcome.rank, color_[static_cast<int>(channel)]));
  context_.terminal.write(channel, std::move(text));
}

// Advances a rank that ended towards Gone as far as its pipes and the time allow.
void Attempt::advance_ended_rank(RankState& rank) {
  const auto now = Clock::now();
  if (rank.phase == Phase::Ended && (rank.drained() || now >= rank.drain_until)) {
    kill(-rank.outcome.pid, SIGKILL);
    rank.phase = Phase::GroupKilled;
    rank.drain_until = now + kDrainTime;
  }
  if (rank.phase != Phase::GroupKilled || !(rank.drained() || now >= rank.drain_until)) return;
  for (Stream& stream : rank.streams) {
    if (!stream.fd) continue;
    stream.fd.reset();
    stream.lines.finish([&](const LineSplitter::Line& line) { show(rank, stream.channel, line); });
  }
  context_.guard.forget(rank.outcome.pid);
  // Reaps the rank itself and processes of its group that became children of this process. Killed ones may
  // need a moment to become zombies; kill_everything reaps those.
  while (waitpid(-rank.outcome.pid, nullptr, WNOHANG) > 0) {
  }
  rank.phase = Phase::Gone;
}

void Attempt::send(int signal) {
  for (RankState& rank : ranks_) {
    if (rank.phase != Phase::Alive) continue;
    rank.outcome.sent_signal = signal;
    kill(-rank.outcome.pid, signal);
  }
}

void Attempt::next_step() {
  const auto now = Clock::now();
  // Ranks that are stopped would let the grace pass and not end.
  if (ending_ == Ending::Grace && step_at_ && only_stopped_ranks_are_left()) step_at_ = now;
  if (!step_at_ || now < *step_at_) return;
  const int count = alive();
  step_at_.reset();
  if (count == 0) return;
  if (ending_ == Ending::Grace) {
    print_launcher_line(context_.terminal,
                        fmt::format("{} still running: sending SIGTERM", count_ranks(count)));
    send(SIGTERM);
    ending_ = Ending::Terminated;
    step_at_ = now + options_.kill_after;
  } else if (ending_ == Ending::Interrupted || ending_ == Ending::Terminated) {
    print_launcher_line(context_.terminal,
                        fmt::format("{} still running: sending SIGKILL", count_ranks(count)));
    send(SIGKILL);
    ending_ = Ending::Killed;
    step_at_ = now + kStuckNotice;
  } else {
    print_launcher_line(
        context_.terminal,
        fmt::format("{} not ended by SIGKILL yet: stuck in the kernel, often because of a file "
                    "system or a device that does not answer",
                    count_ranks(count)));
  }
}

// Also used when leaving by an exception: kills and reaps everything left, without reading its output any
// more.
void Attempt::kill_everything() {
  if (cleaned_) return;
  cleaned_ = true;
  for (RankState& rank : ranks_) {
    if (rank.phase != Phase::Gone) {
      kill(-rank.outcome.pid, SIGKILL);
      context_.guard.forget(rank.outcome.pid);
      rank.phase = Phase::Gone;
    }
    while (true) {
      const pid_t reaped = waitpid(-rank.outcome.pid, nullptr, WNOHANG);
      if (reaped < 0 && errno != EINTR) break;  // ECHILD: no child is in that group any more
      if (reaped != 0) continue;
      kill(-rank.outcome.pid, SIGKILL);  // a live child is in it, so the group is still the rank's
      waitpid(-rank.outcome.pid, nullptr, 0);
    }
  }
  kill_stray_processes("PENSTOCK_LAUNCH_ID=" + context_.launch_id);
}

int Attempt::alive() const {
  return static_cast<int>(std::count_if(ranks_.begin(), ranks_.end(),
                                        [](const RankState& r) { return r.phase == Phase::Alive; }));
}

bool Attempt::only_stopped_ranks_are_left() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const RankState& rank) {
    return rank.phase != Phase::Alive || is_stopped(rank.outcome.pid);
  });
}

std::optional<Clock::time_point> Attempt::next_deadline() const {
  std::optional<Clock::time_point> nearest = step_at_;
  if (ending_ == Ending::Grace && nearest) nearest = std::min(*nearest, Clock::now() + kStoppedCheckTime);
  if (context_.nodes != nullptr)
    if (const auto next = context_.nodes->next_call(); !nearest || next < *nearest) nearest = next;
  for (const RankState& rank : ranks_)
    if ((rank.phase == Phase::Ended || rank.phase == Phase::GroupKilled) &&
        (!nearest || rank.drain_until < *nearest))
      nearest = rank.drain_until;
  return nearest;
}

// Prints one line per kind of end, unless all ranks succeeded.
void Attempt::summarize() {
  if (!result_.first_failed_rank && !result_.failed_elsewhere && result_.stopped_by == 0) return;
  if (explained_ && result_.stopped_by == 0) return;
  std::map<std::string, std::vector<const RankOutcome*>> ways;
  for (const RankOutcome& rank : result_.ranks) ways[rank.describe()].push_back(&rank);
  for (const auto& [way, ranks] : ways) {
    std::vector<int> numbers;
    double low = ranks.front()->elapsed_s, high = low;
    for (const RankOutcome* rank : ranks) {
      numbers.push_back(rank->rank);
      low = std::min(low, rank->elapsed_s);
      high = std::max(high, rank->elapsed_s);
    }
    print_launcher_line(
        context_.terminal,
        fmt::format(
            "summary: {} {}: {}, after {}", ranks.size() == 1 ? "rank" : "ranks", format_list(numbers), way,
            elapsed(low) == elapsed(high) ? elapsed(low) : fmt::format("{:.1f} to {}", low, elapsed(high))));
  }
}

}  // namespace

void print_launcher_line(Terminal& terminal, const std::string& text) {
  terminal.write(Channel::Err, "[launch] " + text + "\n");
}

AttemptResult run_attempt(const LaunchContext& context, const AttemptPlan& plan) {
  return Attempt(context, plan).run();
}

}  // namespace penstock::comm
