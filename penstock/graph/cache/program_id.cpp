#include "penstock/graph/cache/program_id.h"

#include <fmt/format.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <vector>

#include "penstock/base/checksum.h"
#include "penstock/base/mapped_file.h"
#include "penstock/graph/cache/cache_key.h"

namespace penstock::graph {
namespace {

struct LoadedObject {
  std::string path;  // empty: the program itself
  std::string build_id;
};

// Libraries that come with the system or with LibTorch.
bool belongs_to_others(const std::string& path) {
  for (const char* folder : {"/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/", "linux-vdso", "linux-gate"})
    if (path.starts_with(folder)) return true;
  const std::string name = std::filesystem::path(path).filename().string();
  for (const char* prefix :
       {"libtorch", "libc10", "libcu", "libnv", "libnccl", "libgomp", "libcaffe2", "libshm"})
    if (name.starts_with(prefix)) return true;
  return false;
}

int add_object(dl_phdr_info* info, std::size_t, void* to) {
  auto& objects = *static_cast<std::vector<LoadedObject>*>(to);
  LoadedObject object{info->dlpi_name ? info->dlpi_name : "", {}};
  if (!object.path.empty() && belongs_to_others(object.path)) return 0;
  for (int i = 0; i < info->dlpi_phnum && object.build_id.empty(); ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type == PT_NOTE)
      object.build_id = detail::build_id_in_notes(
          reinterpret_cast<const unsigned char*>(info->dlpi_addr + segment.p_vaddr), segment.p_memsz);
  }
  objects.push_back(std::move(object));
  return 0;
}

std::string find_program_id() {
  std::vector<LoadedObject> objects;
  dl_iterate_phdr(add_object, &objects);
  std::vector<std::string> parts;
  for (const LoadedObject& object : objects) {
    if (!object.build_id.empty()) {
      parts.push_back(object.build_id);
      continue;
    }
    const std::filesystem::path file = object.path.empty() ? "/proc/self/exe" : object.path;
    const MappedFile bytes(file);
    parts.push_back(fmt::format("{:016x} {}", checksum64(bytes.bytes()), bytes.bytes().size()));
  }
  // Libraries may be loaded at other places and in another order.
  std::sort(parts.begin(), parts.end());
  KeyBuilder key;
  for (const std::string& part : parts) key.field("object", part);
  return key.key().text();
}

}  // namespace

std::string detail::build_id_in_notes(const unsigned char* notes, std::size_t size) {
  constexpr std::uint32_t kBuildId = 3;
  const auto aligned = [](std::size_t bytes) { return (bytes + 3) & ~std::size_t{3}; };
  std::size_t at = 0;
  while (size - at >= 12) {
    std::uint32_t header[3];  // bytes of the name, bytes of the contents, type
    std::memcpy(header, notes + at, sizeof header);
    at += sizeof header;
    const std::size_t name = aligned(header[0]), contents = aligned(header[1]);
    if (name > size - at || contents > size - at - name) return {};
    if (header[2] == kBuildId && header[0] == 4 && std::memcmp(notes + at, "GNU", 4) == 0) {
      std::string text;
      for (std::size_t i = 0; i < header[1]; ++i) text += fmt::format("{:02x}", notes[at + name + i]);
      return text;
    }
    at += name + contents;
  }
  return {};
}

const std::string& program_id() {
  static const std::string id = find_program_id();
  return id;
}

}  // namespace penstock::graph
