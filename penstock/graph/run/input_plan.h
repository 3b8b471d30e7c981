// Inputs that share memory: what a captured function is called with, so that every input of the graph is memory of its own.
//
//   const ViewAndMutationMeta user = analyze(function, inputs);
//   const InputPlan plan(inputs, user);
//   const Function inner = plan.inner_function(function);     // takes plan.inner_inputs(inputs)
//   const ViewAndMutationMeta meta = analyze(inner, plan.inner_inputs(inputs));
//
// The same tensor given twice and written becomes one input. Inputs that overlap in memory, one of which is written, become one
// synthetic base, the tensor that all of them are views of (or their whole memory, where they have no gradients), and are made from it
// inside. What the function finds by itself comes first, then synthetic bases, then the other inputs: those that are no tensors, then by the
// memory they lie in, in order. Inputs that share memory but are not written, or share it without overlapping, stay as they are.
// A lazy conjugate or negative becomes what it is the conjugate or negative of, and is made inside: autograd expects memory to begin as it is.
// Throws NotImplemented where overlapping inputs have no common base but need gradients, are of different dtypes or of another one than their base
// (real(z)), or one changes its metadata, or the function finds one by itself.
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

  // The function is called with what it would be called with anyway.
  bool is_identity() const { return identity_; }
  Values inner_inputs(const Values& inputs) const;
  Function inner_function(Function function) const;
  const Convention& inner_convention() const { return convention_; }
  // The metadata of the inner function as it follows from that of the function as called, by the rules of the reference, without
  // another look at the function. They know a written base no better than its members together: analyze() of the inner function is exact
  // where this is not (which members are written under no_grad, what grad mode is left, how many tangents there are when several members
  // are written), and it is what captured calls run with.
  ViewAndMutationMeta derived_meta(const ViewAndMutationMeta& user, const Values& inputs) const;
  // Whether inputs go to the same places, however long they are.
  bool works_like(const InputPlan& other) const;

 private:
  // Where an input of the function comes from.
  struct Source {
    std::size_t inner = 0;
    std::optional<Geometry> view;  // of a synthetic base
    bool conjugated = false, negated = false;   // lazily: made so inside
    bool is_made() const { return view || conjugated || negated; }
    bool operator==(const Source&) const = default;
  };
  struct Base {
    std::vector<std::size_t> members;
    bool whole_memory = false;     // nobody knows the tensor they are views of
    bool operator==(const Base&) const = default;
  };

  void merge_overlapping(const Values& inputs, const ViewAndMutationMeta& meta);
  std::optional<std::string> why_not_merged(const Base& base, const Values& inputs, const ViewAndMutationMeta& meta) const;
  void order_others(const Values& inputs, const std::vector<char>& merged);
  ViewAndMutationMeta without_duplicates(ViewAndMutationMeta meta) const;
  ViewAndMutationMeta with_bases(ViewAndMutationMeta meta, const Values& inputs) const;
  static at::Tensor base_tensor(const Base& base, const Values& inputs);

  bool identity_ = true;
  bool written_twice_ = false;       // the same tensor is given more than once and written
  std::vector<std::size_t> same_as_; // for each input: the first place of its tensor
  std::vector<std::size_t> kept_;    // inputs without those that are there already
  std::vector<Source> sources_;      // one for each input of the function
  std::vector<Base> bases_;
  std::vector<std::size_t> others_;  // inputs that are handed on, those first that the function finds by itself
  Convention convention_;            // of the inner function
};

// True when two tensors have a byte in common. Exact up to a million elements, above that by the range they reach.
bool overlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace penstock::graph
