#include "tests/chaos/cable.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>

#include "penstock/errors.h"

namespace penstock::chaos {

namespace {

[[noreturn]] void fail(const std::string& what) {
  throw StateError(fmt::format("chaos: {}: {}", what, std::strerror(errno)));
}

bool set_address(int control, ifreq request, unsigned long what, const std::string& text) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  if (inet_pton(AF_INET, text.c_str(), &address.sin_addr) != 1) return false;
  std::memcpy(&request.ifr_addr, &address, sizeof address);
  return ioctl(control, what, &request) == 0;
}

// In the network of the host: makes the interface and sends its descriptor to the harness, since the device
// belongs to the network in which it was opened.
int make_interface(int to_harness, const std::string& address) {
  const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  std::strcpy(request.ifr_name, Cable::kInterface);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  const int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  bool made = device >= 0 && ioctl(device, TUNSETIFF, &request) == 0 &&
              set_address(control, request, SIOCSIFADDR, address) &&
              set_address(control, request, SIOCSIFNETMASK, "255.255.255.0");
  made = made && ioctl(control, SIOCGIFFLAGS, &request) == 0;
  request.ifr_flags = static_cast<short>(request.ifr_flags | IFF_UP | IFF_RUNNING);
  made = made && ioctl(control, SIOCSIFFLAGS, &request) == 0;
  if (!made) {
    std::fprintf(stderr, "chaos: no TUN interface: %s\n", std::strerror(errno));
    return 1;
  }
  char byte = 'x';
  iovec part{&byte, 1};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(head), &device, sizeof device);
  return sendmsg(to_harness, &message, 0) == 1 ? 0 : 1;
}

int receive_descriptor(int from) {
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != 1) return -1;
  const cmsghdr* head = CMSG_FIRSTHDR(&message);
  if (head == nullptr || head->cmsg_type != SCM_RIGHTS) return -1;
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(head), sizeof fd);
  return fd;
}

int interface_of(Host& host, const std::string& address) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail("socketpair");
  int fd = -1;
  try {
    host.run(Host::Enter::Network, "the interface of the cable",
             [&] { return make_interface(ends[1], address); });
    fd = receive_descriptor(ends[0]);
  } catch (const StateError&) {
    close(ends[0]);
    close(ends[1]);
    throw;
  }
  close(ends[0]);
  close(ends[1]);
  if (fd < 0) fail("the interface of the cable");
  return fd;
}

}  // namespace

// Plain numbers behind a counter: the writer makes it odd, and the reader takes what it read between two
// equal even values.
struct Cable::Shared {
  std::atomic<std::uint64_t> version{0};
  std::atomic<double> delay_ms{0}, jitter_ms{0}, loss{0}, reorder{0}, mbit_s{0};
  std::atomic<bool> cut{false};

  void write(const LinkQuality& quality) {
    ++version;
    delay_ms = quality.delay_ms;
    jitter_ms = quality.jitter_ms;
    loss = quality.loss;
    reorder = quality.reorder;
    mbit_s = quality.mbit_s;
    cut = quality.cut;
    ++version;
  }
  LinkQuality read() const {
    for (;;) {
      const std::uint64_t before = version;
      const LinkQuality quality{.delay_ms = delay_ms,
                                .jitter_ms = jitter_ms,
                                .loss = loss,
                                .reorder = reorder,
                                .mbit_s = mbit_s,
                                .cut = cut};
      if (before % 2 == 0 && version == before) return quality;
    }
  }
};

namespace {

int timeout_until(const std::optional<PacketQueue::Time>& arrival, PacketQueue::Time now) {
  if (!arrival) return 50;  // a cable that is cut meanwhile is noticed by then
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*arrival - now).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 50));
}

}  // namespace

std::string Cable::address_of(int host) { return fmt::format("10.77.0.{}", host + 1); }

Cable::Cable(Host& a, Host& b, std::uint64_t seed) {
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("shared memory of the cable");
  shared_ = new (memory) Shared;
  ends_[0] = interface_of(a, address_of(0));
  ends_[1] = interface_of(b, address_of(1));
  relay_ = std::make_unique<Helper>([this, seed]() -> int {
    PacketQueue queues[2] = {PacketQueue(seed), PacketQueue(seed + 1)};  // to the other end
    std::string buffer(65536, '\0');
    for (;;) {
      const auto before = Clock::now();
      const auto first = queues[0].next_arrival(), second = queues[1].next_arrival();
      pollfd polled[2] = {{ends_[0], POLLIN, 0}, {ends_[1], POLLIN, 0}};
      if (poll(polled, 2, std::min(timeout_until(first, before), timeout_until(second, before))) < 0 &&
          errno != EINTR)
        return 1;
      const LinkQuality quality = shared_->read();
      for (int end = 0; end < 2; ++end) {
        ssize_t bytes = 0;
        while ((bytes = read(ends_[end], buffer.data(), buffer.size())) > 0)
          queues[end].push(Clock::now(), buffer.substr(0, static_cast<std::size_t>(bytes)), quality);
        if (quality.cut) queues[end].clear();
        // What the interface does not take is lost, as on any cable.
        while (const auto packet = queues[end].pop(Clock::now()))
          if (write(ends_[1 - end], packet->data(), packet->size()) < 0 && errno == EBADF) return 1;
      }
    }
  });
}

Cable::~Cable() {
  relay_.reset();
  for (const int end : ends_)
    if (end >= 0) close(end);
  munmap(shared_, sizeof(Shared));
}

void Cable::set_quality(const LinkQuality& quality) { shared_->write(quality); }

void Cable::set_carrier(bool plugged) {
  int carrier = plugged ? 1 : 0;
  for (const int end : ends_)
    if (ioctl(end, TUNSETCARRIER, &carrier) != 0) fail("the carrier of the cable");
}

}  // namespace penstock::chaos
