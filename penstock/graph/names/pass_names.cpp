#include "penstock/graph/names/pass_names.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock::graph {
namespace {

struct KnownPassNames {
  std::mutex mutex;
  std::vector<std::string> names{kStandardPasses.begin(), kStandardPasses.end()};
  static KnownPassNames& instance() {
    static KnownPassNames known;
    return known;
  }
};

std::string message_for(const std::string& name, std::string_view what,
                        const std::vector<std::string>& names) {
  const std::string nearest = nearest_name(name, names);
  return describe(what, quote(name), fmt::format("passes out of {}", fmt::join(names, ", ")),
                  nearest.empty() ? "leave it out" : fmt::format("did you mean '{}'?", nearest));
}

}  // namespace

std::vector<std::string> known_pass_names() {
  KnownPassNames& known = KnownPassNames::instance();
  const std::lock_guard lock(known.mutex);
  return known.names;
}

bool add_pass_name(const std::string& name, std::string_view before) {
  KnownPassNames& known = KnownPassNames::instance();
  const std::lock_guard lock(known.mutex);
  if (std::find(known.names.begin(), known.names.end(), name) != known.names.end()) return false;
  auto place = known.names.end();
  if (!before.empty()) {
    place = std::find(known.names.begin(), known.names.end(), before);
    if (place == known.names.end())
      throw ValueError(
          message_for(std::string(before), "graph: a pass is to run before a pass", known.names));
  }
  known.names.insert(place, name);
  return true;
}

std::string unknown_pass(const std::vector<std::string>& names, std::string_view what) {
  const std::vector<std::string> known = known_pass_names();
  for (const std::string& name : names)
    if (std::find(known.begin(), known.end(), name) == known.end()) return message_for(name, what, known);
  return {};
}

}  // namespace penstock::graph
