#include "penstock/comm/secure/secret.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::comm {

JobKey::JobKey(std::string_view secret)
    : key_(Sha256().update("penstock: key of a job, 1").update(secret).finish()) {}

Digest JobKey::digest(std::string_view purpose, std::string_view bytes) const {
  // The length of the purpose comes first: no purpose and bytes run into each other.
  const char length = static_cast<char>(purpose.size());
  return HmacSha256(as_text(key_)).update({&length, 1}).update(purpose).update(bytes).finish();
}

void check_secret(std::string_view secret) {
  if (secret.size() >= kShortestSecret && secret.size() <= kLongestSecret) return;
  throw ConfigError(describe(fmt::format("environment variable {}", kSecretVariable),
                             fmt::format("a text of {} characters", secret.size()),
                             fmt::format("{} to {} characters", kShortestSecret, kLongestSecret),
                             "make one with: head -c 32 /dev/urandom | base64"));
}

std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  std::size_t got = 0;
  while (got < count) {
    const ssize_t n = getrandom(bytes.data() + got, count - got, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      throw StateError(
          fmt::format("the system returned no random numbers: {}; check that the sandbox of this process "
                      "allows the system call getrandom",
                      std::strerror(errno)));
    got += static_cast<std::size_t>(n);
  }
  return bytes;
}

std::string make_secret() {
  std::string text;
  for (const char byte : random_bytes(32)) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

}  // namespace penstock::comm
