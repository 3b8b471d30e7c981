// The real torchrun, whose agent hosts the store in which the ranks meet: that of `python3`, or of the Python
// in PENSTOCK_TEST_PYTHON. Skipped where it has no PyTorch.
//
// The store's protocol belongs to a version of PyTorch: a program with a LibTorch before 2.1 cannot join the
// store of a torchrun from 2.1 on, and says so. In 2.4 another request was added, which only newer programs
// make.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>

#include "tests/command.h"
#include "tests/has_text.h"

namespace penstock::test {
namespace torchrun_test {

using namespace std::chrono_literals;

std::string worker() { return "'" + environment("PENSTOCK_DIST_WORKER") + "'"; }

std::string python() {
  const std::string given = environment("PENSTOCK_TEST_PYTHON");
  return given.empty() ? "python3" : given;
}

// Of a version such as "2.14.0+cpu"; 0 for malformed text.
int protocol_of(const std::string& version) {
  int major = 0, minor = 0;
  if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) != 2) return 0;
  const auto at_least = [&](int other_minor) { return major > 2 || (major == 2 && minor >= other_minor); };
  return at_least(4) ? 3 : at_least(1) ? 2 : 1;
}

// Empty if there is no PyTorch.
std::string torchrun_version() {
  const Ended ended =
      run_command(python() + " -c 'import torch.distributed.run; print(torch.__version__)' 2>/dev/null");
  if (ended.exit_code != 0) return "";
  return ended.output.substr(0, ended.output.find('\n'));
}

constexpr const char* kWithoutLibuv = R"(
import torch.distributed as d
class WithoutLibuv(d.TCPStore):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"use_libuv": False, **kwargs})
d.TCPStore = WithoutLibuv
from torch.distributed.run import main
main())";

class Torchrun : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { theirs_ = protocol_of(torchrun_version()); }
  void SetUp() override {
    if (theirs_ == 0)
      GTEST_SKIP() << python() << " has no PyTorch; set PENSTOCK_TEST_PYTHON to a Python that has";
  }

  static bool same_protocol() { return theirs_ == ours(); }
  static bool other_protocol() { return (theirs_ == 1) != (ours() == 1); }

  // Runs a shell script as two ranks. Some builds of PyTorch lack what torchrun's stores use by default, and
  // torchrun cannot be told to do without: it is then called with another default.
  static Ended run(const std::string& options, const std::string& script) {
    const std::string arguments =
        fmt::format("--nproc-per-node 2 {} --no-python /bin/sh -c \"{}\"", options, script);
    const Ended ended = run_command(python() + " -m torch.distributed.run " + arguments, 180s);
    if (!has_text(ended.output, "built without libuv support")) return ended;
    return run_command(fmt::format("{} -c '{}' {}", python(), kWithoutLibuv, arguments), 180s);
  }

  // torchrun's own rendezvous has a port that other tests may use as well.
  static std::string own_port(int number) {
    return fmt::format("--master-addr 127.0.0.1 --master-port {}", 26000 + getpid() % 900 + 1000 * number);
  }

 private:
  static int ours() { return protocol_of(environment("PENSTOCK_TORCH_VERSION")); }
  static int theirs_;
};
int Torchrun::theirs_ = 0;

TEST_F(Torchrun, RanksMeetInTheStoreOfItsAgent) {
  if (!same_protocol()) GTEST_SKIP() << "torchrun is of another version than LibTorch";
  for (const std::string& rendezvous : {own_port(0), std::string("--standalone")}) {
    const Ended ended = run(rendezvous, worker() + " everything");
    EXPECT_EQ(ended.exit_code, 0) << rendezvous << "\n" << ended.output;
    EXPECT_TRUE(has_text(ended.output, "rank 0 of 2 over CPU gloo"));
    EXPECT_TRUE(has_text(ended.output, "rank 1 of 2 over CPU gloo"));
  }
}

// The agent's store keeps what the ranks of the first attempt wrote.
TEST_F(Torchrun, ARestartBeginsAnew) {
  if (!same_protocol()) GTEST_SKIP() << "torchrun is of another version than LibTorch";
  const Ended ended = run(own_port(1) + " --max-restarts 1",
                          worker() + " everything && test \\$TORCHELASTIC_RESTART_COUNT = 1");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  const std::string line = "rank 1 of 2 over CPU gloo";
  const auto first = ended.output.find(line);
  ASSERT_NE(first, std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find(line, first + 1), std::string::npos) << "once in each attempt\n"
                                                                   << ended.output;
}

TEST_F(Torchrun, AFailureEndsTheJob) {
  if (!same_protocol()) GTEST_SKIP() << "torchrun is of another version than LibTorch";
  const Ended ended = run(own_port(2), "PENSTOCK_TEST_VICTIM=1 exec " + worker() + " throws");
  EXPECT_NE(ended.exit_code, 0);
  EXPECT_TRUE(has_text(ended.output, "ConfigError: the victim's own words"));
}

// The other direction, a newer program under an older torchrun, ends in the same way.
TEST_F(Torchrun, OfAnotherVersionIsNamed) {
  if (!other_protocol()) GTEST_SKIP() << "torchrun's store is one that this LibTorch understands";
  const Ended ended = run(own_port(3), "PENSTOCK_TIMEOUT_S=20 exec " + worker() + " everything");
  EXPECT_NE(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "no store that this program, with LibTorch "));
  EXPECT_TRUE(has_text(ended.output, "use the torchrun of the same version"));
  EXPECT_LT(ended.seconds, 90);
}

}  // namespace torchrun_test
}  // namespace penstock::test
