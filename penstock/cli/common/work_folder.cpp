#include "penstock/cli/common/work_folder.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <system_error>

#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/base/log.h"
#include "penstock/errors.h"

namespace penstock::cli {

namespace fs = std::filesystem;

WorkFolder::WorkFolder(const std::string& purpose, const std::string& keep)
    : purpose_(purpose), keeps_(!keep.empty()) {
  if (keeps_) {
    std::error_code error;
    path_ = fs::absolute(keep, error);
    if (!error) fs::create_directories(path_, error);
    const bool empty = !error && fs::is_empty(path_, error);
    if (error || !empty)
      throw ConfigError(describe("--keep", error ? fmt::format("{} ({})", keep, error.message()) : keep,
                                 "a new or empty folder", "choose another folder"));
    return;
  }
  std::error_code error;
  const fs::path temporary = fs::temp_directory_path(error);
  if (error)
    throw ConfigError(describe("temporary folder", error.message(), "a writable folder", "set TMPDIR"));
  std::string name = (temporary / ("penstock-" + purpose + "-XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr)
    throw ConfigError(describe("temporary folder", name, "a writable folder", "set TMPDIR"));
  path_ = name;
}

WorkFolder::~WorkFolder() {
  if (keeps_) return;
  std::error_code error;
  remove_tree(path_, error);
  if (error) log().warn("{}: {} could not be removed: {}", purpose_, path_.string(), error.message());
}

}  // namespace penstock::cli
