// Strangers that are faster than a member: Gloo's ports take whoever connects first.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "penstock/comm/secure/sha256.h"
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

// Records the proofs of membership that this process sends, as somebody who listens on the network does.
class Wiretap {
 public:
  Wiretap() { current = this; }
  ~Wiretap() { current = nullptr; }
  Wiretap(const Wiretap&) = delete;
  Wiretap& operator=(const Wiretap&) = delete;

  std::set<std::string> proofs() {
    const std::lock_guard lock(mutex_);
    return proofs_;
  }

  // Gloo sends a header, whose third word is the slot, and the bytes of the tensor at once.
  void sends(const iovec* parts, std::size_t count) {
    constexpr std::uint64_t kProofSlot = 0x71ull << 56;
    std::uint64_t header[3];
    if (count != 2 || parts[0].iov_len < sizeof header || parts[1].iov_len != kDigestBytes) return;
    std::memcpy(header, parts[0].iov_base, sizeof header);
    if (header[2] != kProofSlot) return;
    const std::lock_guard lock(mutex_);
    proofs_.emplace(static_cast<const char*>(parts[1].iov_base), kDigestBytes);
  }

  inline static std::atomic<Wiretap*> current = nullptr;

 private:
  std::mutex mutex_;
  std::set<std::string> proofs_;
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

// Two jobs with the same secret, whose groups have the same names and members.
TEST(GroupStrangers, ProofsOfOneJobAreOfNoUseInAnother) {
  std::set<std::string> jobs[2];
  for (auto& proofs : jobs) {
    Wiretap wiretap;
    run_ranks(2, 60s, [](World&) {});
    proofs = wiretap.proofs();
    EXPECT_GE(proofs.size(), 2u) << "one in each direction";
  }
  for (const std::string& proof : jobs[0]) EXPECT_FALSE(jobs[1].contains(proof)) << "it was sent again";
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

// Older versions of Gloo send with writev, newer ones with sendmsg.
extern "C" ssize_t writev(int file, const iovec* parts, int count) {
  auto* wiretap = penstock::comm::group_strangers_test::Wiretap::current.load();
  if (wiretap) wiretap->sends(parts, static_cast<std::size_t>(count));
  return syscall(SYS_writev, file, parts, count);
}

extern "C" ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  auto* wiretap = penstock::comm::group_strangers_test::Wiretap::current.load();
  if (wiretap) wiretap->sends(message->msg_iov, message->msg_iovlen);
  return syscall(SYS_sendmsg, socket, message, flags);
}
