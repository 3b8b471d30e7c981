// The test program of a folder. Its files are compiled and linked together, since LibTorch's headers dominate
// the build time of a test. Each file is still a separate test that runs in its own process:
//
//   build/release/tests/graph_tests --of=compiled_test [GoogleTest's options]
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>

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

// Extends GoogleTest's filter to exclude the tests of other files. Prints the reason and returns false if
// that would run no test or exclude a requested one.
bool choose(const std::string& file) {
  const Choice choice = tests_of(file);
  if (choice.wanted.empty()) {
    std::fprintf(stderr, "--of=%s: this program has no such file with tests\n", file.c_str());
    return false;
  }
  std::string filter = GTEST_FLAG_GET(filter);
  bool excludes = filter.find('-') != std::string::npos;
  for (const std::string& name : choice.others) {
    if (choice.wanted.contains(name)) {
      std::fprintf(stderr, "--of=%s: another file also has a test %s; rename one of them\n", file.c_str(),
                   name.c_str());
      return false;
    }
    filter += (excludes ? ":" : "-") + name;
    excludes = true;
  }
  GTEST_FLAG_SET(filter, filter);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    constexpr std::string_view kOf = "--of=";
    if (argument.starts_with(kOf)) {
      if (!choose(std::string(argument.substr(kOf.size())))) return 2;
    } else {
      std::fprintf(stderr, "unknown argument %s; known are --of=FILE (without .cpp) and GoogleTest's\n",
                   argv[i]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
