// Changes the bytes of a stored capture and decodes them: only ValueError may be thrown, and what is accepted
// must be possible to encode again and to make ready to run.
//
// Input: groups of three bytes, the place of a change (two bytes, scaled to the size of the capture) and what
// is xored to it. A place of 0xffff cuts the capture at the place of the next group. The checksum of a file
// is not part of this: a mutation would never get it right.
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "penstock/errors.h"
#include "penstock/graph/run/capture_codec.h"
#include "penstock/graph/run/compiled_call.h"

namespace {

using namespace penstock;
using namespace penstock::graph;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "capture_fuzz: %s\n", what);
  std::abort();
}

Bytes sample() {
  const at::Tensor found = torch::tensor({1.F, 2.F});
  const Function function = [&](const Values& in) -> Values {
    in[2].toTensor().add_(1);
    const at::Tensor y = torch::gelu(torch::mm(in[0].toTensor(), in[1].toTensor()) + found, "tanh");
    return {y, in[2].toTensor().t(), y.view({-1}), 7, std::string("text")};
  };
  const at::Tensor memory = torch::randn({12});
  return encode_capture(partition(
      capture_function(function, {torch::randn({3, 4}).requires_grad_(), memory.slice(0, 0, 8).view({4, 2}),
                                  memory.slice(0, 2, 12).view({2, 5})}),
      Partitioner::Default));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Bytes whole = sample();
  Bytes bytes = whole;
  for (std::size_t i = 0; i + 3 <= size && !bytes.empty(); i += 3) {
    const std::size_t place = static_cast<std::size_t>(data[i]) << 8 | data[i + 1];
    if (place == 0xffff)
      bytes.resize(bytes.size() * data[i + 2] / 256);
    else
      bytes[place % bytes.size()] ^= data[i + 2];
  }
  try {
    PartitionedCapture read = decode_capture(bytes);
    const Bytes again = encode_capture(read);
    if (encode_capture(decode_capture(again)) != again)
      fail("a capture that changes when it is stored again");
    CompiledCall(std::move(read), graph_compiler(kExecutorCompiler));
  } catch (const Error&) {
  }
  return 0;
}
