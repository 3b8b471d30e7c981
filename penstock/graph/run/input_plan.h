// Handles inputs that share memory: rearranges the inputs of a function so that every graph input has its own
// memory.
//
//   const ViewAndMutationMeta user = analyze(function, inputs);
//   const InputPlan plan(inputs, user);
//   const Function inner = plan.inner_function(function);     // takes plan.inner_inputs(inputs)
//   const ViewAndMutationMeta meta = analyze(inner, plan.inner_inputs(inputs));
//
// A tensor that is passed twice and written becomes one input. Inputs that overlap in memory, one of which is
// written, become one synthetic base, the tensor that all of them are views of (or their whole memory, if
// they have no gradients), and are recreated from it inside. The inner inputs are ordered: first the tensors
// the function finds by itself, then synthetic bases, then the other inputs: non-tensors, then the rest
// grouped by memory, in order. Inputs that share memory but are not written, or share it without overlapping,
// are unchanged. A lazy conjugate or negative is replaced by its operand and recreated inside: autograd
// expects base memory to have neither bit set.
// Throws NotImplemented if overlapping inputs have no common base but require gradients, have different
// dtypes or another dtype than their base (real(z)), or if one changes its metadata or is found by the
// function itself.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "penstock/graph/trace/analyze.h"

namespace penstock::graph {

class InputPlan {
 public:
  InputPlan(const Values& inputs, const ViewAndMutationMeta& meta, const Convention& convention = {});

  // Whether the inner function has the same inputs as the original one.
  bool is_identity() const { return identity_; }
  Values inner_inputs(const Values& inputs) const;
  Function inner_function(Function function) const;
  const Convention& inner_convention() const { return convention_; }
  // Derives the metadata of the inner function from that of the original one by the rules of PyTorch 2.14,
  // without running the function again. The rules know a written base only as well as all its members
  // together. analyze() of the inner function is exact where this is not (which members are written under
  // no_grad, the grad mode afterwards, the number of tangents if several members are written); captured calls
  // use that.
  ViewAndMutationMeta derived_meta(const ViewAndMutationMeta& user, const Values& inputs) const;
  // Whether both plans send inputs to the same places, regardless of sizes.
  bool same_routing(const InputPlan& other) const;

 private:
  // Where an input of the function comes from.
  struct Source {
    std::size_t inner = 0;
    std::optional<Geometry> view;              // into a synthetic base
    bool conjugated = false, negated = false;  // lazily: recreated inside
    bool is_made() const { return view || conjugated || negated; }
    bool operator==(const Source&) const = default;
  };
  struct Base {
    std::vector<std::size_t> members;
    bool whole_memory = false;  // the tensor they are views of is unknown
    bool operator==(const Base&) const = default;
  };

  void merge_overlapping(const Values& inputs, const ViewAndMutationMeta& meta);
  std::optional<std::string> why_not_merged(const Base& base, const Values& inputs,
                                            const ViewAndMutationMeta& meta) const;
  void order_others(const Values& inputs, const std::vector<char>& merged);
  ViewAndMutationMeta without_duplicates(ViewAndMutationMeta meta) const;
  ViewAndMutationMeta with_bases(ViewAndMutationMeta meta, const Values& inputs) const;
  static at::Tensor base_tensor(const Base& base, const Values& inputs);

  bool identity_ = true;
  bool written_twice_ = false;        // the same tensor is passed more than once and written
  std::vector<std::size_t> same_as_;  // for each input: the first position of the same tensor
  std::vector<std::size_t> kept_;     // inputs without duplicates
  std::vector<Source> sources_;       // one for each input of the function
  std::vector<Base> bases_;
  std::vector<std::size_t> others_;  // inputs that are passed on, first those the function finds by itself
  Convention convention_;            // of the inner function
};

// Whether two tensors share a byte. Exact up to a million elements; above that by address range.
bool overlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace penstock::graph
