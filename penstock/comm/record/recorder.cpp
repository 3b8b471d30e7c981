#include "penstock/comm/record/recorder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <thread>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

constexpr std::size_t kMostEntries = std::size_t{1} << 20;

// Number of attempts to read a slot. In a signal handler the writer may be this very thread, interrupted in
// the middle.
constexpr int kReadAttempts = 1'000'000;
constexpr int kInSignalHandler = 100;

// clock_gettime rather than std::chrono, because signal handlers may call it.
std::int64_t now_ns(clockid_t clock) noexcept {
  timespec time{};
  ::clock_gettime(clock, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

std::int32_t thread_number() noexcept {
  static thread_local const std::int32_t number = static_cast<std::int32_t>(::gettid());
  return number;
}

}  // namespace

std::string_view to_text(OperationState state) {
  switch (state) {
    case OperationState::Running:
      return "running";
    case OperationState::Done:
      return "done";
    case OperationState::Failed:
      return "failed";
    case OperationState::TimedOut:
      return "timed out";
  }
  return "unknown";
}

void Recorder::Slot::lock() noexcept {
  for (;;) {
    std::uint64_t seen = version.load(std::memory_order_relaxed);
    if (seen % 2 == 0 && version.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire)) return;
    // Only a thread that is a whole ring ahead or behind writes here; that is rare and brief.
    if (seen % 2 != 0) std::this_thread::yield();
  }
}

void Recorder::Slot::unlock() noexcept {
  version.store(version.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

// The contents are stored with release and loaded with acquire, word by word. A reader that loads a word of a
// later write therefore also sees that write's odd version, and the second check of the version detects the
// change. (Plain moves on x86; fences would also work, but thread sanitizers do not understand them.)
bool Recorder::Slot::read(OperationRecord& record, int attempts) const noexcept {
  for (int attempt = 0; attempt < attempts; ++attempt) {
    const std::uint64_t before = version.load(std::memory_order_acquire);
    if (before % 2 == 0) {
      std::array<std::uint64_t, kWords> words;
      for (std::size_t i = 0; i < kWords; ++i) words[i] = operation[i].load(std::memory_order_acquire);
      std::memcpy(static_cast<void*>(static_cast<Operation*>(&record)), words.data(), sizeof words);
      record.id = id.load(std::memory_order_acquire);
      record.begin_ns = begin_ns.load(std::memory_order_acquire);
      record.end_ns = end_ns.load(std::memory_order_acquire);
      record.thread = thread.load(std::memory_order_acquire);
      record.state = state.load(std::memory_order_acquire);
      if (version.load(std::memory_order_relaxed) == before) return true;
    }
    ::sched_yield();  // a plain system call: also safe in a signal handler
  }
  return false;
}

Recorder::Recorder(std::size_t entries) : entries_(entries) {
  if (entries == 0 || entries > kMostEntries)
    throw ValueError(describe("size of the recorder", fmt::format("{} entries", entries),
                              fmt::format("1 to {}", kMostEntries)));
  slots_ = std::make_unique<Slot[]>(entries);
  if (std::has_single_bit(entries)) mask_ = entries - 1;
  if (::gethostname(host_.data(), host_.size() - 1) != 0)
    std::snprintf(host_.data(), host_.size(), "unknown");
  anchor_steady_ns_ = now_ns(CLOCK_MONOTONIC);
  anchor_wall_ns_ = now_ns(CLOCK_REALTIME);
}

Recorder& Recorder::global() {
  // Never destroyed: threads and signal handlers may record and read until the process ends.
  static Recorder* const instance = new Recorder(
      static_cast<std::size_t>(env_int("PENSTOCK_RECORDER_SIZE", 1, kMostEntries).value_or(kDefaultEntries)));
  return *instance;
}

std::uint64_t Recorder::begin(const Operation& operation) noexcept {
  totals_.add(operation.operation, operation.bytes);
  if (frozen_.load(std::memory_order_relaxed)) [[unlikely]]
    return 0;
  const std::uint64_t id = next_.fetch_add(1, std::memory_order_relaxed);
  const std::int64_t begin_ns = now_ns(CLOCK_MONOTONIC);
  const std::int32_t thread = thread_number();

  Slot& slot = slot_of(id);
  slot.lock();
  const std::uint64_t replaced = slot.id.load(std::memory_order_relaxed);
  // A thread that slept for a whole round of the ring must not replace newer entries.
  if (replaced < id) {
    if (replaced != 0 && slot.state.load(std::memory_order_relaxed) == OperationState::Running)
      running_dropped_.fetch_add(1, std::memory_order_relaxed);
    const char* bytes = reinterpret_cast<const char*>(&operation);
    for (std::size_t i = 0; i < kWords; ++i) {
      std::uint64_t word;
      std::memcpy(&word, bytes + i * sizeof word, sizeof word);
      slot.operation[i].store(word, std::memory_order_release);
    }
    slot.id.store(id, std::memory_order_release);
    slot.begin_ns.store(begin_ns, std::memory_order_release);
    slot.end_ns.store(0, std::memory_order_release);
    slot.thread.store(thread, std::memory_order_release);
    slot.state.store(OperationState::Running, std::memory_order_release);
  }
  slot.unlock();
  return id;
}

void Recorder::end(std::uint64_t id, OperationState state) noexcept {
  const std::int64_t end_ns = now_ns(CLOCK_MONOTONIC);
  Slot& slot = slot_of(id);
  slot.lock();
  if (slot.id.load(std::memory_order_relaxed) == id &&
      slot.state.load(std::memory_order_relaxed) == OperationState::Running) {
    slot.end_ns.store(end_ns, std::memory_order_release);
    slot.state.store(state, std::memory_order_release);
  }
  slot.unlock();
}

template <class Seen>
std::size_t Recorder::visit(int attempts, Seen seen) const {
  const std::uint64_t next = next_.load(std::memory_order_acquire);
  std::size_t unreadable = 0;
  OperationRecord record;
  for (std::uint64_t id = next > entries_ ? next - entries_ : 1; id < next; ++id) {
    if (!slot_of(id).read(record, attempts)) {
      ++unreadable;
    } else if (record.id == id) {
      seen(record);
    }
  }
  return unreadable;
}

std::vector<OperationRecord> Recorder::snapshot() const {
  std::vector<OperationRecord> records;
  records.reserve(entries_);
  // Writers hold a slot for some nanoseconds; readers wait for nothing else.
  visit(kReadAttempts, [&](const OperationRecord& record) { records.push_back(record); });
  return records;
}

std::map<std::string, OperationTotals> Recorder::totals() const {
  std::map<std::string, OperationTotals> totals;
  totals_.visit([&](std::string_view kind, OperationTotals row) { totals.emplace(kind, row); });
  return totals;
}

std::optional<int> Recorder::rank() const noexcept {
  const int rank = rank_;
  return rank < 0 ? std::nullopt : std::optional(rank);
}

template <class Entries>
void Recorder::write_json(ByteSink& sink, std::string_view reason, Entries entries) const {
  const std::int64_t now = now_ns(CLOCK_MONOTONIC);
  JsonWriter json(sink);
  const auto known = [&](int value) -> JsonWriter& { return value < 0 ? json.null() : json.number(value); };
  json.begin_object().new_line();
  json.key("format").number(1).new_line();
  json.key("reason").text(reason).new_line();
  json.key("rank");
  known(rank_).new_line();
  json.key("world_size");
  known(world_size_).new_line();
  json.key("pid").number(::getpid()).new_line();
  json.key("host").text(host_.data()).new_line();
  json.key("time_unix_us").number(now_ns(CLOCK_REALTIME) / 1000).new_line();
  json.key("entries").begin_array();
  const std::size_t unreadable = entries([&](const OperationRecord& record) {
    const bool running = record.state == OperationState::Running;
    json.new_line().begin_object();
    json.key("id").count(record.id);
    json.key("operation").text(record.operation.view());
    json.key("state").text(to_text(record.state));
    json.key("group").text(record.group.view());
    json.key("peer");
    record.peer ? json.number(*record.peer) : json.null();
    json.key("bytes").count(record.bytes);
    json.key("label").text(record.label.view());
    json.key("tag").number(record.tag);
    json.key("sequence").count(record.sequence);
    json.key("thread").number(record.thread);
    json.key("begin_unix_us").number((anchor_wall_ns_ + (record.begin_ns - anchor_steady_ns_)) / 1000);
    json.key("duration_ns").number((running ? now : record.end_ns) - record.begin_ns);
    json.end_object();
  });
  json.end_array().new_line();
  json.key("entries_unreadable").count(unreadable).new_line();
  json.key("running_dropped").count(running_dropped_.load(std::memory_order_relaxed)).new_line();
  json.key("totals").begin_object();
  totals_.visit([&](std::string_view kind, OperationTotals row) {
    json.new_line().key(kind).begin_object();
    json.key("operations").count(row.operations).key("bytes").count(row.bytes).end_object();
  });
  json.end_object().end_object();
  sink.put("\n");
}

std::string Recorder::to_json(std::string_view reason) const {
  // Copied first: formatting is so slow that busy threads would overwrite the whole ring meanwhile.
  const std::vector<OperationRecord> records = snapshot();
  StringSink sink;
  write_json(sink, reason, [&](auto seen) {
    for (const OperationRecord& record : records) seen(record);
    return std::size_t{0};
  });
  return std::move(sink.text);
}

void Recorder::write_from_signal_handler(ByteSink& sink, std::string_view reason) {
  frozen_.store(true, std::memory_order_relaxed);
  write_json(sink, reason, [&](auto seen) { return visit(kInSignalHandler, seen); });
  frozen_.store(false, std::memory_order_relaxed);
}

void Recorder::dump(const std::string& path, std::string_view reason) const {
  // Written under a temporary name until complete: several threads may dump to the same path at once.
  static std::atomic<unsigned> dumps = 0;
  const std::string partial = fmt::format("{}.partial{}", path, ++dumps);
  const std::string text = to_json(reason);
  // In a shared folder somebody may have prepared a link of this name: it is removed and not followed.
  ::unlink(partial.c_str());
  const int file =
      ::open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR);
  bool written = file >= 0;
  for (std::size_t done = 0; written && done < text.size();) {
    const ssize_t part = ::write(file, text.data() + done, text.size() - done);
    if (part > 0) done += static_cast<std::size_t>(part);
    written = part > 0 || (part < 0 && errno == EINTR);
  }
  int error = errno;
  if (file >= 0 && ::close(file) != 0 && written) {
    written = false;
    error = errno;
  }
  if (written && std::rename(partial.c_str(), path.c_str()) == 0) return;
  if (written) error = errno;
  std::remove(partial.c_str());
  throw ConfigError(describe(
      "dump of the recorder", fmt::format("\"{}\" for {}", std::strerror(error), path), "a writable file",
      "set PENSTOCK_RECORDER_DIR to a folder with free space that this user may write to"));
}

}  // namespace penstock::comm
