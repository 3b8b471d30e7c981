// The keys and values of a rendezvous store, and the messages by which ranks use them.
//
// Keys and values are bytes of limited size. A counter is a value that holds a decimal number, as in c10d's
// stores. Thread safety: all functions of StoreTable may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/comm/message/message.h"

namespace penstock::comm {

inline constexpr std::size_t kMaxStoreKey = std::size_t{64} << 10;
inline constexpr std::size_t kMaxStoreValue = std::size_t{16} << 20;
inline constexpr std::size_t kMaxStoreBytes = std::size_t{1} << 30;  // of all keys and values together
// A compare-and-set carries two values.
inline constexpr std::size_t kMaxStoreMessage = 2 * kMaxStoreValue + (std::size_t{1} << 20);

enum class StoreOperation : std::uint8_t { Set = 1, Get, Add, CompareSet, Delete, Check, Count };

struct StoreRequest {
  std::uint64_t number = 0;  // repeated in the reply
  StoreOperation operation = StoreOperation::Check;
  std::vector<std::string> keys;  // one; for Check any number, for Count none
  std::string value;              // Set: the value; CompareSet: the new one
  std::string expected;           // CompareSet
  std::int64_t amount = 0;        // Add

  std::string to_bytes() const;
  // Throws MismatchError for bytes that are no request.
  static StoreRequest from_bytes(std::string_view bytes);
};

struct StoreReply {
  std::uint64_t number = 0;
  bool found = false;       // Get: the key is set; Delete: it was; Check: all of them are
  std::string value;        // Get; CompareSet: the value afterwards
  std::int64_t amount = 0;  // Add: the sum; Count
  std::string refused;      // not empty: nothing was done, and why

  std::string to_bytes() const;
  static StoreReply from_bytes(std::string_view bytes);
};

class StoreTable {
 public:
  // Never throws for the contents of a request: `refused` says what is wrong with it.
  StoreReply apply(const StoreRequest& request);

 private:
  void put(const std::string& key, std::string value);

  std::mutex mutex_;  // guards the members below
  std::map<std::string, std::string, std::less<>> values_;
  std::size_t bytes_ = 0;
};

}  // namespace penstock::comm
