// What the tracer does not record as it is: operators that rebind memory, and decomposed ones.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/trace/tracer.h"
#include "penstock/operator_traits.h"
#include "penstock/torch/dispatch/autocast_scope.h"

namespace penstock::graph {
namespace {

// The elements of the memory that a tensor reaches, counted from the beginning of the memory.
std::int64_t end_of(const Geometry& geometry) {
  std::int64_t last = geometry.storage_offset;
  for (std::size_t dim = 0; dim < geometry.sizes.size(); ++dim) {
    if (geometry.sizes[dim] == 0) return geometry.storage_offset;
    last += (geometry.sizes[dim] - 1) * geometry.strides[dim];
  }
  return last + 1;
}

}  // namespace

void Tracer::record_view(const c10::OperatorHandle& op, const at::Tensor& of, const at::Tensor& like,
                         Operand result) {
  Node node{op, {}, {}, phase, c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()};
  node.arguments = {Operand::of(value_of(of)), Operand::of(c10::IValue(like.sizes().vec())),
                    Operand::of(c10::IValue(like.strides().vec())),
                    Operand::of(c10::IValue(like.storage_offset()))};
  node.results = {std::move(result)};
  graph.nodes.push_back(std::move(node));
}

bool Tracer::rebind(const c10::OperatorHandle& op, Stack* stack, std::size_t base) {
  const c10::OperatorName& name = op.operator_name();
  const bool sets = name.name == "aten::set_" && name.overload_name == "source_Tensor";
  if (!sets && name.name != "aten::resize_") return false;
  const at::Tensor tensor = (*stack)[base].toTensor();
  if (!is_fake(tensor)) return false;  // it belongs to nobody outside, or is refused below
  if (sets) {
    const at::Tensor source = (*stack)[base + 1].toTensor();
    run_below(op, stack);
    set_memory(tensor, source);
    return true;
  }
  const ValueId before = value_of(tensor);
  const Geometry old = graph[before].geometry;
  run_below(op, stack);
  if (has_geometry(tensor, old)) return true;
  if (end_of(geometry_of(tensor)) > end_of(old))
    throw NotImplemented(fmt::format(
        "graph: aten::resize_ from sizes [{}] to [{}] needs more memory than the tensor occupies; whether "
        "there "
        "is more behind it, and what it holds, is no part of a capture; create a new tensor (new_empty)",
        fmt::join(old.sizes, ", "), fmt::join(tensor.sizes(), ", ")));
  static const c10::OperatorHandle as_strided_ =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::as_strided_", "");
  // The argument is the value before, so it is read first.
  Node node{as_strided_, {}, {}, phase, c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()};
  node.arguments = {Operand::of(before), Operand::of(c10::IValue(tensor.sizes().vec())),
                    Operand::of(c10::IValue(tensor.strides().vec())),
                    Operand::of(c10::IValue(tensor.storage_offset()))};
  node.results = {Operand::of(rewritten(tensor))};
  graph.nodes.push_back(std::move(node));
  return true;
}

void Tracer::set_memory(const at::Tensor& tensor, const at::Tensor& source) {
  const std::string_view who = tensor.requires_grad() ? "the tensor" : "its source";
  if (tensor.requires_grad() || source.requires_grad())
    throw NotImplemented(
        fmt::format("graph: aten::set_: {} requires a gradient, which autograd would lose; detach it, or use "
                    "the source itself",
                    who));
  if (source.is_conj() || source.is_neg() || tensor.is_conj() || tensor.is_neg())
    throw NotImplemented(
        "graph: aten::set_ of or to a lazy conjugate; pass a copy (resolve_conj().resolve_neg())");
  const ValueId now = value_of(tensor);
  for (std::size_t i = 0; i < found; ++i)
    if (graph.inputs[i].value == now)
      throw NotImplemented(
          fmt::format("graph: aten::set_ gives {}, a parameter or buffer, other memory; copy into it (copy_)",
                      graph.inputs[i].name));
  const ValueId from = value_of(source);
  // Views of the tensor are recognized by its memory.
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(
      c10::Storage(source.unsafeGetTensorImpl()->unsafe_storage()));
  static const c10::OperatorHandle as_strided =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::as_strided", "");
  Operand result = Operand::of(graph.new_value(geometry_of(tensor), graph[from].storage));
  record_view(as_strided, source, tensor, result);
  FakeNote* note = fake_note(tensor);
  PENSTOCK_INVARIANT(note != nullptr, "a fake tensor has a note");
  *note = {note_owner_, static_cast<std::int32_t>(result.value())};
}

void Tracer::expand(const c10::OperatorHandle& op, const Decomposition& decomposition, Stack* stack,
                    std::size_t base) {
  const std::vector<c10::IValue> arguments(stack->begin() + static_cast<std::ptrdiff_t>(base), stack->end());
  run_below(op, stack);  // in shape only: what the operator returns
  const std::vector<c10::IValue> expected(stack->begin() + static_cast<std::ptrdiff_t>(base), stack->end());
  std::vector<at::Tensor> results;
  {
    struct Running {
      std::vector<c10::OperatorName>& names;
      ~Running() { names.pop_back(); }
    };
    expanding_.push_back(op.operator_name());
    const Running running{expanding_};
    const NoAutocastScope no_casts;
    const ModeGuard again(*this);
    results = decomposition(arguments);
  }
  const std::string& name = traits_of(op).name;
  if (results.size() != expected.size())
    throw ValueError(fmt::format("graph: the decomposition of {} returned {} tensors, expected {}", name,
                                 results.size(), expected.size()));
  for (std::size_t i = 0; i < results.size(); ++i) {
    const at::Tensor& is = results[i];
    const at::Tensor& wanted = expected[i].toTensor();
    const bool same =
        is.defined() == wanted.defined() &&
        (!is.defined() || (is.sizes() == wanted.sizes() && is.scalar_type() == wanted.scalar_type()));
    if (!same)
      throw ValueError(fmt::format(
          "graph: result {} of the decomposition of {} is {}, expected {} as the operator returns", i, name,
          is.defined() ? to_text(geometry_of(is)) : "undefined",
          wanted.defined() ? to_text(geometry_of(wanted)) : "undefined"));
    (*stack)[base + i] = is;
  }
}

// "it reads values computed from x, mask and parameters; the last parameter used before it is
// blocks.1.attention.weight"
std::string Tracer::origin_of_values(const Node& node) const {
  std::vector<char> needed(static_cast<std::size_t>(graph.storages), 0);
  const auto need = [&](ValueId value) { needed[index_of(graph[value].storage)] = 1; };
  for_each_value(node.arguments, need);
  std::string parameter;
  for (auto it = graph.nodes.rbegin(); it != graph.nodes.rend(); ++it) {
    bool used = false;
    for_each_value(it->results, [&](ValueId value) { used |= needed[index_of(graph[value].storage)] != 0; });
    for (const std::size_t argument : written_arguments(*it))
      for (const ValueId value : it->arguments[argument].values)
        used |= value != kNoValue && needed[index_of(graph[value].storage)] != 0;
    if (used) for_each_value(it->arguments, need);
    for (std::size_t i = 0; i < found && parameter.empty(); ++i)
      for_each_value(it->arguments, [&](ValueId value) {
        if (graph.inputs[i].value == value) parameter = graph.inputs[i].name;
      });
  }
  // Arguments rather than parameters, which most values depend on.
  std::vector<std::string> arguments, parameters;
  for (std::size_t i = 0; i < graph.inputs.size(); ++i)
    if (needed[index_of(graph[graph.inputs[i].value].storage)])
      (i < found ? parameters : arguments).push_back(graph.inputs[i].name);
  const auto some_of = [](std::vector<std::string> names) {
    const std::size_t all = names.size();
    names.resize(std::min<std::size_t>(all, 4));
    return fmt::format("{}{}", fmt::join(names, ", "), all > 4 ? fmt::format(" and {} more", all - 4) : "");
  };
  std::string text = "it reads values that depend on no input";
  if (!arguments.empty())
    text =
        "it reads values computed from " + some_of(arguments) + (parameters.empty() ? "" : " and parameters");
  else if (!parameters.empty())
    text = "it reads values computed from " + some_of(parameters);
  if (!parameter.empty()) {
    const std::size_t dot = parameter.rfind('.');
    text +=
        fmt::format("; the last parameter used before it is {}{}", parameter,
                    dot == std::string::npos ? "" : fmt::format(", of module {}", parameter.substr(0, dot)));
  }
  return text +
         "; compute with tensors instead of branching (torch::where), pass the value as an argument that is "
         "no "
         "tensor, or compile what is before and after it separately";
}

}  // namespace penstock::graph
