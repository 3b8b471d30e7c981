// A whole file mapped into memory for reading.
//
//   const MappedFile file = MappedFile::open("train.bin", "a token file");
//   file.bytes()[0]
//
// Immutable; any number of threads may read. The file must not be truncated while it is mapped (the kernel
// would kill the process): replace files by rename.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

namespace penstock::train {

class MappedFile {
 public:
  // An empty file.
  MappedFile() = default;
  // `expected` is for messages: "a token shard". Throws ConfigError that names the file if it cannot be
  // opened or is not a regular file. An empty file has no bytes.
  static MappedFile open(const std::filesystem::path& path, std::string_view expected);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::uint8_t> bytes() const { return {static_cast<const std::uint8_t*>(address_), size_}; }

 private:
  void* address_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace penstock::train
