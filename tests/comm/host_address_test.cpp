// Which address a rank listens on, from interface tables of hosts that do not exist here.
#include "penstock/comm/network/host_address.h"

#include <gtest/gtest.h>

#include "penstock/comm/network/host_identity.h"
#include "penstock/comm/network/host_map.h"
#include "penstock/comm/network/reach.h"
#include "penstock/comm/network/sockets.h"
#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/temporary_folder.h"
#include "tests/throws.h"

namespace penstock::comm {
namespace host_address_test {

using penstock::test::has_text;
using namespace std::chrono_literals;

const std::vector<InterfaceAddress> kTwoNetworks = {
    {"lo", "127.0.0.1"},      {"lo", "::1"},          {"eth0", "10.0.0.2"},         {"eth0", "fd00::2"},
    {"eth0", "fe80::2%eth0"}, {"ib0", "192.168.7.2"}, {"eth1", "172.16.0.2", false}};

Routes routes(std::vector<Routes::Route> to_master, const std::string& chosen = "") {
  return {.interfaces = kTwoNetworks,
          .to_master = std::move(to_master),
          .default_source = "10.0.0.2",
          .chosen_interface = chosen};
}

std::string first_of(const Routes& from) {
  const auto candidates = candidate_addresses(from);
  return candidates.empty() ? "none" : candidates.front().own;
}

std::string message_for(const Routes& from) {
  try {
    candidate_addresses(from);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(HostAddress, KindsOfAddresses) {
  for (const char* address : {"127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"})
    EXPECT_TRUE(is_loopback(address)) << address;
  for (const char* address : {"10.0.0.1", "fd00::1", "128.0.0.1", "", "localhost", "::ffff:10.0.0.1"})
    EXPECT_FALSE(is_loopback(address)) << address;
  for (const char* address : {"fe80::1%eth0", "fe80::1", "169.254.3.4"})
    EXPECT_TRUE(is_link_local(address)) << address;
  for (const char* address : {"10.0.0.1", "fd00::1", "169.253.0.1"})
    EXPECT_FALSE(is_link_local(address)) << address;
  EXPECT_EQ(address_and_port("fd00::1", 7), "[fd00::1]:7");
  EXPECT_EQ(address_and_port("node1", 7), "node1:7");
}

TEST(HostAddress, TheRouteToTheMasterDecides) {
  EXPECT_EQ(first_of(routes({{"10.0.0.1", "10.0.0.2"}})), "10.0.0.2");
  EXPECT_EQ(first_of(routes({{"192.168.7.1", "192.168.7.2"}})), "192.168.7.2");
  EXPECT_EQ(first_of(routes({{"fd00::1", "fd00::2"}, {"10.0.0.1", "10.0.0.2"}})), "fd00::2");
  // No route to the first address of the name.
  EXPECT_EQ(first_of(routes({{"fd99::1", ""}, {"10.0.0.1", "10.0.0.2"}})), "10.0.0.2");
  // The master is here, under a loopback address: only the others know the address.
  EXPECT_EQ(first_of(routes({{"127.0.1.1", "127.0.0.1"}})), "");
  // No master: the default route.
  EXPECT_EQ(first_of(routes({})), "10.0.0.2");
  EXPECT_EQ(first_of({.interfaces = {{"lo", "127.0.0.1"}}}), "none");
}

TEST(HostAddress, ALinkLocalAddressIsReplacedByAnotherOfItsInterface) {
  EXPECT_EQ(first_of(routes({{"fe80::1%eth0", "fe80::2%eth0"}})), "fd00::2");
  Routes only = {.interfaces = {{"eth0", "fe80::2%eth0"}}, .to_master = {{"fe80::1%eth0", "fe80::2%eth0"}}};
  EXPECT_TRUE(has_text(message_for(only), "\"eth0\", which has only a link-local address"));
  only.to_master.push_back({"10.0.0.1", "10.0.0.2"});
  EXPECT_EQ(first_of(only), "10.0.0.2");
}

TEST(HostAddress, AChosenInterfaceWins) {
  EXPECT_EQ(first_of(routes({{"10.0.0.1", "10.0.0.2"}}, "ib0")), "192.168.7.2");
  EXPECT_EQ(first_of(routes({{"10.0.0.1", "10.0.0.2"}}, "ib0,eth0")), "192.168.7.2");
  EXPECT_EQ(first_of(routes({{"fd00::1", "fd00::2"}}, "eth0")), "fd00::2");
  EXPECT_EQ(first_of(routes({{"10.0.0.1", "10.0.0.2"}}, "eth0")), "10.0.0.2");
  EXPECT_EQ(first_of(routes({{"127.0.0.1", "127.0.0.1"}}, "lo")), "127.0.0.1");
  EXPECT_TRUE(has_text(message_for(routes({}, "eth7")), "\"eth7\" does not exist"));
  EXPECT_TRUE(
      has_text(message_for(routes({}, "eth7")), "eth0 (10.0.0.2), eth0 (fd00::2), ib0 (192.168.7.2)"));
  EXPECT_TRUE(has_text(message_for(routes({}, "eth1")), "\"eth1\" has no address that is up"));
}

TEST(HostAddress, WhereTheMasterListens) {
  const auto at = [](const std::vector<std::string>& addresses, const std::string& name, bool one_host) {
    return listen_at(addresses, name, kTwoNetworks, one_host).bind_address();
  };
  EXPECT_EQ(at({"10.0.0.2"}, "node2", false), "10.0.0.2");
  EXPECT_EQ(at({"10.0.0.2"}, "10.0.0.2", true), "10.0.0.2");
  EXPECT_EQ(at({"fd00::2", "10.0.0.2"}, "node2", false), "fd00::2");
  EXPECT_EQ(at({"127.0.0.1"}, "localhost", false), "127.0.0.1");
  EXPECT_EQ(at({"127.0.0.1"}, "127.0.0.1", false), "127.0.0.1");
  EXPECT_EQ(at({"::1"}, "::1", false), "::1");
  // The own name in Debian's /etc/hosts.
  EXPECT_EQ(at({"127.0.1.1"}, "node2", false), "");
  EXPECT_EQ(at({"127.0.1.1"}, "node2", true), "127.0.1.1");
  EXPECT_EQ(at({"127.0.1.1"}, "127.0.1.1", true), "127.0.1.1");
  EXPECT_EQ(at({"::1", "127.0.0.1"}, "localhost", true), "127.0.0.1");
  // Loopback does not hide a real address of the name.
  EXPECT_EQ(at({"127.0.1.1", "10.0.0.2"}, "node2", false), "10.0.0.2");
  // A gateway forwards to this host.
  EXPECT_EQ(at({"203.0.113.9"}, "cluster", false), "");
}

TEST(HostAddress, ThisHost) {
  EXPECT_EQ(source_address_towards("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(source_address_towards("not an address"), "");
  const auto own = interface_addresses();
  EXPECT_EQ(interface_of(own, "127.0.0.1"), "lo");
  EXPECT_EQ(addresses_of_name("127.0.0.1"), std::vector<std::string>{"127.0.0.1"});
  EXPECT_EQ(first_of(routes_to("127.0.0.1")), "");
}

// ------------------------------------------------------------------------------------------------ maps of
// hosts

HostFacts on(const std::string& host, std::vector<Candidate> candidates) {
  HostFacts facts;
  facts.host = host;
  facts.name = "name-" + host;
  facts.candidates = std::move(candidates);
  facts.shared_memory = true;
  return facts;
}

std::vector<std::string> addresses(const std::vector<HostFacts>& facts) {
  std::string error;
  const HostMap map = make_host_map(facts, error);
  return error.empty() ? map.address : std::vector<std::string>{error};
}

using Addresses = std::vector<std::string>;

TEST(HostMap, OneHostListensOnLoopbackAlone) {
  const HostFacts rank = on("a", {{"10.0.0.1", "10.0.0.1"}});
  EXPECT_EQ(addresses({rank, rank}), (Addresses{"127.0.0.1", "127.0.0.1"}));
  HostFacts chosen = rank;
  chosen.chosen = true;
  EXPECT_EQ(addresses({chosen, chosen}), (Addresses{"10.0.0.1", "10.0.0.1"}));
}

TEST(HostMap, SeveralHostsUseTheAddressesThatRouteToTheMaster) {
  const HostFacts first = on("a", {{"10.0.0.1", "10.0.0.1"}}), second = on("b", {{"10.0.0.2", "10.0.0.1"}});
  EXPECT_EQ(addresses({first, second, second}), (Addresses{"10.0.0.1", "10.0.0.2", "10.0.0.2"}));
}

TEST(HostMap, TheMastersHostLearnsItsAddressFromTheOthers) {
  const HostFacts first = on("a", {{"", "127.0.1.1"}}), second = on("b", {{"10.0.0.2", "10.0.0.1"}});
  EXPECT_EQ(addresses({first, first, second}), (Addresses{"10.0.0.1", "10.0.0.1", "10.0.0.2"}));
}

TEST(HostMap, ContainersThatShareANetworkUseLoopback) {
  EXPECT_EQ(addresses({on("a", {{"", "127.0.0.1"}}), on("b", {{"", "127.0.0.1"}})}),
            (Addresses{"127.0.0.1", "127.0.0.1"}));
}

TEST(HostMap, OneFamilyForAll) {
  const HostFacts both = on("a", {{"fd00::1", "fd00::1"}, {"10.0.0.1", "10.0.0.1"}});
  const HostFacts old = on("b", {{"10.0.0.2", "10.0.0.1"}});
  EXPECT_EQ(addresses({both, old}), (Addresses{"10.0.0.1", "10.0.0.2"}));
  EXPECT_EQ(addresses({both, on("b", {{"fd00::2", "fd00::1"}, {"10.0.0.2", "10.0.0.1"}})}),
            (Addresses{"fd00::1", "fd00::2"}));
  const Addresses none = addresses({on("a", {{"fd00::1", "fd00::1"}}), old});
  ASSERT_EQ(none.size(), 1u);
  EXPECT_TRUE(has_text(none[0], "rank 0 on name-a has fd00::1, rank 1 on name-b has 10.0.0.2"));
  EXPECT_TRUE(has_text(none[0], "GLOO_SOCKET_IFNAME"));
}

TEST(HostMap, SaysWhoIsWhere) {
  std::string error;
  const HostFacts a = on("a", {{"10.0.0.1", "10.0.0.1"}}), b = on("b", {{"10.0.0.2", "10.0.0.1"}});
  HostMap map = make_host_map({a, b, a, b}, error);
  EXPECT_EQ(map.host_of, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(map.first_ranks(), (std::vector<int>{0, 1}));
  EXPECT_EQ(map.ranks_on_host_of(3), (std::vector<int>{1, 3}));
  EXPECT_TRUE(map.same_host(0, 2));
  EXPECT_FALSE(map.same_host(0, 1));
  EXPECT_FALSE(map.one_host());
  EXPECT_TRUE(map.has_neighbours());
  EXPECT_TRUE(map.shared_memory);
  EXPECT_EQ(map.describe(3), "rank 3 on name-b (10.0.0.2)");
  map = make_host_map({a, b}, error);
  EXPECT_FALSE(map.has_neighbours());
  // A small /dev/shm matters only where several ranks are.
  HostFacts small = b;
  small.shared_memory = false;
  EXPECT_TRUE(make_host_map({a, a, small}, error).shared_memory);
  EXPECT_FALSE(make_host_map({a, small, small}, error).shared_memory);
  // A world without processes.
  const HostMap none;
  EXPECT_TRUE(none.one_host());
  EXPECT_TRUE(none.same_host(0, 5));
  EXPECT_EQ(none.address_of(3), "127.0.0.1");
}

TEST(HostMap, SurvivesItsText) {
  HostFacts facts = on("token/1:2/3:4", {{"fd00::1", "fd00::1"}, {"", "127.0.1.1"}});
  facts.name = "a|b,c>d e";
  facts.chosen = true;
  const HostFacts back = decode_facts(encode_facts(facts));
  EXPECT_EQ(back.host, facts.host);
  EXPECT_EQ(back.name, "a_b_c_d_e");
  ASSERT_EQ(back.candidates.size(), 2u);
  EXPECT_EQ(back.candidates[1].own, "");
  EXPECT_EQ(back.candidates[1].master, "127.0.1.1");
  EXPECT_TRUE(back.chosen && back.shared_memory && !back.nccl);
  std::string error;
  const HostMap map = make_host_map({facts, on("b", {{"fd00::2", "fd00::1"}})}, error);
  const HostMap same = decode_map(encode_map(map));
  EXPECT_EQ(same.host_of, map.host_of);
  EXPECT_EQ(same.address, map.address);
  EXPECT_EQ(same.name, (std::vector<std::string>{"a_b_c_d_e", "name-b"}));
  for (const char* text : {"", "facts1", "facts1|||x|0|0|0", "facts2||||0|0|0"})
    EXPECT_THROW(decode_facts(text), MismatchError) << text;
  for (const char* text : {"", "hosts1|1|1|", "hosts1|1|1|a>b>c", "hosts1|1|1|0>b"})
    EXPECT_THROW(decode_map(text), MismatchError) << text;
}

// ------------------------------------------------------------------------------------------- identity of a
// host

TEST(HostIdentity, IsThatOfTheSharedFolder) {
  const test::TemporaryFolder one, other;
  std::string text;
  {
    const HostIdentity first("run", one.path.string()), second("run", one.path.string());
    const HostIdentity elsewhere("run", other.path.string()), later("run2", one.path.string());
    EXPECT_EQ(first.text(), second.text());
    EXPECT_NE(first.text(), elsewhere.text());
    EXPECT_NE(first.text(), later.text());
    text = first.text();
  }
  EXPECT_TRUE(std::filesystem::is_empty(one.path)) << "a file is left";
  EXPECT_NE(HostIdentity("run", one.path.string()).text(), text) << "a new run has a new token";
}

TEST(HostIdentity, WithoutACommonFileARankIsAlone) {
  const HostIdentity first("run", "/nonexistent"), second("run", "/nonexistent");
  EXPECT_NE(first.text(), second.text());
  const test::TemporaryFolder folder;
  // What is there is not a file that a rank wrote.
  std::filesystem::create_directory(folder.path / "penstock-host-run");
  EXPECT_NE(HostIdentity("run", folder.path.string()).text(),
            HostIdentity("run", folder.path.string()).text());
}

// ------------------------------------------------------------------------------------------------------
// sockets

TEST(Reach, SaysWhichTargetCannotBeReached) {
  const ReachablePort open("127.0.0.1");
  int closed = 0;
  {
    const ReachablePort gone("127.0.0.1");
    closed = gone.port();
  }
  const auto deadline = std::chrono::steady_clock::now() + 5s;
  EXPECT_EQ(unreachable_targets({{"rank 0", "127.0.0.1", open.port()}}, deadline), "");
  const std::string problem =
      unreachable_targets({{"rank 0", "127.0.0.1", open.port()}, {"rank 1", "127.0.0.1", closed}}, deadline);
  EXPECT_TRUE(has_text(problem, "rank 1 at 127.0.0.1:"));
  EXPECT_TRUE(has_text(problem, "refused"));
  EXPECT_FALSE(has_text(problem, "rank 0"));
  EXPECT_THROW(ReachablePort("203.0.113.7"), StateError);
}

TEST(Sockets, ListenAndConnect) {
  const int listener = open_listener("127.0.0.1", 0);
  ASSERT_GE(listener, 0);
  const auto deadline = std::chrono::steady_clock::now() + 5s;
  const int fd = open_connection("127.0.0.1", port_of_socket(listener), deadline);
  EXPECT_GE(fd, 0);
  close(fd);
  EXPECT_LT(open_listener("127.0.0.1", port_of_socket(listener)), 0);
  EXPECT_EQ(errno, EADDRINUSE);
  EXPECT_LT(open_listener("a name", 0), 0);
  EXPECT_EQ(errno, EINVAL);
  const int everywhere = open_listener("", 0);
  EXPECT_GE(everywhere, 0);
  const int ipv4 = open_connection("127.0.0.1", port_of_socket(everywhere), deadline);
  EXPECT_GE(ipv4, 0) << "all interfaces include IPv4";
  for (const int each : {listener, everywhere, ipv4}) close(each);
}

}  // namespace host_address_test
}  // namespace penstock::comm
