#include "penstock/train/data/map_data_file.h"

#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::train {

MappedFile map_data_file(const std::filesystem::path& path, std::string_view expected) {
  const auto refuse = [&](const char* what, const MapFileError& error) {
    throw ConfigError(describe(fmt::format("{}: {}", path.string(), what), error.what(),
                               fmt::format("{} that can be read", expected), "see penstock data --help"));
  };
  try {
    return MappedFile(path);
  } catch (const MapFileError& error) {
    switch (error.step()) {
      case MapFileError::Step::Open:
        refuse("cannot be opened", error);
        break;
      case MapFileError::Step::Examine:
        refuse("cannot be examined", error);
        break;
      case MapFileError::Step::Map:
        refuse("cannot be mapped", error);
        break;
      case MapFileError::Step::CheckType:
        break;
    }
    throw ConfigError(describe(path.string(), "something that is not a regular file", expected));
  }
}

}  // namespace penstock::train
