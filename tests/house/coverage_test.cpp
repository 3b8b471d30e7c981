// docs/coverage.md held against the tree: every file that a row names exists, every function or type that
// follows a file is in it, every test exists, and every reference to another page has its heading.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/house/tree.h"

namespace penstock::test {
namespace coverage_test {

namespace fs = std::filesystem;

// '*' stands for any characters, also none.
bool fits(std::string_view pattern, std::string_view text) {
  if (pattern.empty()) return text.empty();
  if (pattern[0] == '*') {
    for (std::size_t skipped = 0; skipped <= text.size(); ++skipped)
      if (fits(pattern.substr(1), text.substr(skipped))) return true;
    return false;
  }
  return !text.empty() && pattern[0] == text[0] && fits(pattern.substr(1), text.substr(1));
}

std::string trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \n"), last = text.find_last_not_of(" \n");
  return first == std::string_view::npos ? "" : std::string(text.substr(first, last - first + 1));
}

std::vector<std::string> divided(std::string_view text, std::string_view by) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(by, at), text.size());
    parts.push_back(trimmed(text.substr(at, end - at)));
    at = end + by.size();
  }
  return parts;
}

// What is between backquotes.
std::vector<std::string> words_of(std::string_view cell) {
  const std::vector<std::string> parts = divided(cell, "`");
  std::vector<std::string> words;
  for (std::size_t i = 1; i < parts.size(); i += 2) words.push_back(parts[i]);
  return words;
}

// "a/{b,c}.h" as "a/b.h" and "a/c.h".
std::vector<std::string> expanded(const std::string& word) {
  const std::size_t open = word.find('{'), close = word.find('}');
  if (open == std::string::npos || close == std::string::npos) return {word};
  std::vector<std::string> all;
  for (const std::string& each : divided(word.substr(open + 1, close - open - 1), ","))
    all.push_back(word.substr(0, open) + each + word.substr(close + 1));
  return all;
}

bool has_identifier(std::string_view text, std::string_view name) {
  const auto in_name = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
  for (std::size_t at = text.find(name); at != std::string_view::npos; at = text.find(name, at + 1)) {
    const std::size_t end = at + name.size();
    if ((at == 0 || !in_name(text[at - 1])) && (end == text.size() || !in_name(text[end]))) return true;
  }
  return false;
}

// ---- tests ----

struct Tests {
  std::map<std::string, std::set<std::string>> of_suite;
  std::map<std::string, std::set<std::string>> prefixes;  // of parameterized suites, by suite
  std::set<std::string> files;                            // without extension, and names that ctest knows

  // `word`: "Suite.Name", "Prefix/Suite.Name", "Suite", or a file; with '*'.
  bool have(const std::string& word) const {
    if (fs::exists(source_root() / word)) return true;
    const auto any = [&](std::string_view pattern, const std::set<std::string>& names) {
      return std::any_of(names.begin(), names.end(), [&](const auto& name) { return fits(pattern, name); });
    };
    const std::size_t dot = word.find('.');
    std::string suite = word.substr(0, dot);
    std::optional<std::string> prefix;
    if (const std::size_t slash = suite.find('/'); slash != std::string::npos) {
      prefix = suite.substr(0, slash);
      suite = suite.substr(slash + 1);
    }
    for (const auto& [name, tests] : of_suite) {
      if (!fits(suite, name)) continue;
      if (prefix && (!prefixes.contains(name) || !any(*prefix, prefixes.at(name)))) continue;
      if (dot == std::string::npos || any(word.substr(dot + 1), tests)) return true;
    }
    return dot == std::string::npos && any(word, files);
  }
};

void add_tests(std::string_view text, Tests& tests) {
  for (const std::string_view macro :
       {"\nTEST(", "\nTEST_F(", "\nTEST_P(", "\nRC_GTEST_PROP(", "\nINSTANTIATE_TEST_SUITE_P("}) {
    for (std::size_t at = text.find(macro); at != std::string_view::npos; at = text.find(macro, at + 1)) {
      const std::size_t begin = at + macro.size();
      const std::vector<std::string> names =
          divided(text.substr(begin, text.find_first_of("){", begin) - begin), ",");
      if (names.size() < 2) continue;
      if (macro.starts_with("\nINSTANTIATE"))
        tests.prefixes[names[1]].insert(names[0]);
      else
        tests.of_suite[names[0]].insert(names[1]);
    }
  }
}

// What a CMakeLists.txt registers.
void add_names(std::string_view text, std::set<std::string>& names) {
  for (const std::string_view command :
       {"\npenstock_test(", "\n  penstock_test(", "penstock_long_test(", "add_test(NAME "})
    for (std::size_t at = text.find(command); at != std::string_view::npos; at = text.find(command, at + 1)) {
      const std::size_t begin = at + command.size();
      names.emplace(text.substr(begin, text.find_first_of(" \n)", begin) - begin));
    }
}

Tests read_tests() {
  Tests tests;
  for (const auto& entry : fs::recursive_directory_iterator(source_root() / "tests")) {
    if (!entry.is_regular_file()) continue;
    const fs::path& path = entry.path();
    if (path.filename() == "CMakeLists.txt") add_names("\n" + text_of(path), tests.files);
    if (path.extension() != ".h" && path.extension() != ".cpp" && path.extension() != ".sh") continue;
    tests.files.insert(path.stem().string());
    add_tests(text_of(path), tests);
  }
  return tests;
}

// ---- rows ----

// Files that match a path of a row, which is relative to the root, to penstock/, or to the folder of the path
// before it.
std::vector<fs::path> files_of(const std::string& word, const fs::path& folder_before) {
  std::vector<fs::path> found;
  for (const fs::path& base : {source_root(), source_root() / "penstock", folder_before}) {
    if (base.empty()) continue;
    const fs::path path = base / word;
    if (fs::exists(path)) return {path};
    if (word.find('*') == std::string::npos || !fs::exists(path.parent_path())) continue;
    for (const auto& entry : fs::directory_iterator(path.parent_path()))
      if (fits(path.filename().string(), entry.path().filename().string())) found.push_back(entry.path());
    if (!found.empty()) return found;
  }
  return found;
}

// The text of the files, of those of the same name with another extension, and of those in folders.
std::string text_around(const std::vector<fs::path>& files) {
  std::string text;
  for (const fs::path& file : files) {
    const bool folder = fs::is_directory(file);
    for (const auto& entry : fs::directory_iterator(folder ? file : file.parent_path()))
      if (entry.is_regular_file() && (folder || entry.path().stem() == file.stem()))
        text += text_of(entry.path());
  }
  return text;
}

bool is_path(const std::string& word) {
  if (word.find_first_of(" (") != std::string::npos) return false;
  return word.find('/') != std::string::npos || word.ends_with(".h") || word.ends_with(".cpp");
}

bool is_identifier(const std::string& word) {
  return std::all_of(word.begin(), word.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == ':' || c == '=';
  });
}

std::string objections_to_code(const std::string& cell) {
  std::string found;
  fs::path folder;
  std::string text;
  for (const std::string& word : words_of(cell)) {
    if (is_path(word)) {
      for (const std::string& each : expanded(word)) {
        const std::vector<fs::path> files = files_of(each, folder);
        if (files.empty()) {
          found += "no file " + each + "\n";
          continue;
        }
        folder = files[0].parent_path();
        text += text_around(files);
      }
    } else if (!text.empty() && is_identifier(word)) {
      // "Type::member", "Type::operator==", "::member".
      for (const std::string& part : divided(word, "::"))
        if (!part.empty() && !has_identifier(text, part.substr(0, part.find('='))))
          found += "no " + part + " in the files before it\n";
    }
  }
  return found;
}

std::string objections_to_tests(const std::string& cell, const Tests& tests) {
  std::string found, suite;
  for (std::string word : words_of(cell)) {
    if (word.find_first_of(" (") != std::string::npos) continue;
    if (word.starts_with(".")) word = suite + word;
    suite = word.substr(0, word.find('.'));
    if (!tests.have(word)) found += "no test " + word + "\n";
  }
  return found;
}

// "## Design decisions" is found as "design-decisions".
bool has_heading(std::string_view text, std::string_view anchor) {
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("#")) continue;
    std::string made;
    for (const char c : trimmed(line.substr(line.find_first_not_of('#'))))
      if (const auto u = static_cast<unsigned char>(c); std::isalnum(u) != 0 || c == '-' || c == '_')
        made += static_cast<char>(std::tolower(u));
      else if (c == ' ')
        made += '-';
    if (made == anchor) return true;
  }
  return false;
}

std::string objections_to_links(std::string_view line) {
  std::string found;
  for (std::size_t at = line.find("]("); at != std::string_view::npos; at = line.find("](", at + 1)) {
    const std::string target(line.substr(at + 2, line.find(')', at) - at - 2));
    const std::size_t hash = target.find('#');
    const fs::path page = source_root() / "docs" / target.substr(0, hash);
    if (!fs::exists(page))
      found += "no page " + target + "\n";
    else if (hash != std::string::npos && !has_heading(text_of(page), target.substr(hash + 1)))
      found += "no heading " + target + "\n";
  }
  return found;
}

// "A15–A18, C5, L1": only these letters.
bool names_behaviours(const std::string& cell) {
  const auto is_id = [](std::string_view id) {
    return id.size() >= 2 && std::string_view("ABCDEFKL").find(id[0]) != std::string_view::npos &&
           std::all_of(id.begin() + 1, id.end(), [](char c) { return c >= '0' && c <= '9'; });
  };
  for (const std::string& each : divided(cell, ",")) {
    const std::vector<std::string> ends = divided(each, "–");
    if (ends.size() > 2 || !std::all_of(ends.begin(), ends.end(), is_id)) return false;
    if (ends.size() == 2 &&
        (ends[0][0] != ends[1][0] || std::stoi(ends[0].substr(1)) >= std::stoi(ends[1].substr(1))))
      return false;
  }
  return true;
}

struct Row {
  int line = 0;
  std::string section;
  std::vector<std::string> cells;
};

std::vector<Row> rows_of(const std::string& page) {
  std::vector<Row> rows;
  std::istringstream lines{page};
  std::string section;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.starts_with("## ")) section = line.substr(3);
    if (!line.starts_with("| ") || !line.ends_with(" |")) continue;
    rows.push_back({number, section, divided(line.substr(2, line.size() - 4), " | ")});
  }
  return rows;
}

std::string objections(const Row& row, const Tests& tests) {
  std::string found;
  const std::string& first = row.cells[0];
  if (row.section == "Numbered behaviours" || row.section == "Foundations") {
    const std::size_t expected = row.section == "Foundations" ? 3 : 4;
    if (row.cells.size() != expected)
      return std::to_string(row.cells.size()) + " cells instead of " + std::to_string(expected) + "\n";
    if (first == "ID" || first == "what") return {};
    if (expected == 4 && !names_behaviours(first)) found += "malformed IDs\n";
    found += objections_to_code(row.cells[expected - 2]);
    found += objections_to_tests(row.cells[expected - 1], tests);
    if (words_of(row.cells[expected - 1]).empty()) found += "no test\n";
  } else if (row.section == "Limitations (L)") {
    if (first != "ID" && !names_behaviours(first)) found += "malformed IDs\n";
    for (const std::string& word : words_of(row.cells.back()))
      if (is_path(word)) found += objections_to_code("`" + word + "`");
  }
  for (const std::string& cell : row.cells) found += objections_to_links(cell);
  return found;
}

TEST(Coverage, EveryFileNameAndTestExists) {
  const Tests tests = read_tests();
  EXPECT_GT(tests.of_suite.size(), 300U);
  const std::vector<Row> rows = rows_of(text_of(source_root() / "docs/coverage.md"));
  std::map<std::string, int> checked;
  std::string found;
  for (const Row& row : rows) {
    ++checked[row.section];
    std::istringstream lines(objections(row, tests));
    for (std::string line; std::getline(lines, line);)
      found += "docs/coverage.md:" + std::to_string(row.line) + ": " + row.cells[0] + ": " + line + "\n";
  }
  EXPECT_EQ(found, "");
  EXPECT_GT(checked["Numbered behaviours"], 150);
  EXPECT_GT(checked["Decisions (K)"], 4);
  EXPECT_GT(checked["Limitations (L)"], 10);
  EXPECT_GT(checked["Foundations"], 50);
}

TEST(Coverage, StaleRowsAreFound) {
  Tests tests;
  add_tests("\nTEST(Good, One) {}\nTEST_P(Each, Two) {}\nINSTANTIATE_TEST_SUITE_P(All, Each,\n  x);\n",
            tests);
  tests.files = {"good_test"};
  const auto found = [&](std::vector<std::string> cells, const char* section = "Numbered behaviours") {
    return objections({.line = 1, .section = section, .cells = std::move(cells)}, tests);
  };
  const std::string code = "`base/number.h`";
  for (const char* test :
       {"`Good.One`", "`Good.*`", "`All/Each.Tw*`", "`good_test`", "`Good.O*`, `.One`", "`G*`"})
    EXPECT_EQ(found({"A1, A3–A5", "what", code, test}), "") << test;
  for (const char* test :
       {"`Good.Two`", "`Bad.*`", "`Some/Each.Two`", "`bad_test`", "`Good.One`, `.Two`", "by eye"})
    EXPECT_NE(found({"A1", "what", code, test}), "") << test;
  for (const char* path :
       {"`base/{number,quote}.h`", "`include/penstock/world.h`, `group.h`", "`base/num*.h`", "–",
        "`comm/group`", "`include/penstock/stage_placement.h` `stage_to_rank`", "`penstock doctor`"})
    EXPECT_EQ(found({"A1", "what", path, "`Good.One`"}), "") << path;
  for (const char* path :
       {"`base/nothing.h`", "`base/{number,nothing}.h`", "`base/nothing*.h`", "`comm/nothing`",
        "`include/penstock/stage_placement.h` `stage_to_nothing`", "`world.h`"})
    EXPECT_NE(found({"A1", "what", path, "`Good.One`"}), "") << path;
  for (const char* ids : {"G1", "A", "A1 A2", "A3–A1", "A1–B2", ""})
    EXPECT_NE(found({ids, "what", code, "`Good.One`"}), "") << ids;
  EXPECT_NE(found({"A1", "what", code}), "");
  EXPECT_EQ(found({"what", code, "`Good.One`"}, "Foundations"), "");
  EXPECT_EQ(found({"K1", "[x](pipeline.md#design-decisions)"}, "Decisions (K)"), "");
  EXPECT_NE(found({"K1", "[x](pipeline.md#no-decisions)"}, "Decisions (K)"), "");
  EXPECT_NE(found({"K1", "[x](no_page.md)"}, "Decisions (K)"), "");
}

}  // namespace coverage_test
}  // namespace penstock::test
