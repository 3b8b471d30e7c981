// A folder for what tests keep between runs; it is removed in the end.
#pragma once

#include <filesystem>
#include <string>
#include <utility>

#include "penstock/compile_options.h"
#include "tests/temporary_folder.h"

namespace penstock::graph {

// Keeps whole calls in a folder.
inline CompileOptions options_in(const std::filesystem::path& folder, const std::string& identity = "a test",
                                 CompileOptions options = {}) {
  options.cache = {
      .use = CacheOptions::Use::On, .folder = folder.string(), .identity = identity, .name = "step"};
  return options;
}

class CacheFolder : public test::TemporaryFolder {
 public:
  CompileOptions options(const std::string& identity = "a test", CompileOptions others = {}) const {
    return options_in(path, identity, std::move(others));
  }
};

}  // namespace penstock::graph
