// A folder of token shards from text files: what `penstock data make` does.
//
//   MakeShardsOptions options;
//   options.sources.paths = {"src"};
//   const MadeShards made = make_shards("data", options);
//
// The folder appears as a whole or not at all: everything is written to a temporary folder beside it, then renamed.
// One document a file, in bytes (byte_tokenizer.h). The same files give the same bytes on every machine. Files are streamed: memory does not
// grow with their size. Shards take two bytes for each of text; where there is no room for that, nothing is begun.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "penstock/train/data/source_files.h"

namespace penstock::train {

struct MakeShardsProgress {
  std::uint64_t files = 0;
  std::uint64_t of_files = 0;
  std::uint64_t bytes = 0;
  std::uint64_t of_bytes = 0;
};

struct MakeShardsOptions {
  SourceOptions sources;
  std::uint64_t shard_tokens = std::uint64_t{1} << 26;  // a shard is closed by the document that reaches this
  bool overwrite = false;                               // replace a folder that has shards already
  std::function<void(const MakeShardsProgress&)> progress;  // after every file and every 16 MiB; may be empty
};

struct MadeShards {
  std::uint64_t shards = 0;
  std::uint64_t documents = 0;
  std::uint64_t tokens = 0;
  std::uint64_t bytes = 0;
  std::vector<BadFile> bad;  // skipped
  std::uint64_t max_file_bytes = 0;  // limit of size that was used; 0: none
  std::uint64_t too_large = 0;       // files above it
  std::uint64_t beyond_cap = 0;      // files left out by the cap
  std::vector<std::filesystem::path> cut;  // files of which the cap has taken only the beginning
};

// Throws ConfigError unless shards of so much text have room where the folder will be. What the file system does not say is left to the writing.
void check_room_for_shards(const std::filesystem::path& folder, std::uint64_t text_bytes, std::uint64_t files);

// Throws ConfigError for bad sources (see source_files.h), for a folder that has something in it already, and for failures
// of the file system. `overwrite` replaces a folder only if it holds nothing but shards.
MadeShards make_shards(const std::filesystem::path& folder, const MakeShardsOptions& options);

}  // namespace penstock::train
