// The real Slurm, as a cluster of this machine alone: the batch script that `penstock launch --slurm` writes,
// and ranks that srun starts itself.
//
// The cluster has its own configuration, keys and ports in a temporary folder and ends with the tests. It has
// two nodes where Slurm allows several slurmd on one machine, else one. Skipped where Slurm is not installed
// or does not start (docs/testing.md says what to install).
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/temporary_folder.h"

namespace penstock::test {
namespace slurm_test {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

// Daemons are in folders that are not in everybody's PATH.
const std::string kPath = "export PATH=\"$PATH:/usr/local/sbin:/usr/sbin:/sbin\"; ";

std::string worker() { return "'" + environment("PENSTOCK_DIST_WORKER") + "'"; }
std::string tool() { return "'" + environment("PENSTOCK_BIN") + "/penstock'"; }

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string last_lines(const fs::path& path, int count) {
  std::vector<std::string> lines;
  std::istringstream text(contents(path));
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  std::string last;
  for (std::size_t i = lines.size() - std::min(lines.size(), static_cast<std::size_t>(count));
       i < lines.size(); ++i)
    last += lines[i] + "\n";
  return last;
}

bool installed(const std::string& program) {
  return run_command(kPath + "command -v " + program).exit_code == 0;
}

// A program that runs until the object is destroyed.
class Daemon {
 public:
  Daemon(const std::string& command, const fs::path& log) {
    pid_ = fork();
    if (pid_ != 0) return;
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (freopen(log.c_str(), "a", stdout) == nullptr || dup2(1, 2) < 0) _exit(126);
    execl("/bin/sh", "sh", "-c", (kPath + "exec " + command).c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  ~Daemon() {
    if (!runs()) return;
    kill(pid_, SIGTERM);
    for (int i = 0; i < 500 && runs(); ++i) std::this_thread::sleep_for(10ms);
    if (!runs()) return;
    kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  bool runs() {
    if (pid_ > 0 && waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
    return pid_ > 0;
  }

 private:
  pid_t pid_ = -1;
};

class Cluster {
 public:
  Cluster() {
    for (const char* program : {"slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "sinfo"})
      if (!installed(program)) {
        missing_ = fmt::format("Slurm is not installed: there is no {}", program);
        return;
      }
    chmod(folder_.path.c_str(), 0755);  // munged and slurmctld want to be reached
    host_ = run_command("hostname -s").output;
    host_ = host_.substr(0, host_.find('\n'));
    if (run_command("getent hosts '" + host_ + "'").exit_code != 0) {
      missing_ = fmt::format("the name of this machine, {}, has no address", host_);
      return;
    }
    start_munge();
    if (!missing_.empty()) return;
    // Containers often have no control groups that Slurm could use. What says so depends on its version.
    for (const int nodes : {2, 1})
      for (const char* groups : {"cgroup/v1", "disabled"})
        if (start(nodes, groups)) return;
    missing_ = "Slurm does not start here:\n" + last_lines(folder_.path / "slurmctld.log", 5) +
               last_lines(folder_.path / "slurmd-1.log", 5);
  }

  // Empty if there is a cluster.
  const std::string& missing() const { return missing_; }
  int nodes() const { return nodes_; }
  const fs::path& folder() const { return folder_.path; }

  // Runs a shell command as a user of the cluster.
  Ended run(const std::string& command, std::chrono::seconds limit = 120s) const {
    return run_command(fmt::format("cd '{0}'; export SLURM_CONF='{0}/slurm.conf'; {1}{2}",
                                   folder_.path.string(), kPath, command),
                       limit);
  }

  struct Job {
    Ended ended;  // of sbatch --wait; its exit code is the job's
    std::string output;
  };
  // Submits the script that `penstock launch --slurm OPTIONS` writes, and waits for the end of the job.
  // `meanwhile`: a shell command that runs beside it.
  Job submit(const std::string& name, const std::string& options, const std::string& program,
             const std::string& meanwhile = "") const {
    Job job;
    const Ended written = run(fmt::format("{} launch --slurm --nnodes {} -n 2 --job-name {} {} -- {} > {}.sh",
                                          tool(), nodes_, name, options, program, name));
    EXPECT_EQ(written.exit_code, 0) << written.output;
    job.ended = run(meanwhile.empty() ? fmt::format("sbatch --wait {}.sh", name)
                                      : fmt::format("sbatch --wait {0}.sh & {1}; wait $!", name, meanwhile));
    for (const auto& file : fs::directory_iterator(folder_.path))
      if (file.path().filename().string().starts_with(name + "-") && file.path().extension() == ".out")
        job.output = contents(file.path());
    return job;
  }

 private:
  void start_munge() {
    const fs::path folder = folder_.path / "munge";
    fs::create_directory(folder);
    {
      std::ofstream key(folder / "key", std::ios::binary);
      std::random_device random;
      for (int i = 0; i < 1024; ++i) key.put(static_cast<char>(random()));
    }
    chmod((folder / "key").c_str(), 0600);
    munge_ = std::make_unique<Daemon>(
        fmt::format("munged --foreground --force --key-file='{0}/key' --socket='{0}/socket' "
                    "--pid-file='{0}/pid' --log-file='{0}/log' --seed-file='{0}/seed'",
                    folder.string()),
        folder_.path / "munged.log");
    for (int i = 0; i < 500 && !fs::exists(folder / "socket") && munge_->runs(); ++i)
      std::this_thread::sleep_for(10ms);
    if (!fs::exists(folder / "socket"))
      missing_ = "munged does not start here:\n" + last_lines(folder_.path / "munged.log", 5);
  }

  std::string node_name(int node) const { return node == 1 ? host_ : fmt::format("{}-{}", host_, node); }

  void configure(int nodes, const std::string& groups) const {
    const std::string folder = folder_.path.string();
    const int port = 30000 + getpid() % 2000 * 4;
    const std::string user = run_command("id -un").output;
    std::ofstream conf(folder_.path / "slurm.conf");
    conf << "ClusterName=penstock\n"
         << "SlurmctldHost=" << host_ << "(127.0.0.1)\n"
         << "SlurmUser=" << user << "SlurmdUser=" << user << "SlurmctldPort=" << port
         << "\n"
         // The script derives the port where ranks meet from the number of the job: not that of another test.
         << "FirstJobId=" << 1 + port % 11'000 << "\n"
         << "AuthType=auth/munge\nCredType=cred/munge\nAuthInfo=socket=" << folder << "/munge/socket\n"
         << "SlurmctldPidFile=" << folder << "/slurmctld.pid\n"
         << "SlurmdPidFile=" << folder << "/slurmd-%n.pid\n"
         << "SlurmdSpoolDir=" << folder << "/spool-%n\n"
         << "StateSaveLocation=" << folder << "/state\n"
         << "ProctrackType=proctrack/linuxproc\n"
         << "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\n"
         << "ReturnToService=2\nKillWait=5\n"
         // The nodes have more processors than this machine, which all of them share.
         << "SlurmdParameters=config_overrides\n";
    for (int node = 1; node <= nodes; ++node)
      conf << "NodeName=" << node_name(node) << " NodeHostname=" << host_
           << " NodeAddr=127.0.0.1 Port=" << port + node << " CPUs=4\n";
    conf << "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n";
    std::ofstream(folder_.path / "cgroup.conf") << "CgroupPlugin=" << groups << "\n";
  }

  bool start(int nodes, const std::string& groups) {
    fs::create_directories(folder_.path / "state");
    configure(nodes, groups);
    const std::string conf = (folder_.path / "slurm.conf").string();
    daemons_.clear();
    daemons_.push_back(std::make_unique<Daemon>(fmt::format("slurmctld -D -c -f '{}'", conf),
                                                folder_.path / "slurmctld.log"));
    for (int node = 1; node <= nodes; ++node)
      daemons_.push_back(
          std::make_unique<Daemon>(fmt::format("slurmd -D -N '{}' -f '{}'", node_name(node), conf),
                                   folder_.path / fmt::format("slurmd-{}.log", node)));
    for (const auto until = std::chrono::steady_clock::now() + 30s;
         std::chrono::steady_clock::now() < until;) {
      for (const auto& daemon : daemons_)
        if (!daemon->runs()) {
          daemons_.clear();
          return false;
        }
      const std::string states = run("sinfo --noheader --Node --format=%T", 10s).output;
      std::istringstream words(states);
      int idle = 0;
      for (std::string word; words >> word;) idle += word == "idle";
      if (idle == nodes) {
        nodes_ = nodes;
        return true;
      }
      std::this_thread::sleep_for(200ms);
    }
    daemons_.clear();
    return false;
  }

  TemporaryFolder folder_;
  std::string missing_, host_;
  std::unique_ptr<Daemon> munge_;
  std::vector<std::unique_ptr<Daemon>> daemons_;
  int nodes_ = 0;
};

// One for all tests: it takes seconds to start. Ends before the program does.
class Slurm : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { cluster_ = std::make_unique<Cluster>(); }
  static void TearDownTestSuite() { cluster_.reset(); }
  void SetUp() override {
    if (!cluster_->missing().empty()) GTEST_SKIP() << cluster_->missing();
  }
  static const Cluster& cluster() { return *cluster_; }

 private:
  static std::unique_ptr<Cluster> cluster_;
};
std::unique_ptr<Cluster> Slurm::cluster_;

TEST_F(Slurm, TheScriptStartsTheRanksOfAllNodes) {
  const int ranks = 2 * cluster().nodes();
  const auto job = cluster().submit("everything", "--sbatch --time=5", worker() + " everything");
  EXPECT_EQ(job.ended.exit_code, 0) << job.ended.output << job.output;
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_TRUE(
        has_text(job.output, fmt::format("[rank {}] rank {} of {} over CPU gloo", rank, rank, ranks)));
  EXPECT_FALSE(has_text(job.output, "PENSTOCK_SECRET is not set"));
}

TEST_F(Slurm, TheExitCodeIsThatOfTheRankThatFailed) {
  const auto job = cluster().submit("fails", "--grace 1",
                                    "/bin/sh -c 'test $RANK != 1 || { sleep 1; exit 7; }; sleep 100'");
  EXPECT_EQ(job.ended.exit_code, 7) << job.ended.output << job.output;
  EXPECT_TRUE(has_text(job.output, "rank 1 failed first: exit code 7"));
  EXPECT_LT(job.ended.seconds, 60);
}

// As Slurm does before the time of a job is over: it signals all processes of a step, and the launcher passes
// its own signal on, so that a rank may be signalled twice.
TEST_F(Slurm, SigtermReachesTheRanks) {
  const auto job = cluster().submit(
      "ends", "--grace 20", "/bin/sh -c 'trap \"echo saved; exit 0\" TERM; echo ready; sleep 100 & wait'",
      "for i in $(seq 300); do grep -q ready ends-*.out 2>/dev/null && break; sleep 0.1; done; sleep 1; "
      "scancel --signal=TERM --name=ends");
  EXPECT_EQ(job.ended.exit_code, 0) << job.ended.output << job.output;
  EXPECT_LT(job.ended.seconds, 60);
}

TEST_F(Slurm, SrunStartsTheRanksItself) {
  const int nodes = cluster().nodes(), ranks = 2 * nodes;
  const Ended ended = cluster().run(
      fmt::format("srun --nodes {} --ntasks-per-node 2 --label {} everything", nodes, worker()));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_TRUE(has_text(ended.output, fmt::format("{}: rank {} of {} over CPU gloo", rank, rank, ranks)));
}

}  // namespace slurm_test
}  // namespace penstock::test
