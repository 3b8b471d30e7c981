#include "penstock/comm/transport/host_lookup.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "penstock/comm/network/sockets.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

using namespace std::chrono_literals;

// How old an answer may be.
constexpr auto kLookupAge = 5s, kFailedLookupAge = 1s;

}  // namespace

bool HostLookup::look_up(std::chrono::milliseconds limit) {
  const auto answer = std::make_shared<NameAnswer>();
  const bool answered =
      caller_.run([answer, host = host_, resolver = resolver_] { *answer = resolver(host); }, limit);
  looked_up_ = Clock::now();
  if (!answered) {
    problem_ = "its name cannot be resolved: no name server answers";
    return true;
  }
  if (!answer->error.empty()) {
    problem_ = "its name cannot be resolved: " + answer->error;
    return answer->temporary;
  }
  addresses_ = std::move(answer->addresses);
  return true;
}

void HostLookup::require_known(Clock::time_point deadline, const std::string& remedy) {
  constexpr auto kRetryTime = 3s;
  const auto last = std::min(deadline, Clock::now() + kRetryTime);
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    const bool may_change = look_up(std::max<std::chrono::milliseconds>(left, 1ms));
    if (!addresses_.empty()) return;
    if (!may_change || Clock::now() >= last)
      throw ConfigError(fmt::format("rendezvous: the host \"{}\": {}; {}", host_, problem_, remedy));
    std::this_thread::sleep_for(200ms);
  }
}

int HostLookup::connect(int port, std::chrono::milliseconds limit) {
  const auto age = addresses_.empty() ? kFailedLookupAge : kLookupAge;
  if (!looked_up_ || Clock::now() - *looked_up_ >= age) look_up(limit);
  if (addresses_.empty()) {
    errno = EHOSTUNREACH;
    return -1;
  }
  for (const std::string& address : addresses_)
    if (const int fd = open_connection(address, port, Clock::now() + limit); fd >= 0) return fd;
  const int error = errno;
  problem_ = std::strerror(error);
  errno = error;
  return -1;
}

}  // namespace penstock::comm
