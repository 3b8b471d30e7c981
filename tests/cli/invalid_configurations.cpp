#include "tests/cli/invalid_configurations.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <utility>

#include "tests/command.h"

namespace penstock::test::configurations {

namespace {

namespace fs = std::filesystem;

// ---- valid layouts ----

struct NamedLayout {
  std::string name;
  Settings settings;  // in addition to those of all layouts
};

Settings settings_of_all(const ConfigurationFiles& files) {
  return {{"model.preset", "tiny"},
          {"model.pattern", "AEMEAEME"},
          {"model.attention_feed", "false"},
          {"model.width", "16"},
          {"model.heads", "2"},
          {"model.key_value_heads", "2"},
          {"model.feed_width", "32"},
          {"model.context", "16"},
          {"model.vocabulary", "257"},
          {"model.experts", "4"},
          {"model.top_k", "2"},
          {"model.expert_width", "16"},
          {"model.state_size", "4"},
          {"model.state_head_width", "8"},
          {"model.state_chunk", "8"},
          {"layout.pp", "1"},
          {"layout.schedule", "1F1B"},
          {"layout.microbatches", "4"},
          {"layout.microbatch_size", "2"},
          {"layout.device", "cpu"},
          {"training.steps", "2"},
          {"training.warmup_steps", "1"},
          {"training.validate_every", "0"},
          {"data.sources", files.text.string()},
          {"data.validation_fraction", "0"},
          {"output.sample_tokens", "0"}};
}

std::vector<NamedLayout> layouts(const ConfigurationFiles& files) {
  const auto csv = (files.schedules / "good.csv").string();
  return {
      {"one process", {}},
      {"1F1B", {{"layout.pp", "2"}}},
      {"pp 4", {{"layout.pp", "4"}}},
      {"cuts", {{"layout.pp", "2"}, {"model.pattern", "AEM|EAEME"}}},
      {"Interleaved1F1B",
       {{"layout.pp", "2"}, {"layout.schedule", "Interleaved1F1B"}, {"layout.virtual_stages", "2"}}},
      {"ZBVZeroBubble", {{"layout.pp", "2"}, {"layout.schedule", "ZBVZeroBubble"}}},
      {"VHalf", {{"layout.pp", "2"}, {"layout.schedule", "VHalf"}}},
      {"DualPipeV", {{"layout.pp", "2"}, {"layout.schedule", "DualPipeV"}}},
      {"DualPipe", {{"layout.pp", "2"}, {"layout.schedule", "DualPipe"}}},
      {"CSV", {{"layout.pp", "2"}, {"layout.schedule", csv}}},
      {"shards", {{"layout.pp", "2"}, {"layout.dp", "2"}, {"layout.shard", "2"}}},
      {"experts over ranks", {{"layout.dp", "2"}, {"layout.ep", "2"}}},
      {"tensor parallel", {{"layout.pp", "2"}, {"layout.tp", "2"}}},
      {"recomputed", {{"layout.pp", "2"}, {"training.recompute", "experts"}}},
      {"structure",
       {{"layout.pp", "2"},
        {"data.structure", "cpp"},
        {"model.structure_embedding", "true"},
        {"model.relations", "4"},
        {"model.depth_layers", "1,2"},
        {"model.multi_token_depth", "1"},
        {"model.multi_token_block", "E"}}},
  };
}

// ---- the command line ----

std::string quoted(const std::string& word) {
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string arguments_of(const Settings& settings) {
  std::string all;
  for (const auto& [key, value] : settings) all += " " + quoted("--" + key + "=" + value);
  return all;
}

Settings settings_of(const NamedLayout& layout, const ConfigurationFiles& files) {
  Settings settings = settings_of_all(files);
  for (const auto& [key, value] : layout.settings) settings[key] = value;
  return settings;
}

}  // namespace

ConfigurationFiles make_configuration_files(const std::string& program, const fs::path& folder) {
  ConfigurationFiles files{folder / "text", folder / "schedules", folder / "run"};
  fs::create_directories(files.text);
  fs::create_directories(files.schedules);
  for (int file = 0; file < 8; ++file)
    std::ofstream(files.text / (std::to_string(file) + ".h"))
        << "int value_" << file << " = f(" << file << ");\n"
        << std::string(200, static_cast<char>('a' + file)) << "\n";
  const auto make = [&](const std::string& arguments) {
    const Ended ended =
        run_command(quoted(program) + " " + arguments + " </dev/null", std::chrono::seconds(120));
    if (ended.exit_code != 0)
      throw std::runtime_error("penstock " + arguments + " ended with " + std::to_string(ended.exit_code) +
                               ": " + ended.output);
  };
  const fs::path good = files.schedules / "good.csv";
  make("schedule --kind 1F1B --ranks 2 --microbatches 4 -o " + quoted(good.string()));
  Words rows;
  std::ifstream lines(good);
  for (std::string line; std::getline(lines, line);) rows.push_back(line);
  const auto write = [&](const std::string& name, const Words& changed) {
    std::ofstream file(files.schedules / name);
    for (const std::string& row : changed) file << row << "\n";
  };
  const auto replaced = [&](const std::string& from, const std::string& to) {
    Words changed = rows;
    for (std::string& row : changed)
      if (const auto at = row.find(from); at != std::string::npos) row.replace(at, from.size(), to);
    return changed;
  };
  write("one_rank.csv", {rows.front()});
  write("missing.csv", replaced("0B3", ""));
  write("twice.csv", replaced("1F3", "1F2"));
  write("garbage.csv", {"0F0,,1B", "what is this"});
  write("empty.csv", {});
  Settings other = settings_of_all(files);
  other["model.width"] = "32";
  other["output.run_folder"] = files.run.string();
  make("train" + arguments_of(other));
  return files;
}

std::vector<ValidConfiguration> valid_configurations(const ConfigurationFiles& files) {
  std::vector<ValidConfiguration> all;
  for (const NamedLayout& layout : layouts(files)) {
    const Settings settings = settings_of(layout, files);
    Settings plan;
    for (const auto& [key, value] : settings)
      if (key.starts_with("model.") || key.starts_with("layout.")) plan[key] = value;
    all.push_back({layout.name, arguments_of(settings), arguments_of(plan)});
  }
  return all;
}

InvalidConfiguration make_invalid_configuration(const ConfigurationFiles& files, Chance& chance) {
  const std::vector<Corruption> table = all_corruptions(files);
  const std::vector<NamedLayout> known = layouts(files);
  InvalidConfiguration invalid;
  const NamedLayout& layout = any_of(known, chance);
  invalid.layout = layout.name;
  Settings settings = settings_of(layout, files);
  const std::size_t wanted = between(0, 1, chance) == 0 ? 1 : 2;
  std::vector<const Corruption*> used;
  while (used.size() < wanted) {
    const Corruption& next = any_of(table, chance);
    if (std::any_of(used.begin(), used.end(),
                    [&](const Corruption* each) { return each->shares_a_key_with(next); }))
      continue;
    const std::optional<Words> named = next.apply(settings, chance);
    if (!named) continue;
    used.push_back(&next);
    invalid.corruptions.push_back(next.name);
    invalid.named.push_back(*named);
    invalid.needs_models |= next.needs_models;
  }
  invalid.arguments = arguments_of(settings);
  return invalid;
}

bool names_the_problem(const InvalidConfiguration& invalid, const std::string& output) {
  return std::any_of(invalid.named.begin(), invalid.named.end(), [&](const Words& words) {
    return std::any_of(words.begin(), words.end(),
                       [&](const std::string& word) { return output.find(word) != std::string::npos; });
  });
}

}  // namespace penstock::test::configurations
