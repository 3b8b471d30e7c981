#include "penstock/graph/cache/artifact_folder.h"

#include <fmt/format.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <tuple>

#include "penstock/base/checksum.h"
#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/errors.h"

namespace penstock::graph {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kManifestVersion = 2;
constexpr FileKind kCallKind{"PSCALLS1", "a call of an artifact", 1};
constexpr std::string_view kManifest = "manifest.json";
constexpr std::string_view kCompileAgain = "write the artifact again, with penstock compile";

[[noreturn]] void refuse_artifact(const fs::path& folder, const std::string& why, std::string_view remedy) {
  throw ConfigError(fmt::format("artifact {}: {}; {}", folder.string(), why, remedy));
}

void write_file(const fs::path& file, std::span<const std::uint8_t> bytes, const fs::path& folder) {
  const fs::path temporary = fmt::format("{}.{}.tmp", file.string(), ::getpid());
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  out.close();
  std::error_code error;
  if (out) fs::rename(temporary, file, error);
  if (!out || error) {
    const std::string why = error ? error.message() : std::strerror(errno);
    fs::remove(temporary, error);
    refuse_artifact(folder, fmt::format("{} cannot be written: {}", file.filename().string(), why),
                    "choose a folder that can be written, on a disk with free space");
  }
}

enum class ManifestKind : std::uint8_t { None, OfAnArtifact, Unreadable, OfSomethingElse };

// Other programs call their files manifest.json, too.
ManifestKind manifest_kind(const fs::path& file) {
  if (!file_exists(file)) return ManifestKind::None;
  std::ifstream in(file, std::ios::binary);
  const json manifest = json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (manifest.is_discarded()) return ManifestKind::Unreadable;
  const bool ours = manifest.is_object() && manifest.contains("version") && manifest.contains("fields") &&
                    manifest.contains("calls");
  return ours ? ManifestKind::OfAnArtifact : ManifestKind::OfSomethingElse;
}

// CacheKey::text() + ".call".
bool is_call_file(std::string_view name) {
  constexpr std::size_t kDigits = 32;
  return name.size() == kDigits + 5 && name.ends_with(".call") &&
         name.find_first_not_of("0123456789abcdef") == kDigits;
}

// What write_file leaves behind if the process is killed: NAME.PID.tmp.
bool is_unfinished_file(std::string_view name) {
  if (!name.ends_with(".tmp")) return false;
  name.remove_suffix(4);
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return false;
  const std::string_view pid = name.substr(dot + 1), file = name.substr(0, dot);
  return !pid.empty() && pid.find_first_not_of("0123456789") == std::string_view::npos &&
         (file == kManifest || is_call_file(file));
}

}  // namespace

ArtifactFolder::ArtifactFolder(ArtifactFolder&& other) noexcept
    : folder_(std::move(other.folder_)),
      fields_(std::move(other.fields_)),
      writable_(other.writable_),
      entries_(std::move(other.entries_)) {}

ArtifactFolder ArtifactFolder::create(const fs::path& folder, Fields fields) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error || !fs::is_directory(folder, error))
    refuse_artifact(folder,
                    fmt::format("the folder cannot be made: {}", error ? error.message() : "it is a file"),
                    "choose another one");
  std::vector<fs::path> old;
  bool others = false, calls = false;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    calls |= is_call_file(name);
    if (name == kManifest || is_call_file(name) || is_unfinished_file(name))
      old.push_back(it->path());
    else
      others = true;
  }
  const ManifestKind kind = manifest_kind(folder / kManifest);
  if (kind == ManifestKind::OfSomethingElse || (kind == ManifestKind::Unreadable && !calls) ||
      (others && kind != ManifestKind::OfAnArtifact))
    refuse_artifact(folder, "the folder has files that are no artifact", "choose an empty or a new folder");
  // The manifest first: without it the rest is not an artifact.
  fs::remove(folder / kManifest, error);
  for (const fs::path& file : old) fs::remove(file, error);
  return {folder, std::move(fields), /*writable=*/true};
}

ArtifactFolder ArtifactFolder::open(const fs::path& folder, const Fields& expected) {
  const fs::path file = folder / kManifest;
  if (!file_exists(file))
    refuse_artifact(folder, fmt::format("it has no {}", kManifest),
                    "pass the folder that penstock compile has written, and let it finish");
  const std::string text = read_file(file, "artifact", kCompileAgain);
  Fields fields;
  std::vector<Entry> entries;
  try {
    const json manifest = json::parse(text);
    if (const int version = manifest.at("version").get<int>(); version != kManifestVersion)
      refuse_artifact(folder,
                      fmt::format("its manifest has version {}, expected {}", version, kManifestVersion),
                      kCompileAgain);
    for (const json& field : manifest.at("fields"))
      fields.emplace_back(field.at("name").get<std::string>(), field.at("value").get<std::string>());
    for (const json& call : manifest.at("calls"))
      entries.push_back({call.at("key").get<std::string>(), call.at("module").get<std::string>(),
                         call.at("call").get<std::string>(), call.at("bytes").get<std::size_t>(),
                         call.at("xxh64").get<std::uint64_t>(),
                         std::chrono::microseconds(call.at("made_in_us").get<std::int64_t>())});
  } catch (const json::exception& error) {
    refuse_artifact(folder, fmt::format("{} is damaged: {}", kManifest, error.what()), kCompileAgain);
  }
  const auto value_of = [](const Fields& all, const std::string& name) -> const std::string* {
    for (const auto& [key, value] : all)
      if (key == name) return &value;
    return nullptr;
  };
  const auto shown = [](const std::string* value) {
    return value ? "\"" + *value + "\"" : std::string("not set");
  };
  const auto compare = [&](const std::string& name) {
    const std::string *now = value_of(expected, name), *then = value_of(fields, name);
    if (!now != !then || (now && *now != *then))
      refuse_artifact(folder,
                      fmt::format("it is stale: {} is {}, in the artifact {}", name, shown(now), shown(then)),
                      fmt::format("{}, or restore the value", kCompileAgain));
  };
  for (const auto& [name, value] : expected) compare(name);
  for (const auto& [name, value] : fields) compare(name);
  ArtifactFolder opened(folder, std::move(fields), /*writable=*/false);
  opened.entries_ = std::move(entries);
  return opened;
}

void ArtifactFolder::add(const CacheKey& key, std::string module, std::string call,
                         std::span<const std::uint8_t> bytes, std::chrono::microseconds made_in) {
  PENSTOCK_INVARIANT(writable_, "a call is added to an artifact that was opened");
  const Bytes file = framed(kCallKind, bytes);
  write_file(folder_ / (key.text() + ".call"), file, folder_);
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [&](const Entry& entry) { return entry.key == key.text(); });
  entries_.push_back(
      {key.text(), std::move(module), std::move(call), file.size(), checksum64(file), made_in});
}

void ArtifactFolder::finish() {
  if (!writable_)
    throw StateError(
        fmt::format("artifact {}: it was opened, not created; only create() starts one", folder_.string()));
  json manifest;
  manifest["version"] = kManifestVersion;
  manifest["fields"] = json::array();
  for (const auto& [name, value] : fields_) manifest["fields"].push_back({{"name", name}, {"value", value}});
  manifest["calls"] = json::array();
  for (const Entry& entry : entries())
    manifest["calls"].push_back({{"key", entry.key},
                                 {"module", entry.module},
                                 {"call", entry.call},
                                 {"bytes", entry.bytes},
                                 {"xxh64", entry.checksum},
                                 {"made_in_us", entry.made_in.count()}});
  const std::string text =
      manifest.dump(2, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace) + "\n";
  write_file(folder_ / kManifest, {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()}, folder_);
}

std::vector<ArtifactFolder::Entry> ArtifactFolder::entries() const {
  const std::lock_guard lock(mutex_);
  return entries_;
}

Bytes ArtifactFolder::read(const Entry& entry) const {
  const fs::path file = folder_ / (entry.key + ".call");
  const std::string text = read_file(file, "artifact", kCompileAgain);
  Bytes bytes(text.begin(), text.end());
  if (bytes.size() != entry.bytes || checksum64(bytes) != entry.checksum)
    refuse_artifact(
        folder_,
        fmt::format("{} is not the file that the manifest lists: it is damaged, or of another artifact",
                    file.filename().string()),
        kCompileAgain);
  try {
    const auto fields = unframed(kCallKind, bytes, "artifact " + file.string(), std::string(kCompileAgain));
    return {fields.begin(), fields.end()};
  } catch (const ValueError& error) {
    throw ConfigError(error.what());
  }
}

std::optional<Bytes> ArtifactFolder::find(const CacheKey& key, std::chrono::microseconds* made_in) const {
  for (const Entry& entry : entries()) {
    if (entry.key != key.text()) continue;
    if (made_in) *made_in = entry.made_in;
    return read(entry);
  }
  return std::nullopt;
}

}  // namespace penstock::graph
