// Each test runs twice: with large messages fetched from the sender's memory, and in pieces through shared
// memory.
#include "penstock/comm/transport/ucx_transport.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstddef>
#include <ctime>
#include <future>

#include "forked_ranks.h"
#include "penstock/errors.h"

namespace penstock::comm {
namespace ucx_test {

using namespace std::chrono_literals;
using test::FileStore;
using test::run_ranks;

using Bytes = std::vector<std::uint8_t>;

UcxTransport make(int rank, int size, const FileStore& store, UcxOptions options = {}) {
  return UcxTransport(
      rank, size, [&](const std::string& key, const std::string& bytes) { store.set(key, bytes); },
      [&](const std::string& key) { return store.get(key); }, options);
}

Clock::time_point in(Clock::duration time) { return Clock::now() + time; }

// Differs by position and by seed, so that shifted and swapped messages are detected.
Bytes pattern(std::size_t bytes, std::uint32_t seed) {
  Bytes data(bytes);
  std::uint32_t state = seed * 2654435761u + 12345u;
  for (auto& byte : data) byte = static_cast<std::uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
  return data;
}

void send_now(UcxTransport& transport, const Bytes& data, int peer, std::uint32_t tag,
              std::uint16_t kind = 0) {
  RANK_CHECK(transport.send(data.data(), data.size(), peer, tag, kind)->wait(in(20s)) == WaitResult::Done);
}

Arrival recv_now(UcxTransport& transport, Bytes& data, int peer, std::uint32_t tag) {
  const auto transfer = transport.recv(data.data(), data.size(), peer, tag);
  RANK_CHECK(transfer->wait(in(20s)) == WaitResult::Done);
  return transfer->arrival();
}

double cpu_seconds() {
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

template <class Error>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  throw std::runtime_error("nothing of that type was thrown");
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

bool all_well(const std::vector<int>& ended) {
  return std::all_of(ended.begin(), ended.end(), [](int status) { return status == 0; });
}

bool killed(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }

class Ucx : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { setenv("UCX_TLS", GetParam(), 1); }
  void TearDown() override { unsetenv("UCX_TLS"); }
  bool in_pieces() const { return std::string(GetParam()) == "posix,self"; }
};

INSTANTIATE_TEST_SUITE_P(, Ucx, ::testing::Values("posix,cma,self", "posix,self"), [](const auto& info) {
  return std::string(info.param) == "posix,self" ? "InPieces" : "Fetching";
});

TEST_P(Ucx, SizesContentAndKindArrive) {
  const bool pieces = in_pieces();
  const auto ended = run_ranks(2, 60s, [&](int rank, const FileStore& store) {
    UcxTransport transport = make(rank, 2, store);
    if (pieces) RANK_CHECK(!transport.fetches_large_messages());
    const std::vector<std::size_t> sizes = {0, 1, 4, 4095, 65535, 65536, 65537, 8u << 20, 64u << 20};
    for (std::uint32_t i = 0; i < sizes.size(); ++i) {
      const Bytes data = pattern(sizes[i], i);
      const auto kind = static_cast<std::uint16_t>(0xffff - i);
      Bytes got(sizes[i] + 1, 0xee);  // one more: nothing may be written past the message
      if (rank == 0) send_now(transport, data, 1, i, kind);
      const Arrival arrival = recv_now(transport, got, 1 - rank, i);
      if (rank == 1) send_now(transport, data, 0, i, kind);
      RANK_CHECK(arrival.bytes == sizes[i]);
      RANK_CHECK(arrival.kind == kind);
      RANK_CHECK(got.back() == 0xee);
      got.pop_back();
      RANK_CHECK(got == data);
    }
  });
  EXPECT_TRUE(all_well(ended));
}

TEST_P(Ucx, ManyInFlightBothWaysAndTagsOutOfOrder) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    UcxTransport transport = make(rank, 2, store);
    constexpr std::uint32_t kCount = 200;
    const auto size_of = [](std::uint32_t i) {
      return std::size_t{i} * i * 11 % 200'003;
    };  // both sides of every threshold
    std::vector<Bytes> out, into;
    std::vector<std::shared_ptr<UcxTransfer>> sends, receives;
    for (std::uint32_t i = 0; i < kCount; ++i) {
      out.push_back(pattern(size_of(i), i + 1000u * static_cast<unsigned>(rank)));
      into.emplace_back(size_of(i));
    }
    for (std::uint32_t i = 0; i < kCount; ++i)
      sends.push_back(transport.send(out[i].data(), out[i].size(), 1 - rank, i, 7));
    for (std::uint32_t i = kCount; i-- > 0;)
      receives.push_back(transport.recv(into[i].data(), into[i].size(), 1 - rank, i));
    for (const auto& transfer : receives) RANK_CHECK(transfer->wait(in(20s)) == WaitResult::Done);
    for (const auto& transfer : sends) RANK_CHECK(transfer->wait(in(20s)) == WaitResult::Done);
    for (std::uint32_t i = 0; i < kCount; ++i)
      RANK_CHECK(into[i] == pattern(size_of(i), i + 1000u * static_cast<unsigned>(1 - rank)));
  });
  EXPECT_TRUE(all_well(ended));
}

TEST_P(Ucx, OneTagIsFifoAcrossSizes) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    UcxTransport transport = make(rank, 2, store);
    // Small messages after large ones must not overtake them, although they take another path.
    const std::vector<std::size_t> sizes = {1u << 20, 8, 100'000, 0, 5000, 3u << 20, 64, 70'000};
    std::vector<Bytes> data;
    for (std::uint32_t i = 0; i < sizes.size(); ++i) data.push_back(pattern(sizes[i], i));
    if (rank == 0) {
      std::vector<std::shared_ptr<UcxTransfer>> sends;
      for (std::size_t i = 0; i < data.size(); ++i)
        sends.push_back(transport.send(data[i].data(), data[i].size(), 1, 5, static_cast<std::uint16_t>(i)));
      for (const auto& transfer : sends) RANK_CHECK(transfer->wait(in(20s)) == WaitResult::Done);
    } else {
      for (std::size_t i = 0; i < data.size(); ++i) {
        Bytes got(4u << 20);
        const Arrival arrival = recv_now(transport, got, 0, 5);
        RANK_CHECK(arrival.kind == i);
        RANK_CHECK(arrival.bytes == sizes[i]);
        got.resize(arrival.bytes);
        RANK_CHECK(got == data[i]);
      }
    }
  });
  EXPECT_TRUE(all_well(ended));
}

TEST_P(Ucx, LongerMessagesAreRefusedAndTheNextOneArrives) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    UcxTransport transport = make(rank, 2, store);
    for (const std::size_t bytes : {100u, 20'000u, 300'000u}) {
      const Bytes data = pattern(bytes, 3);
      if (rank == 0) {
        const auto refused = transport.send(data.data(), bytes, 1, 77, 0);
        send_now(transport, data, 1, 78);
        RANK_CHECK(refused->wait(in(20s)) == WaitResult::Done);
      } else {
        Bytes small(bytes, 0xee), whole(bytes);
        const auto transfer = transport.recv(small.data(), bytes - 9, 0, 77);
        const auto text = message_of<MismatchError>([&] { transfer->wait(in(20s)); });
        RANK_CHECK(contains(text, "axis rank 0") && contains(text, "tag 77"));
        RANK_CHECK(contains(text, "at most " + std::to_string(bytes - 9) + " bytes"));
        RANK_CHECK(transfer->done());
        RANK_CHECK(std::all_of(small.end() - 9, small.end(), [](auto byte) { return byte == 0xee; }));
        message_of<StateError>([&] { transfer->arrival(); });
        recv_now(transport, whole, 0, 78);
        RANK_CHECK(whole == data);
      }
    }
  });
  EXPECT_TRUE(all_well(ended));
}

TEST_P(Ucx, TimeOutThenDone) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    UcxTransport transport = make(rank, 2, store);
    Bytes data = pattern(100'000, 1);
    if (rank == 0) {
      Bytes got(data.size());
      const auto transfer = transport.recv(got.data(), got.size(), 1, 1);
      const auto start = Clock::now();
      RANK_CHECK(transfer->wait(in(300ms)) == WaitResult::TimedOut);
      RANK_CHECK(Clock::now() - start >= 300ms && Clock::now() - start < 3s);
      RANK_CHECK(!transfer->done());
      RANK_CHECK(transfer->wait(Clock::now() - 1s) == WaitResult::TimedOut);
      store.set("timed out", "");
      RANK_CHECK(transfer->wait(in(20s)) == WaitResult::Done);  // a timeout does not end the transfer
      RANK_CHECK(got == data);
    } else {
      store.get("timed out");
      send_now(transport, data, 0, 1);
    }
  });
  EXPECT_TRUE(all_well(ended));
}

TEST_P(Ucx, InterruptWakesAPresentAndAFutureWait) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    UcxTransport transport = make(rank, 2, store);
    if (rank == 0) {
      int value = 0;
      const auto transfer = transport.recv(&value, sizeof value, 1, 1);
      auto other = std::async(std::launch::async, [&] {
        std::this_thread::sleep_for(200ms);  // long enough to be asleep
        transfer->interrupt();
      });
      const auto start = Clock::now();
      RANK_CHECK(transfer->wait(in(20s)) == WaitResult::Interrupted);
      RANK_CHECK(Clock::now() - start < 5s);
      RANK_CHECK(transfer->wait(in(20s)) == WaitResult::Interrupted);
      other.get();
      store.set("interrupted", "");
      for (const auto deadline = in(20s); !transfer->done() && Clock::now() < deadline;)
        std::this_thread::yield();
      RANK_CHECK(transfer->wait(in(20s)) == WaitResult::Done);  // done takes precedence over interrupted
      RANK_CHECK(value == 42);
    } else {
      store.get("interrupted");
      const int value = 42;
      RANK_CHECK(transport.send(&value, sizeof value, 0, 1, 0)->wait(in(20s)) == WaitResult::Done);
    }
  });
  EXPECT_TRUE(all_well(ended));
}

TEST_P(Ucx, WaitingSleepsAndWakesForTheMessage) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    UcxTransport transport = make(rank, 2, store);
    Bytes data = pattern(1u << 20, 4), got(data.size());
    const int peer = 1 - rank;
    recv_now(transport, got, peer, (send_now(transport, pattern(8, 0), peer, 0), 0));  // both are connected
    if (rank == 0) {
      const double before = cpu_seconds();
      recv_now(transport, got, 1, 1);
      RANK_CHECK(got == data);
      RANK_CHECK(cpu_seconds() - before < 0.25);
    } else {
      std::this_thread::sleep_for(1s);
      send_now(transport, data, 0, 1);
    }
  });
  EXPECT_TRUE(all_well(ended));
}

// The receiver is absent while the sender fills its queue: the sender must neither spin nor lose anything.
TEST_P(Ucx, ASenderWaitsForASlowReceiverWithoutSpinning) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    UcxTransport transport = make(rank, 2, store);
    constexpr std::uint32_t kCount = 300;
    Bytes data = pattern(60'000, 9), got(data.size());
    if (rank == 0) {
      std::vector<std::shared_ptr<UcxTransfer>> sends;
      const double before = cpu_seconds();
      for (std::uint32_t i = 0; i < kCount; ++i)
        sends.push_back(transport.send(data.data(), data.size(), 1, i, 0));
      for (const auto& transfer : sends) RANK_CHECK(transfer->wait(in(20s)) == WaitResult::Done);
      RANK_CHECK(cpu_seconds() - before < 0.4);
    } else {
      std::this_thread::sleep_for(1s);
      for (std::uint32_t i = 0; i < kCount; ++i) {
        recv_now(transport, got, 0, i);
        RANK_CHECK(got == data);
      }
    }
  });
  EXPECT_TRUE(all_well(ended));
}

// Large messages on one transport, while both ranks wait on another transport for messages that the peer
// sends only after it has received them: nobody calls the first transport except while waiting elsewhere.
TEST_P(Ucx, AWaitForOneTransportMovesTheOthers) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    const auto other_keys = [&](const std::string& key) { return "second/" + key; };
    UcxTransport first = make(rank, 2, store);
    UcxTransport second(
        rank, 2, [&](const std::string& key, const std::string& bytes) { store.set(other_keys(key), bytes); },
        [&](const std::string& key) { return store.get(other_keys(key)); });
    constexpr std::size_t kLarge = 24 << 20;
    for (std::uint32_t round = 0; round < 3; ++round) {
      const Bytes out = pattern(kLarge, 2 * round + static_cast<std::uint32_t>(rank));
      if (rank == 0) {
        const auto sent = first.send(out.data(), out.size(), 1, 5, 0);
        Bytes answer(1);
        recv_now(second, answer, 1, 6);  // sent when the other rank has received everything
        RANK_CHECK(sent->wait(in(20s)) == WaitResult::Done);
      } else {
        Bytes got(kLarge);
        recv_now(first, got, 0, 5);
        RANK_CHECK(got == pattern(kLarge, 2 * round));
        send_now(second, Bytes(1), 0, 6);
      }
    }
  });
  EXPECT_TRUE(all_well(ended));
}

// The sender computes meanwhile and makes no call at all.
TEST_P(Ucx, ALargeMessageArrivesWhileItsSenderComputes) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    UcxTransport transport = make(rank, 2, store);
    constexpr std::size_t kLarge = 24 << 20;
    if (rank == 0) {
      const Bytes out = pattern(kLarge, 1);
      const auto sent = transport.send(out.data(), out.size(), 1, 5, 0);
      RANK_CHECK(store.get("arrived") == "yes");  // uses the file system only
      RANK_CHECK(sent->wait(in(20s)) == WaitResult::Done);
    } else {
      Bytes got(kLarge);
      recv_now(transport, got, 0, 5);
      RANK_CHECK(got == pattern(kLarge, 1));
      store.set("arrived", "yes");
    }
  });
  EXPECT_TRUE(all_well(ended));
}

TEST_P(Ucx, ADeadPeerEndsWaitsAndClosingIsQuick) {
  for (const bool sending : {false, true}) {
    const auto ended = run_ranks(2, 60s, [&](int rank, const FileStore& store) {
      auto transport = std::make_unique<UcxTransport>(
          0 + rank, 2, [&](const std::string& k, const std::string& v) { store.set(k, v); },
          [&](const std::string& k) { return store.get(k); });
      Bytes data(32u << 20), small(8);
      send_now(*transport, pattern(8, 1), 1 - rank, 0);
      recv_now(*transport, small, 1 - rank, 0);
      if (rank == 1) {
        send_now(*transport, pattern(8, 2), 0, 3);
        store.get("waiting");
        std::this_thread::sleep_for(100ms);
        raise(SIGKILL);
      }
      const auto transfer = sending ? transport->send(data.data(), data.size(), 1, 1, 0)
                                    : transport->recv(data.data(), data.size(), 1, 1);
      store.set("waiting", "");
      const auto begun = Clock::now();
      const auto text = message_of<CommError>([&] { transfer->wait(in(20s)); });
      RANK_CHECK(Clock::now() - begun < 5s);
      RANK_CHECK(contains(text, "axis rank 1") && contains(text, "died"));
      RANK_CHECK(transfer->done());
      recv_now(*transport, small, 1, 3);  // sent before the end
      RANK_CHECK(small == pattern(8, 2));
      message_of<CommError>([&] { transport->recv(small.data(), 8, 1, 3)->wait(in(20s)); });
      message_of<CommError>([&] { transport->send(small.data(), 8, 1, 3, 0)->wait(in(20s)); });
      const auto start = Clock::now();
      transport.reset();
      RANK_CHECK(Clock::now() - start < 2s);
    });
    EXPECT_EQ(ended[0], 0) << (sending ? "sending" : "receiving");
    EXPECT_TRUE(killed(ended[1]));
  }
}

// The kernel does not report a stopped process.
TEST_P(Ucx, InterruptEndsAWaitForAStoppedPeer) {
  const auto ended = run_ranks(2, 60s, [&](int rank, const FileStore& store) {
    auto transport = std::make_unique<UcxTransport>(
        0 + rank, 2, [&](const std::string& k, const std::string& v) { store.set(k, v); },
        [&](const std::string& k) { return store.get(k); });
    Bytes data(32u << 20);
    if (rank == 1) {
      store.set("pid", std::to_string(getpid()));
      raise(SIGSTOP);
      return;
    }
    const pid_t peer = std::stoi(store.get("pid"));
    const auto transfer = transport->send(data.data(), data.size(), 1, 1, 0);
    auto other = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(200ms);
      transfer->interrupt();
    });
    RANK_CHECK(transfer->wait(in(20s)) == WaitResult::Interrupted);
    other.get();
    kill(peer, SIGKILL);
    const auto start = Clock::now();
    transport.reset();
    RANK_CHECK(Clock::now() - start < 2s);
    message_of<StateError>([&] { transfer->wait(in(20s)); });
  });
  EXPECT_EQ(ended[0], 0);
  EXPECT_TRUE(killed(ended[1]));
}

// The peer announced a large message and died before it was received.
TEST_P(Ucx, AMessageOfADeadSenderIsAnError) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    auto transport = std::make_unique<UcxTransport>(
        0 + rank, 2, [&](const std::string& k, const std::string& v) { store.set(k, v); },
        [&](const std::string& k) { return store.get(k); });
    Bytes data(32u << 20);
    if (rank == 1) {
      const auto transfer = transport->send(data.data(), data.size(), 0, 1, 0);
      RANK_CHECK(transfer->wait(in(50ms)) == WaitResult::TimedOut);
      store.set("announced", "");
      raise(SIGKILL);
    }
    store.get("announced");
    std::this_thread::sleep_for(200ms);
    const auto transfer = transport->recv(data.data(), data.size(), 1, 1);
    const auto text = message_of<CommError>([&] { transfer->wait(in(20s)); });
    RANK_CHECK(contains(text, "axis rank 1") && contains(text, "died"));
    const auto start = Clock::now();
    transport.reset();
    RANK_CHECK(Clock::now() - start < 2s);
  });
  EXPECT_EQ(ended[0], 0);
  EXPECT_TRUE(killed(ended[1]));
}

TEST_P(Ucx, AbandonedTransfersLeaveMemoryAlone) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    auto transport = std::make_unique<UcxTransport>(
        0 + rank, 2, [&](const std::string& k, const std::string& v) { store.set(k, v); },
        [&](const std::string& k) { return store.get(k); });
    Bytes large(4u << 20, 0xaa), dropped(64, 0xaa), kept(64);
    if (rank == 0) {
      transport->recv(dropped.data(), dropped.size(), 1, 1)
          ->wait(in(20ms));  // dropped: must not take the message
      const auto unfinished = transport->recv(large.data(), large.size(), 1, 2);
      store.set("dropped", "");
      recv_now(*transport, kept, 1, 1);
      RANK_CHECK(kept == pattern(64, 1));
      RANK_CHECK(dropped == Bytes(64, 0xaa));
      transport.reset();
      message_of<StateError>([&] { unfinished->wait(in(20s)); });
      store.set("closed", "");
      store.get("sent");
      RANK_CHECK(large == Bytes(4u << 20, 0xaa));
    } else {
      store.get("dropped");
      send_now(*transport, pattern(64, 1), 0, 1);
      store.get("closed");
      const auto transfer = transport->send(large.data(), large.size(), 0, 2, 0);
      try {
        RANK_CHECK(transfer->wait(in(200ms)) == WaitResult::TimedOut);
      } catch (const CommError& error) {
        RANK_CHECK(
            contains(error.what(), "axis rank 0 has probably died"));  // UCX may notice that the peer is gone
      }
      store.set("sent", "");
      const auto start = Clock::now();
      transport.reset();  // with a send that nobody will receive
      RANK_CHECK(Clock::now() - start < 2s);
    }
  });
  EXPECT_TRUE(all_well(ended));
}

TEST_P(Ucx, FourProcessesAllToAll) {
  const auto ended = run_ranks(4, 60s, [](int rank, const FileStore& store) {
    UcxTransport transport = make(rank, 4, store);
    for (std::uint32_t round = 0; round < 20; ++round) {
      const std::size_t bytes = 1000 + 20'000 * std::size_t{round};
      std::vector<std::shared_ptr<UcxTransfer>> transfers;
      std::vector<Bytes> out(4), into(4, Bytes(bytes));
      for (int peer = 0; peer < 4; ++peer) {
        if (peer == rank) continue;
        const auto at = static_cast<std::size_t>(peer);
        out[at] = pattern(bytes, static_cast<std::uint32_t>(rank * 10 + peer) + round * 100);
        transfers.push_back(transport.recv(into[at].data(), bytes, peer, round));
        transfers.push_back(transport.send(out[at].data(), bytes, peer, round, 0));
      }
      for (const auto& transfer : transfers) RANK_CHECK(transfer->wait(in(20s)) == WaitResult::Done);
      for (int peer = 0; peer < 4; ++peer)
        if (peer != rank)
          RANK_CHECK(into[static_cast<std::size_t>(peer)] ==
                     pattern(bytes, static_cast<std::uint32_t>(peer * 10 + rank) + round * 100));
    }
  });
  EXPECT_TRUE(all_well(ended));
}

// Two members in one process, and two threads waiting on each of them.
TEST_P(Ucx, ThreadsOfOneProcess) {
  const auto ended = run_ranks(1, 60s, [](int, const FileStore& store) {
    const auto member = [&](int rank) {
      UcxTransport transport = make(rank, 2, store, {.spin = 20us});  // short: this tests sleeping and waking
      const auto talk = [&](std::uint32_t tag) {
        for (std::uint32_t i = 0; i < 300; ++i) {
          const Bytes data = pattern((i * 7919) % 100'000, i + tag);
          Bytes got(data.size());
          const auto receive = transport.recv(got.data(), got.size(), 1 - rank, tag);
          if (i % 50 == 0 && rank == 0) std::this_thread::sleep_for(2ms);
          send_now(transport, data, 1 - rank, tag);
          RANK_CHECK(receive->wait(in(20s)) == WaitResult::Done);
          RANK_CHECK(got == data);
        }
      };
      auto other = std::async(std::launch::async, talk, 1000u);
      talk(2000u);
      other.get();
      store.barrier("talked", rank, 2);
    };
    auto other = std::async(std::launch::async, member, 1);
    member(0);
    other.get();
  });
  EXPECT_TRUE(all_well(ended));
}

TEST_P(Ucx, ClosingEndsTheWaitOfAnotherThread) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    auto transport = std::make_unique<UcxTransport>(
        0 + rank, 2, [&](const std::string& k, const std::string& v) { store.set(k, v); },
        [&](const std::string& k) { return store.get(k); });
    if (rank == 0) {
      int value = 0;
      const auto transfer = transport->recv(&value, sizeof value, 1, 1);
      auto waiting = std::async(std::launch::async,
                                [&] { return message_of<StateError>([&] { transfer->wait(in(20s)); }); });
      std::this_thread::sleep_for(100ms);
      transport.reset();
      RANK_CHECK(waiting.wait_for(5s) == std::future_status::ready);
      RANK_CHECK(contains(waiting.get(), "closed"));
    }
    store.barrier("end", rank, 2);
  });
  EXPECT_TRUE(all_well(ended));
}

// Security modules and containers forbid reading another process; UCX itself tests only writing, to itself.
TEST(UcxSetup, WorksWhereTheKernelForbidsReadingOtherProcesses) {
  const auto ended = run_ranks(2, 60s, [](int rank, const FileStore& store) {
    sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_process_vm_readv, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    sock_fprog program{static_cast<unsigned short>(std::size(rules)), rules};
    if (rank == 1) {  // one forbidden member is enough for all to agree on pieces
      RANK_CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
      RANK_CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    }
    UcxTransport transport = make(rank, 2, store);
    RANK_CHECK(!transport.fetches_large_messages());
    Bytes got(8u << 20);
    if (rank == 0) send_now(transport, pattern(8u << 20, 1), 1, 1);
    recv_now(transport, got, 1 - rank, 1);
    if (rank == 1) send_now(transport, pattern(8u << 20, 1), 0, 1);
    RANK_CHECK(got == pattern(8u << 20, 1));
  });
  EXPECT_TRUE(all_well(ended));
}

TEST(UcxSetup, MisuseIsNamed) {
  const auto nothing = [](const std::string&, const std::string&) {};
  const auto fetch = [](const std::string&) -> std::string { return "junk"; };
  EXPECT_THROW(UcxTransport(2, 2, nothing, fetch), ValueError);
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { UcxTransport(0, 2, nothing, fetch); }), "axis rank 1"));
  const auto silent = [](const std::string& key) -> std::string { throw std::runtime_error("no " + key); };
  EXPECT_EQ(message_of<std::runtime_error>([&] { UcxTransport(0, 2, nothing, silent); }), "no ucx/address/1");
  UcxTransport alone(0, 1, nothing, silent);
  int value = 0;
  EXPECT_THROW(alone.send(&value, 4, 0, 0, 0), ValueError);
  EXPECT_THROW(alone.recv(&value, 4, 1, 0), ValueError);
  EXPECT_TRUE(ucx_available());
  EXPECT_FALSE(ucx_version().empty());
}

}  // namespace ucx_test
}  // namespace penstock::comm
