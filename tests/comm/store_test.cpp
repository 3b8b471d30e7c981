// The authenticated store as c10d uses it: by several threads, by several processes, and when something goes
// wrong on the way.
#include "penstock/comm/rendezvous/store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/launch/launch_notices.h"
#include "penstock/comm/rendezvous/monitor.h"
#include "penstock/comm/rendezvous/monitor_notice.h"
#include "penstock/comm/secure/connection.h"
#include "penstock/comm/secure/secret.h"
#include "penstock/errors.h"
#include "tests/comm/forked_ranks.h"
#include "tests/comm/strangers.h"
#include "tests/has_text.h"
#include "tests/temporary_folder.h"

namespace penstock::comm {
namespace store_test {

using namespace std::chrono_literals;
using test::has_text;
using Bytes = std::vector<std::uint8_t>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

using test::port_for_later;

LaunchEnv env_of(int rank, int size, int port, const std::string& secret = "the secret of this job") {
  LaunchEnv env;
  env.rank = rank;
  env.world_size = size;
  env.local_rank = rank;
  env.local_world_size = size;
  env.secret = secret;
  env.rendezvous.kind = Rendezvous::Kind::Tcp;
  env.rendezvous.host = "127.0.0.1";
  env.rendezvous.port = port;
  return env;
}

Clock::time_point in(std::chrono::milliseconds time) { return Clock::now() + time; }

// A store and `clients` ranks that use it, all in this process.
struct Ranks {
  explicit Ranks(int clients, const std::string& secret = "the secret of this job") : port(port_for_later()) {
    all.push_back(Store::connect(env_of(0, clients + 1, port, secret), in(20s)));
    for (int rank = 1; rank <= clients; ++rank)
      all.push_back(Store::connect(env_of(rank, clients + 1, port, secret), in(20s)));
  }
  // The host waits for the others.
  ~Ranks() {
    while (!all.empty()) all.pop_back();
  }
  int port;
  std::vector<Store> all;
};

template <class Error, class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

TEST(AuthenticatedStore, RanksSeeEachOthersValues) {
  Ranks ranks(2);
  const Store &host = ranks.all[0], &one = ranks.all[1], &two = ranks.all[2];
  one.set("key", std::string("value\0with a zero", 17));
  EXPECT_EQ(host.get("key", in(20s), "the key"), std::string("value\0with a zero", 17));
  EXPECT_EQ(two.try_get("key"), std::string("value\0with a zero", 17));
  EXPECT_EQ(two.try_get("no key"), std::nullopt);
  EXPECT_EQ(one.add("count", 3), 3);
  EXPECT_EQ(host.add("count", 4), 7);
  EXPECT_EQ(two.add("count", -8), -1);
  auto later = std::async(std::launch::async, [&] { return two.get("later", in(20s), "host"); });
  std::this_thread::sleep_for(50ms);
  host.set("later", "now");
  EXPECT_EQ(later.get(), "now");
}

// Every operation of c10d::Store, in random order by random ranks, against c10d's own HashStore.
TEST(AuthenticatedStore, DoesWhatAHashStoreDoes) {
  std::mt19937 random(11);
  Ranks ranks(2);
  const StorePtr model = c10::make_intrusive<c10d::HashStore>();
  std::vector<StorePtr> stores;
  for (const Store& store : ranks.all)
    stores.push_back(c10::make_intrusive<c10d::PrefixStore>("group", store.for_c10d()));
  const StorePtr plain = c10::make_intrusive<c10d::PrefixStore>("group", model);
  for (int step = 0; step < 3000; ++step) {
    const StorePtr& store = stores[random() % stores.size()];
    const std::string key = "key" + std::to_string(random() % 12);
    const std::string counter = "count" + std::to_string(random() % 4);
    const Bytes value = bytes_of(std::string(random() % 50, static_cast<char>('a' + random() % 26)));
    switch (random() % 7) {
      case 0:
        store->set(key, value);
        plain->set(key, value);
        break;
      case 1:
        if (plain->check({key})) {
          EXPECT_EQ(store->get(key), plain->get(key));
        }
        break;
      case 2: {
        const auto amount = static_cast<std::int64_t>(random() % 100) - 50;
        EXPECT_EQ(store->add(counter, amount), plain->add(counter, amount));
        EXPECT_EQ(text_of(store->get(counter)), text_of(plain->get(counter)));
        break;
      }
      case 3:
        EXPECT_EQ(store->check({key, counter}), plain->check({key, counter}));
        break;
      case 4:
        EXPECT_EQ(store->deleteKey(key), plain->deleteKey(key));
        break;
      case 5:
        EXPECT_EQ(store->getNumKeys(), plain->getNumKeys());
        break;
      case 6:
        // HashStore takes an empty expected value for "not set"; so does every store.
        if (plain->check({key})) {
          const Bytes expected = random() % 2 == 0 ? plain->get(key) : bytes_of("something else");
          EXPECT_EQ(store->compareSet(key, expected, value), plain->compareSet(key, expected, value));
        } else {
          EXPECT_EQ(store->compareSet(key, {}, value), plain->compareSet(key, {}, value));
        }
        break;
    }
  }
}

TEST(AuthenticatedStore, ThreadsOfOneRankDoNotDisturbEachOther) {
  Ranks ranks(1);
  const StorePtr store = ranks.all[1].for_c10d();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int thread = 0; thread < 8; ++thread)
    threads.emplace_back([&, thread] {
      const std::string own = "thread" + std::to_string(thread);
      for (int i = 0; i < 100; ++i) {
        store->set(own, bytes_of(own + std::to_string(i)));
        if (text_of(store->get(own)) != own + std::to_string(i)) ++wrong;
        store->add("sum", 1);
      }
      // Each waits for the next one, which has no order.
      store->set(own + "done", bytes_of("1"));
      store->wait({"thread" + std::to_string((thread + 1) % 8) + "done"}, 20s);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(ranks.all[0].add("sum", 0), 800);
}

TEST(AuthenticatedStore, WaitsEndAtTheirDeadline) {
  Ranks ranks(1);
  for (const Store& store : ranks.all) {
    const auto begin = Clock::now();
    EXPECT_TRUE(
        has_text(message_of<TimeoutError>([&] { store.get("never", in(100ms), "rank 7"); }), "rank 7"));
    EXPECT_TRUE(
        has_text(message_of<TimeoutError>([&] { store.for_c10d()->wait({"never"}, 100ms); }), "never"));
    EXPECT_LT(Clock::now() - begin, 10s);
  }
}

TEST(AuthenticatedStore, WhatIsTooLargeIsRefusedAndTheStoreStaysUsable) {
  Ranks ranks(1);
  for (const Store& store : ranks.all) {
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { store.set("k", std::string((16 << 20) + 1, 'v')); }),
                         "at most 16777216 bytes"));
    store.set("k", std::string(1 << 20, 'v'));
    EXPECT_EQ(store.try_get("k")->size(), 1u << 20);
    EXPECT_THROW(store.add("k", 1), ValueError);
  }
}

TEST(AuthenticatedStore, AnotherSecretIsAClearErrorWithinTheDeadline) {
  const int port = port_for_later();
  auto host = std::make_unique<Store>(Store::connect(env_of(0, 2, port), in(20s)));
  const auto begin = Clock::now();
  const std::string error = message_of<ConfigError>(
      [&] { Store::connect(env_of(1, 2, port, "the secret of another job"), in(60s)); });
  EXPECT_TRUE(has_text(error, "another secret")) << error;
  EXPECT_TRUE(has_text(error, "PENSTOCK_SECRET")) << error;
  EXPECT_FALSE(has_text(error, "the secret of")) << "no secret is shown: " << error;
  EXPECT_LT(Clock::now() - begin, 20s);
  // A job of another size is another job, too, if neither has a secret.
  host = nullptr;
  host = std::make_unique<Store>(Store::connect(env_of(0, 2, port, ""), in(20s)));
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { Store::connect(env_of(1, 3, port, ""), in(60s)); }),
                       "another secret"));
  Store same = Store::connect(env_of(1, 2, port, ""), in(20s));
  same.set("k", "v");
  EXPECT_EQ(host->try_get("k"), "v");
}

TEST(AuthenticatedStore, AnotherProtocolIsAClearError) {
  const auto [fd, port] = test::listen_on_loopback();
  std::atomic<bool> stop{false};
  std::thread foreign([&, fd = fd] {
    while (!stop) {
      pollfd ready{fd, POLLIN, 0};
      if (poll(&ready, 1, 20) <= 0) continue;
      const int client = accept(fd, nullptr, nullptr);
      test::say(client, "SSH-2.0-OpenSSH_9.2 and more than forty bytes of it\r\n");
      test::hear(client, 50);
      close(client);
    }
  });
  const auto begin = Clock::now();
  const std::string error =
      message_of<ConfigError>([&, port = port] { Store::connect(env_of(1, 2, port), in(60s)); });
  EXPECT_TRUE(has_text(error, "not a Penstock store")) << error;
  EXPECT_LT(Clock::now() - begin, 30s);
  stop = true;
  foreign.join();
  close(fd);
}

// torchrun of another version closes the connection at the first request that it does not understand.
TEST(AgentStore, OfAnotherVersionIsAClearError) {
  const auto [fd, port] = test::listen_on_loopback();
  std::atomic<bool> stop{false};
  std::thread agent([&, fd = fd] {
    while (!stop) {
      pollfd ready{fd, POLLIN, 0};
      if (poll(&ready, 1, 20) <= 0) continue;
      const int client = accept(fd, nullptr, nullptr);
      test::hear(client, 50);
      close(client);
    }
  });
  LaunchEnv env = env_of(1, 2, port);
  env.rendezvous.hosted_by_rank0 = false;
  const auto begin = Clock::now();
  const std::string error = message_of<CommError>([&] { Store::connect(env, in(60s)); });
  EXPECT_TRUE(has_text(error, "no store that this program, with LibTorch ")) << error;
  EXPECT_TRUE(has_text(error, "use the torchrun of the same version")) << error;
  EXPECT_LT(Clock::now() - begin, 30s);
  stop = true;
  agent.join();
  close(fd);
}

TEST(AgentStore, ThatNeverAnswersIsAClearError) {
  const auto [fd, port] = test::listen_on_loopback();  // nobody accepts
  LaunchEnv env = env_of(1, 2, port);
  env.rendezvous.hosted_by_rank0 = false;
  const auto begin = Clock::now();
  const std::string error = message_of<CommError>([&] { Store::connect(env, in(3s)); });
  EXPECT_TRUE(has_text(error, "it does not answer")) << error;
  EXPECT_LT(Clock::now() - begin, 15s);
  close(fd);
}

TEST(AuthenticatedStore, ASilentPortIsATimeOut) {
  const auto [fd, port] = test::listen_on_loopback();  // nobody accepts
  const auto begin = Clock::now();
  const std::string error =
      message_of<TimeoutError>([&, port = port] { Store::connect(env_of(1, 2, port), in(1s)); });
  EXPECT_TRUE(has_text(error, "no answer from the rendezvous")) << error;
  EXPECT_TRUE(has_text(error, "does not answer")) << error;
  EXPECT_LT(Clock::now() - begin, 10s);
  close(fd);
}

TEST(AuthenticatedStore, TheLauncherSaysThatARankHasEnded) {
  NoticeBoard board;
  ASSERT_FALSE(board.path().empty());
  board.post(1, "exit code 0 after 0.1 s");  // the reader itself
  board.post(2, "killed by SIGKILL after 0.2 s");
  LaunchEnv env = env_of(1, 3, port_for_later());
  env.notices = board.path();
  const auto begin = Clock::now();
  const std::string error = message_of<PeerLostError>([&] { Store::connect(env, in(60s)); });
  EXPECT_TRUE(has_text(error, "rank 2 was lost: killed by SIGKILL after 0.2 s")) << error;
  EXPECT_LT(Clock::now() - begin, 20s);
  // The same for the hosting rank, which waits for a key; not for one that is there, nor after the
  // rendezvous.
  env.rank = 0;
  Store host = Store::connect(env, in(20s));
  host.set("there", "");
  EXPECT_NO_THROW(host.get("there", in(20s), "itself"));
  EXPECT_TRUE(has_text(message_of<PeerLostError>([&] { host.get("joined", in(60s), "rank 2"); }),
                       "waiting for rank 2"));
  host.rendezvous_done();
  EXPECT_THROW(host.get("joined", in(50ms), "rank 2"), TimeoutError);
}

// --------------------------------------------------------------------------------------------- files

LaunchEnv file_env(int rank, int size, const std::filesystem::path& path) {
  LaunchEnv env = env_of(rank, size, 0);
  env.rendezvous = {.kind = Rendezvous::Kind::File, .path = path.string()};
  return env;
}

// c10d locks the file for each use; a rank that is stopped meanwhile keeps the lock.
TEST(FileRendezvous, AFileThatStaysLockedIsATimeOut) {
  const test::TemporaryFolder folder;
  const auto path = folder.path / "meet";
  std::optional<Store> store = Store::connect(file_env(0, 2, path), in(2s));
  store->set("a", "b");
  EXPECT_EQ(store->try_get("a"), "b");
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(flock(fd, LOCK_EX), 0);
  std::promise<void> over;
  std::thread lock([&] {
    over.get_future().wait_for(60s);
    close(fd);
  });
  const auto begin = Clock::now();
  const std::string error = message_of<TimeoutError>([&] { store->set("c", "d"); });
  EXPECT_TRUE(has_text(error, "a rank that has locked it is stopped")) << error;
  EXPECT_TRUE(
      has_text(message_of<TimeoutError>([&] { Store::connect(file_env(1, 2, path), in(2s)).set("e", "f"); }),
               "a rank that has locked it is stopped"));
  store.reset();
  EXPECT_LT(Clock::now() - begin, 30s);
  over.set_value();
  lock.join();
}

TEST(FileRendezvous, TheFileIsForItsOwnerAlone) {
  const test::TemporaryFolder folder;
  const auto path = folder.path / "meet";
  const auto refusal = [](const std::filesystem::path& place) {
    return message_of<ConfigError>([&] { Store::connect(file_env(0, 2, place), in(20s)); });
  };
  const Store store = Store::connect(file_env(0, 2, path), in(20s));
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  EXPECT_TRUE(has_text(refusal(path), "the file has the mode 0640"));
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  EXPECT_EQ(refusal(path), "no error");
  std::filesystem::create_symlink(path, folder.path / "link");
  EXPECT_TRUE(has_text(refusal(folder.path / "link"), "the file cannot be opened"));
  if (geteuid() != 0) return;  // nobody else can give a file away
  ASSERT_EQ(chown(path.c_str(), 4711, 4711), 0);
  EXPECT_TRUE(has_text(refusal(path), "the file belongs to user 4711, not to user 0"));
}

// --------------------------------------------------------------------------------------------- real
// processes

TEST(AuthenticatedStore, Processes) {
  const int port = port_for_later();
  const auto ended = test::run_ranks(4, 120s, [&](int rank, const test::FileStore&) {
    const Store store = Store::connect(env_of(rank, 4, port), in(60s));
    for (int round = 0; round < 20; ++round) {
      const std::string topic = "round" + std::to_string(round);
      store.set(topic + "/" + std::to_string(rank), std::string(static_cast<std::size_t>(rank * 1000), 'x'));
      for (int other = 0; other < 4; ++other)
        RANK_CHECK(store.get(topic + "/" + std::to_string(other), in(60s), "the others").size() ==
                   static_cast<std::size_t>(other * 1000));
      store.add("sum", rank);
    }
    // No barrier at the end: whoever is last must still find the host.
    std::this_thread::sleep_for(std::chrono::milliseconds(300 * rank));
    store.add("left", 1);
    RANK_CHECK(store.for_c10d()->getNumKeys() >= 80);
  });
  EXPECT_EQ(ended, (std::vector<int>{0, 0, 0, 0}));
}

TEST(AuthenticatedStore, AHostThatDiesIsNamed) {
  const int port = port_for_later();
  const auto ended = test::run_ranks(2, 60s, [&](int rank, const test::FileStore& files) {
    Store store = Store::connect(env_of(rank, 2, port), in(30s));
    if (rank == 0) {
      files.get("connected");
      kill(getpid(), SIGKILL);
    }
    store.set("a", "b");
    files.set("connected", "");
    const auto begin = Clock::now();
    const std::string error = message_of<PeerLostError>([&] { store.get("never", in(30s), "nobody"); });
    RANK_CHECK(error.find("127.0.0.1:" + std::to_string(port)) != std::string::npos);
    RANK_CHECK(error.find("rank 0, has ended") != std::string::npos);
    RANK_CHECK(Clock::now() - begin < 20s);
  });
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[1], 0);
}

// Whether all threads of a process are stopped.
bool is_stopped(pid_t process) {
  for (const auto& thread :
       std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task")) {
    std::ifstream file(thread.path() / "stat");
    const std::string stat((std::istreambuf_iterator<char>(file)), {});
    const std::size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos || stat.substr(name_end, 3) != ") T") return false;
  }
  return true;
}

TEST(AuthenticatedStore, AHostThatIsStoppedIsATimeOut) {
  const int port = port_for_later();
  const auto ended = test::run_ranks(2, 60s, [&](int rank, const test::FileStore& files) {
    Store store = Store::connect(env_of(rank, 2, port), in(5s));
    if (rank == 0) {
      files.set("host", std::to_string(getpid()));
      files.get("ended", 50s);
      return;
    }
    store.set("a", "b");
    const pid_t host = std::stoi(files.get("host"));
    kill(host, SIGSTOP);
    // Until its last thread has stopped, one of them may still answer.
    for (int i = 0; i < 1000 && !is_stopped(host); ++i) std::this_thread::sleep_for(10ms);
    RANK_CHECK(is_stopped(host));
    const auto begin = Clock::now();
    const std::string error = message_of<TimeoutError>([&] { store.set("c", "d"); });
    RANK_CHECK(error.find("stopped or unreachable") != std::string::npos);
    RANK_CHECK(error.find("127.0.0.1:" + std::to_string(port)) != std::string::npos);
    RANK_CHECK(Clock::now() - begin < 20s);
    kill(host, SIGCONT);
    // The reply to the abandoned request is not taken for another one's.
    for (int i = 0; i < 200; ++i) {
      try {
        RANK_CHECK(store.try_get("a") == "b");
        break;
      } catch (const TimeoutError&) {
        RANK_CHECK(i < 199);
      }
    }
    files.set("ended", "");
  });
  EXPECT_EQ(ended, (std::vector<int>{0, 0}));
}

// -------------------------------------------------------------------------------------------------- monitor

struct Watched {
  std::shared_ptr<Liveness> liveness;
  std::unique_ptr<Monitor> monitor;
};

// The monitors of ranks 0 to n, over one store.
std::vector<Watched> watch_all(const std::vector<LaunchEnv>& envs, const std::vector<Store>& stores,
                               std::chrono::milliseconds timeout) {
  std::vector<Watched> all(envs.size());
  for (std::size_t rank = 0; rank < envs.size(); ++rank) {
    all[rank].liveness = std::make_shared<Liveness>(static_cast<int>(envs.size()));
    all[rank].monitor =
        std::make_unique<Monitor>(envs[rank], stores[rank], all[rank].liveness, in(20s), timeout);
  }
  return all;
}

bool reaches(const Watched& watched, int rank, RankState state) {
  for (int i = 0; i < 1000; ++i) {
    if (watched.liveness->state_of(rank).state == state) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

TEST(Monitor, TellsWhoLeavesAndWhoFails) {
  Ranks ranks(3);
  std::vector<LaunchEnv> envs;
  for (int rank = 0; rank < 4; ++rank) envs.push_back(env_of(rank, 4, ranks.port));
  auto all = watch_all(envs, ranks.all, 20s);
  all[3].monitor.reset();
  for (const int rank : {0, 1, 2})
    EXPECT_TRUE(reaches(all[static_cast<std::size_t>(rank)], 3, RankState::Left));
  all[1].monitor->fail("its own words");
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(reaches(all[static_cast<std::size_t>(rank)], 1, RankState::Failed));
    EXPECT_EQ(all[static_cast<std::size_t>(rank)].liveness->state_of(1).reason, "its own words");
  }
  EXPECT_EQ(all[1].liveness->state_of(1).state, RankState::Running);
  while (all.size() > 1) all.pop_back();
}

// The last owner of a world may be what hears of a loss.
TEST(Monitor, MayBeDestroyedByWhatItReports) {
  Ranks ranks(2);
  std::vector<LaunchEnv> envs;
  for (int rank = 0; rank < 3; ++rank) envs.push_back(env_of(rank, 3, ranks.port));
  auto all = watch_all(envs, ranks.all, 20s);
  std::atomic<int> gone{0};
  std::vector<std::shared_ptr<void>> tokens;
  for (const int rank : {0, 2})
    tokens.push_back(all[static_cast<std::size_t>(rank)].liveness->listen(
        [&, own = &all[static_cast<std::size_t>(rank)]](const RankEvent&) {
          if (!own->monitor) return;
          own->monitor.reset();
          ++gone;
        }));
  all[1].monitor->fail("its own words");
  for (int i = 0; i < 2000 && gone < 2; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(gone, 2);
  EXPECT_EQ(all[0].liveness->state_of(1).reason, "its own words");
  EXPECT_TRUE(reaches(all[1], 0, RankState::Lost)) << "its thread has ended";
  tokens.clear();
  all.pop_back();
}

// Rank 0 answers so late that a rank has closed its connection and tries again.
TEST(Monitor, AConnectionThatNeverSpokeIsNoRank) {
  Ranks ranks(2);
  std::vector<Watched> all(3);
  const auto join = [&](int rank) {
    Watched& watched = all[static_cast<std::size_t>(rank)];
    watched.liveness = std::make_shared<Liveness>(3);
    watched.monitor =
        std::make_unique<Monitor>(env_of(rank, 3, ranks.port), ranks.all[static_cast<std::size_t>(rank)],
                                  watched.liveness, in(20s), 20s);
  };
  join(0);
  join(2);
  const int port = std::stoi(*ranks.all[0].try_get("monitor"));
  const auto shake_hands = [&] {
    SecureConnection connection(Socket(test::stranger(port)), kMaxNotice);
    EXPECT_EQ(connection.shake_hands(JobKey("the secret of this job"), Purpose::Monitor, 1, in(20s)),
              HandshakeEnd::Done);
    return connection;
  };
  shake_hands();                        // closed
  const auto given_up = shake_hands();  // open still
  join(1);
  all[1].monitor->fail("its own words");
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(reaches(all[static_cast<std::size_t>(rank)], 1, RankState::Failed));
    EXPECT_EQ(all[static_cast<std::size_t>(rank)].liveness->state_of(1).reason, "its own words");
  }
  while (!all.empty()) all.pop_back();
}

TEST(Monitor, TheHubLeavesLast) {
  Ranks ranks(1);
  auto all = watch_all({env_of(0, 2, ranks.port), env_of(1, 2, ranks.port)}, ranks.all, 30s);
  std::atomic<bool> gone{false};
  std::thread leaver([&] {
    all[0].monitor.reset();
    gone = true;
  });
  EXPECT_TRUE(reaches(all[1], 0, RankState::Left)) << "it says so at once";
  std::this_thread::sleep_for(300ms);
  EXPECT_FALSE(gone) << "and stays for the others";
  all[1].monitor.reset();
  leaver.join();
  EXPECT_EQ(all[0].liveness->state_of(1).state, RankState::Left);
}

TEST(Monitor, AStrangerCanNeitherReadNorSayAnything) {
  Ranks ranks(1);
  auto all = watch_all({env_of(0, 2, ranks.port), env_of(1, 2, ranks.port)}, ranks.all, 30s);
  const std::string place = *ranks.all[0].try_get("monitor");
  EXPECT_FALSE(has_text(place, "the secret of this job"));
  const int port = std::stoi(place);
  {
    const test::Strangers strangers({port, ranks.port});
    for (int i = 0; i < 2000 && strangers.connections() < 400; ++i) std::this_thread::sleep_for(5ms);
    EXPECT_GE(strangers.connections(), 400);
    ranks.all[1].set("still", "here");
    EXPECT_EQ(ranks.all[0].try_get("still"), "here");
  }
  for (const Watched& watched : all)
    for (const int rank : {0, 1}) EXPECT_EQ(watched.liveness->state_of(rank).state, RankState::Running);
  all[1].monitor->fail("the truth");
  EXPECT_TRUE(reaches(all[0], 1, RankState::Failed));
  all.pop_back();
}

// A stopped process keeps its connections: only its silence tells.
TEST(Monitor, SilenceIsNoticed) {
  const int port = port_for_later();
  const auto ended = test::run_ranks(3, 90s, [&](int rank, const test::FileStore& files) {
    const LaunchEnv env = env_of(rank, 3, port);
    Store store = Store::connect(env, in(30s));
    const auto liveness = std::make_shared<Liveness>(3);
    Monitor monitor(env, store, liveness, in(30s), 3s);
    store.add("here", 1);
    while (store.add("here", 0) < 3) std::this_thread::sleep_for(5ms);
    if (rank == 2) {
      files.set("victim", std::to_string(getpid()));
      files.get("ended", 80s);
      return;
    }
    const pid_t victim = std::stoi(files.get("victim"));
    if (rank == 0) kill(victim, SIGSTOP);
    const auto begin = Clock::now();
    // First it is suspected, which errors mention; then it is lost.
    while (!liveness->silent_since(2) && !liveness->first_failure()) std::this_thread::sleep_for(10ms);
    RANK_CHECK(!liveness->first_failure());
    RANK_CHECK(liveness->describe_silence().find("nothing was heard from rank 2 for") != std::string::npos);
    const auto failure = liveness->await_failure(in(40s));
    RANK_CHECK(failure && failure->rank == 2);
    RANK_CHECK(failure->reason.find("nothing was heard from it") != std::string::npos);
    RANK_CHECK(Clock::now() - begin > 1500ms);
    RANK_CHECK(liveness->state_of(1 - rank).state == RankState::Running);
    if (rank == 0) {
      kill(victim, SIGCONT);
      files.set("ended", "");
    }
    store.add("seen", 1);
    while (store.add("seen", 0) < 2) std::this_thread::sleep_for(5ms);
  });
  EXPECT_EQ(ended, (std::vector<int>{0, 0, 0}));
}

}  // namespace store_test
}  // namespace penstock::comm
