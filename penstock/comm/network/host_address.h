// The addresses of this host: which interfaces it has, and from which address packets to another host leave.
//
// A rank listens on the address by which the other ranks reach it: the one that routes to the rank where all
// meet (the master). Two questions are answered elsewhere: whether loopback suffices, because all ranks are
// on one host (host_map.h), and whether the address is really reachable (reach.h).
#pragma once

#include <string>
#include <vector>

namespace penstock::comm {

// One address of one interface. Addresses are numeric text everywhere: "10.0.0.2", "fd00::2", "fe80::1%eth0".
struct InterfaceAddress {
  std::string interface;
  std::string address;
  bool up = true;
};

// Returns the addresses of this host, as the kernel lists them.
std::vector<InterfaceAddress> interface_addresses();

// 127.0.0.0/8, ::1, and the former written as an IPv6 address.
bool is_loopback(const std::string& address);
// fe80::/10 and 169.254.0.0/16: valid on one cable only.
bool is_link_local(const std::string& address);
bool is_ipv6(const std::string& address);

// "10.0.0.1:29500", "[fd00::1]:29500".
std::string address_and_port(const std::string& host, int port);

// What the system's resolver says of a host name.
struct NameAnswer {
  std::vector<std::string> addresses = {};  // in the order in which to try them
  std::string error = {};                   // empty if there are addresses
  bool temporary = false;                   // another attempt may succeed
};

// May wait for a name server, for as long as the system allows.
NameAnswer look_up_name(const std::string& host);

// Returns the addresses alone; empty if it has none.
std::vector<std::string> addresses_of_name(const std::string& host);

// Returns the source address of packets to `address`, or "" if there is no route. Sends nothing.
std::string source_address_towards(const std::string& address);

// What a rank knows about the way to the others.
struct Routes {
  std::vector<InterfaceAddress> interfaces;

  // For each address of the master, in order of preference, the source address towards it ("": no route).
  struct Route {
    std::string master, source;
  };
  std::vector<Route> to_master;
  // The source address of packets to the rest of the world; used where there is no master, as with a
  // rendezvous by file. "": no default route.
  std::string default_source;
  // GLOO_SOCKET_IFNAME: one interface, or several separated by commas, of which the first counts. "": not
  // set.
  std::string chosen_interface;
};

// Reads them from the system. `master`: a host name or an address; "": none.
Routes routes_to(const std::string& master);

// An address on which a rank might listen, and the address of the master to which it routes.
struct Candidate {
  std::string own;  // "": the master is on this host under a loopback address, so that only the other hosts
                    // know an address of this one
  std::string master;  // "": none
};

// Returns the candidates in order of preference; empty if this host has nothing but loopback. An interface
// that the user chose is the only candidate. Throws ConfigError, with the interfaces that exist, for one that
// does not exist, is down or has no address, and if the way to the master leads over a link-local address of
// an interface that has no other.
std::vector<Candidate> candidate_addresses(const Routes& routes);

// Where the host of a rendezvous listens, decided before it has heard of any other rank.
enum class ListenPlace { Loopback, Address, Everywhere };
struct ListenAt {
  ListenPlace place = ListenPlace::Loopback;
  std::string address;  // for ListenPlace::Address

  // The address to bind, "::1" and "127.0.0.1" for loopback, "" for everywhere.
  std::string bind_address() const;
};

// The others connect to `master`, so its host listens on that address alone. A name that this host resolves
// to a loopback address (as Debian's /etc/hosts does for the host's own name) says nothing about the address
// that others get for it: then, and if the name is that of a gateway that forwards to this host, the answer
// is Everywhere. `one_host`: the launcher says that all ranks are on this host.
ListenAt listen_at(const std::vector<std::string>& master_addresses, const std::string& master_name,
                   const std::vector<InterfaceAddress>& interfaces, bool one_host);
// The same, for this host.
ListenAt listen_at(const std::string& master_name, bool one_host);

// Returns the name of the interface with this address, or "".
std::string interface_of(const std::vector<InterfaceAddress>& interfaces, const std::string& address);

}  // namespace penstock::comm
