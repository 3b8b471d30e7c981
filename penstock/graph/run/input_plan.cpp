#include "penstock/graph/run/input_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>

#include "penstock/errors.h"

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
  if (memory_of_input(a) == nullptr || memory_of_input(a) != memory_of_input(b) || a.numel() == 0 ||
      b.numel() == 0)
    return false;
  const ByteRange in_a = byte_range(a), in_b = byte_range(b);
  const std::int64_t first = std::max(in_a.first, in_b.first), end = std::min(in_a.end, in_b.end);
  if (first >= end) return false;
  constexpr std::int64_t kExactLimit = 1 << 20;
  if (a.numel() > kExactLimit || b.numel() > kExactLimit || in_a.end - in_a.first > 64 * kExactLimit)
    return true;
  std::vector<bool> taken(static_cast<std::size_t>(in_a.end - in_a.first), false);
  visit_elements(a, 0, a.storage_offset(), [&](std::int64_t byte) {
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(a.itemsize()); ++i)
      taken[static_cast<std::size_t>(byte + i - in_a.first)] = true;
    return false;
  });
  return visit_elements(b, 0, b.storage_offset(), [&](std::int64_t byte) {
    for (std::int64_t i = byte; i < byte + static_cast<std::int64_t>(b.itemsize()); ++i)
      if (i >= in_a.first && i < in_a.end && taken[static_cast<std::size_t>(i - in_a.first)]) return true;
    return false;
  });
}

namespace {

// The test of PyTorch 2.14, which recognizes that adjacent rows and columns of one matrix are disjoint and
// treats other interleaved tensors as overlapping. Never false for tensors with a common element.
bool treated_as_overlapping(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  if (a.scalar_type() != b.scalar_type()) return overlap(a, b);
  const at::Tensor &first = a.storage_offset() <= b.storage_offset() ? a : b,
                   &second = a.storage_offset() <= b.storage_offset() ? b : a;
  const std::int64_t distance = second.storage_offset() - first.storage_offset();
  const auto item = static_cast<std::int64_t>(first.itemsize());
  if (byte_range(first).end / item <= second.storage_offset()) return false;
  if (first.is_contiguous() && second.is_contiguous()) return true;
  const bool rows = first.dim() == 2 && second.dim() == 2 && first.stride(1) == 1 && second.stride(1) == 1 &&
                    first.stride(0) == second.stride(0);
  if (!rows || distance < first.size(1)) return true;
  const std::int64_t within = distance % first.stride(0);
  return within < first.size(1) || within + second.size(1) > first.stride(0);
}

at::Tensor lazily(at::Tensor tensor, bool conjugate, bool negate) {
  if (conjugate) tensor = tensor.conj();
  return negate ? tensor._neg_view() : tensor;
}

template <class Items, class Value>
std::size_t place_in(const Items& items, const Value& value) {
  return static_cast<std::size_t>(std::find(items.begin(), items.end(), value) - items.begin());
}

}  // namespace

InputPlan::InputPlan(const Values& inputs, const ViewAndMutationMeta& meta, const Convention& convention)
    : convention_{convention.found, {}} {
  // The same tensor again: only matters if it is written.
  std::unordered_map<const c10::TensorImpl*, std::size_t> first_place;
  same_as_.resize(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    same_as_[i] = i;
    if (!input_is_tensor(inputs[i])) continue;
    const auto [entry, is_new] = first_place.try_emplace(inputs[i].toTensor().unsafeGetTensorImpl(), i);
    same_as_[i] = entry->second;
    written_twice_ |= !is_new && meta.inputs[i].is_touched;
  }
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (!written_twice_ || same_as_[i] == i) kept_.push_back(i);
  sources_.resize(inputs.size());
  merge_overlapping(inputs, meta);
  if (written_twice_)
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (same_as_[i] != i) sources_[i] = sources_[same_as_[i]];
  bool any_lazy = false;
  for (std::size_t i = convention.found; i < inputs.size(); ++i) {
    // A shape change affects the tensor itself, not other tensors of its memory.
    if (!input_is_tensor(inputs[i]) || sources_[i].view || meta.inputs[i].mutates_metadata) continue;
    sources_[i].conjugated = inputs[i].toTensor().is_conj();
    sources_[i].negated = inputs[i].toTensor().is_neg();
    any_lazy |= sources_[i].is_made();
  }
  identity_ = bases_.empty() && !written_twice_ && !any_lazy;
  if (convention.names.empty()) return;
  for (std::size_t i = 0; i < convention.found; ++i) convention_.names.push_back(convention.names[i]);
  for (const Base& base : bases_) {
    std::string name = "base of";
    for (const std::size_t member : base.members) name += " " + convention.name_of(member);
    convention_.names.push_back(std::move(name));
  }
  for (std::size_t i = convention.found; i < others_.size(); ++i)
    convention_.names.push_back(convention.name_of(others_[i]));
}

void InputPlan::merge_overlapping(const Values& inputs, const ViewAndMutationMeta& meta) {
  std::unordered_map<const c10::StorageImpl*, std::vector<std::size_t>> sharing;
  for (const std::size_t i : kept_)
    if (input_is_tensor(inputs[i]))
      if (const c10::StorageImpl* memory = memory_of_input(inputs[i].toTensor()))
        sharing[memory].push_back(i);

  std::vector<char> seen(inputs.size(), 0), merged(inputs.size(), 0);
  for (const std::size_t i : kept_) {
    if (seen[i] || !input_is_tensor(inputs[i])) continue;
    const std::vector<std::size_t>& members = sharing[memory_of_input(inputs[i].toTensor())];
    for (const std::size_t member : members) seen[member] = 1;
    const bool written = std::any_of(members.begin(), members.end(),
                                     [&](std::size_t member) { return meta.inputs[member].mutates_data; });
    const auto any_two = [&](const auto& test) {
      for (std::size_t a = 0; a < members.size(); ++a)
        for (std::size_t b = a + 1; b < members.size(); ++b)
          if (test(inputs[members[a]].toTensor(), inputs[members[b]].toTensor())) return true;
      return false;
    };
    if (!written || !any_two(treated_as_overlapping)) continue;
    Base base{members, /*whole_memory=*/true};
    for (const std::size_t member : members) base.whole_memory &= !inputs[member].toTensor().is_view();
    if (const auto why = why_not_merged(base, inputs, meta)) {
      if (any_two(overlap)) throw NotImplemented(*why);
      continue;
    }
    for (const std::size_t member : members) {
      merged[member] = 1;
      sources_[member] = {convention_.found + bases_.size(), geometry_of(inputs[member].toTensor())};
    }
    bases_.push_back(std::move(base));
  }
  order_others(inputs, merged);
}

std::optional<std::string> InputPlan::why_not_merged(const Base& base, const Values& inputs,
                                                     const ViewAndMutationMeta& meta) const {
  const at::Tensor& first = inputs[base.members[0]].toTensor();
  for (const std::size_t member : base.members) {
    if (member < convention_.found)
      return fmt::format(
          "graph: input {}, a parameter or buffer, overlaps other inputs in memory, one of which is written; "
          "pass a copy",
          member);
    if (meta.inputs[member].mutates_metadata)
      return fmt::format(
          "graph: input {} overlaps other inputs in memory and its metadata is changed (transpose_ ...); "
          "pass a copy",
          member);
    if (inputs[member].toTensor().scalar_type() != first.scalar_type())
      return fmt::format("graph: input {} overlaps input {} in memory and has a different dtype; pass a copy",
                         member, base.members[0]);
  }
  const at::Tensor whole = base_tensor(base, inputs);
  for (const std::size_t member : base.members) {
    const at::Tensor& tensor = inputs[member].toTensor();
    if (base.whole_memory ? tensor.requires_grad()
                          : !(tensor.is_same(whole) || (tensor.is_view() && tensor._base().is_same(whole))))
      return fmt::format(
          "graph: input {} overlaps a written input in memory, but they are not views of the same tensor; "
          "pass a copy",
          member);
    if (tensor.scalar_type() != whole.scalar_type() || tensor.is_conj() || tensor.is_neg())
      return fmt::format(
          "graph: input {} overlaps a written input in memory, and is a conjugate, or has a different dtype "
          "than its base; "
          "pass a copy",
          member);
  }
  return std::nullopt;
}

void InputPlan::order_others(const Values& inputs, const std::vector<char>& merged) {
  for (const std::size_t i : kept_)
    if (!merged[i]) others_.push_back(i);
  if (!bases_.empty()) {
    std::vector<const c10::StorageImpl*> memories{nullptr};  // not a tensor
    const auto order = [&](std::size_t i) {
      const c10::StorageImpl* memory =
          input_is_tensor(inputs[i]) ? memory_of_input(inputs[i].toTensor()) : nullptr;
      const std::size_t place = place_in(memories, memory);
      if (place == memories.size()) memories.push_back(memory);
      return place;
    };
    for (const std::size_t i : kept_) order(i);
    std::stable_sort(others_.begin(), others_.end(), [&](std::size_t a, std::size_t b) {
      const bool found_a = a < convention_.found, found_b = b < convention_.found;
      if (found_a || found_b) return found_a && (!found_b || a < b);
      return order(a) < order(b);
    });
  }
  for (std::size_t i = 0; i < others_.size(); ++i)
    sources_[others_[i]] = {others_[i] < convention_.found ? others_[i] : bases_.size() + i, std::nullopt};
}

ViewAndMutationMeta InputPlan::derived_meta(const ViewAndMutationMeta& user, const Values& inputs) const {
  ViewAndMutationMeta meta = written_twice_ ? without_duplicates(user) : user;
  return bases_.empty() ? meta : with_bases(std::move(meta), inputs);
}

ViewAndMutationMeta InputPlan::without_duplicates(ViewAndMutationMeta meta) const {
  const std::vector<std::size_t> mutated = meta.mutated_at_run_time();
  const auto written = static_cast<std::size_t>(std::count_if(
      meta.inputs.begin(), meta.inputs.end(), [](const InputInfo& info) { return info.mutates_data; }));
  std::vector<TangentInfo> tangents;
  for (std::size_t i = 0; i < meta.tangents.size(); ++i)
    if (i >= written || i >= mutated.size() || same_as_[mutated[i]] == mutated[i])
      tangents.push_back(meta.tangents[i]);
  const std::vector<InputInfo> all = std::move(meta.inputs);
  meta.inputs.clear();
  for (const std::size_t i : kept_) meta.inputs.push_back(all[i]);
  for (OutputInfo& info : meta.outputs)
    if (info.base_index && *info.base_index < all.size())
      info.base_index = place_in(kept_, same_as_[*info.base_index]);
  meta.tangents = std::move(tangents);
  meta.grad_mode_after.reset();
  return meta;
}

ViewAndMutationMeta InputPlan::with_bases(ViewAndMutationMeta meta, const Values& inputs) const {
  const Values inner = inner_inputs(inputs);
  std::vector<InputInfo> infos(inner.size());
  for (std::size_t i = 0; i < inner.size(); ++i) {
    std::vector<InputInfo> members;
    for (std::size_t j = 0; j < kept_.size(); ++j)
      if (sources_[kept_[j]].inner == i) members.push_back(meta.inputs[j]);
    infos[i] = members.at(0);
    if (members.size() == 1) continue;
    InputInfo& base = infos[i];
    base.mutates_data = true;
    base.mutates_metadata = base.mutates_storage_metadata = false;
    for (const InputInfo& member : members) {
      base.is_leaf |= member.is_leaf;
      base.requires_grad |= member.requires_grad;
      base.is_touched |= member.is_touched;
      base.mutations_hidden_from_autograd &= member.mutations_hidden_from_autograd;
      base.mutations_under_no_grad &= member.mutations_under_no_grad;
      base.resizes_storage &= member.resizes_storage;
    }
  }
  for (OutputInfo& info : meta.outputs) {
    if (!info.base_index || *info.base_index >= kept_.size()) continue;
    const Source& source = sources_[kept_[*info.base_index]];
    if (info.kind == OutputKind::IsInput && source.view) info.kind = OutputKind::AliasOfInput;
    info.base_index = source.inner;
  }
  std::vector<TangentInfo> tangents;
  for (std::size_t i = 0; i < inner.size(); ++i)
    if (infos[i].mutates_data && infos[i].requires_grad)
      tangents.push_back({TangentInfo::Kind::MutatedInput, i, geometry_of(inner[i].toTensor())});
  for (std::size_t i = tangents.size(); i < meta.tangents.size(); ++i) tangents.push_back(meta.tangents[i]);
  meta.inputs = std::move(infos);
  meta.tangents = std::move(tangents);
  meta.grad_mode_after.reset();
  return meta;
}

at::Tensor InputPlan::base_tensor(const Base& base, const Values& inputs) {
  const at::Tensor& first = inputs[base.members[0]].toTensor();
  if (base.whole_memory) {
    const at::NoGradGuard no_grad;
    return at::empty({0}, first.options().requires_grad(false)).set_(first.storage());
  }
  for (const std::size_t member : base.members)
    if (const at::Tensor& tensor = inputs[member].toTensor(); tensor.is_view())
      return at::Tensor(tensor._base());
  throw InvariantError("graph: synthetic base without a view");
}

bool InputPlan::same_routing(const InputPlan& other) const {
  return identity_ == other.identity_ && bases_ == other.bases_ && others_ == other.others_ &&
         convention_.found == other.convention_.found &&
         std::equal(sources_.begin(), sources_.end(), other.sources_.begin(), other.sources_.end(),
                    [](const Source& a, const Source& b) {
                      return a.inner == b.inner && a.view.has_value() == b.view.has_value() &&
                             a.conjugated == b.conjugated && a.negated == b.negated;
                    });
}

Values InputPlan::inner_inputs(const Values& inputs) const {
  if (identity_) return inputs;
  Values inner;
  inner.reserve(bases_.size() + others_.size());
  for (std::size_t i = 0; i < convention_.found; ++i) inner.push_back(inputs[i]);
  for (const Base& base : bases_) inner.emplace_back(base_tensor(base, inputs));
  for (std::size_t i = convention_.found; i < others_.size(); ++i) {
    const Source& source = sources_[others_[i]];
    if (source.is_made())
      inner.emplace_back(lazily(inputs[others_[i]].toTensor(), source.conjugated, source.negated));
    else
      inner.push_back(inputs[others_[i]]);
  }
  return inner;
}

Function InputPlan::inner_function(Function function) const {
  if (identity_) return function;
  return [sources = sources_, function = std::move(function)](const Values& inner) {
    Values inputs;
    inputs.reserve(sources.size());
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const Source& source = sources[i];
      // A tensor that is passed twice is a single tensor inside as well.
      const auto earlier = std::find_if(sources.begin(), sources.begin() + static_cast<std::ptrdiff_t>(i),
                                        [&](const Source& other) { return other == source; });
      if (source.is_made() && earlier != sources.begin() + static_cast<std::ptrdiff_t>(i))
        inputs.push_back(inputs[static_cast<std::size_t>(earlier - sources.begin())]);
      else if (source.view)
        inputs.emplace_back(inner[source.inner].toTensor().as_strided(
            source.view->sizes, source.view->strides, source.view->storage_offset));
      else if (source.is_made())
        inputs.emplace_back(lazily(inner[source.inner].toTensor(), source.conjugated, source.negated));
      else
        inputs.push_back(inner[source.inner]);
    }
    return function(inputs);
  };
}

}  // namespace penstock::graph
