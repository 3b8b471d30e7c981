// Tensor subclasses in files: how the context of a kind is stored, so that captures with such tensors can be
// kept between runs of a program (docs/compile_cache.md).
//
//   register_context_codec("Logged", {
//       .encode = [](const Payload&) { return std::vector<std::uint8_t>(); },    // no context
//       .decode = [](const std::vector<std::uint8_t>&, const FlatWrapper& flat,
//                    const std::vector<at::Tensor>&) { return unflatten_wrapper(flat); }});
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "penstock/tensor_subclass.h"

namespace penstock {

// Writes and reads the context of one kind.
struct ContextCodec {
  // Returns the context of a payload as bytes: everything that Payload::same_context compares. Equal contexts
  // have equal bytes, in every process of the same program. Throws NotImplemented for a context without such
  // a form.
  std::function<std::vector<std::uint8_t>(const Payload& payload)> encode;
  // Returns a wrapper with that context around `flat.tensors`; `flat.context` is None. `samples` are tensors
  // of this process that a context may refer to (a mesh that belongs to the process). Throws ValueError if
  // the context cannot be restored here.
  std::function<at::Tensor(const std::vector<std::uint8_t>& context, const FlatWrapper& flat,
                           const std::vector<at::Tensor>& samples)>
      decode;
};

// Sets the codec of a kind. Throws StateError if the kind already has one.
void register_context_codec(const std::string& kind, ContextCodec codec);
// Returns null for a kind without one.
const ContextCodec* find_context_codec(const std::string& kind);

}  // namespace penstock
