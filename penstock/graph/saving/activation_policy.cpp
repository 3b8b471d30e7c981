#include "penstock/graph/saving/activation_policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock::graph {
namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// Takes the first component off a path.
std::string_view take_component(std::string_view& path) {
  const std::size_t end = std::min(path.find('.'), path.size());
  const std::string_view component = path.substr(0, end);
  path.remove_prefix(std::min(end + 1, path.size()));
  return component;
}

bool matches_component(std::string_view pattern, std::string_view text) {
  // The latest star, and how much it stands for so far.
  std::size_t p = 0, t = 0, star = std::string_view::npos, covered = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      covered = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++covered;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

// A module, and those around it; also with numbers as stars, as patterns are written.
void add_candidates(std::string_view module, std::set<std::string>& candidates) {
  std::string plain, starred;
  while (!module.empty()) {
    const std::string component(take_component(module));
    const bool is_number =
        std::all_of(component.begin(), component.end(), [](char c) { return c >= '0' && c <= '9'; });
    plain += (plain.empty() ? "" : ".") + component;
    starred += (starred.empty() ? "" : ".") + (is_number ? "*" : component);
    candidates.insert(plain);
    candidates.insert(starred);
  }
}

}  // namespace

bool matches_module(std::string_view pattern, std::string_view module) {
  if (pattern == "*") return true;
  while (!pattern.empty()) {
    if (module.empty()) return false;
    const std::string_view part = take_component(pattern);
    if (!matches_component(part, take_component(module))) return false;
  }
  return true;
}

int ActivationPolicy::line_of(std::string_view module) const {
  for (std::size_t i = 0; i < lines_.size(); ++i)
    if (matches_module(lines_[i].pattern, module)) return static_cast<int>(i);
  return -1;
}

SavingRule ActivationPolicy::rule_of(std::string_view module) const {
  const int line = line_of(module);
  return line < 0 ? SavingRule::Free : lines_[static_cast<std::size_t>(line)].rule;
}

std::string ActivationPolicy::unmatched(const std::vector<std::string>& modules,
                                        std::string_view what) const {
  for (const Line& line : lines_) {
    if (std::any_of(modules.begin(), modules.end(),
                    [&](const std::string& module) { return matches_module(line.pattern, module); }))
      continue;
    std::set<std::string> candidates;
    for (const std::string& module : modules) add_candidates(module, candidates);
    std::string nearest = nearest_name(line.pattern, {candidates.begin(), candidates.end()});
    std::set<std::string> first;
    for (const std::string& module : modules) first.insert(module.substr(0, module.find('.')));
    first.erase("");
    std::string known;
    for (const std::string& name : first) known += (known.empty() ? "" : ", ") + name;
    return describe(fmt::format("{}: pattern", what), quote(line.pattern),
                    known.empty() ? "the path of a module" : fmt::format("the path of a module in {}", known),
                    nearest.empty()
                        ? "no operator of the graph belongs to such a module; change the pattern, or "
                          "leave it out"
                        : fmt::format("did you mean \"{}\"?", nearest));
  }
  return {};
}

ActivationPolicy parse_activation_policy(const std::vector<std::string>& lines, std::string_view what) {
  std::vector<ActivationPolicy::Line> parsed;
  for (const std::string& line : lines) {
    // The last colon: a pattern may have others.
    const std::size_t colon = line.rfind(':');
    const std::string_view whole = line,
                           pattern = trimmed(whole.substr(0, colon == std::string::npos ? 0 : colon)),
                           word = colon == std::string::npos ? std::string_view()
                                                             : trimmed(whole.substr(colon + 1));
    const std::string lower = to_lower(word);
    if (pattern.empty() || (lower != "save" && lower != "recompute")) {
      const std::string nearest =
          pattern.empty() ? std::string() : nearest_name(lower, {"save", "recompute"});
      throw ConfigError(describe(what, quote(line), "\"PATTERN: save\" or \"PATTERN: recompute\"",
                                 nearest.empty()
                                     ? "for example \"blocks.*.attention: save\""
                                     : fmt::format("did you mean \"{}: {}\"?", pattern, nearest)));
    }
    parsed.push_back({std::string(pattern), lower == "save" ? SavingRule::Save : SavingRule::Recompute});
  }
  return ActivationPolicy(std::move(parsed));
}

}  // namespace penstock::graph
