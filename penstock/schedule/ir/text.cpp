#include "penstock/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "penstock/base/describe.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"

namespace penstock::schedule {

namespace {

constexpr std::string_view kOverlapSuffix = ")OVERLAP_F_B";

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Parses one text and tracks line and column for messages.
class Reader {
 public:
  Reader(std::string_view text, const TextLimits& limits, std::size_t line = 1, std::size_t column = 1)
      : text_(text), limits_(limits), line_(line), first_column_(column) {}

  // Blanks, then nothing, an action or an overlap, then blanks to the end.
  void cell(std::vector<Action>& members) {
    members.clear();
    skip_blanks();
    if (at_end()) return;
    if (peek() == '(') {
      overlap(members);
    } else {
      members.push_back(action());
    }
    skip_blanks();
    if (!at_end())
      fail(position_, fmt::format("found \"{}\" after a complete cell", excerpt(position_)), "remove it");
  }

 private:
  bool at_end() const { return position_ == text_.size(); }
  char peek() const { return text_[position_]; }
  void skip_blanks() {
    while (!at_end() && (is_blank(peek()) || peek() == '\n')) ++position_;
  }

  std::string excerpt(std::size_t from) const {
    std::string shown;
    for (const char c : text_.substr(from, 24)) {
      if (c >= 32 && c < 127) {
        shown += c;
      } else {
        shown += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
      }
    }
    if (text_.size() > from + 24) shown += "...";
    return shown;
  }

  [[noreturn]] void fail(std::size_t at, const std::string& what, const std::string& remedy) const {
    throw ConfigError(
        fmt::format("schedule text, line {}, column {}: {}; {}", line_, first_column_ + at, what, remedy));
  }

  std::int32_t number(std::string_view what, std::int32_t limit) {
    const std::size_t start = position_;
    while (!at_end() && is_digit(peek())) ++position_;
    const std::string_view digits = text_.substr(start, position_ - start);
    const std::optional<std::int64_t> value = parse_integer(digits);
    if (!value || *value > limit) {
      fail(start, fmt::format("{} {} is out of range", what, excerpt(start)),
           fmt::format("at most {} is allowed", limit));
    }
    return static_cast<std::int32_t>(*value);
  }

  ActionKind kind() {
    struct Name {
      std::string_view text;
      ActionKind kind;
    };
    // Longest first where one name is a prefix of another.
    static constexpr std::array<Name, kActionKinds> kNames = {{{"REDUCE_GRAD", ActionKind::ReduceGrad},
                                                               {"UNSHARD", ActionKind::Unshard},
                                                               {"RESHARD", ActionKind::Reshard},
                                                               {"SEND_F", ActionKind::SendForward},
                                                               {"RECV_F", ActionKind::RecvForward},
                                                               {"SEND_B", ActionKind::SendBackward},
                                                               {"RECV_B", ActionKind::RecvBackward},
                                                               {"F", ActionKind::Forward},
                                                               {"B", ActionKind::Backward},
                                                               {"I", ActionKind::BackwardInput},
                                                               {"W", ActionKind::BackwardWeight}}};
    const std::string_view rest = text_.substr(position_);
    for (const Name& name : kNames) {
      if (rest.starts_with(name.text)) {
        position_ += name.text.size();
        return name.kind;
      }
    }
    fail(position_, fmt::format("\"{}\" is not an action kind", excerpt(position_)),
         "use F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD or REDUCE_GRAD");
  }

  Action action() {
    if (at_end() || !is_digit(peek())) {
      fail(position_, fmt::format("\"{}\" does not start with a stage number", excerpt(position_)),
           "write <stage><kind><microbatch>, for example 2F0");
    }
    const int stage = number("stage", limits_.stage);
    const ActionKind what = kind();
    if (at_end() || !is_digit(peek())) return Action(what, stage);
    return Action(what, stage, number("microbatch", limits_.microbatch));
  }

  void overlap(std::vector<Action>& members) {
    const std::size_t start = position_;
    ++position_;
    while (true) {
      skip_blanks();
      members.push_back(action());
      if (members.size() > limits_.overlap_members) {
        fail(start, "an overlap has too many members",
             fmt::format("at most {} are allowed", limits_.overlap_members));
      }
      skip_blanks();
      if (!at_end() && peek() == ';') {
        ++position_;
        continue;
      }
      break;
    }
    if (!text_.substr(position_).starts_with(kOverlapSuffix)) {
      fail(position_, fmt::format("found \"{}\" inside an overlap", excerpt(position_)),
           "write (0F4;3B1)OVERLAP_F_B");
    }
    position_ += kOverlapSuffix.size();
    if (members.size() < 2)
      fail(start, "an overlap has one member", "write a single action without parentheses");
  }

  std::string_view text_;
  const TextLimits& limits_;
  std::size_t line_;
  std::size_t first_column_;
  std::size_t position_ = 0;
};

}  // namespace

std::vector<Action> parse_cell(std::string_view text, const TextLimits& limits) {
  std::vector<Action> members;
  Reader(text, limits).cell(members);
  return members;
}

Action parse_action(std::string_view text, const TextLimits& limits) {
  const std::vector<Action> members = parse_cell(text, limits);
  if (members.size() != 1) {
    throw ConfigError(describe("action text", quote(text), "exactly one action, for example 2F0"));
  }
  return members[0];
}

std::vector<Row> parse_rows(std::string_view csv, const TextLimits& limits) {
  if (csv.size() > limits.bytes) {
    throw ConfigError(describe("size of a schedule text", fmt::format("{} bytes", csv.size()),
                               fmt::format("at most {}", limits.bytes)));
  }
  std::vector<Row> rows;
  std::vector<Action> members;
  // Editors and spreadsheets may write a byte order mark.
  std::size_t line_start = csv.starts_with("\xef\xbb\xbf") ? 3 : 0;
  std::size_t line = 0;
  while (line_start < csv.size()) {
    const std::size_t line_end = std::min(csv.find('\n', line_start), csv.size());
    ++line;
    std::string_view whole = csv.substr(line_start, line_end - line_start);
    if (whole.ends_with('\r')) whole.remove_suffix(1);
    if (const std::size_t comment = whole.find('#'); comment != std::string_view::npos) {
      whole = whole.substr(0, comment);
      if (std::ranges::all_of(whole, is_blank)) {  // a line with only a comment is not a rank
        line_start = line_end + 1;
        continue;
      }
    }
    if (rows.size() == limits.ranks) {
      throw ConfigError(
          fmt::format("schedule text, line {}, column 1: more lines than ranks are allowed; at most {}", line,
                      limits.ranks));
    }
    Row& row = rows.emplace_back();
    if (!whole.empty()) row.reserve(1 + static_cast<std::size_t>(std::ranges::count(whole, ',')));
    std::size_t start = 0;
    // An empty line is a rank without slots, not a rank with one idle slot.
    while (!whole.empty() && start <= whole.size()) {
      const std::size_t end = std::min(whole.find(',', start), whole.size());
      if (row.size() == limits.slots_per_rank) {
        throw ConfigError(
            fmt::format("schedule text, line {}, column {}: more slots than one rank may have; at most {}",
                        line, start + 1, limits.slots_per_rank));
      }
      Reader(whole.substr(start, end - start), limits, line, start + 1).cell(members);
      row.push_slot(members);
      start = end + 1;
    }
    line_start = line_end + 1;
  }
  return rows;
}

std::string to_csv(const std::vector<Row>& rows) {
  std::string out;
  for (const Row& row : rows) {
    bool first = true;
    for (const Slot slot : row) {
      if (!first) out += ',';
      first = false;
      append_text(out, slot);
    }
    // An empty line would be a row without slots; a blank makes it a row with one idle slot.
    if (row.size() == 1 && row[0].empty()) out += ' ';
    out += '\n';
  }
  return out;
}

std::string to_csv(const Schedule& schedule) { return to_csv(schedule.rows()); }

Schedule schedule_from_rows(std::vector<Row> rows, std::optional<StagePlacement> placement) {
  if (rows.empty()) throw ConfigError(describe("schedule text", "no lines", "one line per rank"));
  std::int32_t last_stage = -1;
  std::int32_t last_microbatch = -1;
  std::size_t actions = 0;
  for (const Row& row : rows) {
    for (const Slot slot : row) {
      for (const Action& action : slot) {
        ++actions;
        last_stage = std::max(last_stage, action.stage());
        if (const auto microbatch = action.microbatch())
          last_microbatch = std::max(last_microbatch, *microbatch);
      }
    }
  }
  if (last_stage < 0) throw ConfigError(describe("schedule text", "no action at all", "at least one action"));
  // A complete schedule acts on every stage. A stage number above the number of actions therefore means that
  // stages are missing, and is refused before a table of that size is allocated.
  if (static_cast<std::size_t>(last_stage) >= actions) {
    throw ConfigError(describe("greatest stage of a schedule", fmt::format("{}", last_stage),
                               fmt::format("below its {} actions, since every stage must act", actions)));
  }
  const int ranks = static_cast<int>(rows.size());
  const int stages = last_stage + 1;
  const int microbatches = last_microbatch + 1;
  if (placement) {
    StageMap map = StageMap::make(*placement, ranks, stages, microbatches);
    return Schedule(std::move(map), std::move(rows));
  }
  std::vector<int> map(static_cast<std::size_t>(stages), -1);
  for (int rank = 0; rank < ranks; ++rank) {
    for (const Slot slot : rows[static_cast<std::size_t>(rank)]) {
      for (const Action& action : slot) {
        int& owner = map[static_cast<std::size_t>(action.stage())];
        if (owner < 0) owner = rank;
      }
    }
  }
  const auto absent = std::find(map.begin(), map.end(), -1);
  if (absent != map.end()) {
    throw ConfigError(
        describe("stages of a schedule", fmt::format("no action of stage {}", absent - map.begin()),
                 fmt::format("actions of all stages 0 to {}", last_stage), "add them or give a placement"));
  }
  return Schedule(StageMap(ranks, std::move(map), microbatches), std::move(rows));
}

Schedule parse_schedule(std::string_view csv, std::optional<StagePlacement> placement,
                        const TextLimits& limits) {
  return schedule_from_rows(parse_rows(csv, limits), placement);
}

}  // namespace penstock::schedule
