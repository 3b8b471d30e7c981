// Reference data of the sections `schedules` and `mapping` (stage maps). Every case of an index is run;
// unknown kinds of cases or passes fail.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "penstock/errors.h"
#include "penstock/generators.h"
#include "penstock/lower.h"
#include "penstock/schedule.h"
#include "penstock/schedule/check/dry_run.h"
#include "penstock/validate.h"

namespace penstock::schedule {
namespace golden_schedule_test {

using nlohmann::json;
namespace fs = std::filesystem;

fs::path golden_folder() {
  if (const char* folder = std::getenv("PENSTOCK_GOLDEN"); folder != nullptr && *folder != '\0')
    return folder;
  const char* source = std::getenv("PENSTOCK_SOURCE");
  if (source == nullptr) throw std::runtime_error("set PENSTOCK_GOLDEN to the folder of the reference data");
  return fs::path(source) / "tests" / "golden";
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

const json& section(const std::string& name) {
  static std::map<std::string, json> known;
  auto found = known.find(name);
  if (found == known.end()) {
    const json top = json::parse(read_text(golden_folder() / "index.json"));
    const std::string path = top.at("sections").at(name).get<std::string>();
    json index = json::parse(read_text(golden_folder() / path));
    for (const auto& [kind, count] : top.at("counts").at(name).items()) {
      EXPECT_EQ(index.at(kind).size(), count.get<std::size_t>()) << name << "/" << kind;
    }
    found = known.emplace(name, std::move(index)).first;
  }
  return found->second;
}

std::string read_csv(const json& value) {
  return read_text(golden_folder() / "schedules" / value.get<std::string>());
}

PipelineShape shape_of(const json& config) {
  PipelineShape shape;
  shape.ranks = config.at("pp_size").get<int>();
  shape.stages_per_rank = config.at("stages_per_rank").get<int>();
  shape.microbatches = config.at("n_microbatches").get<int>();
  return shape;
}

Row row_of(const json& cells) {
  Row row;
  for (const json& cell : cells) row.push_slot(parse_cell(cell.get<std::string>()));
  return row;
}

std::vector<Row> rows_of(const json& rows) {
  std::vector<Row> result;
  for (const json& cells : rows) result.push_back(row_of(cells));
  return result;
}

json cells_of(const Row& row) {
  json cells = json::array();
  for (const Slot slot : row) cells.push_back(to_text(slot));
  return cells;
}

std::vector<int> lengths(const Schedule& schedule) {
  std::vector<int> result;
  for (const Row& row : schedule.rows()) result.push_back(static_cast<int>(row.size()));
  return result;
}

// A trace of what PyTorch executed: cells of actions, "[a;b]" for transfers that start together,
// "last_backward@1B3" and "1REDUCE_GRAD(div=4)".
struct Executed {
  Row row;                    // in order, batched or not
  std::string last_backward;  // "1B3"
  std::vector<int> divisors;  // of REDUCE_GRAD
};

Executed executed(const std::string& line) {
  constexpr std::string_view kLast = "last_backward@", kDivisor = "REDUCE_GRAD(div=";
  Executed result;
  std::stringstream cells(line);
  for (std::string cell; std::getline(cells, cell, ',');) {
    if (cell.starts_with(kLast)) {
      EXPECT_TRUE(result.last_backward.empty()) << line;
      result.last_backward = cell.substr(kLast.size());
      continue;
    }
    if (const std::size_t at = cell.find(kDivisor); at != std::string::npos) {
      result.divisors.push_back(std::stoi(cell.substr(at + kDivisor.size())));
      cell = cell.substr(0, cell.find('('));
    }
    const bool batch = cell.starts_with('[') && cell.ends_with(']');
    std::stringstream actions(batch ? cell.substr(1, cell.size() - 2) : cell);
    for (std::string action; std::getline(actions, action, ';');) result.row.push(parse_action(action));
  }
  return result;
}

// Transfers are where PyTorch starts them, regardless of batching; gradients are divided where it divides
// them.
void expect_executed(const Schedule& schedule, const std::string& csv) {
  LowerOptions options;
  options.defer_receives = true;
  options.unshard = false;
  const Schedule ours = lower(schedule, options);
  std::stringstream lines(csv);
  int rank = 0;
  for (std::string line; std::getline(lines, line); ++rank) {
    ASSERT_LT(rank, ours.ranks());
    if (line.ends_with('\r')) line.pop_back();
    const Executed expected = executed(line);
    EXPECT_EQ(cells_of(ours.row(rank)), cells_of(expected.row)) << "rank " << rank;
    EXPECT_EQ(expected.divisors,
              std::vector<int>(schedule.stages().stages_of(rank).size(), schedule.microbatches()));
    std::string last;
    for (const Slot slot : schedule.row(rank))
      for (const Action& action : slot)
        if (action.kind() == ActionKind::Backward || action.kind() == ActionKind::BackwardWeight)
          last = to_text(action);
    EXPECT_EQ(last, expected.last_backward) << "rank " << rank;
  }
  EXPECT_EQ(rank, ours.ranks());
}

TEST(GoldenSchedules, EveryKindOfCaseIsKnown) {
  const std::set<std::string> known = {"configs", "errors",       "validation",
                                       "passes",  "action_parse", "simulation"};
  for (const auto& [kind, cases] : section("schedules").items()) EXPECT_TRUE(known.count(kind)) << kind;
}

TEST(GoldenSchedules, Configs) {
  for (const json& config : section("schedules").at("configs")) {
    SCOPED_TRACE(config.at("id").get<std::string>());
    const Schedule schedule =
        generate(schedule_kind(config.at("schedule").get<std::string>()), shape_of(config));
    const std::string compute = read_csv(config.at("compute_csv"));
    EXPECT_EQ(to_csv(schedule), compute);
    EXPECT_EQ(schedule.stages().stage_to_rank(), config.at("stage_to_rank").get<std::vector<int>>());
    EXPECT_EQ(schedule.stages().stages(), config.at("num_stages").get<int>());
    EXPECT_EQ(lengths(schedule), config.at("rank_lengths").get<std::vector<int>>());
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      EXPECT_EQ(schedule.row(rank).idle_slots(),
                config.at("rank_idle_slots").at(static_cast<std::size_t>(rank)));
    }
    const Report report = check(schedule);
    EXPECT_TRUE(report.ok()) << report.text();

    const Schedule lowered = lower(schedule);
    const std::string lowered_csv = read_csv(config.at("lowered_csv"));
    EXPECT_EQ(to_csv(lowered), lowered_csv);
    EXPECT_EQ(lengths(lowered), config.at("lowered_rank_lengths").get<std::vector<int>>());
    const Report lowered_report = check(lowered);
    EXPECT_TRUE(lowered_report.ok()) << lowered_report.text();

    EXPECT_EQ(to_csv(parse_schedule(compute)), compute);
    EXPECT_EQ(parse_schedule(lowered_csv), lowered);

    if (config.contains("lowered_defer_csv")) {
      LowerOptions options;
      options.defer_receives = true;
      const Schedule deferred = lower(schedule, options);
      EXPECT_EQ(to_csv(deferred), read_csv(config.at("lowered_defer_csv")));
      EXPECT_EQ(lengths(deferred), config.at("lowered_defer_rank_lengths").get<std::vector<int>>());
      ValidateOptions posted;
      posted.sends = SendModel::Posted;
      const Report deferred_report = check(deferred, posted);
      EXPECT_TRUE(deferred_report.ok()) << deferred_report.text();
    }
    if (config.contains("exec_csv")) expect_executed(schedule, read_csv(config.at("exec_csv")));
    // PyTorch 2.14 reports a second, partly wrong form of some schedules. The data records whether it agrees
    // with the executed form; Penstock matches the executed one.
    if (config.contains("reported_ir_csv")) {
      std::vector<Row> with_reduce;
      for (const Row& row : schedule.rows())
        with_reduce.push_back(add_reduce_grad(row, schedule.microbatches()));
      const std::vector<Row> reported = parse_rows(read_csv(config.at("reported_ir_csv")));
      std::vector<Row> reported_dense;
      for (const Row& row : reported) {
        Row dense;
        for (const Slot slot : row) {
          if (!slot.empty()) dense.push_slot(slot);
        }
        reported_dense.push_back(std::move(dense));
      }
      EXPECT_EQ(reported_dense == with_reduce,
                config.at("reported_ir_equals_executed_plus_reduce").get<bool>());
    }
  }
}

// "look up schedule class by name "1f1b"" -> 1f1b
std::string looked_up_name(const json& error) {
  const std::string description = error.at("description").get<std::string>();
  const std::size_t first = description.find('"');
  const std::size_t last = description.rfind('"');
  if (first == std::string::npos || last <= first)
    throw std::runtime_error("no quoted name in: " + description);
  return description.substr(first + 1, last - first - 1);
}

TEST(GoldenSchedules, Errors) {
  for (const json& error : section("schedules").at("errors")) {
    SCOPED_TRACE(error.at("id").get<std::string>());
    const std::string phase = error.at("phase").get<std::string>();
    const bool fails = !error.at("error_type").is_null();
    if (fails) {
      ASSERT_EQ(error.at("error_type"), "ValueError");
    }
    if (phase == "construct") {
      ASSERT_TRUE(fails);
      const ScheduleKind kind = schedule_kind(error.at("schedule").get<std::string>());
      EXPECT_THROW(generate(kind, shape_of(error)), ValueError);
    } else if (phase == "lookup") {
      const std::string name = looked_up_name(error);
      if (fails) {
        try {
          // Only names that PyTorch 2.14 does not have may resolve here.
          EXPECT_FALSE(resolve_schedule_name(name).in_reference) << name;
        } catch (const ValueError&) {
        }
      } else {
        EXPECT_EQ(resolve_schedule_name(name).name, error.at("resolved").get<std::string>());
        EXPECT_TRUE(resolve_schedule_name(name).in_reference);
      }
    } else {
      ADD_FAILURE() << "unknown phase " << phase;
    }
  }
}

TEST(GoldenSchedules, Validation) {
  for (const json& item : section("schedules").at("validation")) {
    SCOPED_TRACE(item.at("id").get<std::string>());
    const int microbatches = item.at("n_microbatches").get<int>();
    ValidateOptions as_pytorch;
    as_pytorch.as_pytorch = true;
    as_pytorch.expected = ValidateOptions::Extent{item.at("pp_size").get<int>(),
                                                  item.at("num_stages").get<int>(), microbatches};
    const auto validated = [&] { return validate(schedule_from_rows(rows_of(item.at("rows"))), as_pytorch); };
    const auto lowered = [&] {
      const Schedule schedule = validated();
      if (!is_compute_only(schedule)) return lower(schedule);  // refuses
      std::vector<Row> rows;
      for (const Row& row : schedule.rows())
        rows.push_back(add_reduce_grad(add_unshard_reshard(row, 3), microbatches));
      return add_send_receive(Schedule(schedule.stages(), std::move(rows)));
    };
    if (item.at("validate") == "ok") {
      EXPECT_EQ(validated().stages().stage_to_rank(), item.at("stage_to_rank").get<std::vector<int>>());
    } else {
      EXPECT_THROW(validated(), ValueError);
      // What PyTorch 2.14 refuses is refused in the strict mode as well.
      EXPECT_THROW(
          {
            ValidateOptions strict = as_pytorch;
            strict.as_pytorch = false;
            validate(schedule_from_rows(rows_of(item.at("rows"))), strict);
          },
          ValueError);
    }
    if (item.at("lower") == "ok") {
      const Schedule result = lowered();
      ASSERT_EQ(result.rows().size(), item.at("lowered_rows").size());
      for (int rank = 0; rank < result.ranks(); ++rank) {
        EXPECT_EQ(cells_of(result.row(rank)), item.at("lowered_rows").at(static_cast<std::size_t>(rank)));
      }
    } else {
      EXPECT_THROW(lowered(), ValueError);
      if (!is_compute_only(schedule_from_rows(rows_of(item.at("rows"))))) continue;
      // PyTorch 2.14 finds cycles between ranks only while lowering; Penstock finds them while validating.
      EXPECT_THROW(validate(schedule_from_rows(rows_of(item.at("rows"))),
                            [&] {
                              ValidateOptions strict;
                              strict.expected = as_pytorch.expected;
                              return strict;
                            }()),
                   ValueError);
    }
  }
}

TEST(GoldenSchedules, Passes) {
  for (const json& item : section("schedules").at("passes")) {
    SCOPED_TRACE(item.at("id").get<std::string>());
    const std::string pass = item.at("pass_name").get<std::string>();
    const Row input = row_of(item.at("input"));
    if (pass == "merge_bw") {
      EXPECT_EQ(cells_of(merge_backward(input)), item.at("output"));
    } else if (pass == "add_reduce_grad") {
      EXPECT_EQ(cells_of(add_reduce_grad(input, item.at("n_microbatches").get<int>())), item.at("output"));
    } else if (pass == "add_unshard_reshard") {
      EXPECT_EQ(cells_of(add_unshard_reshard(input, item.at("max_active_stages").get<int>())),
                item.at("output"));
    } else {
      ADD_FAILURE() << "unknown pass " << pass;
    }
  }
}

// Returns whether this text is the printed form of an action, up to blanks and leading zeros. PyTorch 2.14
// also accepts trailing text after the action, which Penstock refuses.
std::string canonical(const std::string& text) {
  std::string out;
  bool in_number = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (std::isspace(static_cast<unsigned char>(c))) continue;
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    const bool more = i + 1 < text.size() && std::isdigit(static_cast<unsigned char>(text[i + 1])) != 0;
    if (digit && !in_number && c == '0' && more) continue;
    in_number = digit;
    out += c;
  }
  return out;
}

// PyTorch also accepts parenthesized units of any kind, "(0F0;1B0)F", and with one member or none. Penstock
// refuses them, since they could not be executed as written.
bool is_no_overlap(const json& action) {
  if (action.at("type") != "OVERLAP_F_B") return !action.at("sub").is_null();
  return action.at("sub").is_null() || action.at("sub").size() < 2;
}

TEST(GoldenSchedules, ActionParse) {
  for (const json& item : section("schedules").at("action_parse")) {
    const std::string text = item.at("text").get<std::string>();
    SCOPED_TRACE("\"" + text + "\"");
    if (!item.at("ok").get<bool>()) {
      EXPECT_EQ(item.at("error_type"), "RuntimeError");
      EXPECT_THROW(parse_cell(text), ConfigError);
      continue;
    }
    const json& action = item.at("action");
    if (action.is_null()) {
      EXPECT_TRUE(parse_cell(text).empty());
      continue;
    }
    const std::string printed = action.at("printed").get<std::string>();
    if (canonical(text) != printed || is_no_overlap(action)) {
      EXPECT_THROW(parse_cell(text), ConfigError);  // text after the action
      continue;
    }
    const std::vector<Action> members = parse_cell(text);
    EXPECT_EQ(to_text(members), printed);
    ASSERT_FALSE(members.empty());
    // PyTorch classifies an overlap by its kind, whatever its members; Penstock looks at the members.
    if (action.at("sub").is_null()) {
      EXPECT_EQ(is_compute(members[0].kind()), action.at("is_compute").get<bool>());
      ASSERT_EQ(members.size(), 1u);
      EXPECT_EQ(members[0].stage(), action.at("stage").get<int>());
      EXPECT_EQ(to_text(members[0].kind()), action.at("type").get<std::string>());
      EXPECT_EQ(members[0].has_microbatch(), !action.at("microbatch").is_null());
      if (members[0].has_microbatch()) {
        EXPECT_EQ(*members[0].microbatch(), action.at("microbatch").get<int>());
      }
    } else {
      ASSERT_EQ(members.size(), action.at("sub").size());
      EXPECT_EQ(action.at("type"), "OVERLAP_F_B");
      for (std::size_t i = 0; i < members.size(); ++i) {
        EXPECT_EQ(to_text(members[i]), action.at("sub").at(i).get<std::string>());
      }
    }
  }
}

TEST(GoldenSchedules, Simulation) {
  for (const json& item : section("schedules").at("simulation")) {
    SCOPED_TRACE(item.at("id").get<std::string>());
    const Schedule schedule = generate(schedule_kind(item.at("schedule").get<std::string>()), shape_of(item));
    const Schedule run = dry_run(without_sharding(lower(schedule)));
    ASSERT_EQ(run.rows().size(), item.at("rows").size());
    for (int rank = 0; rank < run.ranks(); ++rank) {
      EXPECT_EQ(cells_of(run.row(rank)), item.at("rows").at(static_cast<std::size_t>(rank)));
    }
  }
}

TEST(GoldenMapping, StageMaps) {
  for (const json& item : section("mapping").at("stage_maps")) {
    SCOPED_TRACE(item.at("id").get<std::string>());
    const int ranks = item.at("pp_size").get<int>();
    const int stages = item.at("num_stages").get<int>();
    const auto map = [&] {
      return stage_to_rank(parse_stage_placement(item.at("style").get<std::string>()), ranks, stages);
    };
    const auto inverse = [&] {
      return rank_to_stages(parse_stage_placement(item.at("style").get<std::string>()), ranks, stages);
    };
    if (item.contains("error_type")) {
      ASSERT_EQ(item.at("error_type"), "ValueError");
      EXPECT_THROW(map(), ValueError);
      EXPECT_THROW(inverse(), ValueError);
      continue;
    }
    EXPECT_EQ(map(), item.at("stage_to_rank").get<std::vector<int>>());
    // PyTorch 2.14 omits ranks without a stage from its map.
    json occupied = json::object();
    const auto stages_of = inverse();
    for (std::size_t rank = 0; rank < stages_of.size(); ++rank) {
      if (!stages_of[rank].empty()) occupied[std::to_string(rank)] = stages_of[rank];
    }
    EXPECT_EQ(occupied, item.at("rank_to_stages"));
  }
}

}  // namespace golden_schedule_test
}  // namespace penstock::schedule
