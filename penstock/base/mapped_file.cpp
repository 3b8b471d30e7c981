#include "penstock/base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace penstock {

namespace {

struct MappedFileDescriptor {
  int number = -1;
  ~MappedFileDescriptor() {
    if (number >= 0) ::close(number);
  }
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  const auto fail = [](MapFileError::Step step) {
    throw MapFileError(step, std::generic_category().message(errno));
  };
  // Not blocking: opening a named pipe would wait for a writer.
  const MappedFileDescriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.number < 0) fail(MapFileError::Step::Open);
  struct ::stat status {};
  if (::fstat(file.number, &status) != 0) fail(MapFileError::Step::Examine);
  if (!S_ISREG(status.st_mode)) throw MapFileError(MapFileError::Step::CheckType, "it is not a plain file");
  if (status.st_size == 0) return;  // mmap refuses a length of 0
  const auto size = static_cast<std::size_t>(status.st_size);
  void* const address = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.number, 0);
  if (address == MAP_FAILED) fail(MapFileError::Step::Map);
  address_ = address;
  size_ = size;
}

MappedFile::~MappedFile() {
  if (address_ != nullptr) ::munmap(address_, size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace penstock
