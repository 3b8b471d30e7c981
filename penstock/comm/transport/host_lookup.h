// Connects to a host that is given by its name, again and again until it listens.
//
// The name is looked up before the first attempt and then every few seconds, since its address may change
// while a job starts: a name server must not be asked for each attempt. A lookup that takes too long is
// given up. Thread safety: use an object from one thread.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/comm/network/host_address.h"
#include "penstock/comm/transport/call_with_timeout.h"
#include "penstock/comm/transport/transfer.h"

namespace penstock::comm {

class HostLookup {
 public:
  using Resolver = std::function<NameAnswer(const std::string& host)>;

  // A name or an address. Nothing is looked up yet.
  explicit HostLookup(std::string host, Resolver resolver = look_up_name)
      : host_(std::move(host)), resolver_(std::move(resolver)) {}

  const std::string& host() const { return host_; }

  // Throws ConfigError ending in `remedy` unless the name can be resolved. The answer "no such host" is
  // final; a name server that does not answer is queried again for a short time, at most until the deadline.
  void require_known(Clock::time_point deadline, const std::string& remedy);

  // Returns a connected socket that does not block, or -1 with errno set; `problem` then says why. `limit`:
  // for each address, and for a lookup.
  int connect(int port, std::chrono::milliseconds limit = std::chrono::seconds(2));
  const std::string& problem() const { return problem_; }

 private:
  // Returns whether another attempt may give another answer.
  bool look_up(std::chrono::milliseconds limit);

  const std::string host_;
  const Resolver resolver_;
  CallWithTimeout caller_;
  std::vector<std::string> addresses_;  // of the last answer that had any
  std::optional<Clock::time_point> looked_up_;
  std::string problem_;
};

}  // namespace penstock::comm
