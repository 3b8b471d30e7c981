// What a bad cable does to packets in one direction: delay, loss, another order, a limited rate. A value
// without clock or sockets.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <queue>
#include <string>
#include <vector>

#include "tests/chaos/random.h"

namespace penstock::chaos {

struct LinkQuality {
  double delay_ms = 0;
  double jitter_ms = 0;  // added to the delay of each packet; does not change the order
  double loss = 0;       // share of packets
  double reorder = 0;    // share of packets that wait until later ones have passed
  double mbit_s = 0;     // 0: no limit
  bool cut = false;      // nothing passes
};

class PacketQueue {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit PacketQueue(std::uint64_t seed) : random_(seed) {}

  void push(Time now, std::string packet, const LinkQuality& quality);
  // A packet that has arrived by `now`; std::nullopt if there is none. Packets under way are lost when the
  // cable is cut.
  std::optional<std::string> pop(Time now);
  std::optional<Time> next_arrival() const;
  void clear() { under_way_ = {}; }

 private:
  struct UnderWay {
    Time arrival;
    std::uint64_t number;
    std::string packet;
    bool operator<(const UnderWay& other) const {  // the earliest is the greatest
      return arrival != other.arrival ? arrival > other.arrival : number > other.number;
    }
  };

  Random random_;
  std::priority_queue<UnderWay> under_way_;
  Time last_arrival_{};  // of packets in order
  Time link_free_{};     // when the limited link has sent all packets
  std::uint64_t number_ = 0;
};

}  // namespace penstock::chaos
