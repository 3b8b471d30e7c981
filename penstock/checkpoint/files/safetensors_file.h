// Files of a checkpoint, mapped into memory for reading.
//
// Checkpoints are never changed once they have their name, so a mapping is not truncated under a reader.
// Thread safety: any number of threads may read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

#include "penstock/base/mapped_file.h"
#include "penstock/checkpoint/files/safetensors.h"

namespace penstock::checkpoint {

// Throws CheckpointError that names the path and the cause.
MappedFile map_checkpoint_file(const std::filesystem::path& path);

class SafetensorsFile {
 public:
  // Checks the header, not the values. Throws CheckpointError.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const Header& header() const { return header_; }
  // `entry` must be an entry of this header.
  std::span<const std::uint8_t> data(const TensorEntry& entry) const {
    return file_.bytes().subspan(header_.data_begin + entry.begin, entry.end - entry.begin);
  }

 private:
  MappedFile file_;
  Header header_;
};

}  // namespace penstock::checkpoint
