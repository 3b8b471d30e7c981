#include "penstock/base/files.h"

#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

int remove_entry(const char* path, const struct stat*, int, struct FTW*) {
  return ::remove(path) == 0 || errno == ENOENT ? 0 : -1;
}

}  // namespace

void remove_tree(const std::filesystem::path& path, std::error_code& error) noexcept {
  constexpr int kOpenFolders = 16;
  error.clear();
  errno = 0;
  if (::nftw(path.c_str(), remove_entry, kOpenFolders, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT)
    error.assign(errno, std::generic_category());
}

void remove_tree(const std::filesystem::path& path) {
  std::error_code error;
  remove_tree(path, error);
  if (error) throw std::filesystem::filesystem_error("remove_tree", path, error);
}

std::string read_file(const std::filesystem::path& path, std::string_view what, std::string_view remedy) {
  const auto refuse = [&](std::string_view found) {
    throw ConfigError(
        describe(std::string(what) + " " + path.string(), found, "a file that can be read", remedy));
  };
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  const std::unique_ptr<std::FILE, Close> file(std::fopen(path.c_str(), "rb"));
  if (!file) refuse(std::strerror(errno));
  struct stat status {};
  if (::fstat(::fileno(file.get()), &status) != 0) refuse(std::strerror(errno));
  if (S_ISDIR(status.st_mode)) refuse("a folder");
  if (S_ISCHR(status.st_mode) || S_ISBLK(status.st_mode)) refuse("a device");
  std::string text;
  char buffer[65536];
  while (const std::size_t count = std::fread(buffer, 1, sizeof buffer, file.get()))
    text.append(buffer, count);
  if (std::ferror(file.get()) != 0) refuse(std::strerror(errno));
  return text;
}

bool file_exists(const std::filesystem::path& path) noexcept {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

}  // namespace penstock
