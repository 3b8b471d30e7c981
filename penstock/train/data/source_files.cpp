#include "penstock/train/data/source_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "penstock/base/checksum.h"
#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;

constexpr const char* kSourceRemedy =
    "repair or remove it, or set data.skip_bad_files (--skip-bad-files) to skip it";

// Device and inode of a file, which identify it whatever its path.
using Identity = std::pair<std::uint64_t, std::uint64_t>;

class Search {
 public:
  Search(const SourceOptions& options, std::vector<std::string> extensions)
      : options_(options), extensions_(std::move(extensions)) {}

  void start(const fs::path& root) {
    struct ::stat status {};
    if (::stat(root.c_str(), &status) != 0)
      throw ConfigError(describe(fmt::format("{}: source", root.string()), std::strerror(errno),
                                 "a file or folder that can be read", "give another path"));
    if (S_ISDIR(status.st_mode)) {
      folder(root, status, "");
    } else {
      file(root, status, root.filename().string(), /*named=*/true);
    }
  }

  SourceList& list() { return list_; }

  void bad(const fs::path& path, const std::string& why) {
    if (!options_.skip_bad_files)
      throw ConfigError(describe(fmt::format("{}: source file", path.string()), why, "text", kSourceRemedy));
    list_.bad.push_back({path, why});
  }

 private:
  void folder(const fs::path& path, const struct ::stat& status, const std::string& relative) {
    if (!seen_.insert({status.st_dev, status.st_ino}).second) return;
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error))
      names.push_back(entry->path().filename().string());
    if (error) {
      bad(path, error.message());
      return;
    }
    std::sort(names.begin(), names.end());  // directory order differs between machines
    for (const std::string& name : names) {
      const fs::path child = path / name;
      const std::string inner = relative.empty() ? name : relative + "/" + name;
      struct ::stat found {};
      if (::stat(child.c_str(), &found) != 0) {
        if (wanted(child)) bad(child, std::strerror(errno));  // a broken link
      } else if (S_ISDIR(found.st_mode)) {
        folder(child, found, inner);
      } else {
        file(child, found, inner, /*named=*/false);
      }
    }
  }

  void file(const fs::path& path, const struct ::stat& status, const std::string& relative, bool named) {
    if (!named && !wanted(path)) return;
    if (!seen_.insert({status.st_dev, status.st_ino}).second) return;
    if (!S_ISREG(status.st_mode)) return bad(path, "not a regular file");
    const auto bytes = static_cast<std::uint64_t>(status.st_size);
    if (bytes == 0) return bad(path, "an empty file");
    if (options_.max_file_bytes > 0 && bytes > options_.max_file_bytes) {
      ++list_.too_large;
      return;
    }
    if (::access(path.c_str(), R_OK) != 0) return bad(path, std::strerror(errno));
    list_.files.push_back({path, relative, bytes, checksum64(relative), false});
  }

  bool wanted(const fs::path& path) const {
    if (extensions_.empty()) return true;
    return std::find(extensions_.begin(), extensions_.end(), to_lower(path.extension().string())) !=
           extensions_.end();
  }

  const SourceOptions& options_;
  std::vector<std::string> extensions_;
  std::set<Identity> seen_;
  SourceList list_;
};

// Keeps the files with the lowest checksums while they fit, and does not change their order. If no file fits,
// truncates the first one.
void apply_cap(SourceList& list, std::uint64_t cap) {
  std::vector<std::size_t> order(list.files.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  // Not the checksum of the split: its lowest values are the validation files, which would all be kept.
  std::vector<std::uint64_t> rank(list.files.size());
  for (std::size_t i = 0; i < rank.size(); ++i) rank[i] = checksum64("cap " + list.files[i].relative);
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return std::pair(rank[a], a) < std::pair(rank[b], b); });
  std::vector<bool> kept(list.files.size(), false);
  std::uint64_t total = 0;
  for (const std::size_t i : order) {
    if (list.files[i].bytes > cap - total) continue;
    kept[i] = true;
    total += list.files[i].bytes;
  }
  if (total == 0 && !order.empty()) {
    SourceFile& first = list.files[order.front()];
    first.cut = kept[order.front()] = true;
    first.bytes = cap;
  }
  std::vector<SourceFile> files;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (kept[i]) files.push_back(std::move(list.files[i]));
  }
  list.beyond_cap = list.files.size() - files.size();
  list.files = std::move(files);
}

}  // namespace

std::vector<fs::path> default_source_paths() {
  std::vector<fs::path> paths;
  std::error_code ignored;  // inaccessible folders are ignored
  const auto add = [&](const fs::path& path) {
    if (fs::is_directory(path, ignored)) paths.push_back(path);
  };
  add("/usr/include/c++");
  std::string_view folders = PENSTOCK_TORCH_INCLUDE_FOLDERS;
  while (!folders.empty()) {
    const std::size_t end = std::min(folders.find(':'), folders.size());
    // By subfolder: the include folder may be that of the whole system.
    for (const char* part : {"ATen", "c10", "torch"}) add(fs::path(folders.substr(0, end)) / part);
    folders.remove_prefix(std::min(end + 1, folders.size()));
  }
  return paths;
}

const std::vector<std::string>& cpp_extensions() {
  static const std::vector<std::string> kExtensions = {".h", ".hh", ".hpp", ".hxx", ".inl", ".ipp", ".tcc",
                                                       ".c", ".cc", ".cpp", ".cxx", ".cu",  ".cuh", ""};
  return kExtensions;
}

SourceList find_sources(const SourceOptions& options) {
  SourceOptions effective = options;
  const bool defaults = options.paths.empty();
  if (defaults) {
    effective.paths = default_source_paths();
    effective.skip_bad_files = true;  // the user cannot repair system headers
    if (effective.max_file_bytes == 0) effective.max_file_bytes = kDefaultSourceFileBytes;
    if (effective.paths.empty())
      throw ConfigError(describe("sources", "no C++ headers on this machine", "a folder of text",
                                 "set data.sources (--source) to files or folders"));
  }
  effective.paths = expand_patterns(effective.paths);
  std::vector<std::string> extensions =
      defaults && options.extensions.empty() ? cpp_extensions() : options.extensions;
  for (std::string& extension : extensions) {
    extension = to_lower(extension);
    if (!extension.empty() && extension.front() != '.') extension.insert(0, 1, '.');
  }
  Search search(effective, std::move(extensions));
  for (const fs::path& path : effective.paths) search.start(path);
  SourceList list = std::move(search.list());
  list.max_file_bytes = effective.max_file_bytes;
  if (options.cap_bytes > 0) apply_cap(list, options.cap_bytes);
  for (const SourceFile& file : list.files) list.bytes += file.bytes;
  if (list.files.empty())
    throw ConfigError(describe("source files",
                               list.too_large + list.bad.size() == 0
                                   ? std::string("none")
                                   : fmt::format("none ({} larger than {}, {} unusable)", list.too_large,
                                                 format_bytes(list.max_file_bytes), list.bad.size()),
                               "at least one file", "give other paths, extensions or limits"));
  return list;
}

std::vector<fs::path> expand_patterns(const std::vector<fs::path>& paths) {
  std::vector<fs::path> all;
  for (const fs::path& path : paths) {
    std::error_code ignored;  // errors are reported when the file is read
    if (path.string().find_first_of("*?[") == std::string::npos || fs::exists(path, ignored)) {
      all.push_back(path);
      continue;
    }
    struct Found {
      ::glob_t names{};
      ~Found() { ::globfree(&names); }
    } found;
    const int result = ::glob(path.c_str(), 0, nullptr, &found.names);
    if (result != 0)
      throw ConfigError(describe(fmt::format("{}: source", path.string()),
                                 result == GLOB_NOMATCH ? "a pattern that matches nothing"
                                                        : "a pattern whose folders cannot be read",
                                 "files or folders that can be read", "give another path"));
    for (std::size_t i = 0; i < found.names.gl_pathc; ++i) all.emplace_back(found.names.gl_pathv[i]);
  }
  return all;
}

void read_source(const SourceFile& file, const std::function<void(std::string_view)>& piece) {
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(
        describe(fmt::format("{}: source file", file.path.string()), why, "text", kSourceRemedy));
  };
  struct Descriptor {
    int number;
    ~Descriptor() {
      if (number >= 0) ::close(number);
    }
  } const opened{::open(file.path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (opened.number < 0) refuse(std::strerror(errno));
  std::vector<char> buffer(std::size_t{1} << 20);
  std::uint64_t done = 0;
  while (!file.cut || done < file.bytes) {
    const std::size_t wanted =
        file.cut ? static_cast<std::size_t>(std::min<std::uint64_t>(buffer.size(), file.bytes - done))
                 : buffer.size();
    const ::ssize_t count = ::read(opened.number, buffer.data(), wanted);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse(std::strerror(errno));
    if (count == 0) break;
    const std::string_view text(buffer.data(), static_cast<std::size_t>(count));
    if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos)
      refuse(fmt::format("a binary file (zero byte at {})", done + zero));
    piece(text);
    done += text.size();
  }
  if (done == 0) refuse("an empty file");
}

}  // namespace penstock::train
