// Decides whether a capture is valid for a call: what is compared, and how differences are reported.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/graph/ir/subclass_record.h"
#include "penstock/graph/ir/symbolic_table.h"
#include "penstock/graph/trace/analyze.h"
#include "penstock/torch/dispatch/autocast_scope.h"

namespace penstock::graph {

class CallGuard {
 public:
  CallGuard() = default;  // of a call without inputs; to be filled by a decoder
  CallGuard(const Values& inputs, const Convention& convention);

  std::size_t size() const { return inputs_.size(); }  // number of inputs

  bool inputs_share_memory() const { return any_sharing_; }
  // The first input that uses the same memory as `input`: itself, or an earlier one.
  std::size_t shares_with(std::size_t input) const { return inputs_[input].shares_with; }
  std::size_t same_as(std::size_t input) const { return inputs_[input].same_as; }
  // Whether the capture is valid for these inputs; takes about 50 ns per input. `sizes`: the values of the
  // symbols in this call, for a capture with dynamic dims.
  bool holds(const Values& inputs, const BoundSizes* sizes = nullptr) const;
  // Returns an empty string if the capture is valid; otherwise the difference: "input 1 has sizes [2, 4], in
  // the capture [3, 4]".
  std::string difference(const Values& inputs, const BoundSizes* sizes = nullptr,
                         const SymbolicTable* table = nullptr) const;
  // Whether the inputs differ at most in sizes, strides and offsets.
  bool same_kind(const Values& inputs) const;
  bool same_kind(const CallGuard& other) const;

  // Calls `visit(index of the input, Geometry&)` for each tensor.
  template <class Visit>
  void for_each_geometry(Visit&& visit) {
    for (std::size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i].tensor) visit(i, *inputs_[i].tensor);
  }
  template <class Visit>
  void for_each_geometry(Visit&& visit) const {
    for (std::size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i].tensor) visit(i, *inputs_[i].tensor);
  }

 private:
  friend struct CallGuardFields;
  struct Input {
    std::optional<Geometry> tensor;
    // Set for a subclass: kind, context and inner tensors are compared as well.
    std::shared_ptr<const FlattenRecord> subclass;
    c10::IValue value;  // of a non-tensor
    bool requires_grad = false, is_leaf = true, is_view = false;
    std::size_t same_as = 0;      // the first input that is the same tensor
    std::size_t shares_with = 0;  // the first input that uses the same memory
  };
  enum class Records { Make, None };
  static std::vector<Input> describe_all(const Values& inputs, Records records);
  static bool same_kind(const std::vector<Input>& a, const std::vector<Input>& b);

  std::vector<Input> inputs_;
  std::vector<std::string> names_;
  bool any_sharing_ = false;

  // Conditions of the whole call: thread-local and process-wide modes.
  struct Modes {
    bool grad = true, inference = false, deterministic = false;
    AutocastState autocast;
    at::ScalarType default_dtype = at::kFloat;  // of tensors that are made without a dtype
    friend bool operator==(const Modes&, const Modes&) = default;
  };
  static Modes current_modes();
  static std::string difference(const Modes& is, const Modes& was);
  Modes modes_;
};

}  // namespace penstock::graph
