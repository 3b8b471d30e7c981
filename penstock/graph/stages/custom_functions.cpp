#include "penstock/graph/stages/custom_functions.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <typeinfo>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/torch/compat/autograd_node.h"
#include "penstock/torch/dispatch/autocast_scope.h"

namespace penstock::graph {

using torch::autograd::Edge;
using torch::autograd::variable_list;
using AutogradNode = torch::autograd::Node;

namespace {

constexpr std::string_view kCustom = "torch::autograd::CppNode<", kOfLibTorch = "torch::autograd::";

std::string type_of(const AutogradNode& node) { return c10::demangle(typeid(node).name()); }

// Functions of a user, and nodes that a program has made by hand: replaying operators does not bring them
// back.
bool is_custom(const AutogradNode& node) {
  const std::string type = type_of(node);
  return type.starts_with(kCustom) || !type.starts_with(kOfLibTorch);
}

// "torch::autograd::CppNode<my::(anonymous namespace)::Scale>" -> "my::(anonymous namespace)::Scale"
std::string custom_name(const AutogradNode& node) {
  const std::string type = type_of(node);
  return type.starts_with(kCustom) ? type.substr(kCustom.size(), type.size() - kCustom.size() - 1) : type;
}

// Later functions last.
std::vector<AutogradNode*> custom_nodes(const HistoryOfValues& history) {
  std::vector<AutogradNode*> found = history.nodes();
  std::erase_if(found, [](const AutogradNode* node) { return !is_custom(*node); });
  std::sort(found.begin(), found.end(),
            [](const AutogradNode* a, const AutogradNode* b) { return a->sequence_nr() < b->sequence_nr(); });
  return found;
}

class Recording {
 public:
  Recording(Tracer& tracer, const HistoryOfValues& history)
      : tracer_(tracer), graph_(tracer.graph), history_(history), forward_nodes_(graph_.nodes.size()) {
    made_by_.assign(graph_.values.size(), kNotMade);
    for (std::size_t i = 0; i < forward_nodes_; ++i)
      for_each_value(graph_.nodes[i].results, [&](ValueId value) {
        std::size_t& first = made_by_[index_of(value)];
        if (first == kNotMade) first = i;
      });
  }

  std::vector<CustomFunction> run() {
    const std::size_t inputs = graph_.inputs.size();
    std::vector<CustomFunction> functions;
    tracer_.phase = Phase::Backward;
    const c10::AutoGradMode no_gradients(false);
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    for (AutogradNode* node : custom_nodes(history_)) functions.push_back(record(*node));
    graph_.inputs.resize(inputs);
    return functions;
  }

 private:
  static constexpr std::size_t kNotMade = static_cast<std::size_t>(-1);

  CustomFunction record(AutogradNode& node) {
    CustomFunction function;
    function.name = custom_name(node);
    for (const Edge& edge : node.next_edges()) {
      function.inputs.push_back(edge.is_valid() ? history_.value_at(edge) : kNoValue);
      if (edge.is_valid() && function.inputs.back() == kNoValue)
        throw NotImplemented(
            fmt::format("graph: the autograd function {} takes a tensor that was written in place after it "
                        "was called, or "
                        "that no operator of forward has made; pass a copy of it to the function",
                        function.name));
    }
    variable_list tangents;
    for (std::uint32_t i = 0; i < node.num_inputs(); ++i) {
      const ValueId output = history_.value_at({held(node), i});
      function.outputs.push_back(output);
      function.tangents.push_back(kNoValue);
      tangents.emplace_back();
      if (output == kNoValue) continue;  // backward makes zeros of it
      Geometry geometry = graph_[output].geometry;
      geometry.storage_offset = 0;
      geometry.conjugated = geometry.negated = false;
      tangents.back() = make_fake(geometry.sizes, at::dtype(geometry.dtype).device(geometry.device));
      tracer_.add_input(tangents.back(), fmt::format("gradient of {} [{}]", function.name, i));
      function.tangents.back() = graph_.inputs.back().value;
    }
    refuse_writes(function);
    const std::size_t first_value = graph_.values.size();
    const variable_list gradients = node(std::move(tangents));
    for (std::size_t i = 0; i < function.inputs.size(); ++i) {
      const bool wanted = function.inputs[i] != kNoValue && i < gradients.size() && gradients[i].defined();
      function.gradients.push_back(wanted ? tracer_.operand_of(c10::IValue(gradients[i]))
                                          : Operand::of(kNoValue));
    }
    const auto begin = graph_.nodes.begin() + static_cast<std::ptrdiff_t>(forward_nodes_);
    function.backward.assign(std::make_move_iterator(begin), std::make_move_iterator(graph_.nodes.end()));
    graph_.nodes.erase(begin, graph_.nodes.end());
    find_saved(function, first_value);
    find_place(function);
    return function;
  }

  void refuse_writes(const CustomFunction& function) const {
    for (const ValueId output : function.outputs)
      if (output != kNoValue &&
          std::find(function.inputs.begin(), function.inputs.end(), output) != function.inputs.end())
        throw NotImplemented(
            fmt::format("graph: the autograd function {} writes its argument (mark_dirty), which a traced "
                        "pipeline cannot repeat; return a new tensor from it",
                        function.name));
  }

  // The values of forward that backward reads: all that its nodes take and neither made nor got.
  void find_saved(CustomFunction& function, std::size_t first_value) const {
    std::set<ValueId> own(function.tangents.begin(), function.tangents.end()), found;
    const auto take = [&](ValueId value) {
      if (index_of(value) < first_value && !own.contains(value) && !is_constant(value)) found.insert(value);
    };
    for (const Node& node : function.backward) for_each_value(node.arguments, take);
    for_each_value(function.gradients, take);
    function.saved.assign(found.begin(), found.end());
  }

  bool is_constant(ValueId value) const {
    return std::any_of(graph_.constants.begin(), graph_.constants.end(),
                       [&](const ConstantTensor& constant) { return constant.value == value; });
  }

  // Its nodes ran without grad mode, in a row; what it returns and saves is complete with the last of them
  // that makes or writes some of it.
  void find_place(CustomFunction& function) {
    function.first = kNotMade;
    std::size_t last = 0;
    std::set<StorageId> memory;
    for (const std::vector<ValueId>* values : {&function.outputs, &function.saved})
      for (const ValueId value : *values) {
        if (value == kNoValue) continue;
        const std::size_t node = made_by(value);
        if (node == kNotMade) continue;
        last = std::max(last, node + 1);
        if (values == &function.outputs) {
          function.first = std::min(function.first, node);
          memory.insert(graph_[value].storage);
        }
      }
    for (const ValueId input : function.inputs) {
      if (input == kNoValue) continue;
      if (made_by(input) != kNotMade) last = std::max(last, made_by(input) + 1);
      // The history of its arguments comes first.
      if (const auto other = end_of_.find(input); other != end_of_.end())
        last = std::max(last, other->second);
    }
    for (std::size_t i = last; i < forward_nodes_ && !graph_.nodes[i].grad_enabled; ++i) {
      const Node& node = graph_.nodes[i];
      for (const std::size_t argument : written_arguments(node))
        for (const ValueId value : node.arguments[argument].values)
          if (value != kNoValue && memory.contains(graph_[value].storage)) last = i + 1;
    }
    if (function.first == kNotMade) function.first = last;
    function.end = last;
    for (const ValueId output : function.outputs)
      if (output != kNoValue) end_of_[output] = last;
  }

  std::size_t made_by(ValueId value) const {
    return index_of(value) < made_by_.size() ? made_by_[index_of(value)] : kNotMade;
  }

  Tracer& tracer_;
  Graph& graph_;
  const HistoryOfValues& history_;
  const std::size_t forward_nodes_;
  std::vector<std::size_t> made_by_;       // by value: the first node that returned it
  std::map<ValueId, std::size_t> end_of_;  // by result of a function: where it gets its history
};

}  // namespace

std::vector<CustomFunction> record_custom_functions(Tracer& tracer, const HistoryOfValues& history) {
  std::vector<CustomFunction> functions = Recording(tracer, history).run();
  // A function that takes the result of another one comes after it.
  std::stable_sort(functions.begin(), functions.end(),
                   [](const CustomFunction& a, const CustomFunction& b) { return a.end < b.end; });
  return functions;
}

}  // namespace penstock::graph
