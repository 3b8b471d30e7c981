#include "penstock/plan/cost/cost_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock::plan {

namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end == std::string_view::npos ? end : end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

double parse_time(std::string_view what, std::string_view text) {
  return read_number(what, text, {.low = 0, .high = kLongestTime});
}

using Setter = std::function<void(std::string_view what, std::string_view value)>;
struct Entry {
  const char* name;
  Setter set;
};

void apply(std::string_view what, std::string_view text, const std::vector<Entry>& entries) {
  for (const std::string_view part : split(text, ',')) {
    const std::size_t equals = part.find('=');
    if (equals == std::string_view::npos) {
      throw ConfigError(describe(fmt::format("{}: entry", what), quote(part), "name=value",
                                 fmt::format("for example {}=1", entries.front().name)));
    }
    const std::string name = to_lower(part.substr(0, equals));
    const auto found = std::find_if(entries.begin(), entries.end(),
                                    [&](const Entry& entry) { return to_lower(entry.name) == name; });
    if (found == entries.end()) {
      std::vector<std::string> names;
      for (const Entry& entry : entries) names.emplace_back(entry.name);
      const std::string nearest = nearest_name(name, names);
      throw ConfigError(describe(fmt::format("{}: name", what), quote(part.substr(0, equals)),
                                 fmt::format("one of {}", fmt::join(names, ", ")),
                                 nearest.empty() ? "" : fmt::format("did you mean {}?", nearest)));
    }
    found->set(fmt::format("{}: {}", what, found->name), part.substr(equals + 1));
  }
}

// Assigns one value, or one per stage, to the entries. A single common entry is expanded to one per stage if
// needed.
template <class Item, class Value, class Assign>
void spread(std::string_view what, std::vector<Item>& items, const std::vector<Value>& values,
            Assign assign) {
  if (values.size() > 1 && items.size() == 1) items.resize(values.size(), items.front());
  if (values.size() > 1 && items.size() != values.size()) {
    throw ConfigError(
        describe(what, count_of(values.size(), "value"),
                 fmt::format("1 or {}, since another entry has that many stages", items.size())));
  }
  for (std::size_t i = 0; i < items.size(); ++i) assign(items[i], values[values.size() == 1 ? 0 : i]);
}

}  // namespace

std::vector<std::int64_t> parse_bytes_list(std::string_view what, std::string_view text) {
  std::vector<std::int64_t> values;
  for (const std::string_view part : split(text, ':')) values.push_back(read_bytes(what, part));
  return values;
}

void apply_cost_text(CostModel& model, std::string_view text) {
  const auto per_stage = [&](auto assign) -> Setter {
    return [&model, assign](std::string_view what, std::string_view value) {
      std::vector<double> values;
      for (const std::string_view part : split(value, ':')) values.push_back(parse_time(what, part));
      spread(what, model.stages, values, assign);
    };
  };
  const auto single = [](double& target) -> Setter {
    return [&target](std::string_view what, std::string_view value) { target = parse_time(what, value); };
  };
  apply("cost", text,
        {{"F", per_stage([](StageCost& cost, double value) { cost.forward = value; })},
         {"I", per_stage([](StageCost& cost, double value) { cost.backward_input = value; })},
         {"W", per_stage([](StageCost& cost, double value) { cost.backward_weight = value; })},
         {"B", per_stage([](StageCost& cost, double value) { cost.backward = value; })},
         {"send", single(model.latency)},
         {"bytes",
          [&model](std::string_view what, std::string_view value) {
            spread(
                what, model.stages, parse_bytes_list(what, value),
                [](StageCost& cost, std::int64_t bytes) { cost.output_bytes = static_cast<double>(bytes); });
          }},
         {"bandwidth",
          [&model](std::string_view what, std::string_view value) {
            const std::optional<double> bytes = parse_scaled(value);
            if (!bytes || !(*bytes > 0))
              throw ConfigError(describe(what, quote(value),
                                         "a positive number of bytes per unit of time, such as 0.5 or 4G"));
            model.bandwidth = *bytes;
          }},
         {"unshard", per_stage([](StageCost& cost, double value) { cost.unshard = value; })},
         {"reduce", per_stage([](StageCost& cost, double value) { cost.reduce_grad = value; })},
         {"overlap", [&model](std::string_view what, std::string_view value) {
            model.overlap_saving = read_number(what, value, {.low = 0, .high = 1});
          }}});
}

void apply_memory_text(CostModel& model, std::string_view text) {
  const auto per_stage = [&](auto assign) -> Setter {
    return [&model, assign](std::string_view what, std::string_view value) {
      spread(what, model.memory, parse_bytes_list(what, value), assign);
    };
  };
  apply("memory", text,
        {{"params", per_stage([](StageMemory& memory, std::int64_t bytes) { memory.parameters = bytes; })},
         {"unsharded", per_stage([](StageMemory& memory, std::int64_t bytes) { memory.unsharded = bytes; })},
         {"grads", per_stage([](StageMemory& memory, std::int64_t bytes) { memory.gradients = bytes; })},
         {"act", per_stage([](StageMemory& memory, std::int64_t bytes) { memory.activation = bytes; })},
         {"split", per_stage([](StageMemory& memory, std::int64_t bytes) {
            memory.between_input_and_weight = bytes;
          })}});
}

Communication parse_communication(std::string_view text) {
  const std::string name = to_lower(text);
  if (name == "overlapped") return Communication::Overlapped;
  if (name == "blocking") return Communication::Blocking;
  throw ConfigError(describe("communication", quote(text), "overlapped or blocking"));
}

}  // namespace penstock::plan
