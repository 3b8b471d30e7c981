// Determines whether the paths of data.sources are text or token files of other programs.
//
//   const DataFiles found = find_data_files({.paths = {"data/fineweb_train_*.bin"}});
//   found.kind == DataKind::LlmC
//   const TokenSources sources = open_token_files(found, {...});
//
// llm.c token files are recognized by their first number, whatever their name; headerless files only if
// data.format says so. A file that ends in .bin and has no such number is therefore refused, and so is a
// folder that mixes token files with other files: the kind of a file is never guessed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "penstock/train/data/token_dataset.h"

namespace penstock::train {

enum class DataKind { Text, LlmC, Uint16 };

struct DataFilesOptions {
  std::vector<std::filesystem::path> paths;  // files, folders and patterns
  std::string format = "auto";               // auto, text or uint16, like data.format
  std::vector<std::string> extensions;       // in folders, only files with these extensions; empty: .bin
};

struct DataFiles {
  DataKind kind = DataKind::Text;
  // Token files in the order of the paths, those of a folder or pattern sorted by name, each once. For text,
  // the paths as given: source_files.h finds the files.
  std::vector<std::filesystem::path> files;
};

// Reads only the first bytes of a file. Throws ConfigError for paths of several kinds and in the cases above.
DataFiles find_data_files(const DataFilesOptions& options);

// Opens token files. Throws ConfigError for damaged ones.
TokenSources open_token_files(const DataFiles& files, std::uint64_t vocabulary,
                              std::optional<std::uint32_t> end_of_document);

}  // namespace penstock::train
