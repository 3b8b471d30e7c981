#include "penstock/graph/wrap/lazy_inputs.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "penstock/graph/codec/graph_decoder.h"
#include "penstock/graph/codec/graph_encoder.h"

namespace penstock::graph {
namespace {

// Applied twice, it returns the tensor itself.
at::Tensor with_lazy_bits(at::Tensor tensor, const LazyInputs::Bits& bits) {
  if (bits.conjugated) tensor = tensor.conj();
  return bits.negated ? tensor._neg_view() : tensor;
}

}  // namespace

bool LazyInputs::same_but_for_sizes(const AppliedWrapper& other) const {
  const auto* theirs = dynamic_cast<const LazyInputs*>(&other);
  return theirs && bits_ == theirs->bits_;
}

template <class Archive, Is<LazyInputs::Bits> T>
void fields(Archive& archive, T& bits) {
  auto& [conjugated, negated] = bits;
  archive(conjugated, negated);
}

void LazyInputs::save(GraphEncoder& encoder) const { encoder(bits_); }

std::shared_ptr<const AppliedWrapper> LazyInputsWrapper::load(GraphDecoder& decoder,
                                                              std::size_t inputs) const {
  std::vector<LazyInputs::Bits> bits;
  decoder(bits);
  if (bits.size() != inputs) decoder.fail("lazy bits of another number of inputs");
  return std::make_shared<const LazyInputs>(std::move(bits));
}

std::string LazyInputs::decision() const {
  std::string text;
  for (std::size_t i = 0; i < bits_.size(); ++i)
    if (bits_[i].any())
      text += fmt::format("{}input {} is {}{}", text.empty() ? "" : ", ", i,
                          bits_[i].conjugated ? "a conjugate" : "",
                          bits_[i].negated ? (bits_[i].conjugated ? ", negated" : "negated") : "");
  return text;
}

Values LazyInputs::inner_inputs(const Values& inputs) const {
  Values inner = inputs;
  for (std::size_t i = 0; i < inner.size(); ++i)
    if (bits_[i].any()) inner[i] = with_lazy_bits(inner[i].toTensor(), bits_[i]);
  return inner;
}

Function LazyInputs::inner_function(Function function) const {
  return [bits = bits_, function = std::move(function)](const Values& inner) {
    Values inputs = inner;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (bits[i].any()) inputs[i] = with_lazy_bits(inner[i].toTensor(), bits[i]);
    return function(inputs);
  };
}

std::shared_ptr<const AppliedWrapper> LazyInputsWrapper::apply(FunctionForm& form) const {
  std::vector<LazyInputs::Bits> bits(form.inputs().size());
  bool any = false;
  for (std::size_t i = form.convention().found; i < bits.size(); ++i) {
    // A shape change affects the tensor itself, not other tensors of its memory.
    if (!is_defined_tensor(form.inputs()[i]) || form.meta().inputs[i].mutates_metadata) continue;
    const at::Tensor& tensor = form.inputs()[i].toTensor();
    bits[i] = {tensor.is_conj(), tensor.is_neg()};
    any |= bits[i].any();
  }
  if (!any) return nullptr;
  auto applied = std::make_shared<const LazyInputs>(std::move(bits));
  std::vector<std::size_t> same(form.inputs().size());
  std::iota(same.begin(), same.end(), std::size_t{0});
  form.replace(applied->inner_function(form.function()), applied->inner_inputs(form.inputs()),
               form.convention(), same);
  return applied;
}

}  // namespace penstock::graph
