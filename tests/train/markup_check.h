// Checks whether the tags of a page are balanced, and counts elements. Supports only the HTML that our pages
// use.
#pragma once

#include <cctype>
#include <cstddef>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::test {

// Returns an empty string if every element is closed in order and every attribute quoted, else the first
// problem.
inline std::string markup_problem(std::string_view page) {
  static const std::set<std::string, std::less<>> kVoid{"meta", "!doctype", "br", "link"};
  std::vector<std::string> open;
  for (std::size_t at = 0; (at = page.find_first_of("<>", at)) != std::string_view::npos;) {
    const auto around = [&] { return std::string(page.substr(at > 40 ? at - 40 : 0, 120)); };
    if (page[at] == '>') return "a bracket that opens nothing at: " + around();
    std::size_t end = at + 1;
    bool quoted = false;
    for (; end < page.size() && (quoted || page[end] != '>'); ++end) {
      if (page[end] == '"') quoted = !quoted;
      if (page[end] == '<') return "a bracket inside of a tag at: " + around();
    }
    if (end >= page.size()) return "a tag without end at: " + around();
    std::string_view tag = page.substr(at + 1, end - at - 1);
    at = end + 1;
    const bool closing = tag.front() == '/', alone = tag.back() == '/';
    if (closing) tag.remove_prefix(1);
    const std::string name(tag.substr(0, tag.find_first_of(" /")));
    if (closing) {
      if (open.empty() || open.back() != name)
        return "</" + name + "> closes " + (open.empty() ? "nothing" : open.back()) + " at: " + around();
      open.pop_back();
    } else if (!alone && !kVoid.contains(name)) {
      open.push_back(name);
      if (name == "script" || name == "style") at = page.find("</" + name, at);
    }
  }
  return open.empty() ? "" : "<" + open.back() + "> is never closed";
}

inline std::size_t count_of(std::string_view text, std::string_view part) {
  std::size_t count = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string_view::npos; at += part.size()) ++count;
  return count;
}

}  // namespace penstock::test
