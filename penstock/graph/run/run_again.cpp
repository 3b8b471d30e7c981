#include "penstock/graph/run/run_again.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "penstock/base/warnings.h"
#include "penstock/errors.h"
#include "penstock/graph/wrap/random_numbers.h"
#include "penstock/operator_traits.h"
#include "penstock/torch/compat/autograd_node.h"

namespace penstock::graph {
namespace {

using torch::autograd::variable_list;

// Separates the function from what came before it. While it is closed, gradients end here: those of the
// function are asked for at this place, and must not reach an input a second time through another one that
// was computed from it.
struct Boundary final : torch::autograd::Node {
  explicit Boundary(std::shared_ptr<const bool> open) : open(std::move(open)) {}
  variable_list apply(variable_list&& gradients) override {
    if (!*open) return variable_list(1);
    return std::move(gradients);
  }
  std::shared_ptr<const bool> open;
};

at::Tensor behind_boundary(const at::Tensor& tensor, const std::shared_ptr<const bool>& open) {
  auto node = make_node<Boundary>(open);
  node->add_next_edge(torch::autograd::impl::gradient_edge(tensor));
  // Shares the version counter: a later write is noticed by what is saved here.
  const auto& impl = tensor.unsafeGetTensorImpl();
  at::Tensor result(
      impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
  torch::autograd::create_gradient_edge(result, node);
  return result;
}

}  // namespace

RunAgain::RunAgain(const FunctionForm& form, const JointGraph& joint)
    : function_(form.function()),
      found_(form.convention().found),
      inputs_(form.inputs()),
      autocast_(autocast_state()) {
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (!is_defined_tensor(inputs_[i])) continue;
    inputs_[i] = at::Tensor();
    primals_.push_back({i, form.name_of(i)});
  }
  why_not_ = why_not(form, joint);
  if (!why_not_.empty()) return;
  const ViewAndMutationMeta& meta = form.meta();
  const TangentInfo* last = nullptr;
  for (const TangentInfo& tangent : joint.tangents) {
    // A tangent that is a subclass consists of several.
    const bool same = last && last->kind == tangent.kind && last->index == tangent.index;
    last = &tangent;
    if (same) continue;
    Root root{tangent.index, false};
    if (tangent.kind == TangentInfo::Kind::IntermediateBase) {
      root.base = true;
      for (std::size_t i = 0; i < meta.outputs.size(); ++i)
        if (meta.outputs[i].kind == OutputKind::AliasOfIntermediateSaveAsOutput &&
            meta.outputs[i].base_index == tangent.index)
          root.output = i;
    }
    roots_.push_back(root);
  }
}

bool RunAgain::fits(std::size_t inputs, std::size_t tensors, std::size_t tangents) const {
  const auto is_tensor_of_call = [&](const Primal& primal) {
    return primal.input < inputs_.size() && inputs_[primal.input].isTensor();
  };
  return inputs_.size() == inputs && found_ <= inputs && primals_.size() == tensors &&
         std::all_of(primals_.begin(), primals_.end(), is_tensor_of_call) &&
         (roots_.size() == tangents || !why_not_.empty());
}

std::string RunAgain::why_not(const FunctionForm& form, const JointGraph& joint) const {
  for (std::size_t i = 0; i < form.meta().inputs.size(); ++i)
    if (form.meta().inputs[i].is_touched)
      return fmt::format("it writes {}, and would write it again", form.name_of(i));
  if (!joint.written_in_backward.empty())
    return fmt::format("its backward writes {}", joint.graph.inputs[joint.written_in_backward[0]].name);
  for (const Node& node : joint.graph.nodes) {
    if (accesses_generator(node)) continue;  // the graph draws: others were removed
    const std::string& op = traits_of(node.op).name;
    if (is_random(node)) return fmt::format("it draws random numbers ({}), and would draw others", op);
    if (has_side_effect(node)) return fmt::format("it has a side effect ({}), which would happen again", op);
  }
  return {};
}

void RunAgain::check_possible() const {
  if (!why_not_.empty())
    throw NotImplemented(fmt::format(
        "graph: the backward of a captured function is differentiated (create_graph), for which the function "
        "must run again: {}; call backward without create_graph, or the function itself",
        why_not_));
  if (!function_)
    throw NotImplemented(
        "graph: the backward of a captured function is differentiated (create_graph), for which the function "
        "must run again, but the call was decoded without it; load it through graph::compile of the module, "
        "or call backward without create_graph");
}

std::vector<at::Tensor> RunAgain::gradients(const std::vector<at::Tensor>& primals,
                                            const std::vector<at::Tensor>& tangents) const {
  check_possible();
  warn_once(
      "graph",
      "the backward of a captured function is differentiated (create_graph): the function itself runs again, "
      "without its graph, each time");
  const c10::AutoGradMode on(true);
  const AutocastStateScope casts(autocast_);
  const auto open = std::make_shared<bool>(false);
  Values inputs = inputs_;
  variable_list asked;
  std::vector<std::size_t> asked_for;
  for (std::size_t i = 0; i < primals.size(); ++i) {
    const std::size_t input = primals_.at(i).input;
    // The function takes parameters by itself.
    const bool inside = input >= found_ && primals[i].requires_grad();
    const at::Tensor used = inside ? behind_boundary(primals[i], open) : primals[i];
    inputs[input] = used;
    if (!used.requires_grad()) continue;
    asked.push_back(used);
    asked_for.push_back(i);
  }
  const Values outputs = function_(inputs);
  variable_list roots, of_roots;
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    if (!tangents.at(i).defined()) continue;
    const Root& wanted = roots_[i];
    at::Tensor root = wanted.output < outputs.size() && is_defined_tensor(outputs[wanted.output])
                          ? outputs[wanted.output].toTensor()
                          : at::Tensor();
    if (root.defined() && wanted.base && root.is_view()) root = at::Tensor(root._base());
    if (!root.defined() || !root.requires_grad() || root.sizes() != tangents[i].sizes())
      throw StateError(fmt::format(
          "graph: result {} of the captured function is another one when it runs again for a second "
          "derivative; make the function do the same on every call",
          wanted.output));
    roots.push_back(std::move(root));
    of_roots.push_back(tangents[i]);
  }
  std::vector<at::Tensor> gradients(primals.size());
  if (roots.empty() || asked.empty()) return gradients;
  const variable_list found = torch::autograd::grad(roots, asked, of_roots, /*retain_graph=*/c10::nullopt,
                                                    /*create_graph=*/true, /*allow_unused=*/true);
  *open = true;
  for (std::size_t i = 0; i < found.size(); ++i) gradients[asked_for[i]] = found[i];
  return gradients;
}

void HeldInputs::hold(const at::Tensor& input, bool keep) {
  inputs_.push_back(
      {c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(input.getIntrusivePtr()),
       keep ? input : at::Tensor(),
       input.is_inference() ? std::nullopt : std::optional(std::int64_t{input._version()})});
}

std::vector<at::Tensor> HeldInputs::get(const RunAgain& again) const {
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    at::Tensor tensor(inputs_[i].tensor.lock());
    if (!tensor.defined())
      throw StateError(fmt::format(
          "graph: {} is needed to differentiate the backward of a captured function (create_graph), but "
          "was freed after forward; keep the tensor, or set second_derivatives to "
          "RunAgainKeepingInputs",
          again.name_of(i)));
    if (inputs_[i].version && *inputs_[i].version != static_cast<std::int64_t>(tensor._version()))
      throw StateError(fmt::format(
          "graph: {} was modified by an inplace operation after forward, and its former value is "
          "needed to differentiate the backward of a captured function (create_graph); write a copy",
          again.name_of(i)));
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

}  // namespace penstock::graph
