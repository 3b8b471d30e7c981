// Writes files and reports every failure with path and cause.
//
// Thread safety: one thread per file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace penstock::checkpoint {

// For tests of full and broken disks: called before every write; returns 0 or the errno with which the write
// fails.
using WriteFault =
    std::function<int(const std::filesystem::path& path, std::uint64_t offset, std::uint64_t bytes)>;

class OutputFile {
 public:
  enum class Mode { Create, Existing };
  OutputFile(std::filesystem::path path, Mode mode, WriteFault fault = {});
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  // Sets the size and reserves space in the file system, so that a full disk is detected before anything is
  // written.
  void reserve(std::uint64_t bytes);
  void write(std::uint64_t offset, std::span<const std::uint8_t> bytes);
  // Returns when the data is on disk.
  void sync();

 private:
  std::filesystem::path path_;
  WriteFault fault_;
  int file_ = -1;
};

// Writes a whole new file. Does not sync it.
void write_file(const std::filesystem::path& path, const std::string& text, const WriteFault& fault = {});

// Flushes data written to an existing file to disk.
void sync_file(const std::filesystem::path& path);

// Flushes the names in a folder to disk.
void sync_folder(const std::filesystem::path& folder);

// Throws CheckpointError "cannot ACTION PATH: CAUSE; REMEDY" for an errno.
[[noreturn]] void throw_file_error(const std::string& action, const std::filesystem::path& path, int error);

}  // namespace penstock::checkpoint
