#include "tests/chaos/packet_queue.h"

#include <algorithm>
#include <utility>

namespace penstock::chaos {

namespace {

using std::chrono::duration_cast;
using std::chrono::nanoseconds;

nanoseconds milliseconds_of(double ms) { return nanoseconds(static_cast<std::int64_t>(ms * 1e6)); }

// A full buffer in front of a slow link drops packets.
constexpr auto kLongestBacklog = std::chrono::milliseconds(250);

}  // namespace

void PacketQueue::push(Time now, std::string packet, const LinkQuality& quality) {
  if (quality.cut || random_.chance(quality.loss)) return;
  Time sent = now;
  if (quality.mbit_s > 0) {
    const auto ready = std::max(now, link_free_);
    if (ready - now > kLongestBacklog) return;
    sent = ready + milliseconds_of(static_cast<double>(packet.size()) * 8 / (quality.mbit_s * 1000));
    link_free_ = sent;
  }
  Time arrival = sent + milliseconds_of(quality.delay_ms + quality.jitter_ms * random_.share());
  if (random_.chance(quality.reorder)) {
    arrival += milliseconds_of(random_.number(1, 10));
  } else {
    arrival = std::max(arrival, last_arrival_);
    last_arrival_ = arrival;
  }
  under_way_.push({arrival, number_++, std::move(packet)});
}

std::optional<std::string> PacketQueue::pop(Time now) {
  if (under_way_.empty() || under_way_.top().arrival > now) return std::nullopt;
  std::string packet = under_way_.top().packet;
  under_way_.pop();
  return packet;
}

std::optional<PacketQueue::Time> PacketQueue::next_arrival() const {
  if (under_way_.empty()) return std::nullopt;
  return under_way_.top().arrival;
}

}  // namespace penstock::chaos
