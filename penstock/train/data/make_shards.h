// Makes a folder of token shards from text files, for `penstock data make`.
//
//   MakeShardsOptions options;
//   options.sources.paths = {"src"};
//   const MakeShardsResult made = make_shards("data", options);
//
// The folder is created completely or not at all: everything is written to a temporary folder next to it,
// which is then renamed. Each file is one document of byte tokens (byte_tokenizer.h). The same files produce
// the same bytes on every machine. Files are streamed: memory does not grow with their size. Shards need two
// bytes per byte of text; without enough disk space nothing is started.
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
  std::uint64_t shard_tokens = std::uint64_t{1} << 26;  // a shard ends with the document that reaches this
  bool overwrite = false;                               // replace a folder that already contains shards
  std::function<void(const MakeShardsProgress&)> progress;  // after every file and every 16 MiB; may be empty
};

struct MakeShardsResult {
  std::uint64_t shards = 0;
  std::uint64_t documents = 0;
  std::uint64_t tokens = 0;
  std::uint64_t bytes = 0;
  std::vector<BadFile> bad;                // skipped
  std::uint64_t max_file_bytes = 0;        // size limit that was used; 0: none
  std::uint64_t too_large = 0;             // files above the limit
  std::uint64_t beyond_cap = 0;            // files skipped because of the cap
  std::vector<std::filesystem::path> cut;  // files truncated by the cap
};

// Throws ConfigError if the folder's disk has too little space for shards of this much text. If the space is
// unknown, writing reports the error.
void check_space_for_shards(const std::filesystem::path& folder, std::uint64_t text_bytes,
                            std::uint64_t files);

// Throws ConfigError for bad sources (see source_files.h), for a folder that is not empty, and for file
// system errors. `overwrite` replaces a folder only if it contains nothing but shards.
MakeShardsResult make_shards(const std::filesystem::path& folder, const MakeShardsOptions& options);

}  // namespace penstock::train
