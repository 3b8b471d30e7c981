#include "penstock/overlapped_chunks.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

void check_backward(const OverlappedBackward& chunk) {
  const char* what = "the chunk of overlapped_chunks that runs backward";
  if (chunk.loss.defined() != chunk.outputs.empty())
    throw ValueError(describe(what,
                              chunk.loss.defined() ? "a loss and outputs" : "neither a loss nor outputs",
                              "one of them", "pass the loss on the last stage, the outputs on others"));
  if (chunk.outputs.size() != chunk.output_grads.size())
    throw ValueError(describe(
        what, fmt::format("{} outputs and {} gradients", chunk.outputs.size(), chunk.output_grads.size()),
        "as many gradients as outputs", "pass an undefined tensor where there is none"));
}

void run_backward(const OverlappedBackward& chunk) {
  if (chunk.loss.defined()) {
    torch::autograd::backward({chunk.loss}, {});
    return;
  }
  std::vector<at::Tensor> outputs, gradients;
  for (std::size_t i = 0; i < chunk.outputs.size(); ++i) {
    if (!chunk.outputs[i].requires_grad() || !chunk.output_grads[i].defined()) continue;
    outputs.push_back(chunk.outputs[i]);
    gradients.push_back(chunk.output_grads[i]);
  }
  if (!outputs.empty()) torch::autograd::backward(outputs, gradients);
}

Tree spread(const Tree& inputs) {
  if (inputs.kind() == Tree::Kind::Tuple) return inputs;
  if (inputs.kind() == Tree::Kind::List) return Tree::tuple(inputs.entries());
  return Tree::tuple({inputs});
}

}  // namespace

OverlappedResult overlapped_chunks(const OverlappedForward& forward, const OverlappedBackward& backward) {
  check_backward(backward);
  run_backward(backward);
  OverlappedResult result;
  result.outputs = forward.module.forward(spread(forward.inputs), forward.kwargs);
  if (forward.criterion) result.loss = forward.criterion(result.outputs, forward.target);
  return result;
}

}  // namespace penstock
