// A whole file mapped into memory for reading.
//
// The mapping stays valid when the file is deleted. If another process truncates the file while it is mapped,
// touching the missing part ends this process (SIGBUS): replace files by rename.
// Thread safety: immutable; any number of threads may read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>

namespace penstock {

// Thrown by MappedFile. Callers catch it and report the failure with their own error type and remedy.
class MapFileError : public std::runtime_error {
 public:
  enum class Step { Open, Examine, CheckType, Map };
  // `reason`: the system's message; "it is not a plain file" for CheckType.
  MapFileError(Step step, const std::string& reason) : std::runtime_error(reason), step_(step) {}
  Step step() const { return step_; }

 private:
  Step step_;
};

class MappedFile {
 public:
  // Maps no file: bytes() is empty.
  MappedFile() = default;
  // An empty file has no bytes. Throws MapFileError if the file cannot be read or is not a plain file.
  explicit MappedFile(const std::filesystem::path& path);
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

}  // namespace penstock
