// A folder of entries, each the bytes stored under a key, shared by all processes that use the folder.
//
//   const DirectoryCache cache({.folder = "/home/me/.cache/penstock"});
//   CacheLookup found = cache.find_or_reserve(key, "step of stage 0");
//   if (!found.entry) {
//     ... make the bytes; other processes that need this entry wait ...
//     found.reservation.store(bytes, took);  // or not: then the next one who waits makes it
//   }
//
// An entry has the time that making it took, so that the counts say what the hits have saved.
//
// Nothing here fails the run. What cannot be read, locked or written is reported by one warning for each file
// and reason, and the caller works as if the entry did not exist: a full disk, a folder without permission, a
// lock that is not released within the limit, an entry that is damaged or of another version (it is
// replaced).
//
// Files: KEY.entry; KEY.lock while an entry is being made; KEY.entry.PID.tmp while it is being written, then
// renamed. The total size is bounded: after a store, the entries that were not used for the longest time are
// removed. Thread safety: any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "penstock/graph/cache/byte_stream.h"
#include "penstock/graph/cache/cache_key.h"
#include "penstock/graph/cache/entry_lock.h"

namespace penstock::graph {

// What happened so far.
struct CacheCounts {
  std::size_t hits = 0, misses = 0, stored = 0;
  std::size_t waited = 0;                      // hits that another process made meanwhile
  std::size_t damaged = 0;                     // entries that were replaced
  std::size_t removed = 0;                     // to keep the folder within its size
  std::chrono::microseconds time_saved{0};     // in which the entries of the hits were made
  std::map<std::string, std::size_t> refused;  // what was not cached, by reason

  std::string text() const;  // "3 hits, 1 miss, 1 stored"
};

struct DirectoryCacheOptions {
  std::filesystem::path folder;
  std::int64_t max_bytes = std::int64_t{4} << 30;
  // For another process that makes an entry, in one lookup.
  std::chrono::milliseconds longest_wait = std::chrono::minutes(5);
};

class DirectoryCache;

// The right to make an entry. Until it is destroyed, other processes wait for it.
class CacheReservation {
 public:
  CacheReservation() = default;
  // Writes the entry, which was made in this time, and ends the reservation. Returns whether it was written.
  bool store(std::span<const std::uint8_t> bytes, std::chrono::microseconds made_in = {});
  void release() { lock_.release(); }
  // Whether an entry can be stored at all.
  explicit operator bool() const { return cache_ != nullptr; }

 private:
  friend class DirectoryCache;
  const DirectoryCache* cache_ = nullptr;
  CacheKey key_;
  EntryLock lock_;
};

struct CacheLookup {
  std::optional<Bytes> entry;
  std::chrono::microseconds made_in{0};  // how long it took to make the entry
  CacheReservation reservation;          // if there is no entry
  bool timed_out = false;                // another process held the lock for the longest wait
};

class DirectoryCache {
 public:
  explicit DirectoryCache(DirectoryCacheOptions options);

  // What to do if another process is making the entry.
  enum class Busy : std::uint8_t {
    Wait,
    GoOn  // without a reservation
  };
  // Returns the entry; or reserves it, or does what `busy` says. `what` is for messages.
  CacheLookup find_or_reserve(const CacheKey& key, std::string_view what, Busy busy = Busy::Wait) const;
  // Returns the entry if there is one.
  std::optional<Bytes> find(const CacheKey& key) const;
  // Replaces an entry, or adds it, without a reservation.
  bool replace(const CacheKey& key, std::span<const std::uint8_t> bytes,
               std::chrono::microseconds made_in = {}) const;
  // Removes an entry whose contents turned out to be unusable, and warns; the next lookup makes it anew.
  void discard(const CacheKey& key, const std::string& why) const;
  // Counts something that could not be cached.
  void refuse(const std::string& why) const;

  const std::filesystem::path& folder() const { return options_.folder; }
  std::filesystem::path file_of(const CacheKey& key) const {
    return options_.folder / (key.text() + ".entry");
  }
  CacheCounts counts() const;

 private:
  friend class CacheReservation;
  // Sets the entry and its time, if there is one. `first`: a damaged entry is counted; false for another look
  // at it.
  void read(const CacheKey& key, CacheLookup& lookup, bool first = true) const;
  bool write(const CacheKey& key, std::span<const std::uint8_t> bytes,
             std::chrono::microseconds made_in) const;
  void count_hit(const CacheLookup& lookup, bool waited) const;
  void limit_size(const std::filesystem::path& keep) const;
  template <class Change>
  void count(const Change& change) const;

  DirectoryCacheOptions options_;
  bool usable_ = false;
  mutable std::mutex mutex_;
  mutable CacheCounts counts_;
};

// The folder and limits that the environment asks for: PENSTOCK_CACHE (a folder, or "off"), else
// $XDG_CACHE_HOME/penstock, else ~/.cache/penstock; PENSTOCK_CACHE_MB.
struct CacheEnvironment {
  bool off = false;              // PENSTOCK_CACHE is "off"
  bool asked_for = false;        // PENSTOCK_CACHE names a folder
  std::filesystem::path folder;  // empty if there is none: no home folder
  std::int64_t max_bytes = std::int64_t{4} << 30;
};
// Throws ConfigError for a malformed PENSTOCK_CACHE_MB.
CacheEnvironment cache_environment();

}  // namespace penstock::graph
