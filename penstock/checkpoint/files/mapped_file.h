// A file mapped into memory for reading, and a safetensors file read through one.
//
// The mapping stays valid when the file is deleted meanwhile. A file that another program cuts while it is mapped ends the
// process when the missing part is touched (SIGBUS); checkpoints are never changed once they have their name.
// Thread rule: any number of threads may read.
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
  // Checks the header; the values are whatever they are.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const Header& header() const { return header_; }
  // Of an entry of this header.
  std::span<const std::uint8_t> data(const TensorEntry& entry) const {
    return file_.bytes().subspan(header_.data_begin + entry.begin, entry.end - entry.begin);
  }

 private:
  MappedFile file_;
  Header header_;
};

}  // namespace penstock::checkpoint
