#include "penstock/torch/scan/causal_convolution.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/dispatch/once_differentiable.h"
#include "penstock/torch/scan/causal_convolution_kernels.h"
#include "penstock/torch/scan/document_starts.h"
#include "penstock/torch/scan/scan_types.h"

namespace penstock {

namespace {

using detail::ConvolutionGradients;
using detail::ConvolutionTensors;
using detail::maybe;
using detail::OptionalTensor;
using detail::or_undefined;
using detail::real_of;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- operators. On the meta device they compute the shapes only ----

ConvolutionTensors gathered(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& documents, bool silu) {
  const at::ScalarType real = real_of(x.scalar_type());
  ConvolutionTensors in{
      .x = x, .weight = weight.to(real).contiguous(), .bias = {}, .starts = {}, .silu = silu};
  if (x.is_cpu()) in.x = in.x.to(real);
  if (in.x.stride(2) != 1) in.x = in.x.contiguous();
  if (bias.has_value()) in.bias = bias->to(real).contiguous();
  if (documents.has_value()) in.starts = document_starts(*documents);
  return in;
}

at::Tensor convolution_forward(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& documents, bool silu) {
  if (x.is_meta() || x.numel() == 0) return at::empty(x.sizes(), x.options());
  const detail::PlainScope plain;
  const ConvolutionTensors in = gathered(x, weight, bias, documents, silu);
  const at::Tensor result = at::empty(x.sizes(), in.x.options());
  x.is_cpu() ? convolve_on_cpu(in, result) : convolve_on_cuda(in, result);
  return result.to(x.scalar_type());
}

// The gradients of weight and bias are in the dtypes of these; that of an absent bias has no elements.
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& documents, bool silu) {
  const std::int64_t channels = x.size(2);
  const bool biased = bias.has_value();
  if (x.is_meta() || x.numel() == 0)
    return {at::empty(x.sizes(), x.options()), at::zeros(weight.sizes(), weight.options()),
            at::zeros({biased ? channels : 0}, biased ? bias->options() : weight.options())};
  const detail::PlainScope plain;
  const ConvolutionTensors in = gathered(x, weight, bias, documents, silu);
  const ConvolutionGradients out{.x = at::empty(x.sizes(), in.x.options()),
                                 .weight = at::empty(weight.sizes(), in.weight.options()),
                                 .bias = at::empty({channels}, in.weight.options())};
  const at::Tensor from = gradient.to(in.x.scalar_type()).contiguous();
  x.is_cpu() ? convolve_backward_on_cpu(in, from, out) : convolve_backward_on_cuda(in, from, out);
  return {out.x.to(x.scalar_type()), out.weight.to(weight.scalar_type()),
          biased ? out.bias.to(bias->scalar_type()) : at::empty({0}, weight.options())};
}

struct Convolution : torch::autograd::Function<Convolution> {
  // Absent tensors are empty optionals: LibTorch 1.13 looks for the device of every tensor.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias, const OptionalTensor& documents, bool silu) {
    static const auto op =
        detail::operator_named<decltype(convolution_forward)>("penstock::causal_convolution");
    note_history(context, {x, weight, or_undefined(bias)});
    context->save_for_backward({x, weight, or_undefined(bias), or_undefined(documents)});
    context->saved_data["silu"] = silu;
    return op.call(x, weight, bias, documents, silu);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op =
        detail::operator_named<decltype(convolution_backward)>("penstock::causal_convolution_backward");
    const variable_list saved = context->get_saved_variables();
    return once_differentiable(context, "penstock::causal_convolution", gradients, [&] {
      const auto [x, weight, bias] = op.call(gradients[0], saved[0], saved[1], maybe(saved[2]),
                                             maybe(saved[3]), context->saved_data["silu"].toBool());
      return variable_list{x, weight, saved[2].defined() ? bias : at::Tensor(), at::Tensor(), at::Tensor()};
    });
  }
};

void add_convolution_operators(torch::Library& library) {
  library.impl("causal_convolution", &convolution_forward);
  library.impl("causal_convolution_backward", &convolution_backward);
}

void check_convolution(const CausalConvolution& job) {
  const char* const what = "causal_convolution";
  if (job.x.dim() != 3 || !job.x.is_floating_point())
    throw ValueError(describe(fmt::format("{}: x", what), fmt::format("{} dims", job.x.dim()),
                              "floating-point [batch, length, channels]"));
  const std::int64_t channels = job.x.size(2);
  if (job.weight.dim() != 2 || job.weight.size(0) != channels || job.weight.size(1) < 1)
    throw ValueError(describe(fmt::format("{}: weight", what), detail::sizes_text(job.weight),
                              fmt::format("[{}, taps]", channels)));
  if (job.bias.defined() && (job.bias.dim() != 1 || job.bias.size(0) != channels))
    throw ValueError(
        describe(fmt::format("{}: bias", what), detail::sizes_text(job.bias), fmt::format("[{}]", channels)));
  if (job.documents.defined()) check_documents(what, job.documents, job.x.size(0), job.x.size(1));
}

}  // namespace

at::Tensor causal_convolution(const CausalConvolution& job) {
  check_convolution(job);
  return Convolution::apply(job.x, job.weight, maybe(job.bias), maybe(job.documents), job.silu);
}

ConvolutionPiece causal_convolution_step(const CausalConvolution& job, const at::Tensor& memory,
                                         const at::Tensor& memory_documents) {
  check_convolution(job);
  const std::int64_t before = job.weight.size(1) - 1, added = job.x.size(1);
  if (memory.dim() != 3 || memory.size(0) != job.x.size(0) || memory.size(1) != before ||
      memory.size(2) != job.x.size(2))
    throw ValueError(
        describe("causal_convolution_step: memory", detail::sizes_text(memory),
                 fmt::format("[{}, {}, {}]", job.x.size(0), before, job.x.size(2)),
                 "pass the memory that the step before returned, or zeros at the beginning of a row"));
  if (job.documents.defined()) {
    if (!memory_documents.defined())
      throw ValueError(
          describe("causal_convolution_step: memory_documents", "none",
                   "the documents of the inputs in memory, because the new tokens have documents"));
    check_documents("causal_convolution_step: memory", memory_documents, job.x.size(0), before);
  }
  CausalConvolution whole = job;
  whole.x = at::cat({memory.to(job.x.scalar_type()), job.x}, 1);
  if (job.documents.defined())
    whole.documents = at::cat({memory_documents.to(job.documents.scalar_type()), job.documents}, 1);
  return {.y = causal_convolution(whole).narrow(1, before, added),
          .memory = whole.x.narrow(1, added, before)};
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def(
      "causal_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? documents, bool silu) -> Tensor");
  library.def(
      "causal_convolution_backward(Tensor gradient, Tensor x, Tensor weight, Tensor? bias, Tensor? "
      "documents, "
      "bool silu) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(penstock, CPU, library) { add_convolution_operators(library); }
TORCH_LIBRARY_IMPL(penstock, CUDA, library) { add_convolution_operators(library); }
TORCH_LIBRARY_IMPL(penstock, Meta, library) { add_convolution_operators(library); }

}  // namespace penstock
