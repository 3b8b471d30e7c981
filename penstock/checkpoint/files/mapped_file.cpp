#include "penstock/checkpoint/files/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "penstock/checkpoint/files/checkpoint_error.h"

namespace penstock::checkpoint {

namespace {

[[noreturn]] void refuse(const std::filesystem::path& path, int error) {
  throw CheckpointError(fmt::format("cannot read {}: {}", path.string(), std::generic_category().message(error)));
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) refuse(path, errno);
  struct stat facts {};
  if (::fstat(file, &facts) != 0) {
    const int error = errno;
    ::close(file);
    refuse(path, error);
  }
  if (!S_ISREG(facts.st_mode)) {
    ::close(file);
    throw CheckpointError(fmt::format("cannot read {}: it is not a regular file", path.string()));
  }
  size_ = static_cast<std::size_t>(facts.st_size);
  if (size_ > 0) {
    begin_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    if (begin_ == MAP_FAILED) {
      const int error = errno;
      begin_ = nullptr;
      ::close(file);
      refuse(path, error);
    }
  }
  ::close(file);
}

MappedFile::MappedFile(MappedFile&& other) noexcept : begin_(std::exchange(other.begin_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(begin_, other.begin_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (begin_ != nullptr) ::munmap(begin_, size_);
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(path), header_(parse_header(file_.bytes(), file_.bytes().size(), path.string())) {}

}  // namespace penstock::checkpoint
