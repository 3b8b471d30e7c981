// The files to train on: found under given paths, checked, in an order that is the same on every machine.
//
//   SourceOptions options;
//   options.paths = {"src", "include"};
//   options.extensions = {".h", ".cpp"};
//   for (const SourceFile& file : find_sources(options).files) ...
//
// Folders are searched to the bottom; links are followed, and a file or folder that can be reached twice (a link back,
// overlapping paths) is taken once. A path that is given and not there is always a ConfigError. What is found but cannot be
// used (unreadable, empty, binary) is an error too, unless `skip_bad_files` is set: then it is listed. Files outside the
// limits of size or beyond the cap are left out because the caller asked for it, and only counted. There are no limits by
// default, except for the default sources.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::train {

struct SourceOptions {
  std::vector<std::filesystem::path> paths;  // empty: default_source_paths(), whose bad files are always skipped
  // With the dot, any case; "" for names without one (the C++ standard headers). Empty: all files of a given path, and
  // those of C++ for the default paths. A file that is named itself is taken whatever its extension.
  std::vector<std::string> extensions;
  // 0: no limit, and kDefaultSourceFileBytes for the default sources, among which are a few huge generated files.
  std::uint64_t max_file_bytes = 0;
  // Bytes of all files together at most; 0: no cap. Which files stay is decided by the checksums of their paths, so that a
  // cap takes something of everything. If none fits, the first of them is cut.
  std::uint64_t cap_bytes = 0;
  bool skip_bad_files = false;
};

struct SourceFile {
  std::filesystem::path path;
  std::string relative;  // to the given path it was found under, with '/'
  std::uint64_t bytes = 0;
  std::uint64_t key = 0;  // checksum of `relative`: decides between training and validation
  bool cut = false;       // by the cap: only its first `bytes` are taken
};

struct BadFile {
  std::filesystem::path path;
  std::string why;
};

struct SourceList {
  std::vector<SourceFile> files;  // sorted by given path, then by relative path
  std::vector<BadFile> bad;       // skipped
  std::uint64_t bytes = 0;
  std::uint64_t max_file_bytes = 0;  // that was used; 0: none
  std::uint64_t too_large = 0;       // files above it
  std::uint64_t beyond_cap = 0;      // files left out by the cap
};

inline constexpr std::uint64_t kDefaultSourceFileBytes = std::uint64_t{1} << 20;

// The C++ headers that are on every machine with Penstock: those of the standard library and of LibTorch. May be empty.
std::vector<std::filesystem::path> default_source_paths();
// ".h", ".hpp", ... and "" for names without extension.
const std::vector<std::string>& cpp_extensions();

// Throws ConfigError as said above, and when nothing is left.
SourceList find_sources(const SourceOptions& options);

// The paths with patterns (*, ?, [...]) in place of them what they match, sorted. A path that is there is no pattern. Throws
// ConfigError for a pattern that nothing matches.
std::vector<std::filesystem::path> expand_patterns(const std::vector<std::filesystem::path>& paths);

// The text of a file, a piece of at most 1 MiB at a time: files may be larger than memory. Throws ConfigError when it cannot be
// read, is empty or is binary (has a zero byte); `piece` has then been called for what comes before.
void read_source(const SourceFile& file, const std::function<void(std::string_view)>& piece);

}  // namespace penstock::train
