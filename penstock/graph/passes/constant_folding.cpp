// "constant-folding": computes small tensors that depend on constants alone once, when the graph is compiled.
//
// Of operators in a table: factories, arithmetic, comparisons, casts, and views. Of constants that cannot
// change: numbers, what was folded before, and tensors declared as constant (constant_tensor.h); another
// tensor that the program holds may be written between two calls. On the CPU only, where a tensor that is
// computed now can be read by any thread later without waiting for a stream. Never in the memory of an
// output: each call returns a tensor of its own.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include <optional>
#include <utility>

#include "penstock/graph/ir/graph.h"
#include "penstock/graph/passes/replacement.h"
#include "penstock/graph/passes/standard_passes.h"
#include "penstock/mode.h"
#include "penstock/operator_traits.h"
#include "penstock/torch/dispatch/constant_tensor.h"

namespace penstock::graph {
namespace {

constexpr std::int64_t kLargestConstantBytes = 1024;

constexpr std::string_view kFoldedOperators[] = {"aten::full",
                                                 "aten::zeros",
                                                 "aten::ones",
                                                 "aten::scalar_tensor",
                                                 "aten::arange",
                                                 "aten::arange.start",
                                                 "aten::arange.start_step",
                                                 "aten::eye",
                                                 "aten::eye.m",
                                                 "aten::tril",
                                                 "aten::triu",
                                                 "aten::add.Tensor",
                                                 "aten::add.Scalar",
                                                 "aten::sub.Tensor",
                                                 "aten::sub.Scalar",
                                                 "aten::mul.Tensor",
                                                 "aten::mul.Scalar",
                                                 "aten::div.Tensor",
                                                 "aten::div.Scalar",
                                                 "aten::neg",
                                                 "aten::reciprocal",
                                                 "aten::sqrt",
                                                 "aten::rsqrt",
                                                 "aten::exp",
                                                 "aten::log",
                                                 "aten::eq.Tensor",
                                                 "aten::eq.Scalar",
                                                 "aten::ne.Tensor",
                                                 "aten::ne.Scalar",
                                                 "aten::lt.Tensor",
                                                 "aten::lt.Scalar",
                                                 "aten::le.Tensor",
                                                 "aten::le.Scalar",
                                                 "aten::gt.Tensor",
                                                 "aten::gt.Scalar",
                                                 "aten::ge.Tensor",
                                                 "aten::ge.Scalar",
                                                 "aten::logical_not",
                                                 "aten::logical_and",
                                                 "aten::logical_or",
                                                 "aten::bitwise_not",
                                                 "aten::where.self",
                                                 "aten::masked_fill.Scalar",
                                                 "aten::cat",
                                                 "aten::_to_copy",
                                                 "aten::clone",
                                                 "aten::view",
                                                 "aten::transpose.int",
                                                 "aten::permute",
                                                 "aten::t",
                                                 "aten::unsqueeze",
                                                 "aten::squeeze.dim",
                                                 "aten::select.int",
                                                 "aten::slice.Tensor",
                                                 "aten::expand"};

class Folder {
 public:
  explicit Folder(Graph& graph)
      : graph_(graph), memory_(graph), operators_(kFoldedOperators), known_(graph.values.size()) {
    for (const ConstantTensor& constant : graph.constants)
      if (is_constant_tensor(constant.tensor)) known_[index_of(constant.value)] = constant.tensor;
  }

  std::size_t run() {
    std::vector<char> gone(graph_.nodes.size(), 0);
    std::size_t folded = 0;
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i)
      if (fold(graph_.nodes[i])) {
        gone[i] = 1;
        ++folded;
      }
    if (folded > 0) erase_nodes(graph_, gone);
    return folded;
  }

 private:
  bool fold(const Node& node) {
    if (operators_.of(node.op) < 0 || node.results.size() != 1 || must_run(node)) return false;
    const ValueId result = node.results[0].value();
    if (result == kNoValue) return false;
    const Geometry& geometry = graph_[result].geometry;
    if (!geometry.device.is_cpu() || memory_.in_output(graph_, result) ||
        geometry.numel() * static_cast<std::int64_t>(c10::elementSize(geometry.dtype)) >
            kLargestConstantBytes)
      return false;
    bool all_known = true;
    for_each_value(node.arguments, [&](ValueId value) { all_known &= known_[index_of(value)].defined(); });
    if (!all_known) return false;
    std::optional<at::Tensor> tensor = compute(node);
    // What the graph says about the result holds for later nodes.
    if (!tensor || !has_geometry(*tensor, geometry)) return false;
    known_[index_of(result)] = *tensor;
    graph_.constants.push_back({result, *std::move(tensor), kNotSymbolic});
    return true;
  }

  // As a run of the graph would: below autograd and autocast.
  std::optional<at::Tensor> compute(const Node& node) const {
    const c10::InferenceMode no_inference(false);
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    Stack stack;
    for (const Operand& operand : node.arguments) stack.push_back(argument(operand));
    try {
      node.op.callBoxed(&stack);
    } catch (const c10::Error&) {
      return std::nullopt;  // the node stays, and throws when the graph runs
    }
    return stack.size() == 1 && stack[0].isTensor() ? std::optional(stack[0].toTensor()) : std::nullopt;
  }

  c10::IValue argument(const Operand& operand) const {
    const auto tensor = [&](ValueId value) {
      return value == kNoValue ? at::Tensor() : known_[index_of(value)];
    };
    if (operand.kind == Operand::Kind::Constant) return operand.constant;
    if (operand.kind == Operand::Kind::Tensor) return tensor(operand.values[0]);
    c10::List<at::Tensor> list;
    for (const ValueId value : operand.values) list.push_back(tensor(value));
    return list;
  }

  Graph& graph_;
  VisibleMemory memory_;
  OperatorNumbers operators_;
  std::vector<at::Tensor> known_;  // by value
};

class ConstantFolding final : public GraphPass {
 public:
  std::string_view name() const override { return "constant-folding"; }
  Graph run(Graph graph, const PassContext& context) const override {
    if (current_mode()) {
      context.note("left out: a mode is active, which would see what is computed");
      return graph;
    }
    if (const std::size_t folded = Folder(graph).run(); folded > 0)
      context.note(fmt::format("{} {} computed beforehand", folded, folded == 1 ? "result" : "results"));
    return graph;
  }
};

}  // namespace

PassPointer constant_folding_pass() { return std::make_shared<const ConstantFolding>(); }

}  // namespace penstock::graph
