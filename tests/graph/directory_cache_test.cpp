// The folder of the compile cache: entries, locks between processes, and everything that a file system can do
// to it.
#include "penstock/graph/cache/directory_cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "penstock/base/files.h"
#include "penstock/base/warnings.h"
#include "penstock/errors.h"
#include "penstock/graph/cache/artifact_folder.h"
#include "penstock/graph/cache/program_id.h"
#include "tests/has_text.h"
#include "tests/temporary_folder.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace directory_cache_test {

using namespace std::chrono_literals;
using test::has_text;
using test::message_of;
using Folder = test::TemporaryFolder;
namespace fs = std::filesystem;

CacheKey key_of(const std::string& text) { return KeyBuilder().field("test", text).key(); }
Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string text_of(const std::vector<Warning>& warnings) {
  std::string text;
  for (const Warning& warning : warnings) text += warning.message + "\n";
  return text;
}

TEST(CacheKey, DependsOnEveryNameValueAndTheirOrder) {
  const auto key = [](const std::vector<std::pair<std::string, std::string>>& all) {
    return KeyBuilder().fields(all).key();
  };
  const CacheKey first = key({{"a", "b"}, {"c", "d"}});
  EXPECT_EQ(first, key({{"a", "b"}, {"c", "d"}}));
  for (const auto& other : std::vector<std::vector<std::pair<std::string, std::string>>>{
           {{"c", "d"}, {"a", "b"}}, {{"a", "bc"}, {"", "d"}}, {{"a", "b"}, {"c", "e"}}, {{"a", "b"}}, {}})
    EXPECT_NE(first, key(other));
  // Long values are replaced by their hash.
  std::string longer(1000, 'x');
  const CacheKey of_long = key({{"a", longer}});
  longer[999] = 'y';
  EXPECT_NE(of_long, key({{"a", longer}}));
  EXPECT_EQ(first.text().size(), 32U);
  EXPECT_NE(first.high, first.low);
}

TEST(DirectoryCache, KeepsWhatIsStored) {
  const Folder folder;
  const DirectoryCache cache({.folder = folder.path / "made" / "on demand"});
  CacheLookup lookup = cache.find_or_reserve(key_of("one"), "a test");
  EXPECT_FALSE(lookup.entry);
  ASSERT_TRUE(lookup.reservation);
  EXPECT_TRUE(lookup.reservation.store(bytes_of("first")));
  EXPECT_EQ(cache.find(key_of("one")), bytes_of("first"));
  EXPECT_EQ(DirectoryCache({.folder = cache.folder()}).find(key_of("one")), bytes_of("first"));
  EXPECT_FALSE(cache.find(key_of("two")));
  EXPECT_TRUE(cache.replace(key_of("one"), bytes_of("second")));
  EXPECT_EQ(cache.find_or_reserve(key_of("one"), "a test").entry, bytes_of("second"));
  EXPECT_EQ(cache.counts().text(), "2 hits, 2 misses, 2 stored");
  // Neither locks nor temporary files are left.
  for (const auto& item : fs::directory_iterator(cache.folder()))
    EXPECT_EQ(item.path().extension(), ".entry");
}

TEST(DirectoryCache, AnEntryHasTheTimeThatMakingItTook) {
  const Folder folder;
  const DirectoryCache cache({.folder = folder.path});
  EXPECT_TRUE(cache.find_or_reserve(key_of("one"), "a test").reservation.store(bytes_of("1"), 1500us));
  EXPECT_TRUE(cache.replace(key_of("two"), bytes_of("2"), 3h));
  EXPECT_TRUE(cache.replace(key_of("unknown"), bytes_of("3")));
  EXPECT_EQ(cache.counts().time_saved, 0us);
  EXPECT_EQ(cache.find_or_reserve(key_of("one"), "a test").made_in, 1500us);
  EXPECT_EQ(cache.counts().time_saved, 1500us);
  EXPECT_TRUE(cache.find(key_of("two")));
  EXPECT_EQ(cache.find_or_reserve(key_of("unknown"), "a test").made_in, 0us);
  EXPECT_EQ(cache.find_or_reserve(key_of("other"), "a test").made_in, 0us);
  EXPECT_EQ(cache.counts().time_saved, 3h + 1500us);
  // Frames without a possible time inside.
  ByteWriter negative, none;
  negative.number(std::int64_t{-1});
  none.raw(bytes_of("1234567"));
  for (const Bytes& fields : {negative.bytes, none.bytes}) {
    const Bytes whole = framed({"PSCACHE1", "an entry of the compile cache", 2}, fields);
    std::ofstream(cache.file_of(key_of("one")), std::ios::binary)
        .write(reinterpret_cast<const char*>(whole.data()), static_cast<std::streamsize>(whole.size()));
    const WarningCapture capture;
    EXPECT_FALSE(cache.find(key_of("one")));
  }
  EXPECT_EQ(cache.counts().damaged, 2U);
  EXPECT_EQ(cache.counts().time_saved, 3h + 1500us);
}

TEST(DirectoryCache, OneThreadMakesAnEntryAndTheOthersWait) {
  const Folder folder;
  const DirectoryCache cache({.folder = folder.path});
  std::atomic<int> made{0}, right{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i)
    threads.emplace_back([&] {
      CacheLookup lookup = cache.find_or_reserve(key_of("shared"), "a test");
      if (!lookup.entry) {
        ++made;
        std::this_thread::sleep_for(50ms);
        lookup.reservation.store(bytes_of("made"));
        lookup.entry = bytes_of("made");
      }
      right += *lookup.entry == bytes_of("made") ? 1 : 0;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, 1);
  EXPECT_EQ(right, 6);
}

// A reservation that is given up lets the next one make the entry.
TEST(DirectoryCache, ANextOneMakesWhatWasNotStored) {
  const Folder folder;
  const DirectoryCache cache({.folder = folder.path});
  { const CacheLookup lookup = cache.find_or_reserve(key_of("x"), "a test"); }
  EXPECT_TRUE(cache.find_or_reserve(key_of("x"), "a test").reservation);
}

TEST(DirectoryCache, DamagedEntriesAreReplacedWithAWarning) {
  const Folder folder;
  const CacheKey key = key_of("damaged");
  const Bytes whole = bytes_of("an entry of some length");
  DirectoryCache({.folder = folder.path}).replace(key, whole);
  const fs::path file = DirectoryCache({.folder = folder.path}).file_of(key);
  const std::string good = read_file(file, "test", "");
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::string bad = good;
    if (round % 3 == 0)
      bad.resize(random() % bad.size());
    else if (round % 3 == 1)
      bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
    else
      bad += 'x';
    std::ofstream(file, std::ios::binary | std::ios::trunc) << bad;
    const WarningCapture capture;
    const DirectoryCache cache({.folder = folder.path});
    CacheLookup lookup = cache.find_or_reserve(key, "a test");
    ASSERT_FALSE(lookup.entry) << round;
    EXPECT_TRUE(has_text(text_of(capture.warnings()), file.string())) << text_of(capture.warnings());
    ASSERT_TRUE(lookup.reservation.store(whole));
    EXPECT_EQ(cache.find(key), whole);
    EXPECT_GE(cache.counts().damaged, 1U);
  }
}

// Whatever the clocks of other hosts say.
TEST(DirectoryCache, WhatWasJustStoredIsNotRemoved) {
  const Folder folder;
  const DirectoryCache cache({.folder = folder.path, .max_bytes = 2500});
  for (const char* key : {"a", "b"}) {
    cache.replace(key_of(key), Bytes(1000, 1));
    fs::last_write_time(cache.file_of(key_of(key)), fs::file_time_type::clock::now() + 1h);
  }
  EXPECT_TRUE(cache.replace(key_of("new"), Bytes(1000, 1)));
  EXPECT_TRUE(cache.find(key_of("new")));
  EXPECT_EQ(cache.counts().removed, 1U);
}

TEST(DirectoryCache, EntriesOfOtherVersionsAreReplaced) {
  const Folder folder;
  const DirectoryCache cache({.folder = folder.path});
  cache.replace(key_of("x"), bytes_of("new"));
  std::string bytes = read_file(cache.file_of(key_of("x")), "test", "");
  bytes[8] = 77;  // the version
  std::ofstream(cache.file_of(key_of("x")), std::ios::binary) << bytes;
  const WarningCapture capture;
  EXPECT_TRUE(cache.find_or_reserve(key_of("x"), "a test").reservation);
  EXPECT_TRUE(has_text(text_of(capture.warnings()), "version 77, expected 2")) << text_of(capture.warnings());
}

TEST(DirectoryCache, FoldersThatCannotBeUsedNeverFail) {
  const Folder folder;
  std::ofstream(folder.path / "file") << "x";
  for (const fs::path& path :
       {folder.path / "file", folder.path / "file" / "below", fs::path("/proc/cache")}) {
    const WarningCapture capture;
    const DirectoryCache cache({.folder = path});
    CacheLookup lookup = cache.find_or_reserve(key_of("x"), "a test");
    EXPECT_FALSE(lookup.entry);
    EXPECT_FALSE(lookup.reservation);
    EXPECT_FALSE(lookup.reservation.store(bytes_of("x")));
    EXPECT_FALSE(cache.replace(key_of("x"), bytes_of("x")));
    EXPECT_EQ(capture.warnings().size(), 1U) << text_of(capture.warnings());
  }
  // An entry, or a lock, that is a folder.
  const DirectoryCache cache({.folder = folder.path, .longest_wait = 100ms});
  fs::create_directories(cache.file_of(key_of("x")) / "inside");
  const WarningCapture capture;
  CacheLookup lookup = cache.find_or_reserve(key_of("x"), "a test");
  EXPECT_FALSE(lookup.reservation.store(bytes_of("x")));
  fs::create_directories(folder.path / (key_of("y").text() + ".lock"));
  EXPECT_FALSE(cache.find_or_reserve(key_of("y"), "step of stage 0").reservation);
  EXPECT_TRUE(has_text(text_of(capture.warnings()), "step of stage 0 is compiled without the cache"))
      << text_of(capture.warnings());
}

// As a user without rights: the superuser may write everywhere.
TEST(DirectoryCache, AFolderThatIsReadOnlyIsRead) {
  const Folder folder;
  DirectoryCache({.folder = folder.path}).replace(key_of("there"), bytes_of("there"));
  fs::permissions(folder.path, fs::perms(0555));
  const pid_t child = ::fork();
  if (child == 0) {
    if (::getuid() == 0 && ::setuid(65534) != 0) ::_exit(9);
    const WarningCapture capture;
    const DirectoryCache cache({.folder = folder.path});
    const bool refused = !cache.find_or_reserve(key_of("x"), "a test").reservation;
    const bool not_written = !cache.replace(key_of("x"), bytes_of("x"));
    ::_exit(refused && not_written && capture.warnings().size() == 2 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  fs::permissions(folder.path, fs::perms(0755));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(DirectoryCache, AFullDiskNeverFails) {
  const Folder folder;
  if (::mount("tmpfs", folder.path.c_str(), "tmpfs", 0, "size=64k") != 0)
    GTEST_SKIP() << "this user cannot mount a small file system";
  {
    const WarningCapture capture;
    const DirectoryCache cache({.folder = folder.path});
    EXPECT_TRUE(cache.replace(key_of("small"), Bytes(20 << 10, 1)));
    EXPECT_FALSE(cache.replace(key_of("large"), Bytes(100 << 10, 2)));
    EXPECT_TRUE(has_text(text_of(capture.warnings()), "No space left on device"))
        << text_of(capture.warnings());
    EXPECT_EQ(cache.find(key_of("small")), Bytes(20 << 10, 1));
    EXPECT_EQ(std::distance(fs::directory_iterator(folder.path), {}), 1);
    // Another process makes the entry again when there is space.
    EXPECT_TRUE(cache.find_or_reserve(key_of("large"), "a test").reservation);
  }
  ::umount(folder.path.c_str());
}

TEST(DirectoryCache, RemovesWhatWasNotUsedForTheLongestTime) {
  const Folder folder;
  const DirectoryCache cache({.folder = folder.path, .max_bytes = 4000});
  const auto age = [&](const char* key, std::chrono::seconds seconds) {
    fs::last_write_time(cache.file_of(key_of(key)), fs::file_time_type::clock::now() - seconds);
  };
  for (const char* key : {"a", "b", "c"}) cache.replace(key_of(key), Bytes(1000, 1));
  age("a", 30s), age("b", 20s), age("c", 10s);
  EXPECT_TRUE(cache.find(key_of("a")));  // used now
  cache.replace(key_of("d"), Bytes(1000, 1));
  EXPECT_FALSE(cache.find(key_of("b")));
  for (const char* key : {"a", "c", "d"}) EXPECT_TRUE(cache.find(key_of(key))) << key;
  EXPECT_EQ(cache.counts().removed, 1U);
  EXPECT_FALSE(cache.replace(key_of("large"), Bytes(5000, 1)));
  // What a killed process was writing.
  const fs::path left = folder.path / "0123.entry.5.0.tmp";
  std::ofstream(left) << "x";
  fs::last_write_time(left, fs::file_time_type::clock::now() - 2h);
  cache.replace(key_of("e"), Bytes(10, 1));
  EXPECT_FALSE(file_exists(left));
}

// ---- locks ----

TEST(EntryLock, OfADeadProcessIsTaken) {
  const Folder folder;
  const fs::path file = folder.path / "x.lock";
  // A process of this host that is gone, one of another host, and no owner at all: none of them holds the
  // kernel's lock.
  for (const std::string& text :
       {LockOwner{1 << 22, LockOwner::self().host, 1}.text(), LockOwner{1, "another-host", 1}.text(),
        std::string("\0\xff garbage", 10), std::string()}) {
    std::ofstream(file, std::ios::binary | std::ios::trunc) << text;
    EXPECT_TRUE(EntryLock::acquire(file, 0ms, [] { return false; }).held());
  }
}

// The kernel's lock is inherited by a forked child, which may live longer than the process that compiles.
TEST(EntryLock, ThatAChildOfADeadProcessInheritedIsReplaced) {
  const Folder folder;
  const fs::path file = folder.path / "x.lock";
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t owner = ::fork();
  if (owner == 0) {
    const EntryLock lock = EntryLock::acquire(file, 0ms, [] { return false; });
    const pid_t child = ::fork();
    if (child == 0) {
      ::write(ready[1], "x", 1);
      std::this_thread::sleep_for(20s);
      ::_exit(0);
    }
    ::write(ready[1], &child, sizeof child);
    ::kill(::getpid(), SIGKILL);
  }
  char got[1 + sizeof(pid_t)];
  for (std::size_t size = 0; size < sizeof got;)
    size += static_cast<std::size_t>(::read(ready[0], got + size, 1));
  int status = 0;
  ::waitpid(owner, &status, 0);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(EntryLock::acquire(file, 15s, [] { return false; }).held());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
  pid_t child = 0;
  std::string all(got, sizeof got);
  all.erase(all.find('x'), 1);
  std::copy(all.begin(), all.end(), reinterpret_cast<char*>(&child));
  ::kill(child, SIGKILL);
  ::close(ready[0]), ::close(ready[1]);
}

TEST(EntryLock, IsWaitedForNoLongerThanTheLimit) {
  const Folder folder;
  const fs::path file = folder.path / "x.lock";
  const EntryLock first = EntryLock::acquire(file, 0ms, [] { return false; });
  ASSERT_TRUE(first.held());
  const EntryLock second = EntryLock::acquire(file, 60ms, [] { return false; });
  EXPECT_EQ(second.outcome(), EntryLock::Outcome::TimedOut);
  EXPECT_TRUE(has_text(second.why(), "process " + std::to_string(::getpid()) + " on host")) << second.why();
  EXPECT_EQ(EntryLock::acquire(file, 60s, [] { return true; }).outcome(), EntryLock::Outcome::Done);
}

TEST(LockOwner, IsReadAsItWasWritten) {
  const LockOwner self = LockOwner::self();
  EXPECT_EQ(LockOwner::parse(self.text()), self);
  EXPECT_FALSE(self.is_dead());
  EXPECT_TRUE(
      (LockOwner{self.pid, self.host, self.started + 1}.is_dead()));  // another process had the number
  for (const char* bad :
       {"", "pid", "pid x host h started 1", "pid -1 host h started 1", "pid 1 host h started 1 x"})
    EXPECT_FALSE(LockOwner::parse(bad)) << bad;
}

// 8 processes need the same entries; some are killed while they make one. Every entry is made by one process
// that lives (and by those that were killed while they made it), nobody hangs, everybody has the right bytes.
TEST(DirectoryCache, EightProcessesAndKills) {
  constexpr int kEntries = 6;
  for (unsigned seed = 0; seed < 3; ++seed) {
    const Folder folder;
    const fs::path made = folder.path / "made";
    fs::create_directories(made);
    const auto work = [&](unsigned process) {
      std::mt19937 random(seed * 100 + process);
      const DirectoryCache cache({.folder = folder.path / "cache", .longest_wait = 60s});
      std::vector<int> order(kEntries);
      for (int i = 0; i < kEntries; ++i) order[static_cast<std::size_t>(i)] = i;
      std::shuffle(order.begin(), order.end(), random);
      for (const int entry : order) {
        const std::string name = std::to_string(entry);
        const Bytes right = Bytes(static_cast<std::size_t>(10000 + entry), static_cast<std::uint8_t>(entry));
        CacheLookup lookup = cache.find_or_reserve(key_of(name), "entry " + name);
        if (!lookup.entry) {
          if (!lookup.reservation) ::_exit(2);
          std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
          if (process % 2 == 1 && random() % 3 == 0) ::kill(::getpid(), SIGKILL);
          if (!lookup.reservation.store(right)) ::_exit(3);
          std::ofstream(made / (name + "." + std::to_string(process))) << "x";
        } else if (*lookup.entry != right) {
          ::_exit(4);
        }
      }
      ::_exit(0);
    };
    std::vector<pid_t> processes;
    for (unsigned process = 0; process < 8; ++process) {
      const pid_t child = ::fork();
      if (child == 0) work(process);
      processes.push_back(child);
    }
    for (std::size_t i = 0; i < processes.size(); ++i) {
      int status = 0;
      ASSERT_EQ(::waitpid(processes[i], &status, 0), processes[i]);
      const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
      EXPECT_TRUE(killed ? i % 2 == 1 : WEXITSTATUS(status) == 0) << i << ": " << WEXITSTATUS(status);
    }
    std::vector<int> times(kEntries, 0);
    for (const auto& item : fs::directory_iterator(made))
      ++times[static_cast<std::size_t>(item.path().filename().string()[0] - '0')];
    for (int entry = 0; entry < kEntries; ++entry)
      EXPECT_EQ(times[static_cast<std::size_t>(entry)], 1) << entry;
  }
}

// ---- the environment, programs, artifacts ----

class SavedEnvironment {
 public:
  ~SavedEnvironment() {
    for (const auto& [name, value] : values_) value ? ::setenv(name, value->c_str(), 1) : ::unsetenv(name);
  }
  void set(const char* name, const char* value) {
    if (const char* old = std::getenv(name))
      values_.emplace_back(name, old);
    else
      values_.emplace_back(name, std::nullopt);
    value ? ::setenv(name, value, 1) : ::unsetenv(name);
  }

 private:
  std::vector<std::pair<const char*, std::optional<std::string>>> values_;
};

TEST(CacheEnvironment, NamesTheFolder) {
  SavedEnvironment environment;
  environment.set("PENSTOCK_CACHE", nullptr), environment.set("XDG_CACHE_HOME", nullptr);
  environment.set("HOME", "/home/me"), environment.set("PENSTOCK_CACHE_MB", nullptr);
  EXPECT_EQ(cache_environment().folder, "/home/me/.cache/penstock");
  EXPECT_FALSE(cache_environment().asked_for);
  EXPECT_EQ(cache_environment().max_bytes, std::int64_t{4} << 30);
  environment.set("XDG_CACHE_HOME", "/caches");
  EXPECT_EQ(cache_environment().folder, "/caches/penstock");
  environment.set("PENSTOCK_CACHE", "/fast"), environment.set("PENSTOCK_CACHE_MB", "7");
  EXPECT_EQ(cache_environment().folder, "/fast");
  EXPECT_TRUE(cache_environment().asked_for);
  EXPECT_EQ(cache_environment().max_bytes, 7 << 20);
  environment.set("PENSTOCK_CACHE", "off");
  EXPECT_TRUE(cache_environment().off);
  environment.set("PENSTOCK_CACHE_MB", "many");
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { cache_environment(); }), "PENSTOCK_CACHE_MB"));
}

TEST(ProgramId, IsTheSameAllTheTime) {
  EXPECT_EQ(program_id().size(), 32U);
  EXPECT_EQ(program_id(), program_id());
  const unsigned char notes[] = {4, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 'G', 'N', 'U', 0, 0xab, 0x01, 0, 0};
  EXPECT_EQ(detail::build_id_in_notes(notes, sizeof notes), "ab01");
  for (std::size_t size = 0; size < sizeof notes; ++size)
    EXPECT_EQ(detail::build_id_in_notes(notes, size), "");
}

TEST(ArtifactFolder, IsOpenedWithEqualFieldsOnly) {
  const Folder folder;
  const ArtifactFolder::Fields fields{{"model.layers", "12"}, {"libtorch", "1.13"}};
  {
    ArtifactFolder made = ArtifactFolder::create(folder.path / "a", fields);
    made.add(key_of("x"), "stage 0", "2 inputs", bytes_of("x"), 1500us);
    EXPECT_TRUE(has_text(message_of<ConfigError>([&] { ArtifactFolder::open(folder.path / "a", fields); }),
                         "let it finish"));
    made.finish();
  }
  const ArtifactFolder opened = ArtifactFolder::open(folder.path / "a", fields);
  std::chrono::microseconds made_in{0};
  EXPECT_EQ(opened.find(key_of("x"), &made_in), bytes_of("x"));
  EXPECT_EQ(made_in, 1500us);
  EXPECT_FALSE(opened.find(key_of("y")));
  EXPECT_EQ(opened.entries().at(0).module, "stage 0");
  const auto refused = [&](const ArtifactFolder::Fields& other) {
    return message_of<ConfigError>([&] { ArtifactFolder::open(folder.path / "a", other); });
  };
  EXPECT_TRUE(
      has_text(refused({{"model.layers", "24"}, {"libtorch", "1.13"}}),
               "it is stale: model.layers is \"24\", in the artifact \"12\"; write the artifact again"));
  EXPECT_TRUE(has_text(refused({{"model.layers", "12"}, {"libtorch", "2.6"}}), "libtorch is \"2.6\""));
  EXPECT_TRUE(has_text(refused({{"model.layers", "12"}, {"libtorch", "1.13"}, {"new", "1"}}),
                       "new is \"1\", in the artifact not set"));
  EXPECT_TRUE(has_text(refused({{"model.layers", "12"}}), "libtorch is not set, in the artifact \"1.13\""));

  const fs::path call = folder.path / "a" / (key_of("x").text() + ".call");
  std::string bytes = read_file(call, "test", "");
  bytes.back() ^= 1;
  std::ofstream(call, std::ios::binary) << bytes;
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { opened.find(key_of("x")); }), "it is damaged"));
  std::ofstream(folder.path / "a" / "manifest.json") << "{\"version\": 2";
  EXPECT_TRUE(has_text(refused(fields), "manifest.json is damaged"));
}

TEST(ArtifactFolder, DoesNotRemoveFilesOfOthers) {
  const Folder folder;
  std::ofstream(folder.path / "thesis.tex") << "x";
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { ArtifactFolder::create(folder.path, {}); }),
                       "files that are no artifact"));
  EXPECT_TRUE(file_exists(folder.path / "thesis.tex"));
}

// Other programs have files with these endings, too.
TEST(ArtifactFolder, RemovesItsOwnFilesOnly) {
  const std::string key = key_of("old").text();
  for (const std::string& name :
       {std::string("phone.call"), std::string("upload.tmp"), key + ".tmp", key + ".call.tmp",
        key + ".call.x.tmp", key.substr(1) + ".call", "A" + key.substr(1) + ".call", "0" + key + ".call",
        std::string("manifest.json.bak.12.tmp")}) {
    SCOPED_TRACE(name);
    const Folder folder;
    std::ofstream(folder.path / name) << "x";
    EXPECT_TRUE(has_text(message_of<ConfigError>([&] { ArtifactFolder::create(folder.path, {}); }),
                         "files that are no artifact"));
    EXPECT_TRUE(file_exists(folder.path / name));
    // It stays beside an artifact.
    const fs::path there = folder.path / "artifact";
    ArtifactFolder::create(there, {}).finish();
    std::ofstream(there / name) << "x";
    ArtifactFolder made = ArtifactFolder::create(there, {});
    EXPECT_TRUE(file_exists(there / name));
    EXPECT_FALSE(file_exists(there / "manifest.json"));
  }
}

TEST(ArtifactFolder, ReplacesADamagedOrUnfinishedArtifact) {
  const std::string call = key_of("old").text() + ".call";
  const auto left_of = [](const std::vector<std::string>& names) {
    const Folder folder;
    for (const std::string& name : names) std::ofstream(folder.path / name) << "{";
    ArtifactFolder::create(folder.path, {});
    return std::distance(fs::directory_iterator(folder.path), {});
  };
  EXPECT_EQ(left_of({call, call + ".12.tmp", "manifest.json.12.tmp"}), 0);
  EXPECT_EQ(left_of({call, "manifest.json"}), 0);
  // Without a call, nothing says that the manifest is that of an artifact.
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { left_of({"manifest.json"}); }), "files that are no artifact"));
}

}  // namespace directory_cache_test
}  // namespace penstock::graph
