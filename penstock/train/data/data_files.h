// What the paths of data.sources are: text, or token files of other programs.
//
//   const DataFiles found = find_data_files({.paths = {"data/fineweb_train_*.bin"}});
//   found.kind == DataKind::LlmC
//   const TokenSources sources = open_token_files(found, {...});
//
// Token files of llm.c are known by their first number, whatever they are called; headerless ones only by being told. A file that ends in .bin
// and has no such number is therefore refused, and so is a folder that has token files and others: what a file is taken for is never a guess.
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
  std::string format = "auto";               // auto, text or uint16, as data.format
  std::vector<std::string> extensions;       // in folders: only files with these; empty: .bin
};

struct DataFiles {
  DataKind kind = DataKind::Text;
  // Token files in the order of the paths, those of a folder or pattern by name, each once. Of text the paths as given: source_files.h finds
  // the files.
  std::vector<std::filesystem::path> files;
};

// Opens no more of a file than its first bytes. Throws ConfigError for paths of several kinds and as said above.
DataFiles find_data_files(const DataFilesOptions& options);

// Of token files. Throws ConfigError for damaged ones.
TokenSources open_token_files(const DataFiles& files, std::uint64_t vocabulary, std::optional<std::uint32_t> end_of_document);

}  // namespace penstock::train
