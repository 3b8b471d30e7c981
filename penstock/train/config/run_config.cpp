#include "penstock/train/config/run_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/train/config/config_fields.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kRun = "{run}";

using PathChange = std::function<std::string(const std::string&)>;

// Applies `change` to each path in the value of a field.
void change_paths(const std::string& name, FieldData& value, const PathChange& change) {
  if (name == "data.sources") {
    for (std::string& each : std::get<std::vector<std::string>>(value)) each = change(each);
    return;
  }
  auto* text = std::get_if<std::string>(&value);
  if (text == nullptr || text->empty()) return;
  const bool is_path = name == "data.shards" || name == "checkpoint.folder" || name == "training.artifact" ||
                       (name == "checkpoint.resume" && *text != "auto" && *text != "never") ||
                       (name == "layout.schedule" &&
                        (text->find('/') != std::string::npos || to_lower(*text).ends_with(".csv")));
  if (is_path) *text = change(*text);
}

void change_paths(TrainConfig& config, const PathChange& change) {
  for (const ConfigField& field : config_fields()) {
    FieldData value = field.get(config);
    change_paths(field.name(), value, change);
    field.set(config, value);
  }
}

fs::path normal(const fs::path& path) {
  const fs::path whole = fs::absolute(path).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

// Returns the part of `path` after `folder`, or std::nullopt if the path is not inside the folder.
std::optional<fs::path> inside(const fs::path& path, const fs::path& folder) {
  const fs::path rest = path.lexically_relative(folder);
  if (rest.empty() || *rest.begin() == "..") return std::nullopt;
  return rest;
}

bool begins_with_run(const std::string& path) {
  return path == kRun || path.starts_with(std::string(kRun) + "/");
}

PathChange to_absolute(const fs::path& folder) {
  return [folder](const std::string& path) {
    if (!begins_with_run(path)) return normal(path).string();
    return folder.empty() ? path : normal(folder.string() + path.substr(kRun.size())).string();
  };
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines{""};
  for (const char each : text) {
    if (each == '\n')
      lines.emplace_back();
    else
      lines.back() += each;
  }
  return lines;
}

struct OwnSettings {
  std::vector<ConfigSetting> settings;
  // Origin of each value according to the comment after it; empty: a default. Values edited since then are
  // not in the map.
  std::map<std::string, std::string> written;
};

OwnSettings read_settings(const fs::path& file) {
  const std::string text = read_config_file(file);
  OwnSettings own{parse_toml(text, file.string()), {}};
  const std::vector<std::string> lines = lines_of(text);
  for (const ConfigSetting& setting : own.settings) {
    std::size_t number = 0;
    const std::string digits = setting.origin.substr(setting.origin.rfind(':') + 1);
    std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (number == 0 || number > lines.size()) continue;
    const std::string& line = lines[number - 1];
    const std::string expected = fmt::format("{} = {}", setting.field->key, to_toml(setting.value));
    if (!line.starts_with(expected)) continue;
    const std::string rest = line.substr(expected.size());
    if (rest.empty())
      own.written[setting.field->name()] = "";
    else if (rest.starts_with("  # "))
      own.written[setting.field->name()] = rest.substr(4);
  }
  return own;
}

// Returns the settings of a run at its current location.
OwnSettings read_run(const fs::path& given) {
  const fs::path folder = normal(given);
  if (!contains_run(folder))
    throw ConfigError(describe("run folder", folder.string(),
                               fmt::format("a folder with a {}", kRunConfigName),
                               "give the folder of a penstock train run (runs/...)"));
  OwnSettings own = read_settings(folder / kRunConfigName);
  fs::path former;  // run folder according to a file of an earlier version
  for (const ConfigSetting& setting : own.settings)
    if (setting.field->name() == "output.run_folder") former = std::get<std::string>(setting.value);
  std::erase_if(own.settings,
                [](const ConfigSetting& setting) { return setting.field->name() == "output.run_folder"; });
  for (ConfigSetting& setting : own.settings)
    change_paths(setting.field->name(), setting.value, [&](const std::string& path) {
      if (former.is_absolute() && fs::path(path).is_absolute())
        if (const auto rest = inside(fs::path(path).lexically_normal(), normal(former)))
          return (folder / *rest).lexically_normal().string();
      return to_absolute(folder)(path);
    });
  return own;
}

// Restores the origins that the values from the run's file had when the file was written.
ResolvedConfig resolve_own(const OwnSettings& own, std::vector<std::vector<ConfigSetting>> layers) {
  layers.insert(layers.begin(), own.settings);
  ResolvedConfig resolved = resolve_settings(layers);
  for (const ConfigSetting& setting : own.settings) {
    const std::string name = setting.field->name();
    const auto written = own.written.find(name);
    if (written == own.written.end() || resolved.origins[name] != setting.origin) continue;
    if (written->second.empty())
      resolved.origins.erase(name);
    else
      resolved.origins[name] = written->second;
  }
  return resolved;
}

bool changes_layout(const std::vector<ConfigSetting>& given) {
  return std::any_of(given.begin(), given.end(), [](const ConfigSetting& setting) {
    return setting.field->section == "layout" || setting.field->name() == "training.global_batch" ||
           setting.field->name() == "training.accumulation";
  });
}

// Removes what was derived for the former layout: only what the file marks as derived and what would be
// derived again. Values that the user has edited in the file stay.
OwnSettings without_derived(const OwnSettings& own) {
  static const std::set<std::string> kDerived = {"layout.ranks", "layout.virtual_stages", "layout.schedule",
                                                 "training.accumulation"};
  const auto is_candidate = [&](const ConfigSetting& setting) {
    const auto written = own.written.find(setting.field->name());
    return written != own.written.end() && written->second == "derived" &&
           kDerived.contains(setting.field->name());
  };
  OwnSettings rest = own;
  std::erase_if(rest.settings, is_candidate);
  TrainConfig again;
  try {
    again = resolve_settings({rest.settings}).config;
  } catch (const ConfigError&) {
    return own;  // the file was edited; errors are reported when the whole configuration is resolved
  }
  rest = own;
  std::erase_if(rest.settings, [&](const ConfigSetting& setting) {
    return is_candidate(setting) && setting.field->get(again) == setting.value;
  });
  return rest;
}

// Parameters, optimizer state, data and the order of samples depend on these. New keys of the model and data
// sections are fixed unless named here.
bool is_fixed(const ConfigField& field) {
  if (field.section == "model") return field.key != "dropout";
  if (field.section == "data") return field.key != "document_mask";
  return field.name() == "training.optimizer" || field.name() == "training.seed" ||
         field.name() == "checkpoint.folder";
}

bool is_same(const ConfigField& field, const TrainConfig& own, const TrainConfig& wanted) {
  if (field.name() == "model.pattern" && !(own.model.pattern.empty() && wanted.model.pattern.empty())) {
    // Stage boundaries belong to the layout.
    const auto blocks = [](const TrainConfig& config) {
      std::string letters = config.model.pattern.empty()
                                ? std::string(static_cast<std::size_t>(config.model.layers), 'A')
                                : config.model.pattern;
      std::erase(letters, '|');
      return letters;
    };
    return blocks(own) == blocks(wanted);
  }
  // Shards may have moved: loading the checkpoint checks that they hold the same tokens.
  if (field.name() == "data.shards" && !own.data.shards.empty() && !wanted.data.shards.empty()) return true;
  return field.get(own) == field.get(wanted);
}

void refuse_changes(const fs::path& folder, const TrainConfig& own, const ResolvedConfig& wanted) {
  std::vector<std::string> problems;
  bool data = false, other = false;
  for (const ConfigField& field : config_fields()) {
    if (!is_fixed(field) || is_same(field, own, wanted.config)) continue;
    const auto origin = wanted.origins.find(field.name());
    problems.push_back(fmt::format(
        "{} = {} ({}), but the run was started with {}", field.name(), to_toml(field.get(wanted.config)),
        origin == wanted.origins.end() ? "default" : origin->second, to_toml(field.get(own))));
    (field.section == "data" ? data : other) = true;
  }
  if (problems.empty()) return;
  const char* remedy = data && !other
                           ? "leave it out, or train on other data in a new run: set another --run_folder, "
                             "and --resume to the path of a checkpoint of this run"
                           : "leave it out to continue the run, or start a new run in another --run_folder";
  throw ConfigError(fmt::format(
      "run folder {} contains a run, and {} cannot change when it continues: {}; {}", folder.string(),
      problems.size() == 1 ? "this" : "these", fmt::join(problems, "; "), remedy));
}

std::vector<ConfigSetting> given_settings(std::vector<ConfigSetting> settings, const fs::path& folder) {
  std::erase_if(settings,
                [](const ConfigSetting& setting) { return setting.field->name() == "output.run_folder"; });
  for (ConfigSetting& setting : settings)
    change_paths(setting.field->name(), setting.value, to_absolute(folder));
  return settings;
}

std::vector<ConfigSetting> file_settings(const ConfigSources& sources) {
  if (!sources.file) return {};
  return parse_toml(read_config_file(*sources.file), sources.file->string());
}

}  // namespace

bool contains_run(const fs::path& folder) {
  std::error_code error;  // errors are reported when the file is opened
  return fs::exists(folder / kRunConfigName, error);
}

ResolvedConfig load_run_config(const fs::path& folder) { return resolve_own(read_run(folder), {}); }

ResolvedConfig continue_run_config(const fs::path& given, const ConfigSources& sources) {
  const fs::path folder = normal(given);
  const OwnSettings own = read_run(folder);
  const std::vector<ConfigSetting> file = given_settings(file_settings(sources), folder),
                                   arguments = given_settings(parse_arguments(sources.arguments), folder);
  const ResolvedConfig former = resolve_own(own, {});
  if (file.empty() && arguments.empty()) return former;
  const bool derives = changes_layout(file) || changes_layout(arguments);
  const ResolvedConfig wanted = resolve_own(derives ? without_derived(own) : own, {file, arguments});
  refuse_changes(folder, former.config, wanted);
  return wanted;
}

fs::path named_run_folder(const ConfigSources& sources) {
  std::string named;
  std::vector<ConfigSetting> settings = file_settings(sources);
  const std::string in_file = [&] {
    for (const ConfigSetting& setting : settings)
      if (setting.field->name() == "output.run_folder") return std::get<std::string>(setting.value);
    return std::string();
  }();
  for (const ConfigSetting& setting : parse_arguments(sources.arguments))
    if (setting.field->name() == "output.run_folder") named = std::get<std::string>(setting.value);
  if (!named.empty() || in_file.empty()) return named;
  // A config.toml of an earlier version, given as the file, continues its run in the folder of the file, even
  // if the run has been moved.
  const fs::path file_folder = normal(*sources.file).parent_path();
  std::error_code error;
  const bool of_a_run =
      sources.file->filename() == kRunConfigName && fs::path(in_file).is_absolute() &&
      (fs::exists(file_folder / "metrics.jsonl", error) || fs::exists(file_folder / "checkpoints", error));
  return of_a_run ? file_folder : fs::path(in_file);
}

ResolvedConfig with_absolute_paths(ResolvedConfig resolved, const fs::path& folder) {
  change_paths(resolved.config, to_absolute(folder.empty() ? folder : normal(folder)));
  return resolved;
}

std::string run_config_text(const ResolvedConfig& resolved, const fs::path& given) {
  const fs::path folder = normal(given);
  ResolvedConfig written = resolved;
  written.config.output.run_folder.clear();
  written.origins.erase("output.run_folder");
  change_paths(written.config, [&](const std::string& path) {
    const auto rest = inside(path, folder);
    if (!rest) return path;
    return *rest == "." ? std::string(kRun) : fmt::format("{}/{}", kRun, rest->generic_string());
  });
  return to_toml(written);
}

ResolvedConfig read_written_config(const fs::path& file) { return resolve_own(read_settings(file), {}); }

}  // namespace penstock::train
