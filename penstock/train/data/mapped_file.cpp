#include "penstock/train/data/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "penstock/errors.h"

namespace penstock::train {

namespace {

struct Descriptor {
  int number = -1;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

}  // namespace

MappedFile MappedFile::open(const std::filesystem::path& path, std::string_view expected) {
  const auto refuse = [&](const char* what) {
    throw ConfigError(describe(fmt::format("{}: {}", path.string(), what), std::strerror(errno),
                               fmt::format("{} that can be read", expected), "see penstock data --help"));
  };
  // Non-blocking: opening a named pipe would wait for a writer.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.number < 0) refuse("cannot be opened");
  struct ::stat status {};
  if (::fstat(file.number, &status) != 0) refuse("cannot be examined");
  if (!S_ISREG(status.st_mode)) throw ConfigError(describe(path.string(), "something that is not a regular file", expected));
  MappedFile mapped;
  mapped.size_ = static_cast<std::size_t>(status.st_size);
  if (mapped.size_ == 0) return mapped;  // an empty file cannot be mapped
  void* address = ::mmap(nullptr, mapped.size_, PROT_READ, MAP_SHARED, file.number, 0);
  if (address == MAP_FAILED) {
    mapped.size_ = 0;
    refuse("cannot be mapped");
  }
  mapped.address_ = address;
  return mapped;
}

MappedFile::~MappedFile() {
  if (address_ != nullptr) ::munmap(address_, size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept : address_(std::exchange(other.address_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace penstock::train
