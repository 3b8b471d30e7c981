// Ways in which a valid configuration becomes one that cannot be trained: a table that
// invalid_configurations.h draws from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

// Apart from the names of bad_inputs.cpp.
namespace penstock::test::configurations {

using Chance = std::mt19937_64;
using Words = std::vector<std::string>;
using Settings = std::map<std::string, std::string>;  // value by key: "layout.pp"

template <class Items>
const typename Items::value_type& any_of(const Items& items, Chance& chance) {
  return items[std::uniform_int_distribution<std::size_t>(0, items.size() - 1)(chance)];
}

inline std::int64_t between(std::int64_t first, std::int64_t last, Chance& chance) {
  return std::uniform_int_distribution<std::int64_t>(first, last)(chance);
}

struct Corruption {
  std::string name;            // "more stages than blocks"
  std::set<std::string> keys;  // that it sets or relies on: two corruptions of one case must not share any
  // Returns words any of which names the problem; nothing if this layout cannot be corrupted like this.
  std::function<std::optional<Words>(Settings&, Chance&)> apply;
  bool needs_models = false;  // model.type is one of those that tests/cli/invalid_models.cpp registers

  bool shares_a_key_with(const Corruption& other) const {
    return std::any_of(keys.begin(), keys.end(),
                       [&](const std::string& key) { return other.keys.contains(key); });
  }
};

// Files that some of them refer to.
struct ConfigurationFiles {
  std::filesystem::path text;       // a folder of C++ text
  std::filesystem::path schedules;  // a folder of CSV files: good.csv and others that cannot be run
  std::filesystem::path run;        // a run of a model of another width, with a checkpoint
};

std::vector<Corruption> all_corruptions(const ConfigurationFiles& files);

}  // namespace penstock::test::configurations
