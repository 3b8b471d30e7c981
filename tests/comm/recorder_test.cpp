#include "penstock/comm/record/recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <thread>

#include "penstock/base/files.h"
#include "penstock/errors.h"
#include "tests/comm/allocation_counter.h"

namespace penstock::comm {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::Pair;

Operation send(std::uint64_t bytes, std::string_view label = "") {
  return {.operation = "send",
          .group = "pp.forward",
          .label = label,
          .tag = -7,
          .sequence = 11,
          .bytes = bytes,
          .peer = 3};
}

TEST(ShortText, IsCutAtItsSizeAndAtNul) {
  EXPECT_EQ(ShortText<8>("1234567").view(), "1234567");
  EXPECT_EQ(ShortText<8>("12345678").view(), "1234567");
  EXPECT_EQ(ShortText<8>(std::string_view("ab\0cd", 5)).view(), "ab");
  EXPECT_EQ(ShortText<8>("").view(), "");
}

TEST(Recorder, KeepsAllFields) {
  Recorder recorder(8);
  const std::uint64_t id = recorder.begin(send(512, "2F0 -> stage 3"));
  auto entries = recorder.snapshot();
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].id, id);
  EXPECT_EQ(entries[0].operation.view(), "send");
  EXPECT_EQ(entries[0].group.view(), "pp.forward");
  EXPECT_EQ(entries[0].label.view(), "2F0 -> stage 3");
  EXPECT_EQ(entries[0].tag, -7);
  EXPECT_EQ(entries[0].sequence, 11u);
  EXPECT_EQ(entries[0].bytes, 512u);
  EXPECT_EQ(entries[0].peer, 3);
  EXPECT_EQ(entries[0].thread, ::gettid());
  EXPECT_EQ(entries[0].state, OperationState::Running);
  EXPECT_EQ(entries[0].end_ns, 0);

  recorder.end(id, OperationState::TimedOut);
  recorder.end(id, OperationState::Done);  // the first end counts
  entries = recorder.snapshot();
  EXPECT_EQ(entries[0].state, OperationState::TimedOut);
  EXPECT_GE(entries[0].end_ns, entries[0].begin_ns);
  EXPECT_GT(entries[0].begin_ns, 0);
}

TEST(Recorder, ARingKeepsTheNewest) {
  Recorder recorder(5);
  for (std::uint64_t i = 0; i < 13; ++i) recorder.end(recorder.begin(send(i)), OperationState::Done);
  std::vector<std::uint64_t> bytes;
  for (const auto& entry : recorder.snapshot()) bytes.push_back(entry.bytes);
  EXPECT_THAT(bytes, ElementsAre(8, 9, 10, 11, 12));
}

TEST(Recorder, EndingAnEntryThatTheRingDroppedChangesNothing) {
  Recorder recorder(2);
  const std::uint64_t old = recorder.begin(send(1));
  recorder.begin(send(2));
  recorder.begin(send(3));  // replaces the first
  recorder.end(old, OperationState::Failed);
  recorder.end(0, OperationState::Failed);
  recorder.end(999, OperationState::Failed);
  for (const auto& entry : recorder.snapshot()) EXPECT_EQ(entry.state, OperationState::Running);
  EXPECT_EQ(json::parse(recorder.to_json("test"))["running_dropped"], 1);
}

TEST(Recorder, SizeIsChecked) {
  EXPECT_THROW(Recorder(0), ValueError);
  EXPECT_THROW(Recorder(std::size_t{1} << 40), ValueError);
}

TEST(Recorder, TotalsDoNotWrapWithTheRing) {
  Recorder recorder(4);
  for (int i = 0; i < 1000; ++i) recorder.end(recorder.begin(send(1 << 20)), OperationState::Done);
  recorder.begin({.operation = "all_reduce", .bytes = 8});  // counted when it begins
  EXPECT_THAT(recorder.totals(), ElementsAre(Pair("all_reduce", OperationTotals{1, 8}),
                                             Pair("send", OperationTotals{1000, 1000u << 20})));
  recorder.reset_totals();
  EXPECT_TRUE(recorder.totals().empty());
  EXPECT_EQ(recorder.snapshot().size(), 4u);
  recorder.begin(send(5));
  EXPECT_THAT(recorder.totals(), ElementsAre(Pair("send", OperationTotals{1, 5})));
}

TEST(Recorder, KindsBeyondTheTableAreCountedTogether) {
  Recorder recorder(4);
  for (std::size_t i = 0; i < OperationTotalsTable::kCapacity + 10; ++i) {
    const std::string kind = "kind" + std::to_string(i);
    recorder.begin({.operation = std::string_view(kind), .bytes = 2});
    recorder.begin({.operation = std::string_view(kind), .bytes = 1});
  }
  const auto totals = recorder.totals();
  EXPECT_EQ(totals.size(), OperationTotalsTable::kCapacity + 1);
  EXPECT_EQ(totals.at("kind0"), (OperationTotals{2, 3}));
  EXPECT_EQ(totals.at("other kinds"), (OperationTotals{20, 30}));
}

TEST(Recorder, RecordingAllocatesNothing) {
  Recorder recorder(16);
  const auto once = [&] {
    recorder.end(recorder.begin(send(1, "a label longer than any small string buffer, cut")),
                 OperationState::Done);
  };
  once();
  const std::uint64_t before = test::allocations();
  for (int i = 0; i < 100; ++i) once();
  EXPECT_EQ(test::allocations(), before);
  ::operator delete(::operator new(1));  // checks that the counter counts
  EXPECT_EQ(test::allocations(), before + 1);
}

TEST(Recorder, CostIsPrinted) {
  Recorder recorder;
  constexpr int kRounds = 200000;
  double best_ns = std::numeric_limits<double>::max();
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kRounds; ++i)
      recorder.end(recorder.begin(send(64, "2F0 -> stage 3")), OperationState::Done);
    best_ns = std::min(
        best_ns,
        std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / kRounds);
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kRounds; ++i) static_cast<void>(std::chrono::steady_clock::now());
  const double clock_ns =
      std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / kRounds;
  std::printf("begin + end: %.1f ns, of which two clock reads: %.1f ns\n", best_ns, 2 * clock_ns);
  EXPECT_EQ(recorder.totals().at("send").operations, 5u * kRounds);
}

// Every entry has the same value in all of its fields, so that a mixture of two entries is detected.
Operation consistent(std::uint64_t n) {
  const std::string digits = std::to_string(n);
  return {.operation = n % 2 ? "odd" : "even",
          .group = std::string_view(digits),
          .label = std::string_view(digits),
          .tag = static_cast<std::int64_t>(n),
          .sequence = n,
          .bytes = n,
          .peer = static_cast<std::int32_t>(n % 1000)};
}
void expect_consistent(const OperationRecord& entry) {
  const Operation expected = consistent(entry.bytes);
  EXPECT_EQ(entry.operation, expected.operation);
  EXPECT_EQ(entry.group, expected.group);
  EXPECT_EQ(entry.label, expected.label);
  EXPECT_EQ(entry.tag, expected.tag);
  EXPECT_EQ(entry.sequence, expected.sequence);
  EXPECT_EQ(entry.peer, expected.peer);
  if (entry.state == OperationState::Running) {
    EXPECT_EQ(entry.end_ns, 0);
  } else {
    EXPECT_GE(entry.end_ns, entry.begin_ns);
    EXPECT_EQ(entry.state, entry.bytes % 3 ? OperationState::Done : OperationState::Failed);
  }
}

TEST(Recorder, ReadersSeeWholeEntriesWhileThreadsWrite) {
  Recorder recorder(7);  // small: threads contend for the same slots
  constexpr std::uint64_t kEach = 20000;
  constexpr std::uint64_t kThreads = 4;
  std::atomic<std::uint64_t> finished = 0;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < kEach; ++i) {
        const std::uint64_t n = t * kEach + i;
        recorder.end(recorder.begin(consistent(n)), n % 3 ? OperationState::Done : OperationState::Failed);
      }
      ++finished;
    });
  std::size_t seen = 0;
  do {
    std::uint64_t last = 0;
    for (const auto& entry : recorder.snapshot()) {
      expect_consistent(entry);
      EXPECT_GT(entry.id, last);  // oldest first
      last = entry.id;
      ++seen;
    }
    EXPECT_FALSE(json::parse(recorder.to_json("test"), nullptr, false).is_discarded());
  } while (finished < kThreads);
  for (auto& thread : threads) thread.join();
  EXPECT_GT(seen, 0u);
  ASSERT_EQ(recorder.snapshot().size(), 7u);
  for (const auto& entry : recorder.snapshot()) {
    expect_consistent(entry);
    EXPECT_NE(entry.state, OperationState::Running);
  }
  constexpr std::uint64_t kAll = kEach * kThreads;
  const auto totals = recorder.totals();
  EXPECT_EQ(totals.at("odd").operations, kAll / 2);
  EXPECT_EQ(totals.at("even").operations, kAll / 2);
  EXPECT_EQ(totals.at("odd").bytes + totals.at("even").bytes, kAll * (kAll - 1) / 2);
}

TEST(Recorder, JsonHasAllFields) {
  Recorder recorder(8);
  json dump = json::parse(recorder.to_json("nothing yet"));
  EXPECT_EQ(dump["rank"], nullptr);
  EXPECT_EQ(dump["entries"], json::array());
  EXPECT_EQ(dump["totals"], json::object());

  recorder.set_rank(2);
  recorder.set_world_size(4);
  recorder.end(recorder.begin(send(512, "first")), OperationState::Failed);
  recorder.begin({.operation = "barrier"});
  const auto before = std::chrono::duration_cast<std::chrono::microseconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
  dump = json::parse(recorder.to_json("a test"));
  EXPECT_EQ(dump["format"], 1);
  EXPECT_EQ(dump["reason"], "a test");
  EXPECT_EQ(dump["rank"], 2);
  EXPECT_EQ(dump["world_size"], 4);
  EXPECT_EQ(dump["pid"], ::getpid());
  EXPECT_FALSE(dump["host"].get<std::string>().empty());
  EXPECT_NEAR(dump["time_unix_us"].get<double>(), static_cast<double>(before), 10e6);
  EXPECT_EQ(dump["entries_unreadable"], 0);
  ASSERT_EQ(dump["entries"].size(), 2u);
  const json& first = dump["entries"][0];
  EXPECT_EQ(first["state"], "failed");
  EXPECT_EQ(first["operation"], "send");
  EXPECT_EQ(first["group"], "pp.forward");
  EXPECT_EQ(first["peer"], 3);
  EXPECT_EQ(first["bytes"], 512);
  EXPECT_EQ(first["label"], "first");
  EXPECT_EQ(first["tag"], -7);
  EXPECT_EQ(first["sequence"], 11);
  EXPECT_EQ(first["thread"], ::gettid());
  EXPECT_NEAR(first["begin_unix_us"].get<double>(), static_cast<double>(before), 10e6);
  EXPECT_GE(first["duration_ns"], 0);
  EXPECT_EQ(dump["entries"][1]["state"], "running");
  EXPECT_EQ(dump["entries"][1]["peer"], nullptr);
  EXPECT_GT(dump["entries"][1]["duration_ns"], 0);
  EXPECT_EQ(
      dump["totals"],
      json::parse(R"({"send": {"operations": 1, "bytes": 512}, "barrier": {"operations": 1, "bytes": 0}})"));
}

TEST(Recorder, LabelsAreCutAt47) {
  Recorder recorder(2);
  recorder.begin(send(1, std::string(46, 'a') + "bc"));
  EXPECT_EQ(json::parse(recorder.to_json(""))["entries"][0]["label"], std::string(46, 'a') + "b");
}

TEST(Recorder, OddCharactersStayValidJson) {
  const std::pair<std::string, std::string> cases[] = {
      {"say \"hi\" \\ there", "say \"hi\" \\ there"},
      {"\n\t\x01\x1f\x7f", "\n\t\x01\x1f\x7f"},
      {"stage \xe2\x86\x92 \xc3\xa9 \xf0\x9f\x98\x80", "stage \xe2\x86\x92 \xc3\xa9 \xf0\x9f\x98\x80"},
      {"\xff", "\xef\xbf\xbd"},
      {"a\xc3", "a\xef\xbf\xbd"},                                                // cut in the middle
      {"\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd"},                                  // overlong
      {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},                  // surrogate
      {"\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},  // past the last code point
      {"</script>,]}", "</script>,]}"},
  };
  for (const auto& [label, shown] : cases) {
    Recorder recorder(2);
    recorder.begin({.operation = std::string_view(label),
                    .group = std::string_view(label),
                    .label = std::string_view(label)});
    const json dump = json::parse(recorder.to_json(label));
    EXPECT_EQ(dump["entries"][0]["label"], shown);
    EXPECT_EQ(dump["entries"][0]["group"], shown);
    EXPECT_EQ(dump["reason"], shown);
    EXPECT_TRUE(dump["totals"].contains(shown));
  }
}

TEST(Recorder, EveryPairOfBytesStaysValidJson) {
  StringSink sink;
  JsonWriter writer(sink);
  writer.begin_array();
  for (int a = 1; a < 256; ++a)
    for (int b = 1; b < 256; ++b) {
      const char text[] = {static_cast<char>(a), static_cast<char>(b)};
      writer.text({text, 2});
    }
  writer.end_array();
  EXPECT_EQ(json::parse(sink.text).size(), 255u * 255u);
}

TEST(JsonWriter, NumbersAtTheirLimits) {
  StringSink sink;
  JsonWriter(sink)
      .begin_array()
      .number(std::numeric_limits<std::int64_t>::min())
      .number(0)
      .number(-1)
      .number(std::numeric_limits<std::int64_t>::max())
      .count(std::numeric_limits<std::uint64_t>::max())
      .end_array();
  EXPECT_EQ(sink.text, "[-9223372036854775808,0,-1,9223372036854775807,18446744073709551615]");
}

TEST(Recorder, DumpWritesAFileOrSaysWhyNot) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("recorder_test_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  Recorder recorder(4);
  recorder.begin(send(1));
  recorder.dump(folder / "dump.json", "asked for");
  std::ifstream file(folder / "dump.json");
  EXPECT_EQ(json::parse(file)["reason"], "asked for");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);  // no partial file is left
  try {
    recorder.dump(folder / "missing" / "dump.json", "asked for");
    ADD_FAILURE() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("No such file or directory"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("missing/dump.json"));
  }
  remove_tree(folder);
}

}  // namespace
}  // namespace penstock::comm
