#include "penstock/comm/network/host_address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "penstock/base/env.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

// Reserved for documentation (RFC 5737, RFC 3849): the default route leads there, and no host is there.
// Nothing is sent; the kernel only looks up the route.
constexpr const char* kFarAwayIpv4 = "192.0.2.1";
constexpr const char* kFarAwayIpv6 = "2001:db8::1";

// An address without its zone: "fe80::1%eth0" becomes "fe80::1".
std::string without_zone(const std::string& address) { return address.substr(0, address.find('%')); }

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

// Reads numeric text; returns false for anything else.
bool parse_numeric(const std::string& text, int port, SocketAddress& result) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(text.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return false;
  std::memcpy(&result.storage, found->ai_addr, found->ai_addrlen);
  result.length = found->ai_addrlen;
  freeaddrinfo(found);
  return true;
}

std::string numeric_text(const sockaddr* address) {
  const socklen_t length = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  char text[NI_MAXHOST];
  return getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

std::string first_of_list(const std::string& names) { return names.substr(0, names.find(',')); }

std::string list_of_interfaces(const std::vector<InterfaceAddress>& interfaces) {
  std::string list;
  for (const InterfaceAddress& each : interfaces)
    if (each.up && !is_loopback(each.address) && !is_link_local(each.address))
      list += fmt::format("{}{} ({})", list.empty() ? "" : ", ", each.interface, each.address);
  return list.empty() ? "none but loopback" : list;
}

// The first address of an interface that other hosts can use, of the wanted family if it has one.
std::string address_of_interface(const std::vector<InterfaceAddress>& interfaces, const std::string& name,
                                 bool prefer_ipv6) {
  std::string other;
  for (const InterfaceAddress& each : interfaces) {
    if (each.interface != name || !each.up || is_link_local(each.address)) continue;
    if (is_ipv6(each.address) == prefer_ipv6) return each.address;
    if (other.empty()) other = each.address;
  }
  return other;
}

Candidate chosen_candidate(const Routes& routes) {
  const std::string name = first_of_list(routes.chosen_interface);
  const std::string master = routes.to_master.empty() ? "" : routes.to_master.front().master;
  const std::string address =
      address_of_interface(routes.interfaces, name, !master.empty() && is_ipv6(master));
  if (!address.empty()) return {address, master};
  const bool exists = std::any_of(routes.interfaces.begin(), routes.interfaces.end(),
                                  [&](const InterfaceAddress& each) { return each.interface == name; });
  throw ConfigError(
      fmt::format("GLOO_SOCKET_IFNAME: the interface {} {} on this host; choose one of {}, or unset it to "
                  "use the one that "
                  "routes to the master",
                  quote(name), exists ? "has no address that is up" : "does not exist",
                  list_of_interfaces(routes.interfaces)));
}

}  // namespace

std::vector<InterfaceAddress> interface_addresses() {
  std::vector<InterfaceAddress> result;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return result;
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr) continue;
    if (at->ifa_addr->sa_family != AF_INET && at->ifa_addr->sa_family != AF_INET6) continue;
    const std::string address = numeric_text(at->ifa_addr);
    if (!address.empty()) result.push_back({at->ifa_name, address, (at->ifa_flags & IFF_UP) != 0});
  }
  freeifaddrs(list);
  return result;
}

bool is_ipv6(const std::string& address) { return address.find(':') != std::string::npos; }

bool is_loopback(const std::string& address) {
  in_addr v4{};
  if (inet_pton(AF_INET, address.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6{};
  if (inet_pton(AF_INET6, without_zone(address).c_str(), &v6) != 1) return false;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
}

bool is_link_local(const std::string& address) {
  in_addr v4{};
  if (inet_pton(AF_INET, address.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 16 == 0xa9fe;
  in6_addr v6{};
  return inet_pton(AF_INET6, without_zone(address).c_str(), &v6) == 1 && IN6_IS_ADDR_LINKLOCAL(&v6);
}

std::string address_and_port(const std::string& host, int port) {
  return is_ipv6(host) ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

NameAnswer look_up_name(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  NameAnswer answer;
  if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0) {
    answer.error = error == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(error);
    answer.temporary = error == EAI_AGAIN;
    return answer;
  }
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    const std::string text = numeric_text(at->ai_addr);
    if (!text.empty() &&
        std::find(answer.addresses.begin(), answer.addresses.end(), text) == answer.addresses.end())
      answer.addresses.push_back(text);
  }
  freeaddrinfo(found);
  if (answer.addresses.empty()) answer.error = "it has no address";
  return answer;
}

std::vector<std::string> addresses_of_name(const std::string& host) { return look_up_name(host).addresses; }

std::string source_address_towards(const std::string& address) {
  constexpr int kDiscardPort = 9;  // any port would do
  SocketAddress to;
  if (!parse_numeric(address, kDiscardPort, to)) return "";
  const int fd = socket(to.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "";
  SocketAddress own;
  own.length = sizeof own.storage;
  const bool found = connect(fd, to.get(), to.length) == 0 && getsockname(fd, own.get(), &own.length) == 0;
  close(fd);
  return found ? numeric_text(own.get()) : "";
}

Routes routes_to(const std::string& master) {
  Routes routes;
  routes.interfaces = interface_addresses();
  if (!master.empty())
    for (const std::string& address : addresses_of_name(master))
      routes.to_master.push_back({address, source_address_towards(address)});
  routes.default_source = source_address_towards(kFarAwayIpv4);
  if (routes.default_source.empty()) routes.default_source = source_address_towards(kFarAwayIpv6);
  routes.chosen_interface = env_text("GLOO_SOCKET_IFNAME").value_or("");
  return routes;
}

std::vector<Candidate> candidate_addresses(const Routes& routes) {
  if (!routes.chosen_interface.empty()) return {chosen_candidate(routes)};
  std::vector<Candidate> result;
  std::string link_local_interface;
  for (const auto& [master, source] : routes.to_master) {
    if (source.empty()) continue;
    if (is_loopback(source)) {
      result.push_back({"", master});
    } else if (!is_link_local(source)) {
      result.push_back({source, master});
    } else {
      // The zone in such an address ("%eth0") means something on this host only, so no other host could use
      // it.
      const std::string interface = interface_of(routes.interfaces, source);
      const std::string usable = address_of_interface(routes.interfaces, interface, is_ipv6(source));
      if (!usable.empty()) result.push_back({usable, master});
      if (usable.empty()) link_local_interface = interface;
    }
  }
  if (result.empty() && !link_local_interface.empty())
    throw ConfigError(fmt::format(
        "the way to the master leads over interface {}, which has only a link-local address that other hosts "
        "cannot use; give the interface an address, or set MASTER_ADDR to the master's address on another "
        "network",
        quote(link_local_interface)));
  if (!result.empty() || !routes.to_master.empty()) return result;
  if (!routes.default_source.empty() && !is_loopback(routes.default_source) &&
      !is_link_local(routes.default_source))
    return {{routes.default_source, ""}};
  for (const InterfaceAddress& each : routes.interfaces)
    if (each.up && !is_loopback(each.address) && !is_link_local(each.address)) return {{each.address, ""}};
  return {};
}

std::string ListenAt::bind_address() const {
  switch (place) {
    case ListenPlace::Loopback:
      return address.empty() ? "127.0.0.1" : address;
    case ListenPlace::Address:
      return address;
    case ListenPlace::Everywhere:
      return "";
  }
  return "";
}

ListenAt listen_at(const std::vector<std::string>& master_addresses, const std::string& master_name,
                   const std::vector<InterfaceAddress>& interfaces, bool one_host) {
  const bool says_loopback = master_name == "localhost" || is_loopback(master_name);
  const bool all_loopback =
      !master_addresses.empty() && std::all_of(master_addresses.begin(), master_addresses.end(), is_loopback);
  if (says_loopback || (one_host && all_loopback)) {
    // Clients try the addresses of a name in order, and a literal address is the only one of its name. A
    // listener at 127.0.0.1 is not reached at 127.0.1.1, which Debian gives to the host's own name.
    if (is_loopback(master_name)) return {ListenPlace::Loopback, master_name};
    for (const std::string& address : master_addresses)
      if (is_loopback(address) && !is_ipv6(address)) return {ListenPlace::Loopback, address};
    return {ListenPlace::Loopback, master_addresses.empty() ? "" : master_addresses.front()};
  }
  for (const std::string& address : master_addresses)
    if (!is_loopback(address) && !interface_of(interfaces, address).empty())
      return {ListenPlace::Address, address};
  return {ListenPlace::Everywhere, ""};
}

ListenAt listen_at(const std::string& master_name, bool one_host) {
  return listen_at(addresses_of_name(master_name), master_name, interface_addresses(), one_host);
}

std::string interface_of(const std::vector<InterfaceAddress>& interfaces, const std::string& address) {
  for (const InterfaceAddress& each : interfaces)
    if (each.address == address) return each.interface;
  return "";
}

}  // namespace penstock::comm
