#include "penstock/context_codec.h"

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <utility>

#include "penstock/errors.h"

namespace penstock {
namespace {

struct CodecRegistry {
  std::mutex mutex;
  std::map<std::string, ContextCodec> codecs;
  // Never destroyed: tensors may outlive every static object.
  static CodecRegistry& instance() {
    static CodecRegistry& registry = *new CodecRegistry;
    return registry;
  }
};

}  // namespace

void register_context_codec(const std::string& kind, ContextCodec codec) {
  CodecRegistry& registry = CodecRegistry::instance();
  const std::lock_guard lock(registry.mutex);
  if (!registry.codecs.emplace(kind, std::move(codec)).second)
    throw StateError(fmt::format(
        "register_context_codec: kind {} already has a codec; choose another name for your subclass", kind));
}

const ContextCodec* find_context_codec(const std::string& kind) {
  CodecRegistry& registry = CodecRegistry::instance();
  const std::lock_guard lock(registry.mutex);
  const auto found = registry.codecs.find(kind);
  return found == registry.codecs.end() ? nullptr : &found->second;
}

}  // namespace penstock
