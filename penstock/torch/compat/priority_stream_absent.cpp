// Without CUDA there is no priority stream.
#include "penstock/torch/compat/streams.h"

namespace penstock {

std::optional<c10::Stream> priority_stream(c10::Device) { return std::nullopt; }

}  // namespace penstock
