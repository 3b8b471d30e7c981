#include "penstock/cli/plain/cost_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/base/printable.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"

namespace penstock::cli {
namespace {

using CostJson = nlohmann::ordered_json;

constexpr const char* kMakeCosts = "write it with penstock inspect costs CONFIG -o FILE";

class CostReader {
 public:
  explicit CostReader(const std::string& path)
      : path_(path), json_(CostJson::parse(read_file(path, "costs", kMakeCosts), nullptr, false)) {
    if (!json_.is_object())
      fail("", "text that is not a JSON object", "an object with embed, blocks and head");
  }

  CostFile read() const {
    CostFile costs;
    costs.embed = part(json_, "embed");
    costs.head = part(json_, "head");
    const CostJson& blocks = member(json_, "blocks");
    if (!blocks.is_object() || blocks.empty()) fail("blocks", "", "an object with the kinds of blocks");
    for (const auto& entry : blocks.items()) costs.blocks[entry.key()] = part(blocks, entry.key());
    costs.kept_by_stage = number(json_, "kept_by_stage", "kept_by_stage");
    costs.border = number(json_, "border", "border");
    return costs;
  }

 private:
  [[noreturn]] void fail(const std::string& where, const std::string& found,
                         const std::string& wanted) const {
    throw ConfigError(describe(where.empty() ? path_ : fmt::format("{}: {}", path_, quote(where)), found,
                               wanted, kMakeCosts));
  }
  const CostJson& member(const CostJson& object, const std::string& name) const {
    const auto found = object.find(name);
    if (found == object.end()) fail(name, "nothing", "an entry");
    return *found;
  }
  double number(const CostJson& object, const char* name, const std::string& where) const {
    const CostJson& value = member(object, name);
    constexpr double kMost = 1e100;  // sums stay finite
    if (!value.is_number() || !(value.get<double>() >= 0) || value.get<double>() > kMost)
      fail(where, shortened(value.dump(), 80), "a number of at least 0");
    return value.get<double>();
  }
  PartCost part(const CostJson& object, const std::string& name) const {
    const CostJson& entry = member(object, name);
    if (!entry.is_object()) fail(name, "", "an object with forward, backward and kept");
    return {.forward = number(entry, "forward", name + ".forward"),
            .backward = number(entry, "backward", name + ".backward"),
            .kept = number(entry, "kept", name + ".kept")};
  }

  const std::string& path_;
  const CostJson json_;
};

CostJson json_of_part(const PartCost& part) {
  return {{"forward", part.forward}, {"backward", part.backward}, {"kept", part.kept}};
}

}  // namespace

CostFile read_cost_file(const std::string& path) { return CostReader(path).read(); }

std::string to_json(const CostFile& costs) {
  CostJson blocks = CostJson::object();
  for (const auto& [kind, part] : costs.blocks) blocks[kind] = json_of_part(part);
  const CostJson all = {{"unit", "seconds and bytes per microbatch"},
                        {"embed", json_of_part(costs.embed)},
                        {"blocks", blocks},
                        {"head", json_of_part(costs.head)},
                        {"kept_by_stage", costs.kept_by_stage},
                        {"border", costs.border}};
  return all.dump(1) + "\n";
}

models::PartCosts part_costs(const CostFile& costs, const models::ModelPlan& plan, const std::string& path) {
  models::PartCosts parts{.blocks = {}, .embed = costs.embed.time(), .head = costs.head.time()};
  for (const models::BlockPlan& block : plan.blocks) {
    const auto found = costs.blocks.find(block.kind);
    if (found == costs.blocks.end()) {
      std::vector<std::string> kinds;
      for (const auto& [kind, part] : costs.blocks) kinds.push_back(kind);
      throw ConfigError(describe(fmt::format("{}: blocks", path), fmt::format("{}", fmt::join(kinds, ", ")),
                                 fmt::format("also \"{}\", which the model has", block.kind), kMakeCosts));
    }
    parts.blocks.push_back(found->second.time());
  }
  return parts;
}

}  // namespace penstock::cli
