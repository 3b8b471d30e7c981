#include "penstock/torch/scan/selective_scan.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/dispatch/once_differentiable.h"
#include "penstock/torch/scan/document_starts.h"
#include "penstock/torch/scan/scan_kernels.h"
#include "penstock/torch/scan/scan_types.h"

namespace penstock {

namespace detail {

ScanShape shape_of_scan(const at::Tensor& values, const at::Tensor& keys, std::int64_t chunk) {
  ScanShape shape{.batch = values.size(0),
                  .length = values.size(1),
                  .heads = values.size(2),
                  .head_width = values.size(3),
                  .groups = keys.size(2),
                  .state_size = keys.size(3),
                  .chunk = std::min(chunk, values.size(1)),
                  .chunks = 0};
  shape.chunks = (shape.length + shape.chunk - 1) / shape.chunk;
  return shape;
}

}  // namespace detail

namespace {

using detail::maybe;
using detail::OptionalTensor;
using detail::or_undefined;
using detail::real_of;
using detail::ScanGradientInputs;
using detail::ScanGradients;
using detail::ScanOutputs;
using detail::ScanShape;
using detail::ScanTensors;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// [batch, heads, head width, state size] to the layout between chunks, and back.
at::Tensor state_inside(const at::Tensor& state, const ScanShape& s) {
  return state.view({s.batch, s.groups, s.group_width(), s.state_size}).transpose(2, 3).contiguous();
}
at::Tensor state_outside(const at::Tensor& inside, const ScanShape& s) {
  return inside.transpose(2, 3).contiguous().view({s.batch, s.heads, s.head_width, s.state_size});
}
std::vector<std::int64_t> outside_sizes(const ScanShape& s) {
  return {s.batch, s.heads, s.head_width, s.state_size};
}
std::vector<std::int64_t> states_sizes(const ScanShape& s) {
  return {s.batch, s.chunks, s.groups, s.state_size, s.group_width()};
}

// Everything contiguous, and on the CPU in the dtype of sums.
ScanTensors gathered_scan(const at::Tensor& values, const at::Tensor& steps, const at::Tensor& decay,
                          const at::Tensor& keys, const at::Tensor& queries, const at::Tensor& skip,
                          const OptionalTensor& documents, const OptionalTensor& initial,
                          std::int64_t chunk) {
  const at::ScalarType real = real_of(values.scalar_type()),
                       inside = values.is_cpu() ? real : values.scalar_type();
  ScanTensors in{.shape = detail::shape_of_scan(values, keys, chunk),
                 .values = values.to(inside).contiguous(),
                 .keys = keys.to(inside).contiguous(),
                 .queries = queries.to(inside).contiguous(),
                 .steps = steps.to(real).contiguous(),
                 .decay = decay.to(real).contiguous(),
                 .skip = skip.to(real).contiguous(),
                 .starts = {},
                 .initial = {}};
  if (documents.has_value()) in.starts = document_starts(*documents);
  if (initial.has_value()) in.initial = state_inside(initial->to(real).contiguous(), in.shape);
  return in;
}

// ---- operators. On the meta device they compute the shapes only ----

// Returns the result, the last state, and the states before each chunk in the dtype of the values.
std::tuple<at::Tensor, at::Tensor, at::Tensor> scan_forward(const at::Tensor& values, const at::Tensor& steps,
                                                            const at::Tensor& decay, const at::Tensor& keys,
                                                            const at::Tensor& queries, const at::Tensor& skip,
                                                            const OptionalTensor& documents,
                                                            const OptionalTensor& initial,
                                                            std::int64_t chunk) {
  const at::ScalarType dtype = values.scalar_type(), real = real_of(dtype);
  if (values.is_meta()) {
    const ScanShape shape = detail::shape_of_scan(values, keys, chunk);
    return {at::empty(values.sizes(), values.options()),
            at::empty(outside_sizes(shape), values.options().dtype(real)),
            at::empty(states_sizes(shape), values.options())};
  }
  const detail::PlainScope plain;
  const ScanTensors in = gathered_scan(values, steps, decay, keys, queries, skip, documents, initial, chunk);
  const ScanOutputs out = values.is_cpu() ? scan_on_cpu(in) : scan_batched(in);
  return {out.values.to(dtype), state_outside(out.last, in.shape), out.states.to(dtype)};
}

// Returns gradients of values, steps, decay, keys, queries, skip and the initial state, in their dtypes; the
// last one also if there was no initial state.
using SevenTensors =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
SevenTensors scan_backward(const at::Tensor& gradient, const OptionalTensor& state_gradient,
                           const at::Tensor& values, const at::Tensor& steps, const at::Tensor& decay,
                           const at::Tensor& keys, const at::Tensor& queries, const at::Tensor& skip,
                           const OptionalTensor& documents, const OptionalTensor& initial,
                           const at::Tensor& states, std::int64_t chunk) {
  const auto initial_options =
      initial.has_value() ? initial->options() : values.options().dtype(real_of(values.scalar_type()));
  if (values.is_meta()) {
    const auto like = [](const at::Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); };
    return {like(values),
            like(steps),
            like(decay),
            like(keys),
            like(queries),
            like(skip),
            at::empty(outside_sizes(detail::shape_of_scan(values, keys, chunk)), initial_options)};
  }
  const detail::PlainScope plain;
  const ScanTensors in = gathered_scan(values, steps, decay, keys, queries, skip, documents, initial, chunk);
  const at::ScalarType inside = in.values.scalar_type(), real = real_of(inside);
  const ScanGradientInputs from{.values = gradient.to(inside).contiguous(),
                                .last = state_gradient.has_value()
                                            ? state_inside(state_gradient->to(real).contiguous(), in.shape)
                                            : at::Tensor(),
                                .states = states.to(inside).contiguous()};
  const ScanGradients out =
      values.is_cpu() ? scan_backward_on_cpu(in, from) : scan_backward_batched(in, from);
  return {out.values.to(values.scalar_type()),
          out.steps.to(steps.scalar_type()),
          out.decay.to(decay.scalar_type()),
          out.keys.to(keys.scalar_type()),
          out.queries.to(queries.scalar_type()),
          out.skip.to(skip.scalar_type()),
          state_outside(out.initial, in.shape).to(initial_options)};
}

std::tuple<at::Tensor, at::Tensor> scan_step(const at::Tensor& values, const at::Tensor& steps,
                                             const at::Tensor& decay, const at::Tensor& keys,
                                             const at::Tensor& queries, const at::Tensor& skip,
                                             const at::Tensor& state) {
  const at::ScalarType dtype = values.scalar_type();
  if (values.is_meta())
    return {at::empty(values.sizes(), values.options()),
            at::empty(state.sizes(), state.options().dtype(real_of(dtype)))};
  const detail::PlainScope plain;
  const ScanTensors in = gathered_scan(values, steps, decay, keys, queries, skip, {}, {}, values.size(1));
  at::Tensor after = at::empty(state.sizes(), state.options().dtype(real_of(dtype)));
  after.copy_(state);
  const at::Tensor result = at::empty(in.values.sizes(), in.values.options());
  values.is_cpu() ? scan_step_on_cpu(in, after, result) : scan_step_on_cuda(in, after, result);
  return {result.to(dtype), after};
}

// ---- derivative ----

struct Scan : torch::autograd::Function<Scan> {
  // Absent tensors are empty optionals: LibTorch 1.13 looks for the device of every tensor.
  static variable_list forward(AutogradContext* context, const at::Tensor& values, const at::Tensor& steps,
                               const at::Tensor& decay, const at::Tensor& keys, const at::Tensor& queries,
                               const at::Tensor& skip, const OptionalTensor& documents,
                               const OptionalTensor& initial, std::int64_t chunk) {
    static const auto op = detail::operator_named<decltype(scan_forward)>("penstock::selective_scan");
    note_history(context, {values, steps, decay, keys, queries, skip, or_undefined(initial)});
    const auto [result, state, states] =
        op.call(values, steps, decay, keys, queries, skip, documents, initial, chunk);
    context->set_materialize_grads(false);
    context->save_for_backward(
        {values, steps, decay, keys, queries, skip, or_undefined(documents), or_undefined(initial), states});
    context->saved_data["chunk"] = chunk;
    return {result, state};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op =
        detail::operator_named<decltype(scan_backward)>("penstock::selective_scan_backward");
    const variable_list saved = context->get_saved_variables();
    variable_list result(9);
    if (!gradients[0].defined() && !gradients[1].defined()) return result;
    return once_differentiable(context, "penstock::selective_scan", gradients, [&] {
      const at::Tensor gradient = gradients[0].defined() ? gradients[0] : at::zeros_like(saved[0]);
      at::Tensor initial;
      std::tie(result[0], result[1], result[2], result[3], result[4], result[5], initial) =
          op.call(gradient, maybe(gradients[1]), saved[0], saved[1], saved[2], saved[3], saved[4], saved[5],
                  maybe(saved[6]), maybe(saved[7]), saved[8], context->saved_data["chunk"].toInt());
      if (saved[7].defined()) result[7] = initial;
      return result;
    });
  }
};

// ---- checks ----

[[noreturn]] void refuse_scan(const char* argument, const at::Tensor& actual, const std::string& expected,
                              const std::string& remedy = {}) {
  throw ValueError(
      describe(fmt::format("selective_scan: {}", argument), detail::sizes_text(actual), expected, remedy));
}

void require_sizes(const char* argument, const at::Tensor& actual,
                   const std::vector<std::int64_t>& expected) {
  if (actual.sizes() != at::IntArrayRef(expected))
    refuse_scan(argument, actual, fmt::format("[{}]", fmt::join(expected, ", ")));
}

void check_scan(const SelectiveScan& scan) {
  const at::Tensor& values = scan.values;
  if (values.dim() != 4 || values.numel() == 0 || !values.is_floating_point())
    refuse_scan("values", values, "floating-point [batch, length, heads, head width], at least one element");
  const std::int64_t batch = values.size(0), length = values.size(1), heads = values.size(2);
  if (scan.keys.dim() != 4 || scan.keys.numel() == 0)
    refuse_scan("keys", scan.keys, fmt::format("[{}, {}, groups, state size]", batch, length));
  const std::int64_t groups = scan.keys.size(2), state_size = scan.keys.size(3);
  if (heads % groups != 0)
    refuse_scan("keys", scan.keys, fmt::format("a number of groups that divides {} heads", heads),
                "the third size is the number of groups");
  require_sizes("keys", scan.keys, {batch, length, groups, state_size});
  require_sizes("queries", scan.queries, {batch, length, groups, state_size});
  require_sizes("steps", scan.steps, {batch, length, heads});
  require_sizes("decay", scan.decay, {heads});
  require_sizes("skip", scan.skip, {heads});
  if (scan.documents.defined()) check_documents("selective_scan", scan.documents, batch, length);
  if (scan.initial_state.defined())
    require_sizes("initial_state", scan.initial_state, {batch, heads, values.size(3), state_size});
  if (scan.chunk < 1)
    throw ValueError(describe("selective_scan: chunk", fmt::format("{}", scan.chunk), "at least 1 token"));
}

void add_scan_operators(torch::Library& library) {
  library.impl("selective_scan", &scan_forward);
  library.impl("selective_scan_backward", &scan_backward);
  library.impl("selective_scan_step", &scan_step);
}

}  // namespace

ScanResult selective_scan(const SelectiveScan& scan) {
  check_scan(scan);
  const at::ScalarType dtype = scan.values.scalar_type(), real = real_of(dtype);
  const variable_list results = Scan::apply(
      scan.values, scan.steps.to(real), scan.decay.to(real), scan.keys.to(dtype), scan.queries.to(dtype),
      scan.skip.to(real), maybe(scan.documents),
      maybe(scan.initial_state.defined() ? scan.initial_state.to(real) : at::Tensor()), scan.chunk);
  return {.values = results[0], .state = results[1]};
}

ScanResult selective_scan_step(const SelectiveScan& scan) {
  check_scan(scan);
  if (!scan.initial_state.defined())
    throw ValueError(describe("selective_scan_step: initial_state", "none", "the state before the tokens",
                              "pass zeros at the beginning of a row"));
  if (scan.documents.defined())
    throw ValueError(describe("selective_scan_step: documents", detail::sizes_text(scan.documents), "none",
                              "call selective_scan, or set the state to zero where a document begins"));
  static const auto op = detail::operator_named<decltype(scan_step)>("penstock::selective_scan_step");
  const at::ScalarType dtype = scan.values.scalar_type(), real = real_of(dtype);
  const at::NoGradGuard no_grad;
  auto [values, state] =
      op.call(scan.values.detach(), scan.steps.detach().to(real), scan.decay.detach().to(real),
              scan.keys.detach().to(dtype), scan.queries.detach().to(dtype), scan.skip.detach().to(real),
              scan.initial_state.detach());
  return {.values = values, .state = state};
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def(
      "selective_scan(Tensor values, Tensor steps, Tensor decay, Tensor keys, Tensor queries, Tensor skip, "
      "Tensor? documents, Tensor? initial_state, int chunk) -> (Tensor, Tensor, Tensor)");
  library.def(
      "selective_scan_backward(Tensor gradient, Tensor? state_gradient, Tensor values, Tensor steps, Tensor "
      "decay, Tensor keys, Tensor queries, Tensor skip, Tensor? documents, Tensor? initial_state, Tensor "
      "states, int chunk) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "selective_scan_step(Tensor values, Tensor steps, Tensor decay, Tensor keys, Tensor queries, Tensor "
      "skip, Tensor state) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(penstock, CPU, library) { add_scan_operators(library); }
TORCH_LIBRARY_IMPL(penstock, CUDA, library) { add_scan_operators(library); }
TORCH_LIBRARY_IMPL(penstock, Meta, library) { add_scan_operators(library); }

}  // namespace penstock
