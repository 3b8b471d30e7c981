// Partitioned captures as bytes: everything that a compiled call needs, for the cache and for artifacts.
//
//   const Bytes bytes = encode_capture(partitioned);
//   PartitionedCapture again = decode_capture(bytes, default_call_wrappers());
//   CompiledCall call(std::move(again), graph_compiler("executor"));
//
// The wrappers around a function are stored by name, with what they have decided, and are applied again:
// decoding takes the list of those that the program knows. Contexts of subclasses are restored by the codecs
// of their kinds (penstock/context_codec.h), which may look for meshes among `samples`, the inputs of the
// call. What runs the function again for second derivatives is stored without the function
// (FunctionCapture::set_function).
//
// encode_capture throws NotImplemented, naming it, for what has no form in bytes. decode_capture throws
// ValueError for bytes that no encode_capture of this version has written, and StateError for contexts that
// this process does not have; all indices of the result are valid.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "penstock/graph/cache/byte_stream.h"
#include "penstock/graph/run/function_capture.h"

namespace penstock::graph {

// Increment it with every change of what is stored or of what it means; it is part of every key.
inline constexpr std::uint32_t kCaptureVersion = 5;

Bytes encode_capture(const PartitionedCapture& capture);
PartitionedCapture decode_capture(std::span<const std::uint8_t> bytes,
                                  const CallWrappers& wrappers = default_call_wrappers(),
                                  const std::vector<at::Tensor>& samples = {},
                                  const std::string& name = "stored capture");

// The guard alone, without making anything that the graph needs.
CallGuard decode_guard_of_capture(std::span<const std::uint8_t> bytes, const std::vector<at::Tensor>& samples,
                                  const std::string& name);

class GraphDecoder;
// What decode_capture checks: calls decoder.fail() for an index or a count that does not fit the others.
void check_capture(const PartitionedCapture& capture, const GraphDecoder& decoder);

// The parts that keys are made of.
Bytes encode_guard(const CallGuard& guard);
// Without sizes, strides and offsets: for calls with dynamic dims.
Bytes encode_kind(const CallGuard& guard);
Bytes encode_joint(const FunctionCapture& capture);
CallGuard decode_guard(std::span<const std::uint8_t> bytes, const std::vector<at::Tensor>& samples,
                       const std::string& name);

}  // namespace penstock::graph
