#include "penstock/graph/wrap/duplicate_inputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "penstock/graph/codec/graph_decoder.h"
#include "penstock/graph/codec/graph_encoder.h"

namespace penstock::graph {

DuplicateInputs::DuplicateInputs(std::vector<std::size_t> first) : first_(std::move(first)) {
  for (std::size_t i = 0; i < first_.size(); ++i)
    if (first_[i] == i) kept_.push_back(i);
  for (const std::size_t place : first_) inner_.push_back(place_of(kept_, place));
}

bool DuplicateInputs::same_but_for_sizes(const AppliedWrapper& other) const {
  const auto* theirs = dynamic_cast<const DuplicateInputs*>(&other);
  return theirs && first_ == theirs->first_;
}

void DuplicateInputs::save(GraphEncoder& encoder) const { encoder(first_); }

std::shared_ptr<const AppliedWrapper> DuplicateInputsWrapper::load(GraphDecoder& decoder,
                                                                   std::size_t inputs) const {
  std::vector<std::size_t> first;
  decoder(first);
  if (first.size() != inputs) decoder.fail("duplicates among another number of inputs");
  for (std::size_t i = 0; i < first.size(); ++i)
    if (first[i] > i || first[first[i]] != first[i]) decoder.fail("a duplicate of an input that is none");
  return std::make_shared<const DuplicateInputs>(std::move(first));
}

std::string DuplicateInputs::decision() const {
  std::string text;
  for (std::size_t i = 0; i < first_.size(); ++i)
    if (first_[i] != i) text += fmt::format("{}input {} is input {}", text.empty() ? "" : ", ", i, first_[i]);
  return text;
}

Values DuplicateInputs::inner_inputs(const Values& inputs) const {
  Values inner;
  inner.reserve(kept_.size());
  for (const std::size_t i : kept_) inner.push_back(inputs[i]);
  return inner;
}

Function DuplicateInputs::inner_function(Function function) const {
  return [inner_place = inner_, function = std::move(function)](const Values& inner) {
    Values inputs;
    inputs.reserve(inner_place.size());
    for (const std::size_t place : inner_place) inputs.push_back(inner[place]);
    return function(inputs);
  };
}

ViewAndMutationMeta DuplicateInputs::derived_meta(ViewAndMutationMeta meta, const Values&) const {
  const std::vector<std::size_t> mutated = meta.mutated_at_run_time();
  const auto written = static_cast<std::size_t>(std::count_if(
      meta.inputs.begin(), meta.inputs.end(), [](const InputInfo& info) { return info.mutates_data; }));
  std::vector<TangentInfo> tangents;
  for (std::size_t i = 0; i < meta.tangents.size(); ++i)
    if (i >= written || i >= mutated.size() || first_[mutated[i]] == mutated[i])
      tangents.push_back(meta.tangents[i]);
  const std::vector<InputInfo> all = std::move(meta.inputs);
  meta.inputs.clear();
  for (const std::size_t i : kept_) meta.inputs.push_back(all[i]);
  for (OutputInfo& info : meta.outputs)
    if (info.base_index && *info.base_index < all.size()) info.base_index = inner_[*info.base_index];
  meta.tangents = std::move(tangents);
  meta.grad_mode_after.reset();
  return meta;
}

std::shared_ptr<const AppliedWrapper> DuplicateInputsWrapper::apply(FunctionForm& form) const {
  const Values& inputs = form.inputs();
  std::unordered_map<const c10::TensorImpl*, std::size_t> first_place;
  std::vector<std::size_t> first(inputs.size());
  bool written_twice = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    first[i] = i;
    if (!is_defined_tensor(inputs[i])) continue;
    const auto [entry, is_new] = first_place.try_emplace(inputs[i].toTensor().unsafeGetTensorImpl(), i);
    first[i] = entry->second;
    written_twice |= !is_new && form.meta().inputs[i].is_touched;
  }
  if (!written_twice) return nullptr;
  auto applied = std::make_shared<const DuplicateInputs>(std::move(first));
  Convention convention = form.convention();
  convention.names.clear();
  if (!form.convention().names.empty())
    for (const std::size_t i : applied->kept()) convention.names.push_back(form.convention().name_of(i));
  form.replace(applied->inner_function(form.function()), applied->inner_inputs(inputs), std::move(convention),
               applied->kept());
  return applied;
}

}  // namespace penstock::graph
