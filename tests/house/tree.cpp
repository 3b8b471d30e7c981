#include "tests/house/tree.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <regex>
#include <sstream>
#include <stdexcept>

namespace penstock::test {

namespace fs = std::filesystem;

fs::path source_root() {
  const char* root = std::getenv("PENSTOCK_SOURCE");
  if (root == nullptr) throw std::runtime_error("PENSTOCK_SOURCE is not set; run this through ctest");
  return root;
}

std::string text_of(const fs::path& path) {
  std::ifstream in(path);
  if (!in) throw std::runtime_error(path.string() + " cannot be read");
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::string> sources_under(const std::string& folder) {
  std::vector<std::string> found;
  for (const auto& entry : fs::recursive_directory_iterator(source_root() / folder))
    if (entry.is_regular_file() && (entry.path().extension() == ".h" || entry.path().extension() == ".cpp"))
      found.push_back(fs::relative(entry.path(), source_root()).string());
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<std::string> own_includes(std::string_view text) {
  static const std::regex line("(?:^|\\n)[ \\t]*#[ \\t]*include[ \\t]*\"([^\"]+)\"");
  std::vector<std::string> found;
  const std::string all(text);
  for (auto at = std::sregex_iterator(all.begin(), all.end(), line); at != std::sregex_iterator(); ++at)
    found.push_back((*at)[1]);
  return found;
}

std::set<std::string> Arrows::reachable(const std::string& room) const {
  std::set<std::string> seen;
  const std::function<void(const std::string&)> visit = [&](const std::string& next) {
    if (!seen.insert(next).second) return;
    const auto found = direct.find(next);
    if (found == direct.end())
      throw std::runtime_error("penstock/arrows.txt names " + next + ", which has no line of its own");
    for (const std::string& below : found->second) visit(below);
  };
  visit(room);
  return seen;
}

Arrows parse_arrows(std::string_view text) {
  Arrows arrows;
  bool below = false;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string first, arrow;
    words >> first >> arrow;
    if (first == "LibTorch" && arrow.empty()) {
      below = true;
    } else if (arrow == "<-") {
      if (arrows.direct.contains(first)) throw std::runtime_error("two lines for one room: " + line);
      auto& rooms = arrows.direct[first];
      for (std::string room; words >> room && room != "|";) rooms.insert(room);
      if (below) arrows.with_libtorch.insert(first);
    } else if (first == "header" && !arrow.empty()) {
      std::string room;
      if (!(words >> room)) throw std::runtime_error("a header without its room: " + line);
      arrows.owner[arrow] = room;
    } else if (first == "namespace" && !arrow.empty()) {
      for (std::string folder; words >> folder;) arrows.namespace_of[folder] = arrow;
    } else if (first == "also" && !arrow.empty()) {
      for (std::string room; words >> room && room != "#";) arrows.also[room].insert(arrow);
    } else {
      throw std::runtime_error("cannot read: " + line);
    }
  }
  return arrows;
}

std::string room_of_file(const std::string& path) {
  if (!path.starts_with("penstock/")) return {};
  const std::string folder = fs::path(path).parent_path().string();
  return folder.size() > 9 ? folder.substr(9) : std::string();
}

}  // namespace penstock::test
