#include "penstock/graph/input_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>

#include "penstock/base/errors.h"

namespace penstock::graph {
namespace {

bool input_is_tensor(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

const c10::StorageImpl* memory_of_input(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// In bytes from the beginning of the memory.
struct ByteRange {
  std::int64_t first = 0, end = 0;
};

ByteRange byte_range(const at::Tensor& tensor) {
  const auto item = static_cast<std::int64_t>(tensor.itemsize());
  std::int64_t last = tensor.storage_offset();
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {tensor.storage_offset() * item, (last + 1) * item};
}

// Marks every byte of a tensor; `mark` returns true to stop.
template <class Mark>
bool visit_elements(const at::Tensor& tensor, std::int64_t dim, std::int64_t position, const Mark& mark) {
  if (dim == tensor.dim()) return mark(position * static_cast<std::int64_t>(tensor.itemsize()));
  for (std::int64_t i = 0; i < tensor.size(dim); ++i)
    if (visit_elements(tensor, dim + 1, position + i * tensor.stride(dim), mark)) return true;
  return false;
}

}  // namespace

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (memory_of_input(a) == nullptr || memory_of_input(a) != memory_of_input(b) || a.numel() == 0 || b.numel() == 0) return false;
  const ByteRange in_a = byte_range(a), in_b = byte_range(b);
  const std::int64_t first = std::max(in_a.first, in_b.first), end = std::min(in_a.end, in_b.end);
  if (first >= end) return false;
  constexpr std::int64_t kExactLimit = 1 << 20;
  if (a.numel() > kExactLimit || b.numel() > kExactLimit || in_a.end - in_a.first > 64 * kExactLimit) return true;
  std::vector<bool> taken(static_cast<std::size_t>(in_a.end - in_a.first), false);
  visit_elements(a, 0, a.storage_offset(), [&](std::int64_t byte) {
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(a.itemsize()); ++i) taken[static_cast<std::size_t>(byte + i - in_a.first)] = true;
    return false;
  });
  return visit_elements(b, 0, b.storage_offset(), [&](std::int64_t byte) {
    for (std::int64_t i = byte; i < byte + static_cast<std::int64_t>(b.itemsize()); ++i)
      if (i >= in_a.first && i < in_a.end && taken[static_cast<std::size_t>(i - in_a.first)]) return true;
    return false;
  });
}

InputPlan::InputPlan(const Values& inputs, const ViewAndMutationMeta& meta, const Convention& convention) : convention_{convention.found, {}} {
  // The same tensor again: harmless unless it is written.
  std::unordered_map<const c10::TensorImpl*, std::size_t> first_place;
  std::vector<std::size_t> same_as(inputs.size());
  bool written_twice = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    same_as[i] = i;
    if (!input_is_tensor(inputs[i])) continue;
    const auto [entry, is_new] = first_place.try_emplace(inputs[i].toTensor().unsafeGetTensorImpl(), i);
    same_as[i] = entry->second;
    written_twice |= !is_new && meta.inputs[i].is_touched;
  }
  std::vector<std::size_t> kept;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (!written_twice || same_as[i] == i) kept.push_back(i);
  sources_.resize(inputs.size());
  merge_overlapping(inputs, meta, kept);
  if (written_twice)
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (same_as[i] != i) sources_[i] = sources_[same_as[i]];
  identity_ = bases_.empty() && !written_twice;
  if (convention.names.empty()) return;
  for (std::size_t i = 0; i < convention.found; ++i) convention_.names.push_back(convention.names[i]);
  for (const Base& base : bases_) {
    std::string name = "base of";
    for (const std::size_t member : base.members) name += " " + convention.name_of(member);
    convention_.names.push_back(std::move(name));
  }
  for (std::size_t i = convention.found; i < others_.size(); ++i) convention_.names.push_back(convention.name_of(others_[i]));
}

void InputPlan::merge_overlapping(const Values& inputs, const ViewAndMutationMeta& meta, const std::vector<std::size_t>& kept) {
  std::unordered_map<const c10::StorageImpl*, std::vector<std::size_t>> sharing;
  for (const std::size_t i : kept)
    if (input_is_tensor(inputs[i]))
      if (const c10::StorageImpl* memory = memory_of_input(inputs[i].toTensor())) sharing[memory].push_back(i);

  std::vector<char> merged(inputs.size(), 0);
  for (const std::size_t i : kept) {
    if (merged[i] || !input_is_tensor(inputs[i])) continue;
    const std::vector<std::size_t>& members = sharing[memory_of_input(inputs[i].toTensor())];
    const bool written = std::any_of(members.begin(), members.end(), [&](std::size_t member) { return meta.inputs[member].mutates_data; });
    bool overlapping = false;
    for (std::size_t a = 0; written && a < members.size(); ++a)
      for (std::size_t b = a + 1; b < members.size() && !overlapping; ++b)
        overlapping = overlap(inputs[members[a]].toTensor(), inputs[members[b]].toTensor());
    if (!overlapping) continue;
    Base base{members, /*whole_memory=*/true};
    for (const std::size_t member : members) {
      merged[member] = 1;
      if (member < convention_.found)
        throw NotImplemented(fmt::format("graph: input {}, a parameter or buffer, overlaps other inputs in memory, one of which is written; give "
                                         "the function a copy",
                                         member));
      const at::Tensor& tensor = inputs[member].toTensor();
      base.whole_memory &= !tensor.is_view();
      if (meta.inputs[member].mutates_metadata)
        throw NotImplemented(fmt::format("graph: input {} overlaps other inputs in memory and its metadata is changed (transpose_ ...); give "
                                         "the function a copy",
                                         member));
      if (tensor.scalar_type() != inputs[members[0]].toTensor().scalar_type())
        throw NotImplemented(fmt::format("graph: input {} overlaps input {} in memory and is of another dtype; give the function a copy", member,
                                         members[0]));
    }
    const at::Tensor whole = base_tensor(base, inputs);
    for (const std::size_t member : members) {
      const at::Tensor& tensor = inputs[member].toTensor();
      if (base.whole_memory ? tensor.requires_grad() : !(tensor.is_same(whole) || (tensor.is_view() && tensor._base().is_same(whole))))
        throw NotImplemented(fmt::format("graph: input {} overlaps a written input in memory, but they are not views of one tensor; give the "
                                         "function a copy",
                                         member));
      sources_[member] = {convention_.found + bases_.size(), geometry_of(tensor)};
    }
    bases_.push_back(std::move(base));
  }
  for (const std::size_t i : kept)
    if (!merged[i]) {
      sources_[i] = {i < convention_.found ? i : bases_.size() + others_.size(), std::nullopt};
      others_.push_back(i);
    }
}

at::Tensor InputPlan::base_tensor(const Base& base, const Values& inputs) {
  const at::Tensor& first = inputs[base.members[0]].toTensor();
  if (base.whole_memory) {
    const at::NoGradGuard no_grad;
    return at::empty({0}, first.options().requires_grad(false)).set_(first.storage());
  }
  for (const std::size_t member : base.members)
    if (const at::Tensor& tensor = inputs[member].toTensor(); tensor.is_view()) return at::Tensor(tensor._base());
  throw InvariantError("graph: a synthetic base without a view");
}

bool InputPlan::works_like(const InputPlan& other) const {
  return identity_ == other.identity_ && bases_ == other.bases_ && others_ == other.others_ && convention_.found == other.convention_.found &&
         std::equal(sources_.begin(), sources_.end(), other.sources_.begin(), other.sources_.end(), [](const Source& a, const Source& b) {
           return a.inner == b.inner && a.view.has_value() == b.view.has_value();
         });
}

Values InputPlan::inner_inputs(const Values& inputs) const {
  if (identity_) return inputs;
  Values inner;
  inner.reserve(bases_.size() + others_.size());
  for (std::size_t i = 0; i < convention_.found; ++i) inner.push_back(inputs[i]);
  for (const Base& base : bases_) inner.emplace_back(base_tensor(base, inputs));
  for (std::size_t i = convention_.found; i < others_.size(); ++i) inner.push_back(inputs[others_[i]]);
  return inner;
}

Function InputPlan::inner_function(Function function) const {
  if (identity_) return function;
  return [sources = sources_, function = std::move(function)](const Values& inner) {
    Values inputs;
    inputs.reserve(sources.size());
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const Source& source = sources[i];
      // The same tensor given twice is the same tensor inside, too.
      const auto earlier = std::find_if(sources.begin(), sources.begin() + static_cast<std::ptrdiff_t>(i), [&](const Source& other) {
        return other.inner == source.inner && other.view == source.view;
      });
      if (source.view && earlier != sources.begin() + static_cast<std::ptrdiff_t>(i))
        inputs.push_back(inputs[static_cast<std::size_t>(earlier - sources.begin())]);
      else if (source.view)
        inputs.emplace_back(inner[source.inner].toTensor().as_strided(source.view->sizes, source.view->strides, source.view->storage_offset));
      else
        inputs.push_back(inner[source.inner]);
    }
    return function(inputs);
  };
}

}  // namespace penstock::graph
