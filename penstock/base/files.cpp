#include "penstock/base/files.h"

#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace penstock {

namespace {

int remove_entry(const char* path, const struct stat*, int, struct FTW*) { return ::remove(path) == 0 || errno == ENOENT ? 0 : -1; }

}  // namespace

void remove_tree(const std::filesystem::path& path, std::error_code& error) noexcept {
  constexpr int kOpenFolders = 16;
  error.clear();
  errno = 0;
  if (::nftw(path.c_str(), remove_entry, kOpenFolders, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT) error.assign(errno, std::generic_category());
}

void remove_tree(const std::filesystem::path& path) {
  std::error_code error;
  remove_tree(path, error);
  if (error) throw std::filesystem::filesystem_error("remove_tree", path, error);
}

}  // namespace penstock
