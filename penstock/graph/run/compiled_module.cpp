#include "penstock/compile.h"

#include <fmt/format.h>

#include <algorithm>
#include <ostream>

#include "penstock/errors.h"

namespace penstock::graph {
namespace {

Values values_of_leaves(const std::vector<Tree>& leaves) {
  Values values;
  values.reserve(leaves.size());
  for (const Tree& leaf : leaves) values.push_back(leaf.is_tensor() ? c10::IValue(leaf.tensor()) : tree_to_ivalue(leaf));
  return values;
}

template <class Iterator>
std::vector<Tree> leaves_of_values(Iterator begin, Iterator end) {
  std::vector<Tree> leaves;
  for (; begin != end; ++begin) leaves.push_back(begin->isTensor() ? Tree(begin->toTensor()) : tree_from_ivalue(*begin));
  return leaves;
}

}  // namespace

CompiledModuleBase::CompiledModuleBase(std::shared_ptr<torch::nn::Module> module, const CompileOptions& options)
    : torch::nn::Module(module ? "Compiled" + module->name() : "Compiled"), module_(std::move(module)), options_(options) {
  if (!module_) throw ValueError("graph: compile got no module; pass a non-empty module holder");
  modules_ = module_->modules();
  state_ = ModuleState(*module_);
  state_values_.assign(state_.tensors.begin(), state_.tensors.end());
  // Registers the same tensors and submodules under the same names: optimizers and checkpoints see no
  // difference.
  for (const auto& item : module_->named_parameters(/*recurse=*/false))
    if (item.value().defined()) register_parameter(item.key(), item.value(), item.value().requires_grad());
  for (const auto& item : module_->named_buffers(/*recurse=*/false))
    if (item.value().defined()) register_buffer(item.key(), item.value());
  for (const auto& item : module_->named_children()) register_module(item.key(), item.value());
}

void CompiledModuleBase::pretty_print(std::ostream& stream) const {
  stream << "compiled ";
  module_->pretty_print(stream);
}

std::string CompiledModuleBase::training_flags() const {
  std::string flags(modules_.size(), '0');
  for (std::size_t i = 0; i < modules_.size(); ++i)
    if (modules_[i]->is_training()) flags[i] = '1';
  return flags;
}

CompiledModuleBase::Entry& CompiledModuleBase::entry_for(std::type_index types, const TreeSpec& spec, const Forward& forward) {
  for (const auto& entry : entries_)
    if (entry->types == types && entry->spec == spec) return *entry;
  if (!entries_.empty() && !options_.recapture)
    throw StateError(fmt::format("graph: the capture is not valid for this call: {}; call it as it was captured, or set recapture",
                                 first_difference(entries_.back()->spec, spec).value_or("arguments of other types")));
  const std::size_t found = state_.tensors.size();
  auto results = std::make_shared<std::vector<TreeSpec>>();
  Function function = [forward, spec, results, found](const Values& inputs) {
    const auto first = inputs.begin() + static_cast<std::ptrdiff_t>(found) + 1;
    FlatTree flat = flatten_tree(forward(unflatten_tree(leaves_of_values(first, inputs.end()), spec)));
    Values values = values_of_leaves(flat.leaves);
    const auto known = std::find(results->begin(), results->end(), flat.spec);
    values.emplace_back(static_cast<std::int64_t>(known - results->begin()));
    if (known == results->end()) results->push_back(std::move(flat.spec));
    return values;
  };
  Convention convention{found, state_.names};
  convention.names.emplace_back("the training flags of the submodules");
  for (std::string& path : spec.leaf_paths("args")) convention.names.push_back(std::move(path));
  entries_.push_back(std::make_unique<Entry>(Entry{types, spec, std::move(results), Compiled(std::move(function), options_, std::move(convention))}));
  return *entries_.back();
}

Tree CompiledModuleBase::call(const Tree& args, std::type_index types, const Forward& forward) {
  const FlatTree flat = flatten_tree(args);
  Entry& entry = entry_for(types, flat.spec, forward);
  Values inputs;
  inputs.reserve(state_values_.size() + 1 + flat.leaves.size());
  inputs.insert(inputs.end(), state_values_.begin(), state_values_.end());
  inputs.emplace_back(training_flags());
  for (c10::IValue& leaf : values_of_leaves(flat.leaves)) inputs.push_back(std::move(leaf));
  const Values values = entry.compiled(inputs);
  const auto spec = static_cast<std::size_t>(values.back().toInt());
  return unflatten_tree(leaves_of_values(values.begin(), values.end() - 1), entry.results->at(spec));
}

const TreeSpec& CompiledModuleBase::results_spec(std::size_t entry, std::size_t capture) const {
  const Entry& found = *entries_.at(entry);
  const JointGraph& joint = found.compiled.joint(capture);
  const ViewAndMutationMeta& meta = found.compiled.inner_meta(capture);
  const Operand& index = joint.graph.outputs.at(joint.first_output(meta.mutated_at_run_time().size() + meta.outputs.size() - 1));
  return found.results->at(static_cast<std::size_t>(index.constant.toInt()));
}

}  // namespace penstock::graph
