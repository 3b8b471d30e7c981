#include "penstock/graph/wrap/synthetic_bases.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/codec/graph_decoder.h"
#include "penstock/graph/codec/graph_encoder.h"
#include "penstock/graph/ir/byte_range.h"

namespace penstock::graph {
namespace {

const c10::StorageImpl* memory_of_input(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
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

}  // namespace

at::Tensor SyntheticBases::Base::tensor(const Values& inputs) const {
  const at::Tensor& first = inputs[members[0]].toTensor();
  if (whole_memory) {
    const at::NoGradGuard no_grad;
    return at::empty({0}, first.options().requires_grad(false)).set_(first.storage());
  }
  for (const std::size_t member : members)
    if (const at::Tensor& tensor = inputs[member].toTensor(); tensor.is_view())
      return at::Tensor(tensor._base());
  throw InvariantError("graph: synthetic base without a view");
}

SyntheticBases::SyntheticBases(std::vector<Base> bases, const Values& inputs, std::size_t found)
    : found_(found), bases_(std::move(bases)), sources_(inputs.size()) {
  std::vector<char> merged(inputs.size(), 0);
  for (std::size_t i = 0; i < bases_.size(); ++i)
    for (const std::size_t member : bases_[i].members) {
      merged[member] = 1;
      sources_[member] = {found_ + i, geometry_of(inputs[member].toTensor())};
    }
  order_others(inputs, merged);
}

void SyntheticBases::order_others(const Values& inputs, const std::vector<char>& merged) {
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (!merged[i]) others_.push_back(i);
  std::vector<const c10::StorageImpl*> memories{nullptr};  // not a tensor
  const auto order = [&](std::size_t i) {
    const c10::StorageImpl* memory =
        is_defined_tensor(inputs[i]) ? memory_of_input(inputs[i].toTensor()) : nullptr;
    const std::size_t place = place_of(memories, memory);
    if (place == memories.size()) memories.push_back(memory);
    return place;
  };
  for (std::size_t i = 0; i < inputs.size(); ++i) order(i);
  std::stable_sort(others_.begin(), others_.end(), [&](std::size_t a, std::size_t b) {
    const bool found_a = a < found_, found_b = b < found_;
    if (found_a || found_b) return found_a && (!found_b || a < b);
    return order(a) < order(b);
  });
  for (std::size_t i = 0; i < others_.size(); ++i)
    sources_[others_[i]] = {others_[i] < found_ ? others_[i] : bases_.size() + i, std::nullopt};
}

bool SyntheticBases::same_but_for_sizes(const AppliedWrapper& other) const {
  const auto* theirs = dynamic_cast<const SyntheticBases*>(&other);
  return theirs && found_ == theirs->found_ && bases_ == theirs->bases_ && others_ == theirs->others_;
}

template <class Archive, Is<SyntheticBases::Base> T>
void fields(Archive& archive, T& base) {
  auto& [members, whole_memory] = base;
  archive(members, whole_memory);
}

template <class Archive, Is<SyntheticBases::Source> T>
void fields(Archive& archive, T& source) {
  auto& [inner, view] = source;
  archive(inner, view);
}

void SyntheticBases::save(GraphEncoder& encoder) const { encoder(found_, bases_, others_, sources_); }

std::shared_ptr<const AppliedWrapper> SyntheticBasesWrapper::load(GraphDecoder& decoder,
                                                                  std::size_t inputs) const {
  std::size_t found = 0;
  std::vector<SyntheticBases::Base> bases;
  std::vector<std::size_t> others;
  std::vector<SyntheticBases::Source> sources;
  decoder(found, bases, others, sources);
  std::vector<char> seen(inputs, 0);
  const auto see = [&](std::size_t input) {
    if (input >= inputs || seen[input])
      decoder.fail("a member of a base that is no input, or one of another");
    seen[input] = 1;
  };
  for (const SyntheticBases::Base& base : bases) {
    if (base.members.empty()) decoder.fail("a base without members");
    for (const std::size_t member : base.members) see(member);
  }
  for (const std::size_t other : others) see(other);
  if (sources.size() != inputs || found > others.size() ||
      std::find(seen.begin(), seen.end(), char{0}) != seen.end())
    decoder.fail("bases of another number of inputs");
  for (const SyntheticBases::Source& source : sources)
    if (source.inner >= bases.size() + others.size())
      decoder.fail("an input from a place that does not exist");
  return std::shared_ptr<const SyntheticBases>(
      new SyntheticBases(found, std::move(bases), std::move(others), std::move(sources)));
}

std::string SyntheticBases::decision() const {
  std::string text;
  for (const Base& base : bases_)
    text += fmt::format("{}inputs {} are views of {}", text.empty() ? "" : "; ",
                        fmt::join(base.members, ", "), base.whole_memory ? "their memory" : "one tensor");
  return text;
}

Values SyntheticBases::inner_inputs(const Values& inputs) const {
  Values inner;
  inner.reserve(bases_.size() + others_.size());
  for (std::size_t i = 0; i < found_; ++i) inner.push_back(inputs[i]);
  for (const Base& base : bases_) inner.emplace_back(base.tensor(inputs));
  for (std::size_t i = found_; i < others_.size(); ++i) inner.push_back(inputs[others_[i]]);
  return inner;
}

Function SyntheticBases::inner_function(Function function) const {
  return [sources = sources_, function = std::move(function)](const Values& inner) {
    Values inputs;
    inputs.reserve(sources.size());
    for (const Source& source : sources) {
      if (source.view)
        inputs.emplace_back(inner[source.inner].toTensor().as_strided(
            source.view->sizes, source.view->strides, source.view->storage_offset));
      else
        inputs.push_back(inner[source.inner]);
    }
    return function(inputs);
  };
}

Convention SyntheticBases::inner_convention(const Convention& outer) const {
  Convention inner = outer;
  inner.names.clear();
  if (outer.names.empty()) return inner;
  for (std::size_t i = 0; i < found_; ++i) inner.names.push_back(outer.names[i]);
  for (const Base& base : bases_) {
    std::string name = "base of";
    for (const std::size_t member : base.members) name += " " + outer.name_of(member);
    inner.names.push_back(std::move(name));
  }
  for (std::size_t i = found_; i < others_.size(); ++i) inner.names.push_back(outer.name_of(others_[i]));
  return inner;
}

std::vector<std::size_t> SyntheticBases::came_from() const {
  std::vector<std::size_t> from;
  for (std::size_t i = 0; i < found_; ++i) from.push_back(i);
  for (const Base& base : bases_) from.push_back(base.members[0]);
  for (std::size_t i = found_; i < others_.size(); ++i) from.push_back(others_[i]);
  return from;
}

ViewAndMutationMeta SyntheticBases::derived_meta(ViewAndMutationMeta meta, const Values& inputs) const {
  const Values inner = inner_inputs(inputs);
  std::vector<InputInfo> infos(inner.size());
  for (std::size_t i = 0; i < inner.size(); ++i) {
    std::vector<InputInfo> members;
    for (std::size_t j = 0; j < sources_.size(); ++j)
      if (sources_[j].inner == i) members.push_back(meta.inputs[j]);
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
    if (!info.base_index || *info.base_index >= sources_.size()) continue;
    const Source& source = sources_[*info.base_index];
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

std::optional<std::string> SyntheticBasesWrapper::why_not_merged(const SyntheticBases::Base& base,
                                                                 const FunctionForm& form) {
  const Values& inputs = form.inputs();
  const at::Tensor& first = inputs[base.members[0]].toTensor();
  for (const std::size_t member : base.members) {
    if (member < form.convention().found)
      return fmt::format(
          "graph: {}, a parameter or buffer, overlaps other inputs in memory, one of which is written; pass "
          "a copy",
          form.name_of(member));
    if (form.meta().inputs[member].mutates_metadata)
      return fmt::format(
          "graph: {} overlaps other inputs in memory and its metadata is changed (transpose_ ...); pass a "
          "copy",
          form.name_of(member));
    if (inputs[member].toTensor().scalar_type() != first.scalar_type())
      return fmt::format("graph: {} overlaps {} in memory and has a different dtype; pass a copy",
                         form.name_of(member), form.name_of(base.members[0]));
  }
  const at::Tensor whole = base.tensor(inputs);
  for (const std::size_t member : base.members) {
    const at::Tensor& tensor = inputs[member].toTensor();
    if (base.whole_memory ? tensor.requires_grad()
                          : !(tensor.is_same(whole) || (tensor.is_view() && tensor._base().is_same(whole))))
      return fmt::format(
          "graph: {} overlaps a written input in memory, but they are not views of the same tensor; pass a "
          "copy",
          form.name_of(member));
    if (tensor.scalar_type() != whole.scalar_type() || tensor.is_conj() || tensor.is_neg())
      return fmt::format(
          "graph: {} overlaps a written input in memory, and is a conjugate, or has a different dtype than "
          "its base; pass a copy",
          form.name_of(member));
  }
  return std::nullopt;
}

std::shared_ptr<const AppliedWrapper> SyntheticBasesWrapper::apply(FunctionForm& form) const {
  const Values& inputs = form.inputs();
  std::unordered_map<const c10::StorageImpl*, std::vector<std::size_t>> sharing;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (is_defined_tensor(inputs[i]))
      if (const c10::StorageImpl* memory = memory_of_input(inputs[i].toTensor()))
        sharing[memory].push_back(i);
  std::vector<char> seen(inputs.size(), 0);
  std::vector<SyntheticBases::Base> bases;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (seen[i] || !is_defined_tensor(inputs[i])) continue;
    const std::vector<std::size_t>& members = sharing[memory_of_input(inputs[i].toTensor())];
    for (const std::size_t member : members) seen[member] = 1;
    const bool written = std::any_of(members.begin(), members.end(), [&](std::size_t member) {
      return form.meta().inputs[member].mutates_data;
    });
    const auto any_two = [&](const auto& test) {
      for (std::size_t a = 0; a < members.size(); ++a)
        for (std::size_t b = a + 1; b < members.size(); ++b)
          if (test(inputs[members[a]].toTensor(), inputs[members[b]].toTensor())) return true;
      return false;
    };
    if (!written || !any_two(treated_as_overlapping)) continue;
    SyntheticBases::Base base{members, /*whole_memory=*/true};
    for (const std::size_t member : members) base.whole_memory &= !inputs[member].toTensor().is_view();
    if (const auto why = why_not_merged(base, form)) {
      if (any_two(overlap)) throw NotImplemented(*why);
      continue;
    }
    bases.push_back(std::move(base));
  }
  if (bases.empty()) return nullptr;
  auto applied = std::make_shared<const SyntheticBases>(std::move(bases), inputs, form.convention().found);
  form.replace(applied->inner_function(form.function()), applied->inner_inputs(inputs),
               applied->inner_convention(form.convention()), applied->came_from());
  return applied;
}

}  // namespace penstock::graph
