#include "tests/chaos/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <system_error>
#include <thread>
#include <utility>

#include "penstock/errors.h"

namespace penstock::chaos {

namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr const char* kPort = "29555";  // of hosts with a network of their own
// The usual limit of a login, which connections of strangers must not exhaust.
constexpr int kUsualDescriptors = 1024;

}  // namespace

Job::Job(const Settings& settings, const Plan& plan, std::string mark, const fs::path& folder)
    : settings_(settings), plan_(plan), mark_(std::move(mark)), folder_(folder) {
  const int hosts = plan.start == Start::Hosts ? 2 : 1;
  for (int host = 0; host < hosts; ++host)
    hosts_.push_back(std::make_unique<Host>(settings.no_namespaces.empty()));
  if (hosts == 2) cable_ = std::make_unique<Cable>(*hosts_[0], *hosts_[1], plan.seed);
}

std::map<std::string, std::string> Job::environment(const fs::path& preloaded) const {
  std::map<std::string, std::string> entries;
  for (const char* kept :
       {"PATH", "HOME", "LD_LIBRARY_PATH", "ASAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"})
    if (const char* value = std::getenv(kept)) entries[kept] = value;
  // The number of threads decides over the last bits of sums.
  entries["OMP_NUM_THREADS"] = entries["OPENBLAS_NUM_THREADS"] = "1";
  entries["TMPDIR"] = (folder_ / "tmp").string();
  entries["NO_COLOR"] = "1";
  entries[mark_.substr(0, mark_.find('='))] = mark_.substr(mark_.find('=') + 1);
  if (!preloaded.empty()) {
    entries["LD_PRELOAD"] = settings_.preload.string();
    entries["PENSTOCK_CHAOS_INJECTED"] = preloaded.string();
  }
  return entries;
}

void Job::start_one(Host& host, const std::string& log, Command command, std::vector<std::string> words,
                    std::map<std::string, std::string> environment) {
  command.host = &host;
  command.log = folder_ / log;
  command.running = host.start({.words = std::move(words),
                                .environment = std::move(environment),
                                .log = command.log,
                                .folder = folder_,
                                .most_descriptors = has_strangers(plan_.fault) ? kUsualDescriptors : 0});
  commands_.push_back(std::move(command));
}

void Job::start(const std::string& name, const fs::path& configuration, const fs::path& preloaded) {
  const std::string penstock = settings_.penstock.string();
  const auto common = environment(preloaded);
  std::vector<std::string> train = {penstock, "train", configuration.string()};
  switch (plan_.start) {
    case Start::Train:
      if (plan_.restarts > 0) train.insert(train.end(), {"--restarts", std::to_string(plan_.restarts)});
      start_one(*hosts_[0], name + ".log", {.name = "the launcher"}, std::move(train), common);
      break;
    case Start::Launch: {
      std::vector<std::string> words = {
          penstock, "launch", "-n", "2", "--grace", "3", "--restarts", std::to_string(plan_.restarts), "--"};
      words.insert(words.end(), train.begin(), train.end());
      start_one(*hosts_[0], name + ".log", {.name = "the launcher"}, std::move(words), common);
      break;
    }
    case Start::Hosts:
      for (int rank = 0; rank < 2; ++rank) {
        auto entries = common;
        entries["RANK"] = std::to_string(rank);
        entries["WORLD_SIZE"] = "2";
        entries["LOCAL_RANK"] = "0";
        entries["LOCAL_WORLD_SIZE"] = "1";
        entries["MASTER_ADDR"] = Cable::address_of(0);
        entries["MASTER_PORT"] = kPort;
        // No launcher makes one; 16 characters at least, however short the numbers are.
        entries["PENSTOCK_SECRET"] = "the-secret-of-" + mark_.substr(mark_.find('=') + 1);
        // Two hosts have two disks.
        entries["TMPDIR"] = (folder_ / "tmp" / std::to_string(rank)).string();
        fs::create_directories(entries["TMPDIR"]);
        if (settings_.gloo_by_hand) entries["GLOO_SOCKET_IFNAME"] = Cable::kInterface;
        start_one(host(rank), fmt::format("{}-rank{}.log", name, rank),
                  {.name = fmt::format("rank {}", rank), .rank = rank}, train, std::move(entries));
      }
      break;
  }
}

bool Job::others_ended() {
  bool all = true;
  for (Command& command : commands_) {
    if (command.ended == Clock::time_point{} && command.running->exit_code()) command.ended = Clock::now();
    all = all && (command.hit || command.ended != Clock::time_point{});
  }
  return all;
}

bool Job::all_ended() {
  others_ended();
  return std::all_of(commands_.begin(), commands_.end(),
                     [](const Command& command) { return command.ended != Clock::time_point{}; });
}

CommandEnd Job::end_of(Command& command, Clock::time_point begin) const {
  const auto code = command.running->exit_code();
  const auto at = command.ended == Clock::time_point{} ? Clock::now() : command.ended;
  CommandEnd end;
  end.name = command.name;
  end.rank = command.rank;
  end.hit = command.hit;
  end.exit_code = code.value_or(CommandEnd::kStillRunning);
  end.seconds = std::chrono::duration<double>(at - begin).count();
  std::ifstream file(command.log, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(command.output_before));
  end.output = std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  return end;
}

std::vector<pid_t> Job::process_ids() const {
  std::vector<pid_t> ids;
  for (const test::Process& process : processes()) ids.push_back(process.pid);
  return ids;
}

pid_t Job::await_rank(int rank) const {
  const std::string entry = fmt::format("RANK={}", rank);
  for (const auto until = Clock::now() + 10s; Clock::now() < until;) {
    // What a rank starts has the same environment and a higher id.
    for (const test::Process& process : processes())
      if (process.has(entry)) return process.pid;
    std::this_thread::sleep_for(5ms);
  }
  throw StateError(fmt::format("chaos: rank {} has no process", rank));
}

std::vector<std::string> Job::shared_memory() const {
  std::vector<std::string> left;
  for (const auto& host : hosts_)
    for (std::string& name : host->shared_memory()) left.push_back(std::move(name));
  return left;
}

void Job::signal_all(int signal) const {
  for (const pid_t pid : process_ids()) kill(pid, signal);
}

}  // namespace penstock::chaos
