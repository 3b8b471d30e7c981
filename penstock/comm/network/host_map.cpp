#include "penstock/comm/network/host_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

constexpr const char* kFactsMark = "facts1";
constexpr const char* kMapMark = "hosts1";

std::vector<std::string> split_fields(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// Host names are text from outside: what separates fields here does not belong into one.
std::string plain_name(std::string name) {
  for (char& c : name)
    if (c == '|' || c == ',' || c == '>' || c == ' ' || static_cast<unsigned char>(c) < 32) c = '_';
  return name;
}

std::string flag_digit(bool value) { return value ? "1" : "0"; }

[[noreturn]] void refuse_text(const std::string& what, const std::string& text) {
  throw MismatchError(
      fmt::format("{}: {} is not of this version; start the same build on every host", what, quote(text)));
}

bool has_family(const Candidate& candidate, bool ipv6) {
  return !candidate.own.empty() && is_ipv6(candidate.own) == ipv6;
}

// The address by which ranks of other hosts reached the master, in the wanted family.
std::string address_of_master(const std::vector<HostFacts>& facts, const HostFacts& of, bool ipv6) {
  for (const HostFacts& other : facts) {
    if (other.host == of.host) continue;
    for (const Candidate& candidate : other.candidates)
      if (!candidate.own.empty() && !candidate.master.empty() && is_ipv6(candidate.master) == ipv6)
        return candidate.master;
  }
  return "";
}

// The address of one rank in this family, or "".
std::string address_in_family(const std::vector<HostFacts>& facts, const HostFacts& of, bool ipv6) {
  for (const Candidate& candidate : of.candidates)
    if (has_family(candidate, ipv6)) return candidate.own;
  for (const Candidate& candidate : of.candidates)
    if (candidate.own.empty()) return address_of_master(facts, of, ipv6);
  return "";
}

bool knows_only_loopback(const HostFacts& facts) {
  return std::all_of(facts.candidates.begin(), facts.candidates.end(),
                     [](const Candidate& each) { return each.own.empty(); });
}

std::string no_common_family(const std::vector<HostFacts>& facts) {
  std::string list;
  const std::size_t shown = std::min<std::size_t>(facts.size(), 8);
  for (std::size_t rank = 0; rank < shown; ++rank) {
    const std::vector<Candidate>& own = facts[rank].candidates;
    list += fmt::format("{}rank {} on {} has {}", list.empty() ? "" : ", ", rank, facts[rank].name,
                        own.empty() || own.front().own.empty() ? "loopback only" : own.front().own);
  }
  return fmt::format(
      "rendezvous: the ranks have no kind of address in common ({}{}); set MASTER_ADDR to a numeric address "
      "of rank "
      "0's host that every host can reach, or GLOO_SOCKET_IFNAME on each host to an interface of one network",
      list, shown < facts.size() ? ", ..." : "");
}

}  // namespace

std::string encode_facts(const HostFacts& facts) {
  std::string candidates;
  for (const Candidate& each : facts.candidates)
    candidates += fmt::format("{}{}>{}", candidates.empty() ? "" : ",", each.own, each.master);
  return fmt::format("{}|{}|{}|{}|{}|{}|{}", kFactsMark, facts.host, plain_name(facts.name), candidates,
                     flag_digit(facts.chosen), flag_digit(facts.shared_memory), flag_digit(facts.nccl));
}

HostFacts decode_facts(const std::string& text) {
  const std::vector<std::string> fields = split_fields(text, '|');
  if (fields.size() != 7 || fields[0] != kFactsMark)
    refuse_text("rendezvous: what a rank says about its host", text);
  HostFacts facts;
  facts.host = fields[1];
  facts.name = fields[2];
  if (!fields[3].empty())
    for (const std::string& each : split_fields(fields[3], ',')) {
      const auto middle = each.find('>');
      if (middle == std::string::npos) refuse_text("rendezvous: what a rank says about its host", text);
      facts.candidates.push_back({each.substr(0, middle), each.substr(middle + 1)});
    }
  facts.chosen = fields[4] == "1";
  facts.shared_memory = fields[5] == "1";
  facts.nccl = fields[6] == "1";
  return facts;
}

bool HostMap::one_host() const {
  return std::all_of(host_of.begin(), host_of.end(), [](int host) { return host == 0; });
}

bool HostMap::has_neighbours() const { return !host_of.empty() && first_ranks().size() < host_of.size(); }

std::vector<int> HostMap::ranks_on_host_of(int rank) const {
  std::vector<int> ranks;
  for (int other = 0; other < static_cast<int>(host_of.size()); ++other)
    if (same_host(rank, other)) ranks.push_back(other);
  return ranks;
}

std::vector<int> HostMap::first_ranks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(host_of.size()); ++rank)
    if (host_of[index(rank)] == static_cast<int>(ranks.size())) ranks.push_back(rank);
  return ranks;
}

std::string HostMap::describe(int rank) const {
  if (host_of.empty()) return fmt::format("rank {}", rank);
  return fmt::format("rank {} on {} ({})", rank, name[index(rank)], address[index(rank)]);
}

HostMap make_host_map(const std::vector<HostFacts>& facts, std::string& error) {
  HostMap map;
  std::map<std::string, int> numbers;
  for (const HostFacts& each : facts) {
    map.host_of.push_back(numbers.emplace(each.host, static_cast<int>(numbers.size())).first->second);
    map.name.push_back(each.name);
  }
  map.nccl = std::all_of(facts.begin(), facts.end(), [](const HostFacts& each) { return each.nccl; });
  map.shared_memory = true;
  for (std::size_t rank = 0; rank < facts.size(); ++rank)
    if (map.ranks_on_host_of(static_cast<int>(rank)).size() > 1)
      map.shared_memory = map.shared_memory && facts[rank].shared_memory;
  // Ranks that all reached the master over loopback share its network, even if they share no memory.
  const bool all_loopback = map.one_host() || std::all_of(facts.begin(), facts.end(), knows_only_loopback);
  const bool any_chosen =
      std::any_of(facts.begin(), facts.end(), [](const HostFacts& each) { return each.chosen; });
  if (all_loopback && !any_chosen) {
    map.address.assign(facts.size(), "127.0.0.1");
    return map;
  }
  // The order of preference is that of the first rank with an address of its own.
  bool first_family = false;
  for (const HostFacts& each : facts) {
    const auto own = std::find_if(each.candidates.begin(), each.candidates.end(),
                                  [](const Candidate& candidate) { return !candidate.own.empty(); });
    if (own == each.candidates.end()) continue;
    first_family = is_ipv6(own->own);
    break;
  }
  for (const bool ipv6 : {first_family, !first_family}) {
    map.address.clear();
    for (const HostFacts& each : facts) {
      std::string address = address_in_family(facts, each, ipv6);
      // On one host, only some ranks may have been told to use an interface; loopback reaches that one, too.
      if (address.empty() && map.one_host() && !ipv6) address = "127.0.0.1";
      if (address.empty()) break;
      map.address.push_back(address);
    }
    if (map.address.size() == facts.size()) return map;
  }
  error = no_common_family(facts);
  map.address.clear();
  return map;
}

std::string encode_map(const HostMap& map) {
  std::string ranks;
  for (std::size_t rank = 0; rank < map.host_of.size(); ++rank)
    ranks += fmt::format("{}{}>{}>{}", ranks.empty() ? "" : ",", map.host_of[rank], map.address[rank],
                         plain_name(map.name[rank]));
  return fmt::format("{}|{}|{}|{}", kMapMark, flag_digit(map.shared_memory), flag_digit(map.nccl), ranks);
}

HostMap decode_map(const std::string& text) {
  const std::vector<std::string> fields = split_fields(text, '|');
  if (fields.size() != 4 || fields[0] != kMapMark) refuse_text("rendezvous: rank 0's list of hosts", text);
  HostMap map;
  map.shared_memory = fields[1] == "1";
  map.nccl = fields[2] == "1";
  for (const std::string& each : split_fields(fields[3], ',')) {
    const std::vector<std::string> parts = split_fields(each, '>');
    const auto host = parts.size() == 3 ? parse_integer(parts[0]) : std::nullopt;
    if (!host) refuse_text("rendezvous: rank 0's list of hosts", text);
    map.host_of.push_back(static_cast<int>(*host));
    map.address.push_back(parts[1]);
    map.name.push_back(parts[2]);
  }
  return map;
}

}  // namespace penstock::comm
