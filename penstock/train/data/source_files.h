// Finds the files to train on under given paths, in an order that is the same on every machine.
//
//   SourceOptions options;
//   options.paths = {"src", "include"};
//   options.extensions = {".h", ".cpp"};
//   for (const SourceFile& file : find_sources(options).files) ...
//
// Folders are searched recursively; links are followed, and a file or folder that can be reached twice (a
// link back, overlapping paths) is used once. A given path that does not exist is always a ConfigError. A
// file that is found but unusable (unreadable, empty, binary) is an error, too, unless `skip_bad_files` is
// set: then it is listed. Files above the size limit or beyond the cap are skipped as requested and only
// counted. There are no limits by default, except for the default sources.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::train {

struct SourceOptions {
  std::vector<std::filesystem::path>
      paths;  // empty: default_source_paths(), whose bad files are always skipped
  // With the dot, any case; "" for names without one (the C++ standard headers). Empty: all files of a given
  // path, and C++ files for the default paths. A file that is given itself is used whatever its extension.
  std::vector<std::string> extensions;
  // 0: no limit, but kDefaultSourceFileBytes for the default sources, which include a few huge generated
  // files.
  std::uint64_t max_file_bytes = 0;
  // Maximum bytes of all files together; 0: no cap. The checksums of their paths decide which files stay, so
  // that a cap selects from everywhere. If no file fits, the first one is truncated.
  std::uint64_t cap_bytes = 0;
  bool skip_bad_files = false;
};

struct SourceFile {
  std::filesystem::path path;
  std::string relative;  // to the given path it was found under, with '/'
  std::uint64_t bytes = 0;
  std::uint64_t key = 0;  // checksum of `relative`: decides between training and validation
  bool cut = false;       // truncated by the cap to its first `bytes`
};

struct BadFile {
  std::filesystem::path path;
  std::string why;
};

struct SourceList {
  std::vector<SourceFile> files;  // sorted by given path, then by relative path
  std::vector<BadFile> bad;       // skipped
  std::uint64_t bytes = 0;
  std::uint64_t max_file_bytes = 0;  // limit that was used; 0: none
  std::uint64_t too_large = 0;       // files above the limit
  std::uint64_t beyond_cap = 0;      // files skipped because of the cap
};

inline constexpr std::uint64_t kDefaultSourceFileBytes = std::uint64_t{1} << 20;

// C++ headers that exist on every machine with Penstock: the standard library and LibTorch. May be empty.
std::vector<std::filesystem::path> default_source_paths();
// ".h", ".hpp", ... and "" for names without extension.
const std::vector<std::string>& cpp_extensions();

// Throws ConfigError in the cases above, and if no file remains.
SourceList find_sources(const SourceOptions& options);

// Replaces patterns (*, ?, [...]) among the paths by their sorted matches. An existing path is not a pattern.
// Throws ConfigError for a pattern without matches.
std::vector<std::filesystem::path> expand_patterns(const std::vector<std::filesystem::path>& paths);

// Reads the text of a file in pieces of at most 1 MiB: files may be larger than memory. Throws ConfigError if
// it cannot be read, is empty or is binary (has a zero byte); `piece` has then already been called for the
// preceding text.
void read_source(const SourceFile& file, const std::function<void(std::string_view)>& piece);

}  // namespace penstock::train
