#include "tests/chaos/table.h"

#include <fmt/format.h>

#include <array>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"

namespace penstock::chaos {

namespace {

using Kind = TrialResult::Kind;

constexpr std::array<std::pair<Kind, const char*>, 4> kKinds = {{{Kind::SameLosses, "same losses"},
                                                                 {Kind::NamedError, "named error"},
                                                                 {Kind::Failed, "failed"},
                                                                 {Kind::Skipped, "skipped"}}};

const char* name_of_kind(Kind kind) { return kKinds.at(static_cast<std::size_t>(kind)).second; }

struct Counts {
  std::map<Kind, int> of;
  int trials = 0;  // that ran

  void add(Kind kind) {
    ++of[kind];
    if (kind != Kind::Skipped) ++trials;
  }
  int count(Kind kind) const {
    const auto found = of.find(kind);
    return found == of.end() ? 0 : found->second;
  }
};

struct TableRow {
  std::string fault, meaning;
  Counts counts;
};

std::vector<TableRow> rows_of(const std::vector<TrialResult>& results) {
  std::map<Fault, Counts> by_fault;
  Counts all;
  for (const TrialResult& result : results) {
    by_fault[result.fault].add(result.kind);
    all.add(result.kind);
  }
  std::vector<TableRow> rows;
  for (const Fault fault : all_faults())
    if (by_fault.contains(fault)) rows.push_back({name_of(fault), meaning_of(fault), by_fault.at(fault)});
  rows.push_back({"all", "", all});
  return rows;
}

}  // namespace

std::string to_line(const TrialResult& result) {
  const nlohmann::json line = {{"fault", name_of(result.fault)},
                               {"seed", result.seed},
                               {"end", name_of_kind(result.kind)},
                               {"seconds", result.seconds},
                               {"notes", result.notes}};
  return line.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

TrialResult parse_line(const std::string& line) {
  const auto bad = [&] {
    return ConfigError(describe("line of results", quote(line), "a line that an earlier campaign has written",
                                "remove it, or give another file"));
  };
  try {
    const nlohmann::json read = nlohmann::json::parse(line);
    TrialResult result;
    const auto fault = fault_named(read.at("fault").get<std::string>());
    if (!fault) throw bad();
    result.fault = *fault;
    result.seed = read.at("seed");
    const std::string end = read.at("end");
    bool known = false;
    for (const auto& [kind, name] : kKinds)
      if (end == name) {
        result.kind = kind;
        known = true;
      }
    if (!known) throw bad();
    result.seconds = read.at("seconds");
    result.notes = read.at("notes").get<std::vector<std::string>>();
    return result;
  } catch (const nlohmann::json::exception&) {
    throw bad();
  }
}

std::vector<TrialResult> read_results(const std::filesystem::path& file) {
  std::map<std::pair<Fault, std::uint64_t>, TrialResult> results;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const TrialResult result = parse_line(line);
    results[{result.fault, result.seed}] = result;
  }
  std::vector<TrialResult> list;
  for (auto& [trial, result] : results) list.push_back(std::move(result));
  return list;
}

std::string text_table(const std::vector<TrialResult>& results) {
  std::string text = fmt::format("{:<20} {:>6} {:>12} {:>12} {:>8} {:>8}\n", "fault", "trials", "same losses",
                                 "named error", "failed", "skipped");
  for (const TableRow& row : rows_of(results))
    text += fmt::format("{:<20} {:>6} {:>12} {:>12} {:>8} {:>8}\n", row.fault, row.counts.trials,
                        row.counts.count(Kind::SameLosses), row.counts.count(Kind::NamedError),
                        row.counts.count(Kind::Failed), row.counts.count(Kind::Skipped));
  return text;
}

std::string markdown_table(const std::vector<TrialResult>& results) {
  std::string text =
      "| fault | | trials | same losses | named error | failed |\n|---|---|---:|---:|---:|---:|\n";
  for (const TableRow& row : rows_of(results))
    text += fmt::format("| `{}` | {} | {} | {} | {} | {} |\n", row.fault, row.meaning, row.counts.trials,
                        row.counts.count(Kind::SameLosses), row.counts.count(Kind::NamedError),
                        row.counts.count(Kind::Failed));
  return text;
}

}  // namespace penstock::chaos
