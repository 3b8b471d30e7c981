// The test program of a folder. Its files are compiled and linked together, since LibTorch's headers dominate
// the build time of a test. Each file is still a separate test that runs in its own process:
//
//   build/release/tests/graph_tests --of=compiled_test [GoogleTest's options]
//
// Of several files (--of=a --of=b) each runs in a child process: loading LibTorch, which takes longer than
// most files, happens once.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Names = std::set<std::string>;

struct Choice {
  Names wanted;
  Names others;
};

// Splits the tests of this program into those of one file and the rest.
Choice tests_of(const std::string& file) {
  Choice choice;
  const auto& program = *::testing::UnitTest::GetInstance();
  for (int s = 0; s < program.total_test_suite_count(); ++s) {
    const auto& suite = *program.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const auto& test = *suite.GetTestInfo(t);
      Names& names = std::filesystem::path(test.file()).stem() == file ? choice.wanted : choice.others;
      names.insert(std::string(suite.name()) + "." + test.name());
    }
  }
  return choice;
}

// Makes GoogleTest's filter that of the tests of one file, or extends one that was given to exclude the tests
// of other files. GoogleTest prints it, and the first is far shorter. Prints the reason and returns false if
// that would run no test or exclude a requested one.
bool choose(const std::string& file) {
  const Choice choice = tests_of(file);
  if (choice.wanted.empty()) {
    std::fprintf(stderr, "--of=%s: this program has no such file with tests\n", file.c_str());
    return false;
  }
  for (const std::string& name : choice.others)
    if (choice.wanted.contains(name)) {
      std::fprintf(stderr, "--of=%s: another file also has a test %s; rename one of them\n", file.c_str(),
                   name.c_str());
      return false;
    }
  std::string filter = GTEST_FLAG_GET(filter);
  if (filter == "*") {
    filter.clear();
    for (const std::string& name : choice.wanted) filter += (filter.empty() ? "" : ":") + name;
  } else {
    bool excludes = filter.find('-') != std::string::npos;
    for (const std::string& name : choice.others) {
      filter += (excludes ? ":" : "-") + name;
      excludes = true;
    }
  }
  GTEST_FLAG_SET(filter, filter);
  return true;
}

int run_file(const std::string& file) { return choose(file) ? RUN_ALL_TESTS() : 2; }

// Returns how the child ended: its exit code, or 128 + signal.
int run_in_child(const std::string& file) {
  std::fflush(nullptr);
  const pid_t parent = getpid(), child = fork();
  if (child < 0) {
    std::perror("fork");
    return 2;
  }
  if (child == 0) {
    // A timeout of ctest ends the parent; the child must not stay behind.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) std::_Exit(2);
    std::exit(run_file(file));
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int run_files(const std::vector<std::string>& files) {
  if (files.empty()) return RUN_ALL_TESTS();
  if (files.size() == 1) return run_file(files.front());
  int failed = 0;
  for (const std::string& file : files) {
    std::printf("---- %s ----\n", file.c_str());
    const int code = run_in_child(file);
    if (code == 0) continue;
    std::fprintf(stderr, "---- %s ended with %d%s ----\n", file.c_str(), code,
                 code > 128 ? ", a signal" : "");
    failed = 1;
  }
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    constexpr std::string_view kOf = "--of=";
    if (argument.starts_with(kOf)) {
      files.emplace_back(argument.substr(kOf.size()));
    } else {
      std::fprintf(stderr, "unknown argument %s; known are --of=FILE (without .cpp) and GoogleTest's\n",
                   argv[i]);
      return 2;
    }
  }
  return run_files(files);
}
