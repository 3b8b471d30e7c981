// A lazy conjugate or negative among the inputs is replaced by its operand and made again inside: autograd
// expects the memory of a base to have neither bit set.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph/wrap/inputs_wrapper.h"

namespace penstock::graph {

class LazyInputs final : public InputsWrapper {
 public:
  struct Bits {
    bool conjugated = false, negated = false;
    bool any() const { return conjugated || negated; }
    bool operator==(const Bits&) const = default;
  };
  explicit LazyInputs(std::vector<Bits> bits) : bits_(std::move(bits)) {}  // one for each input

  std::string_view name() const override { return "lazy inputs"; }
  std::string decision() const override;
  bool same_but_for_sizes(const AppliedWrapper& other) const override;
  void save(GraphEncoder& encoder) const override;
  Values inner_inputs(const Values& inputs) const override;
  ViewAndMutationMeta derived_meta(ViewAndMutationMeta outer, const Values&) const override { return outer; }

  Function inner_function(Function function) const override;

 private:
  std::vector<Bits> bits_;
};

class LazyInputsWrapper final : public CallWrapper {
 public:
  std::string_view name() const override { return "lazy inputs"; }
  std::shared_ptr<const AppliedWrapper> apply(FunctionForm& form) const override;
  std::shared_ptr<const AppliedWrapper> load(GraphDecoder& decoder, std::size_t inputs) const override;
};

}  // namespace penstock::graph
