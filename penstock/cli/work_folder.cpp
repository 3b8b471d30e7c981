#include "penstock/cli/work_folder.h"

#include <stdlib.h>

#include <system_error>

#include "penstock/base/errors.h"
#include "penstock/base/files.h"
#include "penstock/base/log.h"

namespace penstock::cli {

namespace fs = std::filesystem;

WorkFolder::WorkFolder(const std::string& purpose, const std::string& keep) : purpose_(purpose), keeps_(!keep.empty()) {
  if (keeps_) {
    path_ = fs::absolute(keep);
    if (fs::exists(path_) && !fs::is_empty(path_)) throw ConfigError(describe("--keep", keep, "a folder that is new or empty", "name another one"));
    fs::create_directories(path_);
    return;
  }
  std::string name = (fs::temp_directory_path() / ("penstock-" + purpose + "-XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr) throw ConfigError(describe("temporary folder", name, "a place that can be written", "set TMPDIR"));
  path_ = name;
}

WorkFolder::~WorkFolder() {
  if (keeps_) return;
  std::error_code error;
  remove_tree(path_, error);
  if (error) log().warn("{}: {} could not be removed: {}", purpose_, path_.string(), error.message());
}

}  // namespace penstock::cli
