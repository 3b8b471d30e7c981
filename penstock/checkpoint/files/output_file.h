// Writing files so that a failure is noticed and named.
//
// Thread rule: one thread per file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace penstock::checkpoint {

// For tests of full and broken disks: asked before every write, returns 0 or the errno that the write shall fail with.
using WriteFault = std::function<int(const std::filesystem::path& path, std::uint64_t offset, std::uint64_t bytes)>;

class OutputFile {
 public:
  enum class Mode { Create, Existing };
  OutputFile(std::filesystem::path path, Mode mode, WriteFault fault = {});
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  // Sets the size and asks the file system for the room, so that a full disk shows before anything is written.
  void reserve(std::uint64_t bytes);
  void write(std::uint64_t offset, std::span<const std::uint8_t> bytes);
  // Returns when the bytes are on the disk.
  void sync();

 private:
  std::filesystem::path path_;
  WriteFault fault_;
  int file_ = -1;
};

// A whole new file; who needs it on the disk syncs it.
void write_file(const std::filesystem::path& path, const std::string& text, const WriteFault& fault = {});

// What was written to an existing file is on the disk when it returns.
void sync_file(const std::filesystem::path& path);

// The names in a folder are on the disk when it returns.
void sync_folder(const std::filesystem::path& folder);

// Throws CheckpointError "cannot ACTION PATH: CAUSE; REMEDY" for an errno.
[[noreturn]] void throw_file_error(const std::string& action, const std::filesystem::path& path, int error);

}  // namespace penstock::checkpoint
