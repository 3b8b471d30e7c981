// Maps a file of training data into memory, with errors for the user of the data settings.
#pragma once

#include <filesystem>
#include <string_view>

#include "penstock/base/mapped_file.h"

namespace penstock::train {

// `expected` is for messages: "a token shard". Throws ConfigError that names the file if it cannot be read or
// is not a regular file. An empty file has no bytes.
MappedFile map_data_file(const std::filesystem::path& path, std::string_view expected);

}  // namespace penstock::train
