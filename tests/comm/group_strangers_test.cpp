// Strangers that are faster than a member: Gloo's ports take whoever connects first.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "penstock/world.h"

namespace penstock::comm {
namespace group_strangers_test {

using namespace std::chrono_literals;

// Connects to ports of this process before anybody else does, as often as allowed, and keeps the connections.
class Squatter {
 public:
  explicit Squatter(std::string says) : says_(std::move(says)) { current = this; }
  ~Squatter() {
    current = nullptr;
    for (const int fd : held_) close(fd);
  }
  Squatter(const Squatter&) = delete;
  Squatter& operator=(const Squatter&) = delete;

  void allow(int connections) { allowed_ = connections; }
  int taken() const { return taken_; }

  // Called between the moment in which a socket listens and the one in which its owner knows.
  void listens(int socket) {
    sockaddr_in at{};
    socklen_t size = sizeof at;
    if (getsockname(socket, reinterpret_cast<sockaddr*>(&at), &size) != 0 || at.sin_family != AF_INET) return;
    const std::lock_guard lock(mutex_);
    if (allowed_ == 0) return;
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0) {
      close(fd);
      return;
    }
    if (!says_.empty()) static_cast<void>(send(fd, says_.data(), says_.size(), MSG_NOSIGNAL));
    held_.push_back(fd);
    --allowed_;
    ++taken_;
  }

  inline static std::atomic<Squatter*> current = nullptr;

 private:
  const std::string says_;
  std::mutex mutex_;
  std::atomic<int> allowed_ = 0, taken_ = 0;
  std::vector<int> held_;
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

// Newer versions of Gloo listen once in a process, older ones for each connection.
#if __has_include(<gloo/transport/tcp/listener.h>)
constexpr int kTaken = 1;
#else
constexpr int kTaken = 3;
#endif

TEST(GroupStrangers, OneThatComesFirstAndSaysNothing) {
  Squatter squatter("");
  expect_groups_work(squatter);
  EXPECT_EQ(squatter.taken(), kTaken);
}

TEST(GroupStrangers, OneThatComesFirstAndSendsGarbage) {
  Squatter squatter(
      "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nUser-Agent: a scan of the network\r\n\r\n");
  expect_groups_work(squatter);
  EXPECT_EQ(squatter.taken(), kTaken);
}

}  // namespace group_strangers_test
}  // namespace penstock::comm

// Of the C library, also for the libraries that this program has loaded: a port is open for milliseconds
// only, which is too short to be looked for.
extern "C" int listen(int socket, int backlog) noexcept {
  const auto result = static_cast<int>(syscall(SYS_listen, socket, backlog));
  auto* squatter = penstock::comm::group_strangers_test::Squatter::current.load();
  if (result == 0 && squatter) squatter->listens(socket);
  return result;
}
