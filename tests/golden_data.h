// Reference data: a folder with index.json, which names the sections; each section has its own index that
// lists every case. PENSTOCK_GOLDEN selects another folder of the same format; the default is tests/golden of
// the source tree.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace penstock::test {

inline std::filesystem::path golden_folder() {
  if (const char* folder = std::getenv("PENSTOCK_GOLDEN"); folder != nullptr && *folder != '\0')
    return folder;
  const char* source = std::getenv("PENSTOCK_SOURCE");
  if (source == nullptr) throw std::runtime_error("set PENSTOCK_GOLDEN to the folder of the reference data");
  return std::filesystem::path(source) / "tests" / "golden";
}

inline nlohmann::json read_json(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return nlohmann::json::parse(file);
}

// The index of a section: its files and ids.
inline nlohmann::json golden_index(const std::string& section) {
  const nlohmann::json top = read_json(golden_folder() / "index.json");
  return read_json(golden_folder() / top.at("sections").at(section).get<std::string>());
}

// The cases of one kind, by id, in a section whose files are named after their kinds; exactly those in the
// index.
inline std::map<std::string, nlohmann::json> golden_cases(const std::string& section,
                                                          const std::string& kind) {
  const nlohmann::json top = read_json(golden_folder() / "index.json");
  const std::filesystem::path path = golden_folder() / top.at("sections").at(section).get<std::string>();
  const nlohmann::json index = read_json(path);
  const nlohmann::json& ids = index.at("ids").at(kind);
  const std::string file = kind + ".json";
  EXPECT_EQ(ids.size(), top.at("counts").at(section).at(kind).get<std::size_t>());
  EXPECT_EQ(ids.size(), index.at("files").at(file).get<std::size_t>());
  std::map<std::string, nlohmann::json> cases;
  const nlohmann::json content = read_json(path.parent_path() / file);
  for (const nlohmann::json& item : content.at("cases")) {
    EXPECT_EQ(item.at("kind"), kind);
    EXPECT_TRUE(cases.emplace(item.at("id").get<std::string>(), item).second) << item.at("id");
  }
  EXPECT_EQ(cases.size(), ids.size());
  for (const nlohmann::json& id : ids) EXPECT_TRUE(cases.contains(id.get<std::string>())) << id;
  return cases;
}

}  // namespace penstock::test
