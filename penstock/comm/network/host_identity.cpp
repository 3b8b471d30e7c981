#include "penstock/comm/network/host_identity.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <optional>
#include <random>

#include "penstock/base/log.h"

namespace penstock::comm {

namespace {

constexpr std::size_t kTokenBytes = 32;

// The number of a namespace of this process; empty if the system does not tell.
std::string namespace_number(const char* kind) {
  struct stat place {};
  if (stat(fmt::format("/proc/self/ns/{}", kind).c_str(), &place) != 0) return "";
  return fmt::format("{}:{}", place.st_dev, place.st_ino);
}

// Returns the token in the file; std::nullopt if there is no file, or none that a rank of this user wrote.
// `missing`: whether there is no file.
std::optional<std::string> read_token(const std::string& path, bool& missing) {
  const int fd = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  missing = fd < 0 && errno == ENOENT;
  if (fd < 0) return std::nullopt;
  struct stat about {};
  char bytes[kTokenBytes];
  const bool ours = fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_uid == geteuid() &&
                    about.st_size == static_cast<off_t>(kTokenBytes) &&
                    read(fd, bytes, kTokenBytes) == static_cast<ssize_t>(kTokenBytes);
  close(fd);
  if (!ours) return std::nullopt;
  return std::string(bytes, kTokenBytes);
}

}  // namespace

std::string machine_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  file >> text;
  return text;
}

std::string random_text() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
}

HostIdentity::HostIdentity(const std::string& run, const std::string& folder)
    : path_(fmt::format("{}/penstock-host-{}", folder, run)) {
  text_ = fmt::format("{}/{}/{}", token(folder), namespace_number("net"), namespace_number("pid"));
}

HostIdentity::~HostIdentity() {
  // By whoever is left: all ranks have read it or given up, and the one that created it may have been killed.
  unlink(path_.c_str());
}

std::string HostIdentity::token(const std::string& folder) {
  const std::string own = random_text();
  // Either the file is there or this rank creates it. It can vanish in between only if someone removes it.
  for (int tries = 0; tries < 8; ++tries) {
    bool missing = false;
    if (const auto known = read_token(path_, missing)) return *known;
    if (!missing) break;
    if (create(own)) return own;
    if (errno != EEXIST) break;
  }
  // Without a common file, this rank is a host of its own: sockets work in any case.
  log().info("comm: no file can be shared in {}, so this rank uses sockets to all others", folder);
  return own;
}

// Creates the file with its content at once: a rank that finds it never reads a part of it.
bool HostIdentity::create(const std::string& token) {
  const std::string draft = fmt::format("{}.{}", path_, token);
  const int fd = open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    if (errno == EEXIST) errno = EACCES;  // of the draft, not of the file: nobody else has this name
    return false;
  }
  const bool written = write(fd, token.data(), token.size()) == static_cast<ssize_t>(token.size());
  close(fd);
  const bool linked = written && link(draft.c_str(), path_.c_str()) == 0;
  const int error = written ? errno : ENOSPC;
  unlink(draft.c_str());
  errno = error;
  return linked;
}

}  // namespace penstock::comm
