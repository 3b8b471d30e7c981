#include "penstock/checkpoint/files/blocks.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>

#include "penstock/checkpoint/files/index.h"

namespace penstock::checkpoint {

namespace {

class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path)
      : file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)), error_(file_ < 0 ? errno : 0) {}
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  ~InputFile() {
    if (file_ >= 0) ::close(file_);
  }

  // Returns the number of bytes read; sets `error` if reading failed.
  std::size_t read(std::uint64_t offset, std::span<std::uint8_t> into, int& error) const {
    error = error_;
    std::size_t filled = 0;
    while (error == 0 && filled < into.size()) {
      const ssize_t got =
          ::pread(file_, into.data() + filled, into.size() - filled, static_cast<off_t>(offset + filled));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) error = errno;
      if (got <= 0) break;
      filled += static_cast<std::size_t>(got);
    }
    return filled;
  }

 private:
  int file_;
  int error_;
};

}  // namespace

void read_blocks(const std::filesystem::path& folder, const std::vector<SizedFile>& files,
                 std::uint64_t block_bytes, int share, int shares,
                 const std::function<void(const BlockRead&)>& call) {
  std::uint64_t total = 0, largest = 0;
  for (const SizedFile& file : files) {
    total += block_count(file.bytes, block_bytes);
    largest = std::max(largest, std::min(file.bytes, block_bytes));
  }
  const auto part = static_cast<std::uint64_t>(share), parts = static_cast<std::uint64_t>(shares);
  const std::uint64_t first = total / parts * part + std::min(part, total % parts);
  const std::uint64_t last = first + total / parts + (part < total % parts ? 1 : 0);
  const auto buffer = std::make_unique_for_overwrite<std::uint8_t[]>(largest);
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::uint64_t blocks = block_count(files[i].bytes, block_bytes);
    const std::uint64_t from = std::max(first, number), to = std::min(last, number + blocks);
    if (from < to) {
      const InputFile input(folder / files[i].name);
      for (std::uint64_t block = from - number; block < to - number; ++block) {
        BlockRead read{i, block * block_bytes, std::min(files[i].bytes, (block + 1) * block_bytes), {}, {}};
        int error = 0;
        const std::size_t got = input.read(read.begin, {buffer.get(), read.end - read.begin}, error);
        if (error != 0) read.error = std::generic_category().message(error);
        read.bytes = {buffer.get(), got};
        call(read);
      }
    }
    number += blocks;
  }
}

}  // namespace penstock::checkpoint
