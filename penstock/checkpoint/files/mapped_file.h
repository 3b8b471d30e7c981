// A file mapped into memory for reading, and a safetensors file read through one.
//
// The mapping stays valid if the file is deleted. If another program truncates the file while it is mapped,
// accessing the missing part ends the process (SIGBUS); checkpoints are never changed once they have their
// final name.
// Thread safety: any number of threads may read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "penstock/checkpoint/files/safetensors.h"

namespace penstock::checkpoint {

class MappedFile {
 public:
  // Throws CheckpointError naming path and cause.
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::uint8_t> bytes() const { return {static_cast<const std::uint8_t*>(begin_), size_}; }

 private:
  void* begin_ = nullptr;
  std::size_t size_ = 0;
};

class SafetensorsFile {
 public:
  // Checks the header, not the values.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const Header& header() const { return header_; }
  // Returns the bytes of an entry of this header.
  std::span<const std::uint8_t> data(const TensorEntry& entry) const {
    return file_.bytes().subspan(header_.data_begin + entry.begin, entry.end - entry.begin);
  }

 private:
  MappedFile file_;
  Header header_;
};

}  // namespace penstock::checkpoint
