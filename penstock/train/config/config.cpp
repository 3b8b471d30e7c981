#include "penstock/train_config.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/train/config/config_fields.h"

namespace penstock::train {

namespace {

void apply(ResolvedConfig& resolved, const std::vector<ConfigSetting>& settings) {
  for (const ConfigSetting& setting : settings) {
    setting.field->set(resolved.config, setting.value);
    resolved.origins[setting.field->name()] = setting.origin;
  }
}

}  // namespace

ResolvedConfig resolve_settings(const std::vector<std::vector<ConfigSetting>>& layers) {
  // The preset is the lowest layer, but its name comes from the layers above.
  ResolvedConfig resolved;
  for (const auto& layer : layers) apply(resolved, layer);
  const auto named = resolved.origins.find("model.preset");
  // The blocks of the default are those of the hybrid model; another one has its own.
  const std::string& type = resolved.config.model.type;
  if (named == resolved.origins.end() && type != "auto" && type != "hybrid")
    resolved.config.model.preset = "tiny";
  const ConfigPreset& preset =
      find_preset(resolved.config.model.preset, named == resolved.origins.end() ? "default" : named->second);
  resolved = {};
  const std::string origin = fmt::format("preset {}", preset.name);
  for (const auto& [name, value] : preset.values)
    apply(resolved, {parse_setting(find_field(name, origin), {std::string(value)}, origin)});
  for (const auto& layer : layers) apply(resolved, layer);
  resolved.config.model.preset = preset.name;
  complete_config(resolved);
  return resolved;
}

std::string read_config_file(const std::filesystem::path& path) {
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  const auto refuse = [&] {
    throw ConfigError(describe(fmt::format("{}: configuration file", path.string()), std::strerror(errno),
                               "a file that can be read", "give another path"));
  };
  const std::unique_ptr<std::FILE, Close> file(std::fopen(path.c_str(), "rb"));
  if (!file) refuse();
  // Reading a device might never end.
  struct stat status {};
  if (::fstat(::fileno(file.get()), &status) == 0 && (S_ISCHR(status.st_mode) || S_ISBLK(status.st_mode)))
    throw ConfigError(describe(fmt::format("{}: configuration file", path.string()), "a device",
                               "a file that can be read", "give another path"));
  std::string text;
  char buffer[16384];
  while (const std::size_t count = std::fread(buffer, 1, sizeof buffer, file.get()))
    text.append(buffer, count);
  if (std::ferror(file.get()) != 0) refuse();
  return text;
}

ResolvedConfig parse_config(std::string_view toml, std::string_view name,
                            const std::vector<std::string>& arguments) {
  return resolve_settings({parse_toml(toml, name), parse_arguments(arguments)});
}

ResolvedConfig load_config(const ConfigSources& sources) {
  if (!sources.file) return resolve_settings({parse_arguments(sources.arguments)});
  return parse_config(read_config_file(*sources.file), sources.file->string(), sources.arguments);
}

}  // namespace penstock::train
