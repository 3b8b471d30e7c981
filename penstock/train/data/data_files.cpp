#include "penstock/train/data/data_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <system_error>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/train/data/bin_tokens.h"
#include "penstock/train/data/source_files.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;

constexpr const char* kTokenExtension = ".bin";

const char* name_of_kind(DataKind kind) {
  switch (kind) {
    case DataKind::Text:
      return "text";
    case DataKind::LlmC:
      return "token files of llm.c";
    case DataKind::Uint16:
      return "token files without a header";
  }
  return "";
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    if (!entry->path().filename().string().starts_with(".")) entries.push_back(entry->path());
  if (error)
    throw ConfigError(describe(fmt::format("{}: source", folder.string()), error.message(),
                               "a folder that can be read", "give another path"));
  std::sort(entries.begin(), entries.end());
  return entries;
}

class Finder {
 public:
  explicit Finder(const DataFilesOptions& options) : options_(options) {
    for (std::string extension : options.extensions) {
      extension = to_lower(extension);
      if (!extension.empty() && extension.front() != '.') extension.insert(0, 1, '.');
      extensions_.insert(extension);
    }
    if (extensions_.empty()) extensions_.insert(kTokenExtension);
  }

  DataFiles find() {
    for (const fs::path& path : expand_patterns(options_.paths)) {
      std::error_code ignored;  // missing files are reported when they are read
      if (fs::is_directory(path, ignored)) {
        folder(path);
      } else {
        file(path);
      }
    }
    if (found_.kind == DataKind::Text || !first_) found_.files = options_.paths;
    return std::move(found_);
  }

 private:
  void add(DataKind kind, const fs::path& path) {
    if (!first_) {
      first_ = path;
      found_.kind = kind;
    } else if (kind != found_.kind) {
      throw ConfigError(describe("data.sources",
                                 fmt::format("{} is {}, {} is {}", first_->string(),
                                             name_of_kind(found_.kind), path.string(), name_of_kind(kind)),
                                 "sources of one kind", "train on one kind at a time"));
    }
    std::error_code ignored;
    const fs::path real = fs::weakly_canonical(path, ignored);
    if (seen_.insert(real).second) found_.files.push_back(path);
  }

  void file(const fs::path& path) {
    if (options_.format == "uint16") return add(DataKind::Uint16, path);
    if (BinTokens::has_magic(path)) return add(DataKind::LlmC, path);
    const std::string extension = to_lower(path.extension().string());
    if (extension == kShardExtension)
      throw ConfigError(
          describe(fmt::format("{}: source", path.string()), "a token shard",
                   "text, or a token file of another program",
                   fmt::format("give its folder as data.shards ({})", path.parent_path().string())));
    std::error_code ignored;
    if (extension == kTokenExtension && fs::is_regular_file(path, ignored))
      throw ConfigError(describe(fmt::format("{}: source", path.string()),
                                 "a file that ends in .bin but has no llm.c header", "a known kind of file",
                                 "for 16-bit tokens without a header (nanoGPT) set data.format = \"uint16\", "
                                 "for text data.format = \"text\""));
    add(DataKind::Text, path);
  }

  void folder(const fs::path& path) {
    const std::vector<fs::path> entries = entries_of(path);
    std::vector<fs::path> tokens;
    bool has_shards = false, has_magic = false;
    for (const fs::path& entry : entries) {
      const std::string extension = to_lower(entry.extension().string());
      has_shards |= extension == kShardExtension;
      if (!extensions_.contains(extension)) continue;
      tokens.push_back(entry);
      has_magic = has_magic || (options_.format != "uint16" && BinTokens::has_magic(entry));
    }
    if (options_.format == "uint16") {
      if (tokens.empty())
        throw ConfigError(describe(fmt::format("{}: source", path.string()), "a folder without token files",
                                   fmt::format("files that end in {}", fmt::join(extensions_, ", ")),
                                   "give the files themselves, or set data.extensions"));
      for (const fs::path& entry : tokens) add(DataKind::Uint16, entry);
      return;
    }
    if (has_shards && tokens.empty())
      throw ConfigError(describe(fmt::format("{}: source", path.string()), "a folder of token shards",
                                 "text, or token files of another program",
                                 fmt::format("give it as data.shards ({})", path.string())));
    const bool only_tokens =
        !tokens.empty() && (tokens.size() == entries.size() || !options_.extensions.empty());
    if (!has_magic && !(only_tokens && options_.extensions.empty())) return add(DataKind::Text, path);
    if (!only_tokens)
      throw ConfigError(describe(
          fmt::format("{}: source", path.string()), "a folder of token files and other files",
          "one kind of files",
          fmt::format(
              "give the files or a pattern ({}/*.bin), or set data.format = \"text\" and data.extensions",
              path.string())));
    for (const fs::path& entry : tokens) file(entry);
  }

  const DataFilesOptions& options_;
  std::set<std::string> extensions_;
  DataFiles found_;
  std::optional<fs::path> first_;
  std::set<fs::path> seen_;
};

}  // namespace

DataFiles find_data_files(const DataFilesOptions& options) {
  if (options.paths.empty() || options.format == "text") return {DataKind::Text, options.paths};
  return Finder(options).find();
}

TokenSources open_token_files(const DataFiles& files, std::uint64_t vocabulary,
                              std::optional<std::uint32_t> end_of_document) {
  TokenSources sources;
  for (const fs::path& file : files.files)
    sources.push_back(BinTokens::open(file, {.headerless = files.kind == DataKind::Uint16,
                                             .vocabulary = vocabulary,
                                             .end_of_document = end_of_document}));
  return sources;
}

}  // namespace penstock::train
