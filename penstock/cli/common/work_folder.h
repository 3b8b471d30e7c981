// A folder that a command and the ranks it starts work in. Gone with the object unless the user has named it.
#pragma once

#include <filesystem>
#include <string>

namespace penstock::cli {

class WorkFolder {
 public:
  // `keep`: made there, and kept; it must be new or empty. Else under the temporary folder, named after `purpose`. Throws ConfigError.
  explicit WorkFolder(const std::string& purpose, const std::string& keep = {});
  ~WorkFolder();
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::string purpose_;
  bool keeps_;
  std::filesystem::path path_;
};

}  // namespace penstock::cli
