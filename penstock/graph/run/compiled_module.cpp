#include "penstock/compile.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/graph/run/leaf_values.h"
#include "penstock/graph/run/spec_codec.h"

namespace penstock::graph {

struct CompiledModuleBase::Impl {
  struct Entry {
    std::type_index types;
    TreeSpec spec;
    std::shared_ptr<std::vector<TreeSpec>> results;  // the structures that forward has returned so far
    Compiled compiled;
  };

  Entry& entry_for(std::type_index types, const TreeSpec& spec, const Forward& forward);
  std::string training_flags() const;

  std::shared_ptr<torch::nn::Module> module;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  // all of them
  CompileOptions options;
  ModuleState state;
  ModuleParts parts;  // when it was compiled
  Values state_values;
  std::vector<std::unique_ptr<Entry>> entries;
  const Entry* latest = nullptr;  // of the latest capture
};

namespace {

std::string flags_of(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  std::string flags(modules.size(), '0');
  for (std::size_t i = 0; i < modules.size(); ++i)
    if (modules[i]->is_training()) flags[i] = '1';
  return flags;
}

// "args[1]['mask']", or "input['mask']" if the argument has that name.
std::string with_argument_name(const std::string& path, const std::vector<std::string>& names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string numbered = fmt::format("args[{}]", i);
    if (!names[i].empty() && path.starts_with(numbered)) return names[i] + path.substr(numbered.size());
  }
  return path;
}

}  // namespace

CompiledModuleBase::CompiledModuleBase(std::shared_ptr<torch::nn::Module> module,
                                       const CompileOptions& options)
    : torch::nn::Module(module ? "Compiled" + module->name() : "Compiled"), impl_(std::make_unique<Impl>()) {
  if (!module) throw ValueError("graph: compile got no module; pass a non-empty module holder");
  check_compilers(options);
  impl_->module = std::move(module);
  impl_->options = options;
  const torch::nn::Module& original = *impl_->module;
  impl_->modules = impl_->module->modules();
  impl_->state = ModuleState(original);
  impl_->parts = ModuleParts(original);
  impl_->state_values.assign(impl_->state.tensors.begin(), impl_->state.tensors.end());
  // Registers the same tensors and submodules under the same names: optimizers and checkpoints see no
  // difference.
  for (const auto& item : original.named_parameters(/*recurse=*/false))
    if (item.value().defined()) register_parameter(item.key(), item.value(), item.value().requires_grad());
  for (const auto& item : original.named_buffers(/*recurse=*/false))
    if (item.value().defined()) register_buffer(item.key(), item.value());
  for (const auto& item : original.named_children()) register_module(item.key(), item.value());
}

CompiledModuleBase::~CompiledModuleBase() = default;

void CompiledModuleBase::train(bool on) { impl_->module->train(on); }

bool CompiledModuleBase::is_training() const noexcept { return impl_->module->is_training(); }

void CompiledModuleBase::pretty_print(std::ostream& stream) const {
  stream << "compiled ";
  impl_->module->pretty_print(stream);
}

std::size_t CompiledModuleBase::captures() const {
  std::size_t captures = 0;
  for (const auto& entry : impl_->entries) captures += entry->compiled.captures();
  return captures;
}

std::string CompiledModuleBase::graph_text() const {
  if (!impl_->latest) return {};
  const Compiled& compiled = impl_->latest->compiled;
  return to_text(compiled.joint(compiled.captures() - 1).graph);
}

std::vector<std::string> CompiledModuleBase::wrappers() const {
  if (!impl_->latest) return {};
  const Compiled& compiled = impl_->latest->compiled;
  return compiled.wrapper_decisions(compiled.captures() - 1);
}

std::string CompiledModuleBase::Impl::training_flags() const { return flags_of(modules); }

CompiledModuleBase::Impl::Entry& CompiledModuleBase::Impl::entry_for(std::type_index types,
                                                                     const TreeSpec& spec,
                                                                     const Forward& forward) {
  for (const auto& entry : entries)
    if (entry->types == types && entry->spec == spec) return *entry;
  if (!entries.empty() && !options.recapture)
    throw StateError(fmt::format(
        "graph: the capture is not valid for this call: {}; call it as it was captured, or set recapture",
        first_difference(entries.back()->spec, spec).value_or("arguments of other types")));
  const std::size_t found = state.tensors.size();
  auto results = std::make_shared<std::vector<TreeSpec>>();
  Function function = [forward, spec, results, found, modules = modules](const Values& inputs) {
    // A second derivative runs the module again.
    if (flags_of(modules) != inputs[found].toStringRef())
      throw StateError(
          "graph: a training flag of a submodule was changed between forward and the second derivative, "
          "which runs "
          "the module again; call train() or eval() after it");
    FlatTree flat =
        flatten_tree(forward(unflatten_tree(leaves_of_values(std::span(inputs).subspan(found + 1)), spec)));
    Values values = values_of_leaves(flat.leaves);
    const auto known = std::find(results->begin(), results->end(), flat.spec);
    values.emplace_back(static_cast<std::int64_t>(known - results->begin()));
    if (known == results->end()) results->push_back(std::move(flat.spec));
    return values;
  };
  Convention convention{found, state.names};
  convention.names.emplace_back("the training flags of the submodules");
  for (std::string& path : spec.leaf_paths("args"))
    convention.names.push_back(with_argument_name(path, options.argument_names));
  FunctionIdentity identity{
      .text = fmt::format("{} {} {} {}", module->name(), types.name(), spec.to_string(),
                          fmt::join(state.names, " ")),
      .save = [results] { return encode_specs(*results); },
      .restore =
          [results](std::span<const std::uint8_t> bytes) {
            std::vector<TreeSpec> stored = decode_specs(bytes);
            const std::size_t common = std::min(stored.size(), results->size());
            // Results refer to their structure by its place in the list.
            if (!std::equal(stored.begin(), stored.begin() + static_cast<std::ptrdiff_t>(common),
                            results->begin()))
              return false;
            if (stored.size() > results->size()) *results = std::move(stored);
            return true;
          }};
  Compiled compiled(std::move(function), options, std::move(convention), std::move(identity));
  entries.push_back(std::make_unique<Entry>(Entry{types, spec, std::move(results), std::move(compiled)}));
  return *entries.back();
}

Tree CompiledModuleBase::call(const Tree& args, std::type_index types, const Forward& forward) {
  if (ModuleParts(*impl_->module) != impl_->parts)
    throw StateError(fmt::format(
        "graph: a submodule, a parameter or a buffer of {} was replaced or added after it was compiled, and "
        "its graphs and those who hold its parameters have the old one; compile the module again",
        impl_->module->name()));
  const FlatTree flat = flatten_tree(args);
  Impl::Entry& entry = impl_->entry_for(types, flat.spec, forward);
  Values inputs;
  inputs.reserve(impl_->state_values.size() + 1 + flat.leaves.size());
  inputs.insert(inputs.end(), impl_->state_values.begin(), impl_->state_values.end());
  inputs.emplace_back(impl_->training_flags());
  for (c10::IValue& leaf : values_of_leaves(flat.leaves)) inputs.push_back(std::move(leaf));
  const std::size_t captures = entry.compiled.captures();
  const Values values = entry.compiled(inputs);
  if (entry.compiled.captures() != captures) impl_->latest = &entry;
  const auto spec = static_cast<std::size_t>(values.back().toInt());
  return unflatten_tree(leaves_of_values(std::span(values).first(values.size() - 1)),
                        entry.results->at(spec));
}

// Gives the functions of compiled_module_internals.h access to the members.
struct CompiledModuleAccess {
  using Impl = CompiledModuleBase::Impl;
  static const Impl& of(const CompiledModuleBase& module) { return *module.impl_; }
};

const ModuleState& state_of(const CompiledModuleBase& module) {
  return CompiledModuleAccess::of(module).state;
}

std::size_t entry_count(const CompiledModuleBase& module) {
  return CompiledModuleAccess::of(module).entries.size();
}

const Compiled& compiled_entry(const CompiledModuleBase& module, std::size_t entry) {
  return CompiledModuleAccess::of(module).entries.at(entry)->compiled;
}

const TreeSpec& arguments_spec(const CompiledModuleBase& module, std::size_t entry) {
  return CompiledModuleAccess::of(module).entries.at(entry)->spec;
}

const TreeSpec& results_spec(const CompiledModuleBase& module, std::size_t entry, std::size_t capture) {
  const CompiledModuleAccess::Impl::Entry& found = *CompiledModuleAccess::of(module).entries.at(entry);
  const JointGraph& joint = found.compiled.joint(capture);
  const ViewAndMutationMeta& meta = found.compiled.inner_meta(capture);
  const Operand& index =
      joint.graph.outputs.at(joint.first_output(meta.mutated_at_run_time().size() + meta.outputs.size() - 1));
  return found.results->at(static_cast<std::size_t>(index.constant.toInt()));
}

}  // namespace penstock::graph
