// The folder behind an artifact (penstock/compile_artifact.h): manifest.json and one file for each call.
//
// The manifest lists what the calls are valid for, as named fields, and the calls: module, a description,
// file, size, checksum and the time it took to make it, which is not in the file. It is written last, under a
// temporary name that is then renamed, so an interrupted artifact cannot be opened. Errors are ConfigError
// with a remedy. Thread safety: any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/graph/cache/byte_stream.h"
#include "penstock/graph/cache/cache_key.h"

namespace penstock::graph {

class ArtifactFolder {
 public:
  using Fields = std::vector<std::pair<std::string, std::string>>;  // name, value
  struct Entry {
    std::string key;     // CacheKey::text()
    std::string module;  // "stage 0"
    std::string call;    // "2 inputs, training": for people
    std::size_t bytes = 0;
    std::uint64_t checksum = 0;              // XXH64
    std::chrono::microseconds made_in = {};  // how long capturing and compiling the call took
  };

  // Starts an empty artifact: makes the folder and removes an older artifact from it, also one that is
  // damaged or unfinished. Refuses a folder with other files, unless they are beside an artifact.
  static ArtifactFolder create(const std::filesystem::path& folder, Fields fields);
  // Reads the manifest and compares its fields with `expected`, in this order.
  static ArtifactFolder open(const std::filesystem::path& folder, const Fields& expected);

  ArtifactFolder(ArtifactFolder&& other) noexcept;

  void add(const CacheKey& key, std::string module, std::string call, std::span<const std::uint8_t> bytes,
           std::chrono::microseconds made_in = {});
  void finish();

  std::optional<Bytes> find(const CacheKey& key, std::chrono::microseconds* made_in = nullptr) const;
  // The bytes of an entry. Throws ConfigError if the file is missing or damaged.
  Bytes read(const Entry& entry) const;

  bool is_writable() const { return writable_; }
  const std::filesystem::path& folder() const { return folder_; }
  const Fields& fields() const { return fields_; }
  std::vector<Entry> entries() const;

 private:
  ArtifactFolder(std::filesystem::path folder, Fields fields, bool writable)
      : folder_(std::move(folder)), fields_(std::move(fields)), writable_(writable) {}

  std::filesystem::path folder_;
  Fields fields_;
  bool writable_ = false;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace penstock::graph
