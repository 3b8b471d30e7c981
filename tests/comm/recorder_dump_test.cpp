// Forked children that crash: the dump must exist and be complete, and the child must die as it would without
// the handler.
#include "penstock/comm/record/recorder_dump.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <thread>

#include "penstock/base/files.h"
#include "penstock/comm/record/recorder.h"
#include "penstock/errors.h"

namespace penstock::comm {
namespace recorder_dump_test {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

// A page without access rights instead of a null pointer, which sanitizers would catch before the processor
// does.
void touch_forbidden_memory() {
  void* page = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *static_cast<volatile int*>(page) = 1;
}

class RecorderDump : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("recorder_dump_test_" + std::to_string(::getpid()));
    remove_tree(folder_);
    ::unsetenv("PENSTOCK_RECORDER_DIR");
    ::unsetenv("PENSTOCK_LOG_DIR");
  }
  void TearDown() override { remove_tree(folder_); }

  struct Death {
    int status = 0;
    json dump;  // null if there is no file
  };

  // Runs `die` in a child that has started one operation.
  Death run_child(const std::function<void()>& die, FatalSignals signals = FatalSignals::Crashes) {
    const pid_t child = ::fork();
    if (child == 0) {
      const rlimit no_core = {0, 0};
      ::setrlimit(RLIMIT_CORE, &no_core);
      // Remove the handlers that sanitizers installed.
      for (const int number : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL}) std::signal(number, SIG_DFL);
      if (before_install_) before_install_();
      install_fatal_signal_dump(folder_, 5, signals);
      Recorder::global().set_world_size(8);
      Recorder::global().end(Recorder::global().begin({.operation = "all_reduce", .bytes = 16}),
                             OperationState::Done);
      Recorder::global().begin({.operation = "recv",
                                .group = "pp.backward",
                                .label = "stuck \"here\"\n\xff",
                                .bytes = 64,
                                .peer = 4});
      die();
      std::_Exit(99);
    }
    Death death;
    EXPECT_EQ(::waitpid(child, &death.status, 0), child);
    const fs::path path = folder_ / ("recorder-rank5-" + std::to_string(child) + ".json");
    if (fs::exists(path)) {
      std::ifstream file(path);
      death.dump = json::parse(file);
      EXPECT_EQ(death.dump["pid"], child);
    }
    return death;
  }

  void expect_story(const json& dump, const std::string& reason) {
    ASSERT_TRUE(dump.is_object());
    EXPECT_EQ(dump["reason"], reason);
    EXPECT_EQ(dump["rank"], 5);
    EXPECT_EQ(dump["world_size"], 8);
    ASSERT_EQ(dump["entries"].size(), 2u);
    EXPECT_EQ(dump["entries"][0]["state"], "done");
    EXPECT_EQ(dump["entries"][1]["state"], "running");
    EXPECT_EQ(dump["entries"][1]["operation"], "recv");
    EXPECT_EQ(dump["entries"][1]["peer"], 4);
    EXPECT_EQ(dump["entries"][1]["label"], "stuck \"here\"\n\xef\xbf\xbd");
    EXPECT_EQ(dump["totals"]["all_reduce"]["bytes"], 16);
    // The same members as a dump on request.
    json asked = json::parse(Recorder::global().to_json("asked"));
    std::vector<std::string> names, asked_names;
    for (const auto& [name, value] : dump.items()) names.push_back(name);
    for (const auto& [name, value] : asked.items()) asked_names.push_back(name);
    EXPECT_EQ(names, asked_names);
  }

  fs::path folder_;
  std::function<void()> before_install_;
};

TEST_F(RecorderDump, ABadAddress) {
  const Death death = run_child(touch_forbidden_memory);
  EXPECT_TRUE(WIFSIGNALED(death.status) && WTERMSIG(death.status) == SIGSEGV) << death.status;
  expect_story(death.dump, "fatal signal SIGSEGV");
}

TEST_F(RecorderDump, Abort) {
  const Death death = run_child([] { std::abort(); });
  EXPECT_TRUE(WIFSIGNALED(death.status) && WTERMSIG(death.status) == SIGABRT) << death.status;
  expect_story(death.dump, "fatal signal SIGABRT");
}

TEST_F(RecorderDump, EverySignalThatIsSent) {
  const std::pair<int, const char*> cases[] = {
      {SIGSEGV, "fatal signal SIGSEGV"}, {SIGABRT, "fatal signal SIGABRT"}, {SIGBUS, "fatal signal SIGBUS"},
      {SIGFPE, "fatal signal SIGFPE"},   {SIGILL, "fatal signal SIGILL"},   {SIGTERM, "signal SIGTERM"},
      {SIGQUIT, "signal SIGQUIT"}};
  for (const auto& [number, reason] : cases) {
    const Death death =
        run_child([number = number] { ::kill(::getpid(), number); }, FatalSignals::CrashesAndTermination);
    EXPECT_TRUE(WIFSIGNALED(death.status) && WTERMSIG(death.status) == number)
        << reason << " " << death.status;
    expect_story(death.dump, reason);
  }
}

TEST_F(RecorderDump, TerminationIsLeftAloneUnlessAskedFor) {
  const Death death = run_child([] { ::raise(SIGTERM); });
  EXPECT_TRUE(WIFSIGNALED(death.status) && WTERMSIG(death.status) == SIGTERM);
  EXPECT_TRUE(death.dump.is_null());
}

TEST_F(RecorderDump, ThePreviousHandlerRunsAfterwards) {
  before_install_ = [] {
    std::signal(SIGABRT, [](int) { std::_Exit(42); });
    std::signal(SIGSEGV, [](int) { std::_Exit(43); });
  };
  Death death = run_child([] { std::abort(); });
  EXPECT_TRUE(WIFEXITED(death.status) && WEXITSTATUS(death.status) == 42) << death.status;
  expect_story(death.dump, "fatal signal SIGABRT");
  death = run_child(touch_forbidden_memory);
  EXPECT_TRUE(WIFEXITED(death.status) && WEXITSTATUS(death.status) == 43) << death.status;
  expect_story(death.dump, "fatal signal SIGSEGV");
}

TEST_F(RecorderDump, ASignalThatIsIgnoredStaysIgnored) {
  before_install_ = [] { std::signal(SIGTERM, SIG_IGN); };
  const Death death = run_child([] { ::raise(SIGTERM); }, FatalSignals::CrashesAndTermination);
  EXPECT_TRUE(WIFEXITED(death.status) && WEXITSTATUS(death.status) == 99) << death.status;
  expect_story(death.dump, "signal SIGTERM");
}

TEST_F(RecorderDump, InstallingAgainChangesTheRankAndKeepsTheOldHandler) {
  before_install_ = [this] {
    std::signal(SIGABRT, [](int) { std::_Exit(44); });
    install_fatal_signal_dump(folder_ / "elsewhere", 1);
  };
  const Death death = run_child([] { std::abort(); });
  EXPECT_TRUE(WIFEXITED(death.status) && WEXITSTATUS(death.status) == 44) << death.status;
  expect_story(death.dump, "fatal signal SIGABRT");
}

TEST_F(RecorderDump, TheFolderMayBeRelativeAndTheProcessMayMove) {
  const Death death = run_child([this] {
    fs::current_path(folder_.parent_path());
    install_fatal_signal_dump(folder_.filename(), 5);
    fs::current_path("/");
    std::abort();
  });
  EXPECT_TRUE(WIFSIGNALED(death.status));
  expect_story(death.dump, "fatal signal SIGABRT");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // sanitizers have their own handlers
__attribute__((noinline)) int fall(int depth) {
  volatile char room[1024];
  room[0] = static_cast<char>(depth);
  return depth < 0 ? 0 : fall(depth + 1) + room[0];
}

TEST_F(RecorderDump, AStackOverflowIsRecorded) {
  const Death death = run_child([] { std::_Exit(fall(1)); });
  EXPECT_TRUE(WIFSIGNALED(death.status) && WTERMSIG(death.status) == SIGSEGV) << death.status;
  expect_story(death.dump, "fatal signal SIGSEGV");
}
#endif

TEST_F(RecorderDump, ACrashWhileOtherThreadsRecord) {
  const Death death = run_child([] {
    for (int t = 0; t < 3; ++t)
      std::thread([] {
        for (;;)
          Recorder::global().end(Recorder::global().begin({.operation = "send", .label = "busy", .bytes = 1}),
                                 OperationState::Done);
      }).detach();
    while (Recorder::global().totals()["send"].operations < 10000) std::this_thread::yield();
    std::abort();
  });
  EXPECT_TRUE(WIFSIGNALED(death.status) && WTERMSIG(death.status) == SIGABRT) << death.status;
  ASSERT_TRUE(death.dump.is_object());
  EXPECT_GT(death.dump["entries"].size(), 4000u);  // nothing was overwritten, however busy the others are
  EXPECT_GE(death.dump["totals"]["send"]["operations"], 10000);
}

// The names are predictable, and the folder may be one in which everybody may write.
TEST_F(RecorderDump, LinksUnderItsNameAreNotFollowed) {
  fs::create_directories(folder_);
  const fs::path victim = folder_ / "victim";
  std::ofstream(victim) << "precious";
  const auto name = [](int rank, pid_t process) {
    return "recorder-rank" + std::to_string(rank) + "-" + std::to_string(process) + ".json";
  };
  const Death death = run_child([&] {
    fs::create_symlink(victim, folder_ / (name(5, ::getpid()) + ".partial"));
    std::abort();
  });
  expect_story(death.dump, "fatal signal SIGABRT");

  Recorder::global().set_rank(6);
  for (int i = 0; i < 100; ++i)
    fs::create_symlink(victim, folder_ / (name(6, ::getpid()) + ".partial" + std::to_string(i)));
  ::setenv("PENSTOCK_RECORDER_DIR", folder_.c_str(), 1);
  EXPECT_THAT(dump_for_error("recv timed out"), HasSubstr("are in " + folder_.string()));

  std::string content;
  std::ifstream(victim) >> content;
  EXPECT_EQ(content, "precious");
  int dumps = 0;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    if (entry.path().extension() != ".json") continue;
    ++dumps;
    EXPECT_FALSE(entry.is_symlink());
    EXPECT_EQ(entry.status().permissions(), fs::perms::owner_read | fs::perms::owner_write);
  }
  EXPECT_EQ(dumps, 2);
}

TEST_F(RecorderDump, TheFolderMustBeUsable) {
  fs::create_directories(folder_);
  std::ofstream(folder_ / "file") << "x";
  EXPECT_THROW(install_fatal_signal_dump(folder_ / "file", 0), ConfigError);
  EXPECT_THROW(
      install_fatal_signal_dump(folder_ / std::string(200, 'a') / std::string(200, 'b') /
                                    std::string(200, 'c') / std::string(200, 'd') / std::string(200, 'e'),
                                0),
      ConfigError);
}

TEST_F(RecorderDump, TheFolderComesFromTheEnvironment) {
  EXPECT_EQ(recorder_directory(), std::nullopt);
  ::setenv("PENSTOCK_LOG_DIR", "/logs", 1);
  EXPECT_EQ(recorder_directory(), "/logs");
  ::setenv("PENSTOCK_RECORDER_DIR", "/dumps", 1);
  EXPECT_EQ(recorder_directory(), "/dumps");
}

TEST_F(RecorderDump, AnErrorSaysWhereItsDumpIs) {
  Recorder::global().set_rank(6);
  const std::string name = "recorder-rank6-" + std::to_string(::getpid()) + ".json";
  ::setenv("PENSTOCK_RECORDER_DIR", (folder_ / "made").c_str(), 1);
  EXPECT_EQ(dump_for_error("recv timed out"),
            "the last operations of this rank are in " + (folder_ / "made" / name).string());
  std::ifstream file(folder_ / "made" / name);
  EXPECT_EQ(json::parse(file)["reason"], "recv timed out");

  ::unsetenv("PENSTOCK_RECORDER_DIR");
  EXPECT_EQ(dump_for_error("again"),
            "the last operations of this rank are in " + (fs::temp_directory_path() / name).string());
  EXPECT_TRUE(fs::remove(fs::temp_directory_path() / name));

  std::ofstream(folder_ / "file") << "x";
  ::setenv("PENSTOCK_RECORDER_DIR", (folder_ / "file").c_str(), 1);
  EXPECT_THAT(dump_for_error("again"), HasSubstr("could not be written: "));
}

}  // namespace recorder_dump_test
}  // namespace penstock::comm
