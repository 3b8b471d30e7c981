#include "penstock/graph/cache/directory_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "penstock/base/env.h"
#include "penstock/base/files.h"
#include "penstock/base/warnings.h"
#include "penstock/errors.h"

namespace penstock::graph {
namespace {

namespace fs = std::filesystem;

// Increment it when a change of the program makes the contents of entries mean something else.
constexpr FileKind kEntryKind{"PSCACHE1", "an entry of the compile cache", 2};
constexpr std::string_view kRemedy = "it is made again; if this happens often, check the disk";
// Left by processes that were killed while they wrote.
constexpr auto kOldTemporary = std::chrono::hours(1);

void warn_about(const fs::path& file, const std::string& why) {
  warn_once("cache", fmt::format("compile cache: {}: {}; set PENSTOCK_CACHE to another folder, or to \"off\"",
                                 file.string(), why));
}

std::string last_error() { return std::strerror(errno); }

// Writes all bytes, and makes sure that they are on the disk before the name is.
bool write_all(int descriptor, std::span<const std::uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return true;
}

std::string plural(std::size_t count, std::string_view one, std::string_view many) {
  return fmt::format("{} {}", count, count == 1 ? one : many);
}

}  // namespace

std::string CacheCounts::text() const {
  std::string text =
      fmt::format("{}, {}, {} stored", plural(hits, "hit", "hits"), plural(misses, "miss", "misses"), stored);
  if (waited > 0) text += fmt::format(", {} made by another process meanwhile", waited);
  if (damaged > 0) text += fmt::format(", {} replaced", damaged);
  for (const auto& [why, times] : refused) text += fmt::format(", {} not cached: {}", times, why);
  return text;
}

bool CacheReservation::store(std::span<const std::uint8_t> bytes, std::chrono::microseconds made_in) {
  if (!cache_) return false;
  const bool written = cache_->write(key_, bytes, made_in);
  lock_.release();
  return written;
}

DirectoryCache::DirectoryCache(DirectoryCacheOptions options) : options_(std::move(options)) {
  std::error_code error;
  fs::create_directories(options_.folder, error);
  usable_ = !error && fs::is_directory(options_.folder, error);
  if (!usable_) warn_about(options_.folder, error ? error.message() : std::string("it is not a folder"));
}

template <class Change>
void DirectoryCache::count(const Change& change) const {
  const std::lock_guard lock(mutex_);
  change(counts_);
}

CacheCounts DirectoryCache::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void DirectoryCache::refuse(const std::string& why) const {
  count([&](CacheCounts& counts) { ++counts.refused[why]; });
}

void DirectoryCache::count_hit(const CacheLookup& lookup, bool waited) const {
  count([&](CacheCounts& counts) {
    ++counts.hits;
    counts.waited += waited ? 1 : 0;
    counts.time_saved += lookup.made_in;
  });
}

void DirectoryCache::read(const CacheKey& key, CacheLookup& lookup, bool first) const {
  const fs::path file = file_of(key);
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    if (errno != ENOENT) warn_about(file, last_error());
    return;
  }
  struct stat info {};
  Bytes bytes;
  std::string why;
  if (::fstat(descriptor, &info) != 0) {
    why = last_error();
  } else if (!S_ISREG(info.st_mode)) {
    why = "it is not a file";
  } else {
    bytes.resize(static_cast<std::size_t>(info.st_size));
    std::size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t size = ::read(descriptor, bytes.data() + done, bytes.size() - done);
      if (size < 0 && errno == EINTR) continue;
      if (size < 0) why = last_error();
      if (size <= 0) break;
      done += static_cast<std::size_t>(size);
    }
    bytes.resize(done);
    // The time of the last use decides what is removed first; a folder that cannot be written keeps the old
    // one.
    if (why.empty() && ::futimens(descriptor, nullptr) != 0) errno = 0;
  }
  ::close(descriptor);
  if (!why.empty()) {
    warn_about(file, why);
    return;
  }
  try {
    const std::string name = "compile cache: " + file.string();
    const auto fields = unframed(kEntryKind, bytes, name, std::string(kRemedy));
    ByteReader in(fields, name, std::string(kRemedy));
    const std::chrono::microseconds made_in(in.number<std::int64_t>());
    if (made_in.count() < 0) in.fail("it was made in less than no time");
    const auto contents = static_cast<std::ptrdiff_t>(bytes.size() - in.remaining());
    bytes.erase(bytes.begin(), bytes.begin() + contents);
    lookup.entry = std::move(bytes);
    lookup.made_in = made_in;
  } catch (const ValueError& error) {
    warn_once("cache", error.what());
    if (first) count([](CacheCounts& counts) { ++counts.damaged; });
  }
}

std::optional<Bytes> DirectoryCache::find(const CacheKey& key) const {
  if (!usable_) return std::nullopt;
  CacheLookup lookup;
  read(key, lookup);
  if (lookup.entry)
    count_hit(lookup, /*waited=*/false);
  else
    count([](CacheCounts& counts) { ++counts.misses; });
  return std::move(lookup.entry);
}

CacheLookup DirectoryCache::find_or_reserve(const CacheKey& key, std::string_view what, Busy busy) const {
  CacheLookup lookup;
  if (!usable_) {
    count([](CacheCounts& counts) { ++counts.misses; });
    return lookup;
  }
  read(key, lookup);
  if (lookup.entry) {
    count_hit(lookup, /*waited=*/false);
    return lookup;
  }
  const fs::path file = file_of(key);
  fs::path lock_file = file;
  lock_file.replace_extension(".lock");
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + (busy == Busy::Wait ? options_.longest_wait : std::chrono::milliseconds(0));
  const auto left = [&] {
    return std::max(std::chrono::milliseconds(0),
                    std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()));
  };
  EntryLock lock = EntryLock::acquire(lock_file, left(), [&] { return file_exists(file); });
  const bool waited = lock.waited();
  // Also if it did not wait: another process may have stored the entry, and released the lock, since the look
  // above.
  read(key, lookup, /*first=*/false);
  if (!lookup.entry && lock.outcome() == EntryLock::Outcome::Done) {
    // A damaged entry, which another process is replacing.
    lock = EntryLock::acquire(lock_file, left(), [] { return false; });
    read(key, lookup, /*first=*/false);
  }
  if (lookup.entry) {
    count_hit(lookup, waited);
    return lookup;
  }
  count([](CacheCounts& counts) { ++counts.misses; });
  if (!lock.held()) {
    const bool timed_out = lock.outcome() == EntryLock::Outcome::TimedOut;
    if (busy == Busy::GoOn && timed_out) return lookup;
    lookup.timed_out = timed_out;
    warn_about(lock_file, fmt::format("{}; {} is compiled without the cache", lock.why(), what));
    return lookup;
  }
  lookup.reservation.cache_ = this;
  lookup.reservation.key_ = key;
  lookup.reservation.lock_ = std::move(lock);
  return lookup;
}

bool DirectoryCache::replace(const CacheKey& key, std::span<const std::uint8_t> bytes,
                             std::chrono::microseconds made_in) const {
  return usable_ && write(key, bytes, made_in);
}

bool DirectoryCache::write(const CacheKey& key, std::span<const std::uint8_t> contents,
                           std::chrono::microseconds made_in) const {
  static std::atomic<unsigned> serial{0};
  const fs::path file = file_of(key);
  const fs::path temporary = fmt::format("{}.{}.{}.tmp", file.string(), ::getpid(), serial.fetch_add(1));
  ByteWriter fields;
  fields.bytes.reserve(sizeof(std::int64_t) + contents.size());
  fields.number(static_cast<std::int64_t>(made_in.count()));
  fields.raw(contents);
  const Bytes bytes = framed(kEntryKind, fields.bytes);
  if (static_cast<std::int64_t>(bytes.size()) > options_.max_bytes) {
    refuse("larger than PENSTOCK_CACHE_MB");
    return false;
  }
  const int descriptor = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor < 0) {
    warn_about(options_.folder, fmt::format("an entry cannot be written: {}", last_error()));
    return false;
  }
  bool written = write_all(descriptor, bytes);
  std::string why = written ? "" : last_error();
  if (::close(descriptor) != 0 && written) written = false, why = last_error();
  if (written && ::rename(temporary.c_str(), file.c_str()) != 0) written = false, why = last_error();
  if (!written) {
    ::unlink(temporary.c_str());
    warn_about(options_.folder, fmt::format("an entry cannot be written: {}", why));
    return false;
  }
  count([](CacheCounts& counts) { ++counts.stored; });
  limit_size(file);
  return true;
}

void DirectoryCache::discard(const CacheKey& key, const std::string& why) const {
  const fs::path file = file_of(key);
  warn_once("cache", fmt::format("compile cache: {}: {}; {}", file.string(), why, kRemedy));
  ::unlink(file.c_str());
  count([](CacheCounts& counts) { ++counts.damaged; });
}

void DirectoryCache::limit_size(const fs::path& keep) const {
  struct Found {
    fs::path file;
    std::int64_t bytes = 0;
    fs::file_time_type used;
  };
  std::vector<Found> entries;
  std::int64_t total = 0;
  std::error_code error;
  const auto now = fs::file_time_type::clock::now();
  for (fs::directory_iterator it(options_.folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;  // files may vanish meanwhile
    const fs::path& file = it->path();
    const auto used = fs::last_write_time(file, ignored);
    if (ignored) continue;
    if (file.extension() == ".tmp" && now - used > kOldTemporary) ::unlink(file.c_str());
    if (file.extension() != ".entry") continue;
    const auto bytes = fs::file_size(file, ignored);
    if (ignored) continue;
    entries.push_back({file, static_cast<std::int64_t>(bytes), used});
    total += entries.back().bytes;
  }
  if (total <= options_.max_bytes) return;
  std::sort(entries.begin(), entries.end(), [](const Found& a, const Found& b) { return a.used < b.used; });
  for (const Found& entry : entries) {
    if (total <= options_.max_bytes) return;
    if (entry.file == keep) continue;
    if (::unlink(entry.file.c_str()) != 0) continue;
    total -= entry.bytes;
    count([](CacheCounts& counts) { ++counts.removed; });
  }
}

CacheEnvironment cache_environment() {
  CacheEnvironment environment;
  environment.max_bytes =
      env_int("PENSTOCK_CACHE_MB", 1, std::int64_t{1} << 40).value_or(4096) * (std::int64_t{1} << 20);
  if (const auto folder = env_text("PENSTOCK_CACHE")) {
    environment.off = *folder == "off";
    environment.asked_for = !environment.off;
    if (environment.asked_for) environment.folder = *folder;
  } else if (const auto base = env_text("XDG_CACHE_HOME")) {
    environment.folder = fs::path(*base) / "penstock";
  } else if (const auto home = env_text("HOME")) {
    environment.folder = fs::path(*home) / ".cache" / "penstock";
  }
  return environment;
}

}  // namespace penstock::graph
