#include "tests/chaos/judge.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstdint>
#include <sstream>
#include <string_view>

namespace penstock::chaos {

namespace {

// Removes "[rank 1] " from the front and returns 1; -1 if the line begins otherwise.
int take_rank_prefix(std::string_view& line) {
  constexpr std::string_view kBegin = "[rank ";
  if (!line.starts_with(kBegin)) return -1;
  const auto close = line.find("] ");
  if (close == std::string_view::npos) return -1;
  int rank = 0;
  for (const char c : line.substr(kBegin.size(), close - kBegin.size())) {
    if (std::isdigit(static_cast<unsigned char>(c)) == 0) return -1;
    rank = rank * 10 + (c - '0');
  }
  line.remove_prefix(close + 2);
  return rank;
}

// "rank 1" is not in "rank 12" and not in "frank 1".
bool has_words(std::string_view line, std::string_view words) {
  const auto is_part = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  for (auto at = line.find(words); at != std::string_view::npos; at = line.find(words, at + 1)) {
    const auto end = at + words.size();
    if ((at == 0 || !is_part(line[at - 1])) && (end == line.size() || !is_part(line[end]))) return true;
  }
  return false;
}

bool is_summary(std::string_view line) {
  return line.starts_with("[launch] summary:") ||
         line.find(" still running: sending ") != std::string_view::npos;
}

// Complaints about the losses; empty if they are those of the undisturbed run.
std::vector<std::string> compare(const Losses& seen, const Losses& undisturbed, int steps) {
  std::vector<std::string> problems;
  std::vector<int> missing;
  for (int step = 1; step <= steps; ++step) {
    const auto expected = undisturbed.find(step);
    const auto found = seen.find(step);
    if (expected == undisturbed.end()) {
      problems.push_back(fmt::format("the undisturbed run has no loss of step {}", step));
      return problems;
    }
    if (found == seen.end()) {
      missing.push_back(step);
    } else if (std::bit_cast<std::uint64_t>(found->second) !=
               std::bit_cast<std::uint64_t>(expected->second)) {
      problems.push_back(
          fmt::format("the loss of step {} is {:a} ({}), that of the undisturbed run {:a} ({})", step,
                      found->second, found->second, expected->second, expected->second));
      break;  // those of later steps follow from it
    }
  }
  if (!missing.empty()) problems.push_back(fmt::format("no loss of steps {}", fmt::join(missing, ", ")));
  if (!seen.empty() && seen.rbegin()->first > steps)
    problems.push_back(fmt::format("a loss of step {} of a run of {} steps", seen.rbegin()->first, steps));
  return problems;
}

bool succeeded(const std::vector<CommandEnd>& commands) {
  return !commands.empty() && std::all_of(commands.begin(), commands.end(),
                                          [](const CommandEnd& end) { return end.exit_code == 0; });
}

bool anyone_names(const std::vector<CommandEnd>& commands, const std::vector<std::string>& texts) {
  return std::any_of(commands.begin(), commands.end(),
                     [&](const CommandEnd& end) { return names_one_of(end.output, texts, end.rank); });
}

void check_first(const Outcome& outcome, const Expectation& expected, std::vector<std::string>& problems) {
  const bool finished = succeeded(outcome.first);
  if (outcome.first.empty()) problems.emplace_back("nothing was started");
  if (!outcome.struck)
    problems.emplace_back("the run was over before the fault began, or the fault reached nothing");
  if (expected.must_fail && finished)
    problems.emplace_back("it finished, although the fault does not allow it");
  const bool named_for_all = expected.one_names_for_all && anyone_names(outcome.first, expected.culprits);
  for (const CommandEnd& end : outcome.first) {
    if (end.exit_code == CommandEnd::kStillRunning) {
      problems.push_back(fmt::format("{} still ran {:.1f} s after the fault", end.name, end.seconds));
      continue;
    }
    if (end.hit) continue;
    if (end.seconds > expected.deadline_s)
      problems.push_back(fmt::format("{} ended {:.1f} s after the fault, expected at most {:.1f} s", end.name,
                                     end.seconds, expected.deadline_s));
    if (end.exit_code == 0) continue;
    if (expected.must_finish)
      problems.push_back(fmt::format("{} ended with {}, expected to finish", end.name, end.exit_code));
    else if (!expected.silent && !named_for_all && !names_one_of(end.output, expected.culprits, end.rank))
      problems.push_back(fmt::format("{} ended with {} and named none of: {}", end.name, end.exit_code,
                                     fmt::join(expected.culprits, ", ")));
    // What ends like this was not reported but has crashed.
    for (const int crash : {70, 128 + 6, 128 + 11})
      if (end.exit_code == crash)
        problems.push_back(
            fmt::format("{} ended with {}: a defect or a crash, not an error", end.name, crash));
  }
  if (!expected.reports.empty() && !anyone_names(outcome.first, expected.reports))
    problems.push_back(fmt::format("nobody reported: {}", fmt::join(expected.reports, ", ")));
}

void check_second(const Outcome& outcome, std::vector<std::string>& problems) {
  if (succeeded(outcome.first)) return;
  if (outcome.second.empty()) problems.emplace_back("it was not started again");
  for (const CommandEnd& end : outcome.second)
    if (end.exit_code == CommandEnd::kStillRunning)
      problems.push_back(fmt::format("started again, {} still ran after {:.1f} s", end.name, end.seconds));
    else if (end.exit_code != 0)
      problems.push_back(fmt::format("started again, {} ended with {}", end.name, end.exit_code));
  if (!outcome.second.empty() && outcome.continued_after < outcome.newest_checkpoint)
    problems.push_back(fmt::format(
        "started again, it continued after step {}, although the checkpoint of step {} was intact",
        outcome.continued_after, outcome.newest_checkpoint));
}

}  // namespace

bool names_one_of(const std::string& output, const std::vector<std::string>& culprits, int own_rank) {
  std::istringstream text(output);
  for (std::string whole; std::getline(text, whole);) {
    std::string_view line = whole;
    if (is_summary(line)) continue;
    const int prefix = take_rank_prefix(line);
    const int speaker = prefix >= 0 ? prefix : own_rank;
    for (const std::string& culprit : culprits)
      if (culprit != fmt::format("rank {}", speaker) && has_words(line, culprit)) return true;
  }
  return false;
}

Verdict judge(const Outcome& outcome, const Expectation& expected, const Losses& undisturbed, int steps) {
  Verdict verdict;
  std::vector<std::string>& problems = verdict.problems;
  check_first(outcome, expected, problems);
  check_second(outcome, problems);
  for (std::string& problem : compare(outcome.losses, undisturbed, steps))
    problems.push_back(std::move(problem));
  for (const std::string& left : outcome.left_processes) problems.push_back("left running: " + left);
  for (const std::string& left : outcome.left_memory) problems.push_back("left in /dev/shm: " + left);
  if (!expected.may_leave_temporary_files)
    for (const std::string& left : outcome.left_temporary) problems.push_back("left behind: " + left);
  for (const std::string& lost : outcome.lost_checkpoints) problems.push_back("checkpoint lost: " + lost);
  if (problems.empty()) verdict.end = succeeded(outcome.first) ? End::SameLosses : End::NamedError;
  return verdict;
}

}  // namespace penstock::chaos
