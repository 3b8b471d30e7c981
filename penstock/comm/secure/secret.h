// The secret that the ranks of one job share, and that nobody else knows.
//
// `penstock launch` and `penstock train` make a random one for each job and pass it to their ranks in
// PENSTOCK_SECRET; whoever starts ranks in another way sets that variable. The text itself is never sent: the
// two ends of a connection prove to each other that they know it (handshake.h).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "penstock/comm/secure/sha256.h"

namespace penstock::comm {

inline constexpr const char* kSecretVariable = "PENSTOCK_SECRET";
// Whoever records a handshake can try texts at leisure, so a short one would be found.
inline constexpr std::size_t kShortestSecret = 16;
inline constexpr std::size_t kLongestSecret = 4096;

// The key of a job, derived from its secret. A value; it is not printed anywhere.
class JobKey {
 public:
  // Any text; `check_secret` says which ones users may set.
  explicit JobKey(std::string_view secret);

  // A digest under this key, for one purpose: digests of different purposes tell nothing about each other.
  Digest digest(std::string_view purpose, std::string_view bytes) const;

 private:
  Digest key_;
};

// Throws ConfigError unless users may set this text as PENSTOCK_SECRET. The message does not repeat it.
void check_secret(std::string_view secret);

// Returns a new secret: 256 random bits in hexadecimal digits.
std::string make_secret();

// Returns random bytes of the operating system. Throws StateError if it has none.
std::string random_bytes(std::size_t count);

}  // namespace penstock::comm
