#include "penstock/checkpoint/files/safetensors_file.h"

#include <fmt/format.h>

#include "penstock/checkpoint_types.h"

namespace penstock::checkpoint {

MappedFile map_checkpoint_file(const std::filesystem::path& path) {
  try {
    return MappedFile(path);
  } catch (const MapFileError& error) {
    throw CheckpointError(fmt::format("cannot read {}: {}", path.string(), error.what()));
  }
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(map_checkpoint_file(path)),
      header_(parse_header(file_.bytes(), file_.bytes().size(), path.string())) {}

}  // namespace penstock::checkpoint
