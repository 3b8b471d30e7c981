// Real processes: every launcher, every kind of death, every way a rendezvous can fail. Each test has a
// deadline, and none may leave a process behind.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "penstock/base/files.h"
#include "tests/comm/strangers.h"
#include "tests/command.h"
#include "tests/has_text.h"

namespace penstock::test {
namespace process_test {

using namespace std::chrono_literals;

std::string worker() { return environment("PENSTOCK_DIST_WORKER"); }
std::string command_line_tool() { return environment("PENSTOCK_BIN") + "/penstock"; }

Ended run(const std::string& command, std::chrono::seconds limit = 60s) {
  return run_command(command, limit);
}

// Ranks that hang get 6 s after the first failure: all but a stopped one must end by themselves well before
// that.
Ended launch(int ranks, const std::string& scenario, const std::string& variables = "",
             std::chrono::seconds limit = 60s) {
  return run(fmt::format("{} '{}' launch -n {} --grace 6 -- '{}' {}", variables, command_line_tool(), ranks,
                         worker(), scenario),
             limit);
}

// Processes that this program has started pass the variable on to theirs; other tests run workers, too.
constexpr const char* kMark = "PENSTOCK_TEST_STARTED_BY";

int workers_alive() {
  const std::string mine = fmt::format("{}={}", kMark, getpid()) + '\0';
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry.path() / "exe", gone);
    if (gone || target != worker()) continue;
    std::ifstream file(entry.path() / "environ");
    std::string variables((std::istreambuf_iterator<char>(file)), {});
    if (variables.find(mine) != std::string::npos) ++count;
  }
  return count;
}

// Returns the lines that rank r printed.
std::string lines_of(const Ended& ended, int rank) {
  std::istringstream text(ended.output);
  std::string lines;
  for (std::string line; std::getline(text, line);)
    if (line.find(fmt::format("[rank {}]", rank)) != std::string::npos) lines += line + "\n";
  return lines;
}

class Processes : public ::testing::Test {
 protected:
  void SetUp() override { setenv(kMark, std::to_string(getpid()).c_str(), 1); }
  void TearDown() override { EXPECT_EQ(workers_alive(), 0) << "processes were left behind"; }
};

// ------------------------------------------------------------------------------------------------ ways to
// start and rendezvous

TEST_F(Processes, LauncherGloo) {
  const Ended ended = launch(4, "everything", "PENSTOCK_P2P=gloo");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "rank 3 of 4 over CPU gloo, CUDA through host memory"));
}

TEST_F(Processes, LauncherUcx) {
  if (environment("PENSTOCK_HAVE_UCX") != "1") return;  // reported at configuration
  const Ended ended = launch(3, "everything", "PENSTOCK_P2P=ucx");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "point-to-point ucx"));
}

TEST_F(Processes, FileRendezvous) {
  const std::string path = fmt::format("/tmp/penstock-meet-{}", getpid());
  unlink(path.c_str());
  const Ended ended = launch(2, "everything", fmt::format("PENSTOCK_RENDEZVOUS=file://{}", path));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  unlink(path.c_str());
}

TEST_F(Processes, Mpirun) {
  ASSERT_EQ(run("command -v mpirun").exit_code, 0) << "mpirun is one of the packages the bootstrap installs";
  const Ended ended = run(fmt::format(
      "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n 2 '{}' everything",
      worker()));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "rank 1 of 2"));
}

TEST_F(Processes, SlurmVariables) {
  const std::string common = fmt::format(
      "SLURM_JOB_ID={} SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_STEP_NODELIST=here", getpid());
  const Ended ended =
      run(fmt::format("{0} SLURM_PROCID=1 SLURM_LOCALID=1 '{1}' everything & {0} SLURM_PROCID=0 "
                      "SLURM_LOCALID=0 '{1}' everything && wait $!",
                      common, worker()));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "rank 1 of 2"));
}

TEST_F(Processes, NoLauncherIsOneRank) {
  const Ended ended = run(fmt::format("'{}' everything", worker()));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "rank 0 of 1"));
}

// Every socket of rank 0 that accepts connections does so from this host only.
TEST_F(Processes, ListensOnLoopbackOnly) {
  const int port = port_for_later();
  std::thread job([&] {
    EXPECT_EQ(
        run(fmt::format("'{}' launch -n 2 --port {} -- '{}' lingers", command_line_tool(), port, worker()))
            .exit_code,
        0);
  });
  // The address of this machine on its own network, if it has one.
  const std::string own = run("hostname -I 2>/dev/null | awk '{print $1}'").output;
  std::string address = own.substr(0, own.find_first_of(" \n"));
  const auto reachable = [&](const std::string& host) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<std::uint16_t>(port));
    inet_pton(AF_INET, host.c_str(), &to.sin_addr);
    const timeval limit{1, 0};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    const bool connected = connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;
    close(fd);
    return connected;
  };
  bool open = false;
  for (int i = 0; i < 2000 && !open; ++i) {
    open = reachable("127.0.0.1");
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_TRUE(open);
  std::this_thread::sleep_for(300ms);
  if (!address.empty() && !address.starts_with("127.") && address.find(':') == std::string::npos) {
    EXPECT_FALSE(reachable(address)) << address;
  }
  job.join();
}

// ---------------------------------------------------------------------------------------------------- deaths

// One of 4 ranks dies; the others must end by themselves, non-zero, within the deadline, naming it.
void expect_death_is_told(const std::string& scenario, const std::string& variables, int victim = 2,
                          double limit_s = 50) {
  const Ended ended = launch(
      4, scenario, fmt::format("PENSTOCK_TIMEOUT_S=60 PENSTOCK_TEST_VICTIM={} {}", victim, variables), 90s);
  EXPECT_EQ(ended.exit_code, 128 + SIGKILL) << ended.output;
  EXPECT_LT(ended.seconds, limit_s)
      << ended.output;  // the deadline is 60 s; a busy machine needs many to start 4 processes
  EXPECT_TRUE(has_text(ended.output, fmt::format("rank {} failed first", victim)));
  EXPECT_FALSE(has_text(ended.output, "sending SIGTERM")) << "somebody hangs for the whole grace\n"
                                                          << ended.output;
  for (int rank = 0; rank < 4; ++rank)
    if (rank != victim) {
      EXPECT_TRUE(has_text(lines_of(ended, rank), fmt::format("PeerLostError: rank {} was lost", victim)))
          << "rank " << rank << "\n"
          << ended.output;
    }
}

TEST_F(Processes, KillInAllReduce) { expect_death_is_told("killed_in_all_reduce", ""); }
TEST_F(Processes, KillInBatch) { expect_death_is_told("killed_in_batch", "PENSTOCK_P2P=gloo"); }
TEST_F(Processes, KillInBatchUcx) {
  if (environment("PENSTOCK_HAVE_UCX") == "1") expect_death_is_told("killed_in_batch", "PENSTOCK_P2P=ucx");
}
TEST_F(Processes, KillOfTheHost) { expect_death_is_told("killed_in_all_reduce", "", 0); }
TEST_F(Processes, KillWhileOthersWaitForLivingRanks) {
  expect_death_is_told("killed_elsewhere", "PENSTOCK_P2P=gloo", 3);
}

TEST_F(Processes, KillInRendezvous) {
  const Ended ended = launch(4, "killed_in_rendezvous", "PENSTOCK_TIMEOUT_S=10", 90s);
  EXPECT_EQ(ended.exit_code, 128 + SIGKILL) << ended.output;
  EXPECT_LT(ended.seconds, 45);
  EXPECT_TRUE(has_text(ended.output, "rank 2 failed first"));
  for (const int rank : {0, 1, 3}) EXPECT_TRUE(has_text(lines_of(ended, rank), "rank 2")) << ended.output;
}

TEST_F(Processes, StoppedRankIsNamedByTheTimeOut) {
  const Ended ended = launch(3, "stopped_rank", "PENSTOCK_TIMEOUT_S=10 PENSTOCK_TEST_VICTIM=1", 90s);
  EXPECT_EQ(ended.exit_code, 3) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "no status from rank 1")) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "after the stop"));
}

// The thread that is told must not be the one that destroys the world: it would wait for its own end.
TEST_F(Processes, ARankThatIsToldOfAFailureWhileItLeavesLeavesInOrder) {
  const Ended ended = launch(2, "told_while_leaving");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(lines_of(ended, 0), "left in order")) << ended.output;
}

TEST_F(Processes, AnExceptionOnOneRankReachesAll) {
  const Ended ended = launch(3, "throws", "PENSTOCK_TIMEOUT_S=60", 90s);
  EXPECT_EQ(ended.exit_code, 3);
  EXPECT_LT(ended.seconds, 40);
  for (const int rank : {0, 1})
    EXPECT_TRUE(has_text(lines_of(ended, rank), "rank 2 failed: an exception ended the program"))
        << ended.output;
}

TEST_F(Processes, LeavingEarlyIsNamed) {
  const Ended ended = launch(3, "leaves_early", "PENSTOCK_TIMEOUT_S=60", 90s);
  EXPECT_EQ(ended.exit_code, 3) << ended.output;
  EXPECT_LT(ended.seconds, 40);
  EXPECT_TRUE(has_text(ended.output, "rank 2 has left the world")) << ended.output;
}

TEST_F(Processes, MismatchIsAnErrorOnEveryRank) {
  const Ended ended = launch(3, "mismatch", "PENSTOCK_TIMEOUT_S=60", 90s);
  EXPECT_EQ(ended.exit_code, 3);
  EXPECT_LT(ended.seconds, 40);
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_TRUE(has_text(lines_of(ended, rank),
                         "rank 0 sent Float[1048576] (4.0 MiB) with tag 3, rank 1 expected Int[8]"))
        << ended.output;
}

// ---------------------------------------------------------------------------------------------- groups
// created by members

void expect_groups_of_axes(const std::string& variables) {
  const Ended ended = launch(4, "mesh_axes", variables);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  for (const char* line : {"rank 0: dp ranks[0,2], tp ranks[0-1]", "rank 1: dp ranks[1,3], tp ranks[0-1]",
                           "rank 2: dp ranks[0,2], tp ranks[2-3]", "rank 3: dp ranks[1,3], tp ranks[2-3]"})
    EXPECT_TRUE(has_text(ended.output, line));
}

TEST_F(Processes, GroupsOfMeshAxes) { expect_groups_of_axes("PENSTOCK_P2P=gloo"); }
TEST_F(Processes, GroupsOfMeshAxesUcx) {
  if (environment("PENSTOCK_HAVE_UCX") == "1") expect_groups_of_axes("PENSTOCK_P2P=ucx");
}
TEST_F(Processes, GroupsOfMeshAxesThroughAFile) {
  const std::string path = fmt::format("/tmp/penstock-meet-axes-{}", getpid());
  unlink(path.c_str());
  expect_groups_of_axes(fmt::format("PENSTOCK_RENDEZVOUS=file://{}", path));
  unlink(path.c_str());
}

TEST_F(Processes, KillOfAMemberBeforeItAsks) { expect_death_is_told("killed_before_group_of", ""); }

// The deadline of a checkpoint is that of slow disks, minutes; a lost rank is noticed as in any other wait.
void expect_loss_is_told_in_checkpoint(const std::string& scenario, int timeout_s, int exit_code) {
  const std::string folder = fmt::format("/tmp/penstock-{}-{}", scenario, getpid());
  const Ended ended = launch(3, scenario,
                             fmt::format("PENSTOCK_TIMEOUT_S={} PENSTOCK_TEST_VICTIM=1 "
                                         "PENSTOCK_TEST_FOLDER='{}'",
                                         timeout_s, folder),
                             60s);
  remove_tree(folder);
  EXPECT_EQ(ended.exit_code, exit_code) << ended.output;
  EXPECT_LT(ended.seconds, 25) << ended.output;
  for (const int rank : {0, 2})
    EXPECT_TRUE(has_text(lines_of(ended, rank), "rank 1 was lost")) << ended.output;
}

TEST_F(Processes, KillBeforeACheckpoint) {
  expect_loss_is_told_in_checkpoint("killed_before_checkpoint", 60, 128 + SIGKILL);
}
TEST_F(Processes, StopBeforeACheckpoint) {
  expect_loss_is_told_in_checkpoint("stopped_before_checkpoint", 3, 3);
}

TEST_F(Processes, AMemberThatNeverAsksIsNamedOnEveryOther) {
  const Ended ended = launch(4, "never_asks", "PENSTOCK_TIMEOUT_S=10 PENSTOCK_TEST_VICTIM=2", 90s);
  EXPECT_EQ(ended.exit_code, 3) << ended.output;
  for (const int rank : {0, 1, 3})
    EXPECT_TRUE(has_text(lines_of(ended, rank), "group of ranks[3,2,1,0]: rank 2 did not request it in time"))
        << ended.output;
}

// --------------------------------------------------------------------------------------- distributed tensors

TEST_F(Processes, DistributedTraining) {
  const Ended ended = launch(4, "distributed_training");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_TRUE(has_text(lines_of(ended, rank), "of one process")) << ended.output;
}

TEST_F(Processes, DistributedTrainingOnAGpuThatAllShare) {
  if (environment("PENSTOCK_HAVE_CUDA") != "1") return;  // reported at configuration
  const Ended ended = launch(4, "distributed_training", "PENSTOCK_TEST_DEVICE=cuda", 120s);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
}

TEST_F(Processes, KillDuringRedistribution) { expect_death_is_told("killed_in_redistribute", ""); }

TEST_F(Processes, PartsThatDisagreeAreAnErrorEverywhere) {
  const Ended ended = launch(3, "parts_disagree");
  EXPECT_EQ(ended.exit_code, 3) << ended.output;
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_TRUE(has_text(lines_of(ended, rank), "from_local: the rank at (")) << ended.output;
}

TEST_F(Processes, AnErrorInAnOperatorOfOneRankReachesAll) {
  const Ended ended = launch(3, "one_rank_throws_in_operator", "PENSTOCK_TEST_VICTIM=1");
  EXPECT_EQ(ended.exit_code, 3) << ended.output;
  EXPECT_TRUE(has_text(lines_of(ended, 1), "a plain tensor [8, 8] among distributed ones")) << ended.output;
  for (const int rank : {0, 2}) EXPECT_TRUE(has_text(lines_of(ended, rank), "PeerLostError")) << ended.output;
}

// ---------------------------------------------------------------------------------------- sharded parameters

// Every surviving rank reports which rank was lost and in which operation it needed it.
void expect_sharded_death_is_told(const std::string& scenario, const std::map<int, std::string>& operations) {
  const Ended ended = launch(4, scenario, "PENSTOCK_TIMEOUT_S=60 PENSTOCK_TEST_VICTIM=2", 90s);
  EXPECT_EQ(ended.exit_code, 128 + SIGKILL) << ended.output;
  EXPECT_LT(ended.seconds, 40) << ended.output;
  EXPECT_FALSE(has_text(ended.output, "sending SIGTERM")) << "somebody hangs for the whole grace\n"
                                                          << ended.output;
  for (const auto& [rank, operation] : operations) {
    const std::string lines = lines_of(ended, rank);
    EXPECT_TRUE(has_text(lines, fmt::format("rank {}: one step", rank)));
    EXPECT_TRUE(has_text(lines, "PeerLostError: rank 2 was lost"));
    EXPECT_TRUE(has_text(lines, operation));
  }
}

constexpr const char* kInGather = "operation all_gather";
constexpr const char* kInReduction = "operation reduce_scatter";
constexpr const char* kOverReplicas = "operation all_reduce";

TEST_F(Processes, KillInGatherOfShards) {
  expect_sharded_death_is_told("killed_in_gather", {{0, kInGather}, {1, kInGather}, {3, kInGather}});
}
TEST_F(Processes, KillInReductionOfShards) {
  expect_sharded_death_is_told("killed_in_reduction",
                               {{0, kInReduction}, {1, kInReduction}, {3, kInReduction}});
}
// Rank 3 shares the victim's parameters. The others have a replica of them, which they can gather and reduce
// until they need rank 2 or rank 3, which waits for it.
TEST_F(Processes, KillInGatherOfReplicatedShards) {
  expect_sharded_death_is_told("killed_in_gather_with_replicas",
                               {{0, kOverReplicas}, {1, kOverReplicas}, {3, kInGather}});
}
TEST_F(Processes, KillInReductionOfReplicatedShards) {
  expect_sharded_death_is_told("killed_in_reduction_with_replicas",
                               {{0, kOverReplicas}, {1, kOverReplicas}, {3, kInReduction}});
}

// ------------------------------------------------------------------------------------------------- pipelines

// The report of each surviving rank names the lost one, and its neighbours report what they needed from it.
TEST_F(Processes, KillInPipeline) {
  const Ended ended =
      launch(4, "killed_in_pipeline", "PENSTOCK_P2P=gloo PENSTOCK_TIMEOUT_S=60 PENSTOCK_TEST_VICTIM=2", 90s);
  EXPECT_EQ(ended.exit_code, 128 + SIGKILL) << ended.output;
  EXPECT_LT(ended.seconds, 40) << ended.output;
  EXPECT_FALSE(has_text(ended.output, "sending SIGTERM")) << "somebody hangs for the whole grace\n"
                                                          << ended.output;
  for (const int rank : {0, 1, 3}) {
    const std::string lines = lines_of(ended, rank);
    EXPECT_TRUE(has_text(lines, "PeerLostError: rank 2 was lost"));
    EXPECT_TRUE(has_text(lines, fmt::format("pipeline step failed, seen from rank {}", rank)));
    EXPECT_TRUE(has_text(lines, "rank 2  lost"));
    EXPECT_TRUE(has_text(lines, "await 3RECV_F1 (activation of stage 2 to stage 3), waits for rank 2"));
    EXPECT_TRUE(has_text(lines, "rank 2 was lost and holds up rank"));
  }
}

// Only the stopped rank is blamed, and all others end.
void expect_stop_is_told(int ranks, int victim, const std::vector<std::string>& told) {
  const std::string folder = fmt::format("/tmp/penstock-stall-{}-{}", getpid(), victim);
  const Ended ended = run(fmt::format("PENSTOCK_TIMEOUT_S=10 PENSTOCK_TEST_VICTIM={} PENSTOCK_STALL_DIR='{}' "
                                      "'{}' launch -n {} --grace 6 -- '{}' stopped_in_pipeline",
                                      victim, folder, command_line_tool(), ranks, worker()),
                          90s);
  EXPECT_EQ(ended.exit_code, 3) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "TimeoutError: timed out"));
  for (int rank = 0; rank < ranks; ++rank) {
    const bool written = std::filesystem::exists(fmt::format("{}/stall-rank{}.json", folder, rank));
    EXPECT_EQ(written, rank != victim) << "rank " << rank << "\n" << ended.output;
    if (rank == victim) continue;
    const std::string lines = lines_of(ended, rank);
    EXPECT_TRUE(has_text(lines, fmt::format("pipeline stalled, seen from rank {}", rank)));
    EXPECT_TRUE(has_text(
        lines, fmt::format("no status from rank {}, which is stopped or cut off and holds up", victim)));
    for (const std::string& part : told) EXPECT_TRUE(has_text(lines, part));
  }
  remove_tree(folder);
}

TEST_F(Processes, StopInPipeline) {
  expect_stop_is_told(
      3, 1,
      {"rank 1  no status", "await 2RECV_F1 (activation of stage 1 to stage 2), waits for rank 1",
       "(gradient of stage 1 to stage 0), waits for rank 1"});
}

// The stopped rank hosts the store: no status can be read, but a rank that waits for it knows.
TEST_F(Processes, StopOfTheHostInPipeline) {
  expect_stop_is_told(
      2, 0, {"rank 0  no status", "await 1RECV_F1 (activation of stage 0 to stage 1), waits for rank 0"});
}

TEST_F(Processes, PipelineSoak) {
  const Ended ended = launch(2, "pipeline_soak", "PENSTOCK_P2P=gloo", 240s);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_TRUE(has_text(lines_of(ended, rank), " steps as in one process")) << ended.output;
}

TEST_F(Processes, PipelineSoakUcx) {
  if (environment("PENSTOCK_HAVE_UCX") != "1") return;  // reported at configuration
  const Ended ended = launch(2, "pipeline_soak", "PENSTOCK_P2P=ucx", 240s);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
}

TEST_F(Processes, KillInPipelineUcx) {
  if (environment("PENSTOCK_HAVE_UCX") != "1") return;  // reported at configuration
  expect_death_is_told("killed_in_pipeline", "PENSTOCK_P2P=ucx");
}

TEST_F(Processes, TraceOfAPipeline) {
  const std::string path = fmt::format("/tmp/penstock-trace-{}.json", getpid());
  const Ended ended = launch(3, "traced_pipeline", fmt::format("PENSTOCK_TEST_TRACE='{}'", path));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  const Ended shown = run(fmt::format("'{}' trace '{}'", command_line_tool(), path));
  EXPECT_EQ(shown.exit_code, 0) << shown.output;
  EXPECT_TRUE(has_text(shown.output, "step: measured "));
  EXPECT_TRUE(has_text(shown.output, "efficiency"));
  unlink(path.c_str());
}

// ------------------------------------------------------------------------------------------------ rendezvous

TEST_F(Processes, PortInUse) {
  const auto [holder, port] = listen_on_loopback();
  const Ended ended = run(
      fmt::format("RANK=0 WORLD_SIZE=2 MASTER_PORT={} PENSTOCK_TIMEOUT_S=5 '{}' connects", port, worker()));
  close(holder);
  EXPECT_EQ(ended.exit_code, 3) << ended.output;
  EXPECT_TRUE(has_text(ended.output, fmt::format("cannot listen on TCP port {}", port)));
  EXPECT_TRUE(has_text(ended.output, "MASTER_PORT"));
}

TEST_F(Processes, NobodyAtTheMaster) {
  const Ended ended = run(fmt::format("RANK=1 WORLD_SIZE=2 MASTER_PORT={} PENSTOCK_TIMEOUT_S=3 '{}' connects",
                                      port_for_later(), worker()));
  EXPECT_EQ(ended.exit_code, 3);
  EXPECT_LT(ended.seconds, 30);
  EXPECT_TRUE(has_text(ended.output, "TimeoutError: no answer from the rendezvous"));
  EXPECT_TRUE(has_text(ended.output, "MASTER_ADDR"));
}

TEST_F(Processes, AMissingRankIsNamedOnEveryOther) {
  const Ended ended = launch(3, "stays_away", "PENSTOCK_TIMEOUT_S=10", 90s);
  EXPECT_NE(ended.exit_code, 0);
  for (const int rank : {0, 1})
    EXPECT_TRUE(has_text(lines_of(ended, rank), "rank 2 of 3 did not join in time")) << ended.output;
}

}  // namespace process_test
}  // namespace penstock::test
