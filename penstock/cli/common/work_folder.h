// A folder shared by a command and the ranks it starts. Removed with the object unless the user named it.
#pragma once

#include <filesystem>
#include <string>

namespace penstock::cli {

class WorkFolder {
 public:
  // With `keep`, creates and keeps that folder, which must be new or empty. Otherwise creates a temporary
  // folder named after `purpose`. Throws ConfigError.
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
