// Two hosts on one machine: network namespaces joined by a virtual cable, each with its own host name,
// /dev/shm and /etc/hosts.
//
//   alpha  10.77.0.1  fd77::1     beta  10.77.0.2  fd77::2
//
// In /etc/hosts, alpha knows itself as 127.0.1.1, as Debian's installer writes it, and beta knows alpha by
// its address. Files are shared. Needs the right to create namespaces; `missing` says why there are none.
#pragma once

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/command.h"
#include "tests/temporary_folder.h"

namespace penstock::test {

class TwoHosts {
 public:
  enum Host { Alpha, Beta };

  TwoHosts() {
    if (run_command("command -v ip && command -v nsenter && command -v unshare").exit_code != 0) {
      missing_ = "ip, nsenter or unshare is not installed";
      return;
    }
    std::ofstream(folder_.path / "hosts-alpha") << "127.0.0.1 localhost\n127.0.1.1 alpha\n10.77.0.2 beta\n";
    std::ofstream(folder_.path / "hosts-beta") << "127.0.0.1 localhost\n10.77.0.1 alpha\n127.0.1.1 beta\n";
    for (const Host host : {Alpha, Beta}) start(host);
    if (!missing_.empty()) return;
    const Ended cable = run_command(fmt::format(
        "ip link add va netns {0} type veth peer name vb netns {1} && "
        "nsenter -t {0} -n sh -c 'ip address add 10.77.0.1/24 dev va; ip -6 address add fd77::1/64 dev va "
        "nodad; ip link set va up' && "
        "nsenter -t {1} -n sh -c 'ip address add 10.77.0.2/24 dev vb; ip -6 address add fd77::2/64 dev vb "
        "nodad; ip link set vb up' && "
        "for i in 1 2 3 4 5 6 7 8 9; do nsenter -t {1} -n ping -c 1 -W 1 10.77.0.1 >/dev/null 2>&1 && break; "
        "nsenter -t {1} -n ip route get 10.77.0.1 >/dev/null 2>&1 && break; sleep 0.2; done",
        holders_[Alpha], holders_[Beta]));
    if (cable.exit_code != 0) missing_ = "no virtual cable can be made: " + cable.output;
  }
  ~TwoHosts() {
    for (const pid_t holder : holders_)
      if (holder > 0) {
        kill(holder, SIGKILL);
        waitpid(holder, nullptr, 0);
      }
  }
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  // Empty if there are two hosts.
  const std::string& missing() const { return missing_; }

  // The words before a command that is executed on this host.
  std::string on(Host host) const { return fmt::format("nsenter -t {} -n -u -m", holders_[host]); }

  // Runs a shell command on each host at the same time.
  std::array<Ended, 2> run(const std::string& alpha, const std::string& beta,
                           std::chrono::seconds limit = std::chrono::seconds(90)) const {
    std::array<Ended, 2> ended;
    std::thread other([&] { ended[Beta] = run_one(Beta, beta, limit); });
    ended[Alpha] = run_one(Alpha, alpha, limit);
    other.join();
    return ended;
  }

  Ended run_one(Host host, const std::string& command, std::chrono::seconds limit) const {
    const auto script = folder_.path / fmt::format("command-{}-{}", static_cast<int>(host), ++commands_);
    std::ofstream(script) << "cd '" << std::filesystem::current_path().string() << "'\n" << command << "\n";
    return run_command(fmt::format("{} sh '{}'", on(host), script.string()), limit);
  }

  // Executes a command on a host without its mounts and without waiting for anything else.
  void do_on(Host host, const std::string& command) const {
    run_command(fmt::format("nsenter -t {} -n -u -m sh -c '{}'", holders_[host], command));
  }

  const std::filesystem::path& folder() const { return folder_.path; }

 private:
  void start(Host host) {
    const std::string name = host == Alpha ? "alpha" : "beta";
    const std::string ready = (folder_.path / ("ready-" + name)).string();
    const std::string script = fmt::format(
        "hostname {0} && mount -t tmpfs -o size=1g tmpfs /dev/shm && mount --bind {1}/hosts-{0} /etc/hosts "
        "&& ip link "
        "set lo up && touch {2} && exec sleep 100000",
        name, folder_.path.string(), ready);
    const pid_t pid = fork();
    if (pid == 0) {
      execlp("unshare", "unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-c",
             script.c_str(), nullptr);
      _exit(99);
    }
    holders_[host] = pid;
    for (int i = 0; i < 6000 && !std::filesystem::exists(ready); ++i) {
      int status = 0;
      if (waitpid(pid, &status, WNOHANG) == pid) {
        holders_[host] = -1;
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (!std::filesystem::exists(ready)) missing_ = "this system does not allow new network namespaces";
  }

  TemporaryFolder folder_;
  pid_t holders_[2] = {-1, -1};
  std::string missing_;
  mutable std::atomic<int> commands_{0};
};

// For the first line of a test: skips it with the reason where there are no two hosts.
#define PENSTOCK_NEEDS_TWO_HOSTS(hosts) \
  if (!(hosts).missing().empty()) GTEST_SKIP() << (hosts).missing()

}  // namespace penstock::test
