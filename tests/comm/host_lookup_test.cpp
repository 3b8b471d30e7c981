// Connecting to a host by its name: how often and how long name servers are asked.
#include "penstock/comm/transport/host_lookup.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <future>
#include <string>

#include "penstock/errors.h"
#include "tests/comm/strangers.h"
#include "tests/has_text.h"

namespace penstock::comm {
namespace host_lookup_test {

using namespace std::chrono_literals;
using test::has_text;

std::string refusal(HostLookup& host, std::chrono::milliseconds limit) {
  try {
    host.require_known(Clock::now() + limit, "set MASTER_ADDR");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(HostLookup, TheSystemKnowsThisHost) {
  const auto [fd, port] = test::listen_on_loopback();
  for (const char* name : {"localhost", "127.0.0.1"}) {
    HostLookup host(name);
    EXPECT_EQ(refusal(host, 20s), "no error");
    const int connection = host.connect(port);
    EXPECT_GE(connection, 0) << host.problem();
    close(connection);
  }
  close(fd);
}

TEST(HostLookup, ManyAttemptsAreOneQuestion) {
  int asked = 0;
  HostLookup host("node1", [&](const std::string&) {
    ++asked;
    return NameAnswer{.addresses = {"127.0.0.1"}};
  });
  EXPECT_EQ(refusal(host, 20s), "no error");
  const int port = test::port_for_later();
  for (int i = 0; i < 50; ++i) {
    errno = 0;
    EXPECT_EQ(host.connect(port), -1);
    EXPECT_EQ(errno, ECONNREFUSED);
  }
  EXPECT_EQ(host.problem(), "Connection refused");
  EXPECT_EQ(asked, 1);
}

TEST(HostLookup, EveryAddressIsTried) {
  const auto [fd, port] = test::listen_on_loopback();
  HostLookup host("node1", [](const std::string&) {
    return NameAnswer{.addresses = {"127.0.0.2", "127.0.0.1"}};
  });
  const int connection = host.connect(port);
  EXPECT_GE(connection, 0) << host.problem();
  close(connection);
  close(fd);
}

TEST(HostLookup, WhatTheResolverSaysIsTold) {
  HostLookup unknown("node1", [](const std::string&) { return NameAnswer{.error = "no such name"}; });
  EXPECT_EQ(unknown.connect(29500), -1);
  EXPECT_EQ(unknown.problem(), "its name cannot be resolved: no such name");
  const auto begin = Clock::now();
  EXPECT_TRUE(has_text(refusal(unknown, 60s),
                       "the host \"node1\": its name cannot be resolved: no such name; set MASTER_ADDR"));
  EXPECT_LT(Clock::now() - begin, 20s) << "the answer is final";
  int asked = 0;
  HostLookup late("node1", [&](const std::string&) {
    return ++asked < 3 ? NameAnswer{.error = "try again", .temporary = true}
                       : NameAnswer{.addresses = {"127.0.0.1"}};
  });
  EXPECT_EQ(refusal(late, 60s), "no error");
  EXPECT_EQ(asked, 3);
}

TEST(HostLookup, ANameServerThatDoesNotAnswerIsNotWaitedForLonger) {
  std::promise<void> over;
  HostLookup host("node1", [answer = over.get_future().share()](const std::string&) {
    answer.wait();
    return NameAnswer{.addresses = {"127.0.0.1"}};
  });
  const auto begin = Clock::now();
  EXPECT_EQ(host.connect(29500, 100ms), -1);
  EXPECT_TRUE(has_text(host.problem(), "no name server answers"));
  EXPECT_TRUE(has_text(refusal(host, 200ms), "no name server answers; set MASTER_ADDR"));
  EXPECT_LT(Clock::now() - begin, 20s);
  over.set_value();
}

}  // namespace host_lookup_test
}  // namespace penstock::comm
