#include "penstock/base/leave_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "penstock/base/files.h"
#include "tests/temporary_folder.h"

namespace penstock::test {
namespace leave_process_test {

// The destructor of a static object of a child process would write to this descriptor.
int told = -1;
struct TellsWhenDestroyed {
  ~TellsWhenDestroyed() {
    if (told >= 0) (void)!::write(told, "destroyed", 9);
  }
};

TEST(LeaveProcess, StreamsAreFlushedAndStaticObjectsStay) {
  const TemporaryFolder folder;
  const std::string printed = folder.path / "printed", destroyed = folder.path / "destroyed";
  const pid_t child = ::fork();
  if (child == 0) {
    static const TellsWhenDestroyed teller;
    std::FILE* const tells = std::fopen(destroyed.c_str(), "w");
    told = ::fileno(tells);
    if (std::freopen(printed.c_str(), "w", stdout) == nullptr) ::_exit(1);
    std::printf("by C, ");
    std::cout << "by C++";
    leave_process(7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7);
  EXPECT_EQ(read_file(printed, "what was printed", "look why"), "by C, by C++");
  EXPECT_EQ(read_file(destroyed, "what was written", "look why"), "");
}

}  // namespace leave_process_test
}  // namespace penstock::test
