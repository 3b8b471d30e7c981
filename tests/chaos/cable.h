// The cable between two hosts: a TUN interface in each, and a process of the harness that carries the packets
// from one to the other. It needs neither netem nor veth, and behaves as badly as it is told.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "tests/chaos/host.h"
#include "tests/chaos/packet_queue.h"

namespace penstock::chaos {

class Cable {
 public:
  static constexpr const char* kInterface = "penstock0";

  // Both hosts must be isolated.
  Cable(Host& a, Host& b, std::uint64_t seed);
  ~Cable();
  Cable(const Cable&) = delete;
  Cable& operator=(const Cable&) = delete;

  static std::string address_of(int host);  // host 0 or 1

  // Takes effect for the next packet.
  void set_quality(const LinkQuality& quality);
  // Whether the interfaces notice that the cable is plugged in.
  void set_carrier(bool plugged);

 private:
  struct Shared;  // between the harness and the process that carries the packets

  int ends_[2] = {-1, -1};
  Shared* shared_ = nullptr;
  std::unique_ptr<Helper> relay_;
};

}  // namespace penstock::chaos
