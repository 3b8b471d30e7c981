// The launcher's parts, and `launch` called inside a process that has its own threads, signals and children.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "penstock/comm/launch/compute_environment.h"
#include "penstock/comm/launch/launch_attempt.h"
#include "penstock/comm/launch/launch_cores.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/errors.h"
#include "tests/comm/launcher_harness.h"

namespace penstock::comm::launcher_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> split(std::size_t limit, const std::vector<std::string>& chunks) {
  std::vector<std::string> shown;
  LineSplitter splitter(limit);
  const auto emit = [&](const LineSplitter::Line& line) {
    shown.push_back((line.continued ? "+" : "") + std::string(line.text) + (line.newline ? "|" : ""));
  };
  for (const std::string& chunk : chunks) splitter.feed(chunk, emit);
  splitter.finish(emit);
  return shown;
}

TEST(LineSplitter, CutsAtNewlinesAndAtTheLimit) {
  EXPECT_THAT(split(8, {"ab\ncd", "ef\n\ngh"}), ElementsAre("ab|", "cdef|", "|", "gh"));
  EXPECT_THAT(split(4, {"abcdefghij\nk\n"}), ElementsAre("abcd", "+efgh", "+ij|", "k|"));
  EXPECT_THAT(split(4, {"abcd\nefgh\n"}), ElementsAre("abcd|", "efgh|"))
      << "a line of exactly the limit is one line";
  EXPECT_THAT(split(4, {"abcd", "\n"}), ElementsAre("abcd|"));
  EXPECT_THAT(split(4, {"abcde", "\n"}), ElementsAre("abcd", "+e|"));
  EXPECT_THAT(split(4, {""}), ElementsAre());
}

TEST(LineSplitter, PiecesJoinToTheStreamHoweverItIsCut) {
  const std::string stream = "a\n\nbcdefgh\nijklmnopqrstuvwxyz\n\nend";
  for (std::size_t chunk = 1; chunk <= stream.size(); ++chunk)
    for (std::size_t limit = 1; limit <= 9; ++limit) {
      std::string joined;
      LineSplitter splitter(limit);
      const auto emit = [&](const LineSplitter::Line& line) {
        EXPECT_LE(line.text.size(), limit);
        joined += std::string(line.text) + (line.newline ? "\n" : "");
      };
      for (std::size_t at = 0; at < stream.size(); at += chunk)
        splitter.feed(std::string_view(stream).substr(at, chunk), emit);
      splitter.finish(emit);
      ASSERT_EQ(joined, stream) << "chunk " << chunk << ", limit " << limit;
    }
}

TEST(Cores, ReadsLimitsOfControlGroups) {
  EXPECT_EQ(parse_cpu_max("150000 100000\n"), 1.5);
  EXPECT_EQ(parse_cpu_max("max 100000\n"), std::nullopt);
  EXPECT_EQ(parse_cpu_max(""), std::nullopt);
  TempFolder folder;
  const auto put = [&](const std::string& path, const std::string& text) {
    fs::create_directories((folder / path).parent_path());
    std::ofstream(folder / path) << text;
  };
  const std::string mount = (folder / "").string();
  put("job/cpu.max", "300000 100000\n");
  put("job/step/cpu.max", "max 100000\n");
  EXPECT_EQ(cgroup_cores("0::/job/step\n", mount), 3.0) << "a parent's limit applies";
  EXPECT_EQ(cgroup_cores("0::/other\n", mount), std::nullopt);
  put("cpu/box/cpu.cfs_quota_us", "50000\n");
  put("cpu/box/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_cores("4:memory:/box\n3:cpu,cpuacct:/box\n", mount), 0.5);
  put("cpu/box/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(cgroup_cores("3:cpu,cpuacct:/box\n", mount), std::nullopt);
}

std::map<std::string, std::string> computed(int threads, const std::map<std::string, std::string>& given) {
  const auto added = compute_environment(threads, [&](const std::string& name) {
    return given.contains(name) ? given.at(name) : std::string();
  });
  std::map<std::string, std::string> result(added.begin(), added.end());
  EXPECT_EQ(result.size(), added.size()) << "no variable twice";
  for (const auto& [name, value] : given)
    EXPECT_TRUE(name == "LD_LIBRARY_PATH" || !result.contains(name)) << name << " is the user's";
  return result;
}

TEST(ComputeEnvironment, EveryLibraryHasTheSameThreads) {
  for (const char* name : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"})
    EXPECT_EQ(computed(3, {})[name], "3");
  // LibTorch prefers MKL_NUM_THREADS to OMP_NUM_THREADS: setting it would override the user's value.
  EXPECT_EQ(computed(3, {{"OMP_NUM_THREADS", "1"}})["MKL_NUM_THREADS"], "1");
  EXPECT_EQ(computed(3, {{"OMP_NUM_THREADS", "1"}})["OPENBLAS_NUM_THREADS"], "1");
  EXPECT_EQ(computed(3, {{"MKL_NUM_THREADS", "5"}})["OMP_NUM_THREADS"], "5");
  EXPECT_EQ(computed(3, {{"OPENBLAS_NUM_THREADS", "5"}})["OMP_NUM_THREADS"], "3");
}

TEST(ComputeEnvironment, WaitingThreadsSpinBriefly) {
  EXPECT_EQ(computed(2, {})["GOMP_SPINCOUNT"], "2000");
  EXPECT_FALSE(computed(2, {{"OMP_WAIT_POLICY", "active"}}).contains("GOMP_SPINCOUNT"));
}

TEST(ComputeEnvironment, IsCompleteAfterOneRound) {
  std::map<std::string, std::string> environment = {{"LD_LIBRARY_PATH", "/opt/lib"}};
  for (const auto& [name, value] : computed(2, environment)) environment[name] = value;
  EXPECT_TRUE(environment["LD_LIBRARY_PATH"].ends_with("/opt/lib"));
  EXPECT_THAT(compute_environment(2, [&](const std::string& name) { return environment[name]; }),
              ElementsAre());
}

TEST(ComputeEnvironment, TheOpenMpBuildOfOpenBlasIsFoundBesideTheOther) {
  TempFolder folder;
  const fs::path libraries = fs::canonical(folder / "");
  const auto install = [&](const std::string& build) {
    fs::create_directories(libraries / build);
    for (const char* name : {"libopenblas.so.0", "libblas.so.3", "liblapack.so.3"})
      std::ofstream(libraries / build / name) << "x";
  };
  const auto choose = [&](const std::string& build) {
    fs::remove(libraries / "libopenblas.so.0");
    fs::create_symlink(libraries / build / "libopenblas.so.0", libraries / "libopenblas.so.0");
  };
  EXPECT_EQ(openmp_blas_folder(libraries), "") << "no OpenBLAS at all";
  install("openblas-pthread");
  choose("openblas-pthread");
  EXPECT_EQ(openmp_blas_folder(libraries), "") << "only one build";
  install("openblas-openmp");
  EXPECT_EQ(openmp_blas_folder(libraries), (libraries / "openblas-openmp").string());
  fs::remove(libraries / "openblas-openmp" / "liblapack.so.3");
  EXPECT_EQ(openmp_blas_folder(libraries), "") << "an incomplete build";
  install("openblas-openmp");
  choose("openblas-openmp");
  EXPECT_EQ(openmp_blas_folder(libraries), "") << "it is already the system's choice";
  install("mkl");
  choose("mkl");
  EXPECT_EQ(openmp_blas_folder(libraries), "") << "another BLAS that the user chose";
  EXPECT_EQ(openmp_blas_folder(""), "");
}

TEST(Cores, FollowTheAffinityMask) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu)
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(available_cores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  EXPECT_LE(available_cores(), CPU_COUNT(&before));
  EXPECT_EQ(threads_per_rank(8, 3), 2);
  EXPECT_EQ(threads_per_rank(2, 4), 1);
}

TEST(Ports, AreFreeUntilSomeoneListens) {
  const int port = free_port();
  EXPECT_TRUE(port_is_free(port));
  const Fd taken(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  ASSERT_EQ(bind(taken.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(taken.get(), 1), 0);
  EXPECT_FALSE(port_is_free(port));
  LaunchOptions options;
  options.ranks = 1;
  options.command = {"true"};
  options.port = port;
  EXPECT_THROW(launch(options), ConfigError);
}

// Runs a script as ranks of this process, with its output in a file.
struct InProcess {
  TempFolder folder;
  LaunchOptions options;

  InProcess(int ranks, const std::string& text) {
    options.ranks = ranks;
    options.command = {"/bin/sh", "-c", text};
    options.out_fd = options.err_fd =
        open((folder / "both").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  }
  ~InProcess() { close(options.out_fd); }
  std::string shown() const { return read_file(folder / "both"); }
};

TEST(LaunchInProcess, ReturnsHowEveryRankEnded) {
  InProcess job(3,
                "echo $GREETING; [ $RANK = 1 ] && kill -SEGV $$; [ $RANK = 2 ] && sleep 2 && exit 6; exit 0");
  job.options.environment = {{"GREETING", "hello"}, {"RANK", "77"}};
  const LaunchResult result = launch(job.options);
  EXPECT_EQ(result.exit_code, 128 + SIGSEGV);
  EXPECT_EQ(result.first_failed_rank, 1);
  EXPECT_EQ(result.attempts, 1);
  EXPECT_EQ(result.stopped_by, 0);
  ASSERT_EQ(result.ranks.size(), 3u);
  EXPECT_TRUE(result.ranks[0].ok());
  EXPECT_EQ(result.ranks[1].signal, SIGSEGV);
  EXPECT_THAT(result.ranks[1].describe(), HasSubstr("killed by SIGSEGV"));
  EXPECT_EQ(result.ranks[2].exit_code, 6);
  EXPECT_GE(result.ranks[2].elapsed_s, 2);
  EXPECT_EQ(count_of(job.shown(), "hello\n"), 3) << job.shown();
}

TEST(LaunchInProcess, SomeExitCodesAreFinal) {
  InProcess job(1, "exit 3");
  job.options.restarts = 3;
  EXPECT_EQ(launch(job.options).attempts, 4);
  job.options.final_exit_codes = {2, 3};
  const LaunchResult result = launch(job.options);
  EXPECT_EQ(result.attempts, 1);
  EXPECT_EQ(result.exit_code, 3);
}

// Ranks that save before they end have a separate grace time after a signal; after a failure the short one
// applies.
TEST(LaunchInProcess, TheGraceAfterASignalIsItsOwn) {
  InProcess saves(
      1, "trap 'sleep 0.7; echo saved; exit 0' TERM; kill -TERM $PPID; while :; do sleep 0.05; done");
  saves.options.grace = 50ms;
  saves.options.stop_grace = 20s;
  const LaunchResult stopped = launch(saves.options);
  EXPECT_EQ(stopped.exit_code, 0) << saves.shown();
  EXPECT_THAT(saves.shown(), HasSubstr("saved"));
  InProcess fails(2, "[ $RANK = 1 ] && exit 5; exec sleep 30");
  fails.options.grace = 50ms;
  fails.options.stop_grace = 20s;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(launch(fails.options).exit_code, 5);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
}

TEST(LaunchInProcess, RunsThisProgramThroughProcSelfExe) {
  InProcess job(2, "");
  job.options.command = {"/proc/self/exe", "--penstock_rank_of_test"};
  const LaunchResult result = launch(job.options);
  EXPECT_EQ(result.exit_code, 0) << job.shown();
  EXPECT_THAT(job.shown(), HasSubstr("[rank 1] rank 1 of 2\n"));
}

extern "C" void own_handler(int) {}

TEST(LaunchInProcess, RestoresSignalsAndGivesRanksCleanOnes) {
  struct sigaction own = {};
  own.sa_handler = own_handler;
  std::map<int, struct sigaction> originals;
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) sigaction(signal, &own, &originals[signal]);
  struct sigaction ignore = {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &originals[SIGPIPE]);
  sigaction(SIGUSR2, &ignore, &originals[SIGUSR2]);
  sigset_t blocked, before, after;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  sigaddset(&blocked, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);

  InProcess job(1, "grep -E 'Sig(Blk|Ign)' /proc/self/status");
  EXPECT_EQ(launch(job.options).exit_code, 0);

  pthread_sigmask(SIG_SETMASK, &before, &after);
  EXPECT_TRUE(sigismember(&after, SIGTERM) && sigismember(&after, SIGUSR1));
  EXPECT_FALSE(sigismember(&after, SIGPIPE) || sigismember(&after, SIGCHLD));
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) {
    struct sigaction now = {};
    sigaction(signal, &originals[signal], &now);
    EXPECT_EQ(now.sa_handler, own_handler) << signal;
  }
  for (const int signal : {SIGPIPE, SIGUSR2}) {
    struct sigaction now = {};
    sigaction(signal, &originals[signal], &now);
    EXPECT_EQ(now.sa_handler, SIG_IGN) << signal;
  }
  int subreaper = -1;
  prctl(PR_GET_CHILD_SUBREAPER, &subreaper);
  EXPECT_EQ(subreaper, 0);
  EXPECT_THAT(job.shown(), HasSubstr("SigBlk:\t0000000000000000"));
  // Bits 12 and 11 are SIGPIPE and SIGUSR2; the rest depends on how the tests were started.
  const auto at = job.shown().find("SigIgn:\t");
  ASSERT_NE(at, std::string::npos);
  EXPECT_EQ(std::stoull(job.shown().substr(at + 8, 16), nullptr, 16) & 0x1800u, 0u);
}

TEST(LaunchInProcess, WorksWithBusyThreadsAndOtherChildren) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 3; ++i)
    busy.emplace_back([&] {
      // Holds the allocator's locks much of the time: a child that allocated after fork would hang
      // eventually.
      while (!stop) std::vector<std::string>(200, std::string(3000, 'x')).clear();
    });
  const pid_t other = fork();
  if (other == 0) {
    execl("/bin/sh", "sh", "-c", "exit 33", nullptr);
    _exit(99);
  }
  for (int round = 0; round < 5; ++round) {
    InProcess job(4, "echo $RANK");
    const LaunchResult result = launch(job.options);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(lines_of(job.shown()).size(), 4u) << job.shown();
  }
  stop = true;
  for (std::thread& thread : busy) thread.join();
  int status = 0;
  EXPECT_EQ(waitpid(other, &status, 0), other) << "its status must not have been reaped";
  EXPECT_EQ(WEXITSTATUS(status), 33);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "ranks, orphans and the guard must all be reaped";
}

TEST(LaunchInProcess, ReapsWhatRanksLeave) {
  InProcess job(2, "(sleep 100 & sleep 0 &) ; setsid sleep 100 & sleep 0.2");
  EXPECT_EQ(launch(job.options).exit_code, 0);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(LaunchInProcess, OneAtATime) {
  InProcess first(1, "echo started; sleep 4"), second(1, "true");
  std::thread thread([&] { EXPECT_EQ(launch(first.options).exit_code, 0); });
  ASSERT_TRUE(eventually([&] { return !first.shown().empty(); }));
  EXPECT_THROW(launch(second.options), StateError);
  thread.join();
  EXPECT_EQ(launch(second.options).exit_code, 0);
}

TEST(LaunchInProcess, LeavesNoDescriptorOpen) {
  const auto open_files = [] {
    return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
  };
  InProcess job(3, "echo x; exit 1");
  job.options.restarts = 1;
  job.options.log_dir = (job.folder / "logs").string();
  launch(job.options);  // the first launch creates the wake-up pipe, once
  const auto before = open_files();
  launch(job.options);
  EXPECT_EQ(open_files(), before);
}

TEST(LaunchInProcess, FailsCleanlyWhenDescriptorsRunOut) {
  InProcess job(64, "sleep 100");
  rlimit before = {};
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit few = before;
  few.rlim_cur = 60;
  setrlimit(RLIMIT_NOFILE, &few);
  std::string message;
  try {
    launch(job.options);
  } catch (const StateError& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_THAT(message, HasSubstr("ulimit -n"));
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "the ranks that had started must be gone";
}

}  // namespace
}  // namespace penstock::comm::launcher_test

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--penstock_rank_of_test") == 0) {
    std::printf("rank %s of %s\n", std::getenv("RANK"), std::getenv("WORLD_SIZE"));
    return 0;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
