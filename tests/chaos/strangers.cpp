#include "tests/chaos/strangers.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <system_error>
#include <thread>

#include "tests/chaos/random.h"

namespace penstock::chaos {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// Numbers of the sockets that a process has open.
void add_sockets_of(pid_t process, std::set<std::string>& numbers) {
  std::error_code error;
  for (fs::directory_iterator entry(fmt::format("/proc/{}/fd", process), error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code gone;
    const std::string target = fs::read_symlink(entry->path(), gone).string();
    constexpr std::string_view kBegin = "socket:[";
    if (!gone && target.starts_with(kBegin))
      numbers.insert(target.substr(kBegin.size(), target.size() - kBegin.size() - 1));
  }
}

// "0100007F:1F90": words of the address in the host's order, the port as a number.
bool parse_address(const std::string& text, Listening& socket) {
  const auto colon = text.find(':');
  if (colon != 8 && colon != 32) return false;
  std::uint32_t words[4] = {};
  for (std::size_t i = 0; i < colon / 8; ++i)
    words[i] = static_cast<std::uint32_t>(std::stoul(text.substr(i * 8, 8), nullptr, 16));
  socket.port = static_cast<int>(std::stoul(text.substr(colon + 1), nullptr, 16));
  if (colon == 8) {
    auto& address = reinterpret_cast<sockaddr_in&>(socket.address);
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(socket.port));
    std::memcpy(&address.sin_addr, words, 4);
    socket.length = sizeof address;
    socket.any_address = address.sin_addr.s_addr == htonl(INADDR_ANY);
    socket.loopback = ntohl(address.sin_addr.s_addr) >> 24 == 127;
  } else {
    auto& address = reinterpret_cast<sockaddr_in6&>(socket.address);
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<std::uint16_t>(socket.port));
    std::memcpy(&address.sin6_addr, words, 16);
    socket.length = sizeof address;
    socket.any_address = IN6_IS_ADDR_UNSPECIFIED(&address.sin6_addr);
    socket.loopback = IN6_IS_ADDR_LOOPBACK(&address.sin6_addr);
  }
  return true;
}

// Connected, or about to be; -1 if it is refused.
int connect_to(const Listening& socket, const std::string& reach) {
  sockaddr_storage address = socket.address;
  socklen_t length = socket.length;
  if (socket.any_address) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<std::uint16_t>(socket.port));
    if (inet_pton(AF_INET, reach.c_str(), &to.sin_addr) != 1) return -1;
    std::memcpy(&address, &to, sizeof to);
    length = sizeof to;
  }
  const int fd = ::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), length) == 0) return fd;
  if (errno == EINPROGRESS) {
    pollfd ready{fd, POLLOUT, 0};
    int error = 0;
    socklen_t size = sizeof error;
    if (poll(&ready, 1, 200) == 1 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0)
      return fd;
  }
  close(fd);
  return -1;
}

void reset_at_close(int fd) {
  const linger none{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
}

// The sockets that can be reached, looked up anew from time to time.
class Targets {
 public:
  explicit Targets(const StrangerOptions& options) : options_(options) {}

  const std::vector<Listening>& now() {
    if (Clock::now() < again_at_) return sockets_;
    again_at_ = Clock::now() + 50ms;
    sockets_ = listening_sockets(options_.processes());
    const bool local = options_.reach.starts_with("127.");
    std::erase_if(sockets_, [&](const Listening& socket) { return socket.loopback && !local; });
    return sockets_;
  }

 private:
  const StrangerOptions& options_;
  std::vector<Listening> sockets_;
  Clock::time_point again_at_{};
};

void send_garbage(Targets& targets, const StrangerOptions& options, Clock::time_point until) {
  Random random(options.seed);
  while (Clock::now() < until) {
    for (const Listening& socket : targets.now()) {
      const int fd = connect_to(socket, options.reach);
      if (fd < 0) continue;
      ++*options.reached;
      const std::string bytes = garbage_bytes(random.next());
      // Who does not read gets as much as the buffers take.
      if (send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && random.chance(0.5))
        reset_at_close(fd);
      if (random.chance(0.5)) std::this_thread::sleep_for(std::chrono::milliseconds(random.whole(0, 20)));
      if (random.chance(0.3)) reset_at_close(fd);
      close(fd);
    }
    std::this_thread::sleep_for(5ms);
  }
}

// A few hundred connections a second and port: more would only measure who gets the processor.
void flood(Targets& targets, const StrangerOptions& options, Clock::time_point until) {
  Random random(options.seed);
  while (Clock::now() < until) {
    for (const Listening& socket : targets.now())
      for (int i = 0; i < 20; ++i) {
        const int fd = connect_to(socket, options.reach);
        if (fd < 0) break;
        ++*options.reached;
        if (random.chance(0.5)) reset_at_close(fd);
        close(fd);
      }
    std::this_thread::sleep_for(10ms);
  }
}

void hold_open(Targets& targets, const StrangerOptions& options, Clock::time_point until) {
  Random random(options.seed);
  std::map<int, std::vector<int>> held;  // by port
  const rlimit limit{65536, 65536};
  setrlimit(RLIMIT_NOFILE, &limit);  // without the right to raise it, as many as there are
  while (Clock::now() < until) {
    for (const Listening& socket : targets.now()) {
      std::vector<int>& open = held[socket.port];
      while (static_cast<int>(open.size()) < options.connections) {
        const int fd = connect_to(socket, options.reach);
        if (fd < 0) break;
        ++*options.reached;
        open.push_back(fd);
        // Some begin to talk and stop.
        if (random.chance(0.2)) {
          const std::string bytes = garbage_bytes(random.next()).substr(0, 1);
          if (send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) break;
        }
      }
    }
    std::this_thread::sleep_for(20ms);
  }
  for (const auto& [port, open] : held)
    for (const int fd : open) close(fd);
}

}  // namespace

bool Listening::operator==(const Listening& other) const {
  return length == other.length && std::memcmp(&address, &other.address, length) == 0;
}

std::vector<Listening> listening_sockets(const std::vector<pid_t>& processes) {
  std::set<std::string> numbers;
  for (const pid_t process : processes) add_sockets_of(process, numbers);
  std::vector<Listening> found;
  for (const char* table : {"tcp", "tcp6"})
    for (const pid_t process : processes) {
      std::ifstream file(fmt::format("/proc/{}/net/{}", process, table));
      std::string line;
      std::getline(file, line);  // the names of the columns
      while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string number, local, remote, state, word, inode;
        words >> number >> local >> remote >> state >> word >> word >> word >> word >> word >> inode;
        Listening socket;
        constexpr const char* kListen = "0A";
        if (state == kListen && numbers.contains(inode) && parse_address(local, socket) &&
            std::find(found.begin(), found.end(), socket) == found.end())
          found.push_back(socket);
      }
    }
  return found;
}

int be_stranger(const StrangerOptions& options) {
  const auto length =
      options.seconds > 0 ? std::chrono::duration<double>(options.seconds) : std::chrono::hours(1);
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(length);
  Targets targets(options);
  if (options.fault == Fault::Garbage) send_garbage(targets, options, until);
  if (options.fault == Fault::Flood) flood(targets, options, until);
  if (options.fault == Fault::HalfOpen) hold_open(targets, options, until);
  return 0;
}

std::string garbage_bytes(std::uint64_t seed) {
  Random random(seed);
  const auto noise = [&](int bytes) {
    std::string text(static_cast<std::size_t>(bytes), '\0');
    for (char& c : text) c = static_cast<char>(random.next());
    return text;
  };
  const auto number = [](std::uint64_t value) {
    std::string text(sizeof value, '\0');
    std::memcpy(text.data(), &value, sizeof value);
    return text;
  };
  switch (random.whole(0, 7)) {
    case 0:
      return std::string(1, '\0');
    case 1:
      return noise(1);
    case 2:
      return noise(random.whole(2, 4096));
    case 3:
      return noise(100'000);
    case 4:  // a kind, a short key, and a value of 1.5 GiB that does not come
      return std::string(1, static_cast<char>(random.whole(0, 12))) + number(3) + "key" + number(3ull << 29);
    case 5:
      return "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    case 6:
      return std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + noise(32);
    default:
      return number(~0ull) + noise(16);
  }
}

}  // namespace penstock::chaos
