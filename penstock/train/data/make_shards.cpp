#include "penstock/train/data/make_shards.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/train/data/byte_tokenizer.h"
#include "penstock/train/data/token_dataset.h"
#include "penstock/train/data/token_shard_writer.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kProgressBytes = std::uint64_t{16} << 20;

[[noreturn]] void refuse(const fs::path& folder, const std::string& why, const char* remedy) {
  throw ConfigError(describe(fmt::format("{}: folder for token shards", folder.string()), why,
                             "a new or empty folder", remedy));
}

// Checks for obstacles to the new folder. Removes nothing that penstock did not create.
void check_target(const fs::path& folder, bool overwrite) {
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (status.type() == fs::file_type::not_found) return;
  if (error) refuse(folder, error.message(), "give another folder");
  if (!fs::is_directory(status)) refuse(folder, "a file", "give another name");
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() != kShardExtension)
      refuse(folder, fmt::format("a folder that contains {}", entry->path().filename().string()),
             "give another folder");
    if (!overwrite)
      refuse(folder, "a folder that already contains token shards",
             "give another folder, or --overwrite to replace them");
  }
  if (error) refuse(folder, error.message(), "give another folder");
}

class TemporaryFolder {
 public:
  explicit TemporaryFolder(const fs::path& target)
      : path_(fmt::format("{}.tmp-{}", target.string(), ::getpid())) {
    std::error_code error;
    if (target.has_parent_path()) fs::create_directories(target.parent_path(), error);
    if (!error) remove_tree(path_, error);
    if (!error) fs::create_directory(path_, error);
    if (error) refuse(path_, error.message(), "give a writable folder");
  }
  ~TemporaryFolder() {
    std::error_code ignored;  // a leftover has a name that is never read
    remove_tree(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

  // Moves an old folder aside first and removes it last: at every moment one of the two is complete.
  void become(const fs::path& target) const {
    std::error_code error;
    const fs::path old = fmt::format("{}.old-{}", target.string(), ::getpid());
    const bool replaces = fs::exists(target, error);
    if (!error && replaces) fs::rename(target, old, error);
    if (!error) fs::rename(path_, target, error);
    if (error) refuse(target, error.message(), "give a writable folder");
    if (replaces) remove_tree(old, error);
    if (error) refuse(old, error.message(), "remove it manually");
  }

 private:
  fs::path path_;
};

}  // namespace

void check_space_for_shards(const fs::path& folder, std::uint64_t text_bytes, std::uint64_t files) {
  constexpr std::uint64_t kTokenBytes = 2, kEntryBytes = 18;  // a document's entry and its end token
  const std::uint64_t needed = kTokenBytes * text_bytes + kEntryBytes * files;
  std::error_code error;
  fs::path there = fs::absolute(folder, error).parent_path();
  while (!there.empty() && !fs::exists(there, error) && there != there.parent_path())
    there = there.parent_path();
  const fs::space_info space = fs::space(there, error);
  if (error || space.available >= needed) return;
  throw ConfigError(describe(fmt::format("{}: free space for token shards", folder.string()),
                             format_bytes(space.available),
                             fmt::format("{} for {} of text", format_bytes(needed), format_bytes(text_bytes)),
                             "free some space, choose another disk (output.run_folder, --out), or use less "
                             "text (data.cap_bytes, --cap-bytes)"));
}

MakeShardsResult make_shards(const fs::path& given, const MakeShardsOptions& options) {
  if (options.shard_tokens < 1) throw ValueError(describe("tokens per shard", "0", "at least 1"));
  // "data/" means "data": the temporary folder is next to it.
  const fs::path folder = given.has_filename() ? given : given.parent_path();
  if (folder.empty()) throw ConfigError(describe("folder for token shards", "nothing", "a name"));
  check_target(folder, options.overwrite);
  SourceList sources = find_sources(options.sources);
  MakeShardsResult made;
  made.bad = std::move(sources.bad);
  made.max_file_bytes = sources.max_file_bytes;
  made.too_large = sources.too_large;
  made.beyond_cap = sources.beyond_cap;
  for (const SourceFile& file : sources.files)
    if (file.cut) made.cut.push_back(file.path);
  check_space_for_shards(folder, sources.bytes, sources.files.size());

  const TemporaryFolder temporary(folder);
  std::optional<TokenShardWriter> writer;
  const auto close = [&] {
    const TokenShardHeader header = writer->finish();
    writer.reset();
    made.documents += header.documents;
    made.tokens += header.tokens;
    ++made.shards;
  };
  MakeShardsProgress progress;
  progress.of_files = sources.files.size();
  progress.of_bytes = sources.bytes;
  const bool skip = options.sources.skip_bad_files || options.sources.paths.empty();
  for (const SourceFile& file : sources.files) {
    bool good = true;
    // A started document cannot be undone: if bad files are skipped, each file is checked first.
    if (skip) {
      try {
        read_source(file, [](std::string_view) {});
      } catch (const ConfigError& error) {
        made.bad.push_back({file.path, error.what()});
        good = false;
      }
    }
    if (good) {
      std::uint64_t seen = 0;
      read_source(file, [&](std::string_view text) {
        if (!writer)
          writer.emplace(temporary.path() / fmt::format("shard-{:05}{}", made.shards, kShardExtension),
                         TokenShardOptions{.vocabulary = byte_tokenizer::kVocabulary,
                                           .end_of_document = byte_tokenizer::kEndOfDocument});
        writer->add_tokens(byte_tokenizer::encode(text));
        made.bytes += text.size();
        seen += text.size();
        if (options.progress && seen / kProgressBytes != (seen - text.size()) / kProgressBytes) {
          MakeShardsProgress now = progress;
          now.bytes += std::min(seen, file.bytes);
          options.progress(now);
        }
      });
      writer->end_document(file.key);
      if (writer->tokens() >= options.shard_tokens) close();
    }
    ++progress.files;
    progress.bytes += file.bytes;
    if (options.progress) options.progress(progress);
  }
  if (writer) close();
  if (made.shards == 0)
    throw ConfigError(describe("source files", fmt::format("{}, all of them unusable", made.bad.size()),
                               "at least one text file", "give other paths"));
  temporary.become(folder);
  return made;
}

}  // namespace penstock::train
