#include "penstock/recompute_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstddef>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"

namespace penstock::models {
namespace {

constexpr const char* kRecomputeForms =
    "none, block, attention, experts, letters:LETTERS or pattern:MARKS with one mark for each block";

[[noreturn]] void refuse_recompute(const std::string& actual, const std::string& expected,
                                   const std::string& remedy = {}) {
  throw ConfigError(describe("training.recompute", actual, expected, remedy));
}

std::string letters_of(const ModelPlan& model) {
  std::string letters;
  for (const BlockPlan& block : model.blocks)
    if (letters.find(block.letter) == std::string::npos) letters += block.letter;
  for (const char letter : model.multi_token_letters)
    if (letters.find(letter) == std::string::npos) letters += letter;
  return letters;
}

RecomputePlan by_letters(std::string_view text, std::string_view letters, const ModelPlan& model) {
  const std::string known = letters_of(model);
  if (letters.empty()) refuse_recompute(quote(text), "at least one letter after \"letters:\"");
  for (const char letter : letters)
    if (known.find(letter) == std::string::npos)
      refuse_recompute(
          quote(text),
          fmt::format("letters of blocks that the model has: {}", known.empty() ? "none" : known),
          "choose one of them, or set it to none");
  return {.letters = std::string(letters)};
}

RecomputePlan by_marks(std::string_view text, std::string_view marks, const ModelPlan& model) {
  RecomputePlan plan;
  for (const char mark : marks) {
    if (mark == ' ' || mark == '|') continue;
    const std::size_t number = plan.blocks.size();
    if (number < model.blocks.size() && mark != '.' && mark != 'R' && mark != model.blocks[number].letter)
      refuse_recompute(
          fmt::format("{}, with {} for block {}", quote(text), quote(std::string(1, mark)), number),
          fmt::format("'.' to keep it, or 'R' or its letter '{}' to recompute it",
                      model.blocks[number].letter));
    plan.blocks.push_back(mark != '.');
  }
  if (plan.blocks.size() != model.blocks.size())
    refuse_recompute(fmt::format("{}, with {} marks", quote(text), plan.blocks.size()),
                     fmt::format("{} marks, one for each block", model.blocks.size()),
                     "write a mark for each letter of model.pattern, or for each of model.layers");
  return plan;
}

void check_numbers(const char* key, const std::vector<std::int64_t>& numbers, std::int64_t count,
                   const char* remedy) {
  for (const std::int64_t number : numbers)
    if (number < 0 || number >= count)
      throw ConfigError(
          describe(key, fmt::format("{}", number), fmt::format("numbers from 0 to {}", count - 1), remedy));
}

bool is_among(const std::vector<std::int64_t>& chosen, std::int64_t number) {
  return chosen.empty() || std::find(chosen.begin(), chosen.end(), number) != chosen.end();
}

}  // namespace

bool RecomputePlan::any() const {
  return !letters.empty() || std::find(blocks.begin(), blocks.end(), true) != blocks.end();
}

bool RecomputePlan::chooses(const BlockId& block) const {
  if (!blocks.empty()) {
    const auto number = static_cast<std::size_t>(block.number);
    return number < blocks.size() && blocks[number];
  }
  return letters == "*" || letters.find(block.letter) != std::string::npos;
}

bool RecomputePlan::recomputes(const BlockId& block, int stage,
                               std::optional<std::int64_t> microbatch) const {
  return chooses(block) && is_among(stages, stage) && (!microbatch || is_among(microbatches, *microbatch));
}

RecomputePlan parse_recompute(std::string_view text, const ModelPlan& model) {
  constexpr std::string_view kLettersForm = "letters:", kPatternForm = "pattern:";
  if (text == "none") return {};
  if (text == "block") return RecomputePlan::all();
  if (text == "attention") return by_letters(text, "A", model);
  if (text == "experts") return by_letters(text, "E", model);
  if (text.starts_with(kLettersForm)) return by_letters(text, text.substr(kLettersForm.size()), model);
  if (text.starts_with(kPatternForm)) return by_marks(text, text.substr(kPatternForm.size()), model);
  refuse_recompute(quote(text), kRecomputeForms);
}

void check_recompute(const RecomputePlan& plan, std::int64_t stages, std::int64_t microbatches) {
  check_numbers("training.recompute_stages", plan.stages, stages,
                "stages are counted from 0 over the whole model; penstock train --dry-run lists them");
  check_numbers("training.recompute_microbatches", plan.microbatches, microbatches,
                "microbatches of a run of the schedule are counted from 0 (layout.microbatches)");
}

}  // namespace penstock::models
