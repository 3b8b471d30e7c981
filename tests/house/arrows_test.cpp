// Who includes whom, held against penstock/arrows.txt; which headers are public; which names exist.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/house/tree.h"

namespace penstock::test {
namespace arrows_test {

namespace fs = std::filesystem;

const Arrows& arrows() {
  static const Arrows read = parse_arrows(text_of(source_root() / "penstock/arrows.txt"));
  return read;
}

// The room that a file belongs to: its folder, or for a public header the room that implements it.
std::string room_of(const std::string& include) {
  if (const std::string room = room_of_file(include); !room.empty()) return room;
  const auto found = arrows().owner.find(fs::path(include).filename().string());
  return found == arrows().owner.end() ? "" : found->second;
}

// What is wrong with the includes of one file; empty if nothing is.
std::string objections(const std::string& file, const std::string& room, std::string_view text) {
  std::string found;
  const std::set<std::string> allowed = arrows().reachable(room);
  for (const std::string& include : own_includes(text)) {
    const std::string other = room_of(include);
    if (other.empty()) {
      found += file + " includes " + include +
               ", which belongs to no room: give it a line in penstock/arrows.txt\n";
    } else if (!allowed.contains(other)) {
      found += file + " includes " + include + ": " + room + " may not use " + other + "\n";
    }
  }
  return found;
}

TEST(Arrows, EveryIncludeFollowsThem) {
  std::string found;
  for (const std::string& file : sources_under("penstock"))
    found += objections(file, room_of_file(file), text_of(source_root() / file));
  for (const std::string& file : sources_under("include/penstock")) {
    const std::string name = fs::path(file).filename().string();
    if (name == "penstock.h") continue;  // the umbrella is above everything
    const auto owner = arrows().owner.find(name);
    if (owner == arrows().owner.end()) {
      found += file + " has no line \"header " + name + " ROOM\" in penstock/arrows.txt\n";
      continue;
    }
    found += objections(file, owner->second, text_of(source_root() / file));
  }
  EXPECT_EQ(found, "");
}

TEST(Arrows, ForbiddenIncludesAreFound) {
  EXPECT_NE(objections("x.h", "base", "#include \"penstock/comm/message/message.h\"\n"), "");
  EXPECT_NE(objections("x.h", "schedule/ir", "// text\n#include \"penstock/world.h\"\n"), "");
  EXPECT_EQ(objections("x.h", "comm/group",
                       "#include \"penstock/comm/message/message.h\"\n#include \"penstock/errors.h\"\n"),
            "");
}

TEST(Arrows, EveryRoomIsThereAndNoneIsInACircle) {
  std::set<std::string> rooms;
  for (const std::string& file : sources_under("penstock")) rooms.insert(room_of_file(file));
  for (const auto& [room, below] : arrows().direct) {
    EXPECT_TRUE(rooms.contains(room)) << room << " has a line in penstock/arrows.txt and no sources";
    for (const std::string& next : below)
      EXPECT_FALSE(arrows().reachable(next).contains(room)) << room << " and " << next;
  }
  for (const std::string& room : rooms)
    EXPECT_TRUE(arrows().direct.contains(room)) << room << " has no line in penstock/arrows.txt";
}

TEST(Arrows, RoomsAboveTheLineKnowNothingOfLibTorch) {
  static const std::regex torch("#include <(torch|ATen|c10|caffe2)/");
  for (const std::string& file : sources_under("penstock")) {
    const std::string room = room_of_file(file);
    if (arrows().with_libtorch.contains(room)) continue;
    EXPECT_FALSE(std::regex_search(text_of(source_root() / file), torch)) << file;
    for (const std::string& below : arrows().reachable(room))
      EXPECT_FALSE(arrows().with_libtorch.contains(below)) << room << " uses " << below;
  }
}

TEST(PublicHeaders, IncludeOnlyPublicHeaders) {
  for (const std::string& file : sources_under("include/penstock"))
    for (const std::string& include : own_includes(text_of(source_root() / file)))
      EXPECT_TRUE(fs::exists(source_root() / "include" / include))
          << file << " includes " << include << ", which is not public";
}

TEST(PublicHeaders, TheUmbrellaHasAllOfThem) {
  const std::vector<std::string> includes =
      own_includes(text_of(source_root() / "include/penstock/penstock.h"));
  const std::set<std::string> all(includes.begin(), includes.end());
  for (const std::string& file : sources_under("include/penstock"))
    if (file != "include/penstock/penstock.h") {
      EXPECT_TRUE(all.contains(file.substr(8))) << file;
    }
}

TEST(PublicHeaders, ExamplesAndDocsUseNothingElse) {
  std::vector<std::string> files = sources_under("examples");
  for (const auto& entry : fs::directory_iterator(source_root() / "docs"))
    if (entry.path().extension() == ".md") files.push_back("docs/" + entry.path().filename().string());
  files.push_back("README.md");
  for (const std::string& file : files)
    for (const std::string& include : own_includes(text_of(source_root() / file)))
      EXPECT_TRUE(include.starts_with("examples/") || fs::exists(source_root() / "include" / include))
          << file << " includes " << include;
}

TEST(PublicHeaders, InternalNamespacesStayInside) {
  static const std::regex detail("namespace (penstock::)?detail");
  std::size_t inside = 0, all = 0;
  for (const std::string& file : sources_under("include/penstock")) {
    ++all;
    if (std::regex_search(text_of(source_root() / file), detail)) ++inside;
  }
  EXPECT_LE(inside, 6u) << "of " << all << " public headers; templates need some";
}

// The headers of LibTorch that a header of ours includes, itself or through others of ours.
const std::set<std::string>& torch_headers_of(const std::string& include) {
  static std::map<std::string, std::set<std::string>> known;
  if (const auto found = known.find(include); found != known.end()) return found->second;
  static const std::regex torch("(?:^|\\n)#include <((?:torch|ATen|c10)/[^>]+)>");
  std::set<std::string>& all = known[include];
  fs::path path = source_root() / "include" / include;
  if (!fs::exists(path)) path = source_root() / include;
  if (!fs::exists(path)) return all;
  const std::string text = text_of(path);
  for (auto at = std::sregex_iterator(text.begin(), text.end(), torch); at != std::sregex_iterator(); ++at)
    all.insert((*at)[1]);
  for (const std::string& other : own_includes(text)) {
    const std::set<std::string>& below = torch_headers_of(other);
    all.insert(below.begin(), below.end());
  }
  return all;
}

// What a header names of LibTorch's larger parts it includes: no compilation with LibTorch's headers
// precompiled would notice.
TEST(Includes, HeadersIncludeThePartsOfLibTorchThatTheyName) {
  const std::vector<std::pair<std::regex, std::regex>> parts{
      {std::regex("\\btorch::nn::"), std::regex("torch/(nn/|torch\\.h).*")},
      {std::regex("\\btorch::optim::"), std::regex("torch/(optim|torch\\.h).*")},
      {std::regex("\\bc10::OperatorHandle\\b|\\bc10::Dispatcher::"),
       std::regex("(ATen/core/(dispatch|boxing)/|torch/(library|torch)\\.h).*")},
      {std::regex("\\b(c10d|::c10d)::"), std::regex("torch/csrc/distributed/.*")},
      {std::regex("\\bat::Tensor\\b"), std::regex("(ATen|torch|c10)/.*")},
  };
  static const std::regex comment("//[^\\n]*");
  std::size_t named = 0;
  for (const char* folder : {"penstock", "include/penstock"})
    for (const std::string& file : sources_under(folder)) {
      if (!file.ends_with(".h")) continue;
      const std::string text = std::regex_replace(text_of(source_root() / file), comment, "");
      for (const auto& [name, header] : parts) {
        std::smatch found;
        if (!std::regex_search(text, found, name)) continue;
        ++named;
        bool included = false;
        for (const std::string& one : torch_headers_of(file.starts_with("include/") ? file.substr(8) : file))
          included |= std::regex_match(one, header);
        EXPECT_TRUE(included) << file << " names " << found[0] << " and includes no header that declares it";
      }
    }
  EXPECT_GT(named, 100u);
}

// Of its folder, with `detail` or the file's own name nested in it, or one that an "also" line allows.
TEST(Namespaces, EachFolderHasOne) {
  static const std::regex opened("(?:^|\\n)namespace ([a-z_:]+) \\{");
  for (const std::string& file : sources_under("penstock")) {
    const std::string room = room_of_file(file), folder = room.substr(0, room.find('/')),
                      own = fs::path(file).stem().string();
    const auto expected = arrows().namespace_of.find(folder);
    ASSERT_NE(expected, arrows().namespace_of.end()) << folder << " has no namespace in penstock/arrows.txt";
    const std::string& outer = expected->second;
    const auto also = arrows().also.find(room);
    const std::string text = text_of(source_root() / file);
    for (auto at = std::sregex_iterator(text.begin(), text.end(), opened); at != std::sregex_iterator();
         ++at) {
      const std::string name = (*at)[1];
      EXPECT_TRUE(name == outer || name == outer + "::detail" || name == outer + "::" + own ||
                  name == "detail" || (also != arrows().also.end() && also->second.contains(name)))
          << file << " opens namespace " << name << ", expected " << outer;
    }
  }
}

// Official LibTorch builds export a std::filesystem::remove_all that jumps to address zero.
TEST(Names, WhatFailsWithLibTorchIsNotCalled) {
  const std::string call = std::string("remove") + "_all(";
  for (const char* folder : {"penstock", "include/penstock", "tests", "bench", "examples"})
    for (const std::string& file : sources_under(folder))
      EXPECT_EQ(text_of(source_root() / file).find(call), std::string::npos)
          << file << " calls remove_all; use remove_tree of penstock/base/files.h";
}

// Types that headers declare: a name means one thing.
TEST(Names, NoTypeNameExistsTwice) {
  static const std::regex declared(
      "(?:^|\\n)(?:template <[^\\n]*>\\n?)?(?:struct|class|enum class)(?: \\[\\[nodiscard\\]\\])? "
      "(\\w+)\\b(?!::)[^;{(]*\\{");
  std::map<std::string, std::set<std::string>> places;
  for (const char* folder : {"penstock", "include/penstock"})
    for (const std::string& file : sources_under(folder)) {
      if (!file.ends_with(".h")) continue;
      const std::string text = text_of(source_root() / file);
      for (auto at = std::sregex_iterator(text.begin(), text.end(), declared); at != std::sregex_iterator();
           ++at)
        places[(*at)[1]].insert(file);
    }
  places.erase("std");  // specializations of std::hash
  EXPECT_GT(places.size(), 300u);
  for (const auto& [name, files] : places) {
    std::string all;
    for (const std::string& file : files) all += " " + file;
    EXPECT_EQ(files.size(), 1u) << name << " is declared in" << all;
  }
}

}  // namespace arrows_test
}  // namespace penstock::test
