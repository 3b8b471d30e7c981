// A tensor that is passed several times and written becomes one input.
//
// Otherwise each copy would be written separately, and each would have a tangent. Tensors that are passed
// several times but not written are left alone.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph/wrap/inputs_wrapper.h"

namespace penstock::graph {

class DuplicateInputs final : public InputsWrapper {
 public:
  // `first`: for each input, the first position of the same tensor.
  explicit DuplicateInputs(std::vector<std::size_t> first);

  std::string_view name() const override { return "duplicate inputs"; }
  std::string decision() const override;
  bool same_but_for_sizes(const AppliedWrapper& other) const override;
  void save(GraphEncoder& encoder) const override;
  Values inner_inputs(const Values& inputs) const override;
  ViewAndMutationMeta derived_meta(ViewAndMutationMeta outer, const Values& inputs) const override;

  const std::vector<std::size_t>& kept() const { return kept_; }
  Function inner_function(Function function) const override;

 private:
  std::vector<std::size_t> first_;
  std::vector<std::size_t> kept_;   // positions of the inner inputs among the outer ones
  std::vector<std::size_t> inner_;  // for each outer input, the inner one
};

class DuplicateInputsWrapper final : public CallWrapper {
 public:
  std::string_view name() const override { return "duplicate inputs"; }
  std::shared_ptr<const AppliedWrapper> apply(FunctionForm& form) const override;
  std::shared_ptr<const AppliedWrapper> load(GraphDecoder& decoder, std::size_t inputs) const override;
};

}  // namespace penstock::graph
