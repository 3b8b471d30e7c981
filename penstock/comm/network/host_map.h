// Which ranks are on the same host, and on which address each rank listens: decided once for a world, by rank
// 0, from what every rank knows about itself. Pure functions of text and values.
#pragma once

#include <string>
#include <vector>

#include "penstock/comm/network/host_address.h"

namespace penstock::comm {

// What a rank tells about itself.
struct HostFacts {
  std::string host;                   // HostIdentity::text()
  std::string name;                   // host name, for messages
  std::vector<Candidate> candidates;  // candidate_addresses()
  bool chosen = false;                // the user chose the interface: it is used on one host, too
  bool shared_memory = false;         // UCX is available and has enough shared memory
  bool nccl = false;                  // the build has NCCL
};

// The facts as one line of text, and back. `decode_facts` throws MismatchError for other text, as from a rank
// of another version.
std::string encode_facts(const HostFacts& facts);
HostFacts decode_facts(const std::string& text);

struct HostMap {
  std::vector<int> host_of;          // by rank: number of its host; hosts are numbered by their lowest rank
  std::vector<std::string> address;  // by rank: the address on which it listens
  std::vector<std::string> name;     // by rank: the name of its host
  bool shared_memory = false;        // every host with several ranks can use UCX between them
  bool nccl = false;                 // every rank's build has NCCL

  // For a world that is not made of processes, everything is on one host.
  bool same_host(int a, int b) const { return host_of.empty() || host_of[index(a)] == host_of[index(b)]; }
  bool one_host() const;
  // Whether a host has more than one rank.
  bool has_neighbours() const;
  std::string address_of(int rank) const { return address.empty() ? "127.0.0.1" : address[index(rank)]; }
  std::vector<int> ranks_on_host_of(int rank) const;
  // The lowest rank of each host.
  std::vector<int> first_ranks() const;
  // "rank 2 on node7 (10.0.0.2)"
  std::string describe(int rank) const;

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
};

// Decides for all ranks. Ranks of one host listen on loopback alone, unless the user chose an interface. On
// several hosts all addresses are of one family, because Gloo connects no IPv4 address with an IPv6 address.
// A rank on the master's host that knows the master by a loopback address only listens on the address by
// which the ranks of other hosts reached the master. Sets `error` to a sentence if there is no such choice.
HostMap make_host_map(const std::vector<HostFacts>& facts, std::string& error);

std::string encode_map(const HostMap& map);
HostMap decode_map(const std::string& text);

}  // namespace penstock::comm
