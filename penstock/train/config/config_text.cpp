// Writes the configuration as text: TOML with comments, and the page of the documentation.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "penstock/train/config/config_fields.h"

namespace penstock::train {

namespace {

// An unescaped | would end the table cell.
std::string cell(std::string text) {
  for (std::size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2)
    text.replace(at, 1, "\\|");
  return text;
}

std::string allowed(const ConfigField& field) {
  if (!field.choices.empty()) return fmt::format("one of {}", fmt::join(field.choices, ", "));
  const std::string range = field.range_text();
  return range.empty() ? field.type_text() : fmt::format("{} {}", field.type_text(), range);
}

}  // namespace

std::string to_toml(const ResolvedConfig& resolved) {
  std::string text =
      "# Complete configuration of a penstock train run: every value that was used.\n"
      "# To continue the run: penstock resume <this folder>. To start a new run with the same values: "
      "penstock train <this file>\n"
      "# {run} stands for the run folder.\n";
  for (const ConfigSection& section : config_sections()) {
    text += fmt::format("\n# {}.\n[{}]\n", section.help, section.name);
    for (const ConfigField& field : config_fields()) {
      if (field.section != section.name) continue;
      const auto origin = resolved.origins.find(field.name());
      std::string from = origin == resolved.origins.end() ? "" : origin->second;
      // A newline in a file name would end the comment.
      std::replace_if(
          from.begin(), from.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; },
          '?');
      text +=
          fmt::format("# {}. {}.\n{} = {}{}\n", field.help, allowed(field), field.key,
                      to_toml(field.get(resolved.config)), from.empty() ? "" : fmt::format("  # {}", from));
    }
  }
  return text;
}

namespace {

// Wraps the text to lines of at most `columns` characters, each indented by `indent` spaces.
std::string wrapped(std::string_view text, std::size_t indent, std::size_t columns) {
  std::string lines, line(indent, ' ');
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    if (line.size() > indent && line.size() + 1 + end > columns) {
      lines += line + '\n';
      line.assign(indent, ' ');
    }
    if (line.size() > indent) line += ' ';
    line += text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines + line + '\n';
}

}  // namespace

std::vector<std::string> config_keys() {
  std::vector<std::string> keys;
  for (const ConfigField& field : config_fields()) keys.push_back(field.name());
  return keys;
}

std::string configuration_help() {
  constexpr std::size_t kIndent = 6, kColumns = 110;
  std::string text =
      "Keys: --section.key VALUE, or --key VALUE if only one section has the key; '-' and '_' are "
      "equivalent. In a file: key = value\n"
      "under [section]. Presets (model.preset):\n";
  for (const ConfigPreset& preset : config_presets())
    text += wrapped(fmt::format("{}: {}", preset.name, preset.help), kIndent, kColumns);
  const TrainConfig defaults;
  for (const ConfigSection& section : config_sections()) {
    text += fmt::format("\n[{}]  {}\n", section.name, section.help);
    for (const ConfigField& field : config_fields()) {
      if (field.section != section.name) continue;
      text += fmt::format("  --{} {}\n", field.key, to_toml(field.get(defaults)));
      text += wrapped(fmt::format("{} ({})", field.help, allowed(field)), kIndent, kColumns);
    }
  }
  return text;
}

std::string configuration_page() {
  std::string text =
      "# Configuration\n"
      "\n"
      "<!-- Generated from the table in penstock/train/config/config_fields.cpp by PENSTOCK_UPDATE_DOCS=1 "
      "./test -R train_config_test; "
      "do not edit by hand. -->\n"
      "\n"
      "`penstock train [config.toml] [--section.key value ...]` takes each value from the command line, else "
      "from the file, else from\n"
      "the preset, else from its default. On the command line, the section may be omitted (`--lr 3e-4`), "
      "lists take several values\n"
      "(`--data.sources src include`, or with commas), a flag without a value is true, and `--data PATH...` "
      "is short for `--data.sources`.\n"
      "`penstock train --help` prints the same list. An unknown key is an error that suggests the nearest "
      "one; inconsistent values are reported with the place each came\n"
      "from.\n"
      "\n"
      "The run folder contains the complete configuration as `config.toml`. `penstock resume RUN "
      "[--section.key value ...]` and\n"
      "`penstock train --run_folder RUN` continue the run with it ([training.md](training.md)); given as a "
      "file, `penstock train RUN/config.toml`,\n"
      "it starts a new run with the same values. Paths are relative to the working folder, and `{run}` "
      "stands for the run folder. In the\n"
      "`config.toml` of a run, paths inside the run are written as `{run}/...`, so that it can be moved and "
      "copied, and all others are absolute, so that it\n"
      "can be continued from any working folder.\n"
      "\n"
      "```toml\n"
      "[model]\n"
      "preset = \"small\"\n"
      "layers = 12\n"
      "\n"
      "[layout]\n"
      "pp = 2\n"
      "schedule = \"ZBVZeroBubble\"\n"
      "microbatches = 16\n"
      "\n"
      "[data]\n"
      "sources = [\"src\", \"include\"]\n"
      "```\n";
  const TrainConfig defaults;
  for (const ConfigSection& section : config_sections()) {
    text += fmt::format("\n## [{}]\n\n{}.\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n",
                        section.name, section.help);
    for (const ConfigField& field : config_fields()) {
      if (field.section != section.name) continue;
      text += fmt::format("| `{}` | `{}` | {} | {} |\n", field.key, cell(to_toml(field.get(defaults))),
                          cell(allowed(field)), cell(std::string(field.help)));
    }
  }
  text +=
      "\n## Presets\n\n`model.preset` selects a preset. It sets:\n\n| preset | description | values "
      "|\n|---|---|---|\n";
  for (const ConfigPreset& preset : config_presets()) {
    std::vector<std::string> values;
    for (const auto& [name, value] : preset.values) values.push_back(fmt::format("{} = {}", name, value));
    text += fmt::format("| `{}` | {} | {} |\n", preset.name, preset.help,
                        values.empty() ? "the defaults above" : fmt::format("{}", fmt::join(values, ", ")));
  }
  return text;
}

}  // namespace penstock::train
