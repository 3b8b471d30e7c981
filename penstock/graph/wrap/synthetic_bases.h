// Inputs that overlap in memory, one of which is written, become views of one input.
//
// That input, the synthetic base, is the tensor that all of them are views of, or their whole memory if they
// have no gradients. Inside, they are made from it again, so that the graph sees which writes reach which
// input. The inner inputs are ordered: first the tensors the function finds by itself, then the bases, then
// the others: non-tensors, then the rest grouped by memory, in order. Inputs that share memory but are not
// written, or share it without overlapping, are left alone.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/graph/wrap/inputs_wrapper.h"

namespace penstock::graph {

// Whether two tensors share a byte. Exact up to a million elements; above that by address range.
bool overlap(const at::Tensor& a, const at::Tensor& b);

class SyntheticBases final : public InputsWrapper {
 public:
  struct Base {
    std::vector<std::size_t> members;
    bool whole_memory = false;  // the tensor they are views of is unknown
    bool operator==(const Base&) const = default;

    at::Tensor tensor(const Values& inputs) const;
  };
  // `inputs`: those of the call; `found`: how many of them the function finds by itself.
  SyntheticBases(std::vector<Base> bases, const Values& inputs, std::size_t found);

  std::string_view name() const override { return "synthetic bases"; }
  std::string decision() const override;
  bool same_but_for_sizes(const AppliedWrapper& other) const override;
  void save(GraphEncoder& encoder) const override;
  Values inner_inputs(const Values& inputs) const override;
  ViewAndMutationMeta derived_meta(ViewAndMutationMeta outer, const Values& inputs) const override;

  Function inner_function(Function function) const override;
  Convention inner_convention(const Convention& outer) const;
  // For each inner input, the first outer one that it is or that is made from it.
  std::vector<std::size_t> came_from() const;

  // Where an outer input comes from.
  struct Source {
    std::size_t inner = 0;
    std::optional<Geometry> view;  // into a base
  };

 private:
  friend class SyntheticBasesWrapper;
  SyntheticBases(std::size_t found, std::vector<Base> bases, std::vector<std::size_t> others,
                 std::vector<Source> sources)
      : found_(found), bases_(std::move(bases)), others_(std::move(others)), sources_(std::move(sources)) {}
  void order_others(const Values& inputs, const std::vector<char>& merged);

  std::size_t found_;
  std::vector<Base> bases_;
  std::vector<std::size_t> others_;  // inputs that are passed on, first those the function finds by itself
  std::vector<Source> sources_;      // one for each outer input
};

// Throws NotImplemented if overlapping inputs have no common base but require gradients, have different
// dtypes or another dtype than their base (real(z)), or if one changes its metadata or is found by the
// function itself.
class SyntheticBasesWrapper final : public CallWrapper {
 public:
  std::string_view name() const override { return "synthetic bases"; }
  std::shared_ptr<const AppliedWrapper> apply(FunctionForm& form) const override;
  std::shared_ptr<const AppliedWrapper> load(GraphDecoder& decoder, std::size_t inputs) const override;

 private:
  static std::optional<std::string> why_not_merged(const SyntheticBases::Base& base,
                                                   const FunctionForm& form);
};

}  // namespace penstock::graph
