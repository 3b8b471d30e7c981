// Tensor subclasses in files: how the context of a kind is stored, so that captures with such tensors can be
// kept between runs of a program (docs/compile_cache.md).
//
//   register_context_codec("Logged", {
//       .encode = [](const Payload&) { return std::vector<std::uint8_t>(); },    // no context
//       .decode = [](const std::vector<std::uint8_t>&, const FlatWrapper& flat,
//                    const std::vector<at::Tensor>&) { return unflatten_wrapper(flat); }});
//
// Register a codec at the start of the program, once for each kind. Thread safety: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
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
  // of this process that a context may refer to (a mesh that belongs to the process). Throws StateError for a
  // context that this process does not have, any other error for bytes that `encode` has not written.
  std::function<at::Tensor(const std::vector<std::uint8_t>& context, const FlatWrapper& flat,
                           const std::vector<at::Tensor>& samples)>
      decode;

  // The rest is for contexts that refer to other processes, as the mesh of a DTensor does.

  // Text in graphs that only this process understands, such as the name of a process group, as bytes that
  // mean the same in every process; std::nullopt for other text. `argument`: of an operator, by its name in
  // the schema. Does not wait for other processes.
  std::function<std::optional<std::vector<std::uint8_t>>(const Payload& payload, const std::string& argument,
                                                         const std::string& text)>
      encode_text = {};
  // Returns the text of this process; it may wait for other processes to do the same. Throws as `decode`.
  std::function<std::string(const std::vector<std::uint8_t>& bytes, const std::vector<at::Tensor>& samples)>
      decode_text = {};
  // Whether capturing a function over such tensors may wait for other processes. A process then does not wait
  // until another one has stored its capture, which could be waiting for this process.
  bool capture_waits = false;
};

// Sets the codec of a kind. Throws StateError if the kind already has one.
void register_context_codec(const std::string& kind, ContextCodec codec);
// Returns null for a kind without one.
const ContextCodec* find_context_codec(const std::string& kind);

}  // namespace penstock
