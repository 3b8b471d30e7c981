// The source tree as the tests of this folder read it: files, the arrows between rooms, includes.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::test {

// PENSTOCK_SOURCE.
std::filesystem::path source_root();

std::string text_of(const std::filesystem::path& path);

// All .h and .cpp files under `folder`, relative to the root, in order.
std::vector<std::string> sources_under(const std::string& folder);

// The paths between quotation marks in #include lines.
std::vector<std::string> own_includes(std::string_view text);

// penstock/arrows.txt.
struct Arrows {
  std::map<std::string, std::set<std::string>> direct;  // what stands after <-, without what is only linked
  std::set<std::string> with_libtorch;                  // rooms below the line "LibTorch"
  std::map<std::string, std::string> owner;             // public header -> room whose sources implement it
  std::map<std::string, std::string> namespace_of;      // folder -> its namespace
  std::map<std::string, std::set<std::string>> also;    // room -> further namespaces that its files may open

  // Rooms that `room` may include: itself, what it names, and what those may include.
  std::set<std::string> reachable(const std::string& room) const;
};
// Throws std::runtime_error with the line for text that it cannot read.
Arrows parse_arrows(std::string_view text);

// "penstock/comm/group/world.cpp" -> "comm/group"; empty for files elsewhere.
std::string room_of_file(const std::string& path);

}  // namespace penstock::test
