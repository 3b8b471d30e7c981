// Chooses the sizes and inputs with which a function with dynamic dims is captured.
#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/run/generalize.h"
#include "penstock/graph/trace/fake_inputs.h"

namespace penstock::graph {
namespace {

// The number of sizes per symbol, by the number of symbols, and how many rounds of combinations are made,
// each with different combinations. More than needed, since the function may throw at some.
constexpr std::size_t kSizes[] = {1, 11, 7, 11, 11};
constexpr std::size_t kPasses[] = {1, 1, 3, 2, 2};
constexpr std::size_t kSteps[] = {1, 2, 3, 5};

// Sizes of one symbol near the actual one, smaller ones first: a function may have tables that end at the
// largest size in use.
std::vector<std::int64_t> sizes_near(const DynamicSymbol& symbol, std::int64_t actual, std::size_t count,
                                     const std::set<std::int64_t>& taken) {
  constexpr std::int64_t kReach = 4096;
  std::vector<std::int64_t> sizes;
  const auto add = [&](std::int64_t size, bool shared) {
    if (sizes.size() < count && size > 1 && size != actual && symbol.allows(size) &&
        taken.contains(size) == shared)
      sizes.push_back(size);
  };
  // A size that also occurs elsewhere is used only if there are not enough others.
  for (const bool shared : {false, true}) {
    for (std::int64_t step = 1; step <= kReach && sizes.size() < count; ++step)
      add(actual - actual % symbol.multiple_of - (step - 1) * symbol.multiple_of, shared);
    for (std::int64_t step = 1; step <= kReach && sizes.size() < count; ++step)
      add(actual - actual % symbol.multiple_of + step * symbol.multiple_of, shared);
  }
  return sizes;
}

// The geometry of a tensor at other sizes. A stride that equals that of a dense tensor, given the inner dims,
// remains dense.
Geometry geometry_at(const at::Tensor& tensor,
                     const std::vector<std::pair<std::size_t, std::int64_t>>& sizes) {
  Geometry geometry = geometry_of(tensor);
  for (const auto& [dim, size] : sizes) geometry.sizes[dim] = size;
  std::vector<std::size_t> inner_first(geometry.sizes.size());
  for (std::size_t i = 0; i < inner_first.size(); ++i) inner_first[i] = inner_first.size() - 1 - i;
  std::stable_sort(inner_first.begin(), inner_first.end(),
                   [&](std::size_t a, std::size_t b) { return tensor.strides()[a] < tensor.strides()[b]; });
  std::int64_t dense_before = 1, dense = 1;
  for (const std::size_t dim : inner_first) {
    const std::int64_t stride = tensor.strides()[dim];
    if (stride == 0) continue;
    if (stride == dense_before) geometry.strides[dim] = dense;
    dense_before = stride * std::max<std::int64_t>(tensor.sizes()[dim], 1);
    dense = geometry.strides[dim] * std::max<std::int64_t>(geometry.sizes[dim], 1);
  }
  return geometry;
}

at::Tensor fake_with(const Geometry& geometry, const at::Tensor& like) {
  at::Tensor fake;
  {
    const at::NoGradGuard no_grad;
    std::int64_t elements = geometry.storage_offset + 1;
    for (std::size_t i = 0; i < geometry.sizes.size(); ++i)
      elements += std::max<std::int64_t>(geometry.sizes[i] - 1, 0) * geometry.strides[i];
    const at::Tensor meta = at::empty({elements}, at::dtype(geometry.dtype).device(at::kMeta))
                                .as_strided(geometry.sizes, geometry.strides, geometry.storage_offset);
    fake = to_fake(meta, geometry.device);
  }
  if (!like.requires_grad()) return fake;
  fake.requires_grad_(true);
  return like.is_leaf() ? fake : non_leaf_of(fake, fake);
}

}  // namespace

std::vector<SymbolValues> sample_sizes(const Values& inputs, const std::vector<DynamicSymbol>& symbols,
                                       const SymbolValues& actual) {
  PENSTOCK_INVARIANT(symbols.size() < std::size(kSizes) && !symbols.empty(), "one to four symbols");
  std::set<std::int64_t> taken;
  for (const c10::IValue& input : inputs)
    if (input.isTensor() && input.toTensor().defined())
      for (const std::int64_t size : input.toTensor().sizes()) taken.insert(size);
  const std::size_t count = kSizes[symbols.size()];
  std::vector<std::vector<std::int64_t>> sizes;
  for (std::size_t i = 0; i < symbols.size(); ++i) {
    sizes.push_back(sizes_near(symbols[i], actual[i], count, taken));
    if (sizes.back().size() < 2) return {};
  }
  std::vector<SymbolValues> different;
  for (std::size_t pass = 0; pass < kPasses[symbols.size()]; ++pass)
    for (std::size_t point = 0; point < count; ++point) {
      // Each symbol cycles through its sizes in a different order (the count is prime): no sum or difference
      // of two of them is constant.
      SymbolValues sample;
      for (std::size_t i = 0; i < symbols.size(); ++i)
        sample.push_back(sizes[i][(point * kSteps[i] + pass * i) % count % sizes[i].size()]);
      std::set<std::int64_t> values(sample.begin(), sample.end());
      const bool is_new = std::find(different.begin(), different.end(), sample) == different.end();
      if (is_new && values.size() == sample.size()) different.push_back(std::move(sample));
    }
  return different;
}

Values inputs_at(const Values& inputs, const std::vector<DynamicSymbol>& symbols, const SymbolValues& sizes) {
  std::vector<std::vector<std::pair<std::size_t, std::int64_t>>> changed(inputs.size());
  for (std::size_t i = 0; i < symbols.size(); ++i)
    for (const DynamicSymbol::Place& place : symbols[i].places)
      changed[place.input].emplace_back(place.dim, sizes[i]);
  // A tensor that is passed twice is one tensor again, with the dims of both.
  std::unordered_map<const c10::TensorImpl*, std::vector<std::pair<std::size_t, std::int64_t>>> of_tensor;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (!changed[i].empty()) {
      auto& dims = of_tensor[inputs[i].toTensor().unsafeGetTensorImpl()];
      dims.insert(dims.end(), changed[i].begin(), changed[i].end());
    }
  std::unordered_map<const c10::TensorImpl*, at::Tensor> made;
  Values result;
  for (const c10::IValue& input : inputs) {
    const auto dims = input.isTensor() && input.toTensor().defined()
                          ? of_tensor.find(input.toTensor().unsafeGetTensorImpl())
                          : of_tensor.end();
    if (dims == of_tensor.end()) {
      result.push_back(input);
      continue;
    }
    at::Tensor& fake = made[dims->first];
    if (!fake.defined()) fake = fake_with(geometry_at(input.toTensor(), dims->second), input.toTensor());
    result.emplace_back(fake);
  }
  return result;
}

}  // namespace penstock::graph
