// What the launchers of one job tell each other, one launcher on each host (a node). The launcher of node 0
// is the hub: all others are connected to it.
//
//   to the hub     Join      I am here, with so many ranks
//                  Failed    one of my ranks failed first, and how
//                  Ended     all ranks of an attempt on my host have ended
//                  Stop      somebody stopped my launcher with a signal
//   from the hub   Plan      start the ranks of an attempt
//                  Refused   you cannot take part, and why
//                  Failed    a rank of another host failed first: end yours
//                  Lost      a host is gone: end your ranks
//                  Stop      a launcher was stopped: stop your ranks
//                  Done      no attempt follows: exit with this code
//   both ways      Beat      I am still here
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace penstock::comm {

inline constexpr std::size_t kMaxNodeMessage = 16 * 1024;  // bytes
inline constexpr int kMaxNodes = 4096;

struct NodeMessage {
  enum class Kind : std::uint8_t { Join, Plan, Refused, Failed, Ended, Lost, Stop, Done, Beat };

  Kind kind = Kind::Beat;
  int attempt = 0;
  int node = -1;        // Join: the wanted number, -1: any; else whom the message is about
  int nodes = 0;        // Plan: number of hosts; Join: the largest number of hosts
  int least_nodes = 0;  // Join: the smallest number of hosts
  int ranks = 0;        // Join, Plan, Lost: ranks on the host; Join with a world: 0
  int first_rank = 0;   // Plan, Lost: its lowest rank
  int world = 0;        // Plan: ranks on all hosts; Join: the same if the job fixes it, else 0
  int port = 0;         // Plan: MASTER_PORT
  int rank = -1;        // Failed
  int code = 0;         // Failed, Ended, Done: exit code
  int signal = 0;       // Stop, Ended: the signal
  bool final = false;   // Failed: another attempt would fail in the same way
  std::string host;     // name of the host that the message is about
  std::string text;     // a part of a sentence for people

  friend bool operator==(const NodeMessage&, const NodeMessage&) = default;
};

// One line of text. Texts of people are cut to fit and lose control characters.
std::string encode(const NodeMessage& message);

// Throws MismatchError for anything that `encode` does not return.
NodeMessage decode_node_message(std::string_view bytes);

}  // namespace penstock::comm
