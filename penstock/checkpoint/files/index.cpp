#include "penstock/checkpoint/files/index.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "penstock/base/checksum.h"
#include "penstock/base/exception_text.h"
#include "penstock/checkpoint_types.h"

namespace penstock::checkpoint {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kDigits = 16;
constexpr std::string_view kFormat = "penstock checkpoint";
const std::string kNoChecksum(kDigits, '0');

std::string text_with(const Index& index, const std::string& own_checksum) {
  Json json;
  json["format"] = kFormat;
  json["version"] = kFormatVersion;
  json["step"] = index.step;
  json["checksum"] = "xxh3-64";
  json["block_bytes"] = index.block_bytes;
  json["files"] = Json::array();
  for (const IndexedFile& file : index.files) {
    std::string blocks;
    for (const std::uint64_t sum : file.checksums) blocks += fmt::format("{:016x}", sum);
    Json entry;
    entry["name"] = file.name;
    entry["section"] = file.section;
    entry["bytes"] = file.bytes;
    entry["blocks"] = blocks;
    json["files"].push_back(std::move(entry));
  }
  json["index_checksum"] = own_checksum;
  return json.dump(2) + "\n";
}

// Accepts only a plain file name: an index never refers to files outside of its folder.
bool plain_name(const std::string& name) {
  return !name.empty() && name.size() <= 255 && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
                  c == '-' || c == '_';
         });
}

}  // namespace

std::uint64_t block_count(std::uint64_t bytes, std::uint64_t block_bytes) {
  return bytes / block_bytes + (bytes % block_bytes == 0 ? 0 : 1);
}

std::string to_text(const Index& index) {
  const std::string text = text_with(index, kNoChecksum);
  const std::span bytes(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
  return text_with(index, fmt::format("{:016x}", xxh3_checksum64(bytes, "checkpoints")));
}

Index parse_index(std::string_view text, const std::string& where) {
  const auto refuse = [&](const std::string& what) {
    throw CheckpointError(fmt::format("{}: {}; the checkpoint is damaged or incomplete", where, what));
  };
  Index index;
  try {
    const Json json = Json::parse(text);
    if (json.at("format").get<std::string>() != kFormat) refuse("not the index of a checkpoint");
    if (const auto version = json.at("version").get<std::int64_t>(); version > kFormatVersion)
      throw CheckpointFormatError(
          fmt::format("{}: format version {}, this build reads {}; it was written by a newer version of "
                      "Penstock: use that one, or another checkpoint",
                      where, version, kFormatVersion));
    else if (version != kFormatVersion)
      refuse(fmt::format("format version {}, which does not exist", version));
    index.step = json.at("step").get<std::int64_t>();
    index.block_bytes = json.at("block_bytes").get<std::uint64_t>();
    std::set<std::string> names;
    for (const Json& entry : json.at("files")) {
      IndexedFile file;
      file.name = entry.at("name").get<std::string>();
      file.section = entry.at("section").get<std::string>();
      file.bytes = entry.at("bytes").get<std::uint64_t>();
      const auto blocks = entry.at("blocks").get<std::string>();
      if (!plain_name(file.name) || !names.insert(file.name).second)
        refuse("a file name that is not plain or occurs twice");
      if (index.block_bytes == 0 || blocks.size() % kDigits != 0 ||
          block_count(file.bytes, index.block_bytes) != blocks.size() / kDigits)
        refuse(fmt::format("{} does not have one checksum per block", file.name));
      for (std::size_t at = 0; at < blocks.size(); at += kDigits) {
        std::uint64_t sum = 0;
        const char* end = blocks.data() + at + kDigits;
        if (const auto read = std::from_chars(blocks.data() + at, end, sum, 16);
            read.ec != std::errc{} || read.ptr != end)
          refuse("a checksum that is not a number");
        file.checksums.push_back(sum);
      }
      index.files.push_back(std::move(file));
    }
  } catch (const nlohmann::json::exception& error) {
    refuse(fmt::format("cannot be read as an index ({})", without_json_tag(error.what())));
  }
  if (to_text(index) != text) refuse("its text does not match its own checksum");
  return index;
}

}  // namespace penstock::checkpoint
