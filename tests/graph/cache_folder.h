// A folder for what tests keep between runs; it is removed in the end.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>
#include <utility>

#include "penstock/base/files.h"
#include "penstock/compile_options.h"

namespace penstock::graph {

// Keeps whole calls in a folder.
inline CompileOptions options_in(const std::filesystem::path& folder, const std::string& identity = "a test",
                                 CompileOptions options = {}) {
  options.cache = {
      .use = CacheOptions::Use::On, .folder = folder.string(), .identity = identity, .name = "step"};
  return options;
}

class CacheFolder {
 public:
  CacheFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "penstock_calls_XXXXXX").string();
    path = ::mkdtemp(pattern.data());
  }
  ~CacheFolder() { remove_tree(path); }
  CacheFolder(const CacheFolder&) = delete;
  CacheFolder& operator=(const CacheFolder&) = delete;

  CompileOptions options(const std::string& identity = "a test", CompileOptions others = {}) const {
    return options_in(path, identity, std::move(others));
  }

  std::filesystem::path path;
};

}  // namespace penstock::graph
