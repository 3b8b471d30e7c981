// Strangers that are faster than a member: Gloo's ports take whoever connects first.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/world.h"

namespace penstock::comm {
namespace group_strangers_test {

using namespace std::chrono_literals;

// The ports of this process that listen on loopback.
std::set<int> listening_ports() {
  std::set<std::string> own;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (!gone && target.starts_with("socket:[")) own.insert(target.substr(8, target.size() - 9));
  }
  std::set<int> ports;
  std::ifstream table("/proc/self/net/tcp");
  std::string line;
  std::getline(table, line);  // the names of the columns
  while (std::getline(table, line)) {
    std::istringstream words(line);
    std::string number, local, remote, state, word, inode;
    words >> number >> local >> remote >> state >> word >> word >> word >> word >> word >> inode;
    if (state == "0A" && own.contains(inode))
      ports.insert(std::stoi(local.substr(local.find(':') + 1), nullptr, 16));
  }
  return ports;
}

// Connects to ports of this process as soon as they are there, as often as allowed, and keeps the
// connections.
class Squatter {
 public:
  explicit Squatter(std::string says) : says_(std::move(says)), thread_([this] { run(); }) {}
  ~Squatter() {
    stop_ = true;
    thread_.join();
    for (const int fd : held_) close(fd);
  }
  Squatter(const Squatter&) = delete;
  Squatter& operator=(const Squatter&) = delete;

  void allow(int connections) { allowed_ = connections; }
  int taken() const { return taken_; }

 private:
  void run() {
    while (!stop_) {
      if (allowed_ > 0)
        for (const int port : listening_ports())
          if (allowed_ > 0 && sit_on(port)) {
            --allowed_;
            ++taken_;
          }
      std::this_thread::sleep_for(100us);
    }
  }

  bool sit_on(int port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<std::uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) {
      close(fd);
      return false;
    }
    if (!says_.empty()) static_cast<void>(send(fd, says_.data(), says_.size(), MSG_NOSIGNAL));
    held_.push_back(fd);
    return true;
  }

  const std::string says_;
  std::atomic<bool> stop_ = false;
  std::atomic<int> allowed_ = 0, taken_ = 0;
  std::vector<int> held_;
  std::thread thread_;
};

// A run with groups of several sizes; every sum must be right.
void expect_groups_work(Squatter& squatter) {
  squatter.allow(2);
  run_ranks(3, 60s, [&](World& world) {
    at::Tensor sum = at::full({64}, world.rank() + 1.0);
    world.group().all_reduce(sum).wait();
    EXPECT_TRUE(at::equal(sum, at::full({64}, 6.0)));
    world.group().barrier().wait();
    if (world.rank() == 0) squatter.allow(1);
    world.group().barrier().wait();
    Group pair = world.new_group({0, 2});
    if (world.rank() == 1) return;
    at::Tensor other = at::full({8}, world.rank() + 1.0);
    pair.all_reduce(other).wait();
    EXPECT_TRUE(at::equal(other, at::full({8}, 4.0)));
  });
}

TEST(GroupStrangers, OneThatComesFirstAndSaysNothing) {
  Squatter squatter("");
  for (int round = 0; round < 5; ++round) expect_groups_work(squatter);
  EXPECT_GT(squatter.taken(), 0) << "the strangers of this test found no port in time";
}

TEST(GroupStrangers, OneThatComesFirstAndSendsGarbage) {
  Squatter squatter(
      "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nUser-Agent: a scan of the network\r\n\r\n");
  for (int round = 0; round < 5; ++round) expect_groups_work(squatter);
  EXPECT_GT(squatter.taken(), 0) << "the strangers of this test found no port in time";
}

}  // namespace group_strangers_test
}  // namespace penstock::comm
