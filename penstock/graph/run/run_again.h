// Second derivatives of a captured function (create_graph): the backward graph cannot be differentiated, so
// the function itself runs again, on the inputs of the call, and is differentiated by autograd as usual.
//
//   RunAgain again(form, joint);                 // when the function is captured; holds no tensors
//   HeldInputs held;                             // in a call's autograd node
//   held.hold(tensor, /*keep=*/false);           // for each tensor among the inputs
//   again.gradients(held.get(again), tangents);  // in backward, with grad mode on
//
// Gradients are those of the function at the inputs, differentiable with respect to them and to the tangents
// any number of times. Stored with a capture, except for the function, which who loads it must set. Private
// to this folder. Thread safety: that of the function.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/graph/ir/joint_graph.h"
#include "penstock/graph/wrap/function_form.h"
#include "penstock/torch/dispatch/autocast_scope.h"

namespace penstock::graph {

class RunAgain {
 public:
  RunAgain() = default;  // to be filled by a decoder
  // `joint`: of the function of the form, still with its writes. Must be made under the modes of the call.
  RunAgain(const FunctionForm& form, const JointGraph& joint);

  // Sets the function, of a decoded capture: that of the form.
  void set_function(Function function) { function_ = std::move(function); }
  // Whether it is for a function with these numbers of inputs, tensors among them, and results with gradient.
  bool fits(std::size_t inputs, std::size_t tensors, std::size_t tangents) const;

  // Throws NotImplemented for a function that would not do the same again, because it writes inputs, draws
  // random numbers, or has side effects, and for one that is not there.
  void check_possible() const;
  // `primals`: the tensors among the inputs. `tangents`: the gradients that backward got, undefined for
  // results that nobody used. Returns one gradient for each primal. Throws what check_possible() does,
  // and StateError if the function did not do the same again.
  std::vector<at::Tensor> gradients(const std::vector<at::Tensor>& primals,
                                    const std::vector<at::Tensor>& tangents) const;
  // Of a primal, for messages.
  const std::string& name_of(std::size_t primal) const { return primals_[primal].name; }

 private:
  friend struct RunAgainFields;
  struct Primal {
    std::size_t input = 0;  // of the function
    std::string name;
  };
  // A result that has a gradient, or the tensor that result is a view of.
  struct Root {
    std::size_t output = 0;
    bool base = false;
  };
  std::string why_not(const FunctionForm& form, const JointGraph& joint) const;

  Function function_;  // empty: it is not known in this process
  std::size_t found_ = 0;
  Values inputs_;  // without tensors
  std::vector<Primal> primals_;
  std::vector<Root> roots_;
  AutocastState autocast_;
  std::string why_not_;  // empty if it can run again
};

// The inputs of a call, for as long as its backward can be run.
class HeldInputs {
 public:
  // `keep`: keeps it alive; otherwise it is there only as long as somebody else holds it.
  void hold(const at::Tensor& input, bool keep);
  void reserve(std::size_t count) { inputs_.reserve(count); }
  void release() { inputs_.clear(); }
  // Throws StateError for an input that is gone or was written since.
  std::vector<at::Tensor> get(const RunAgain& again) const;

 private:
  struct Input {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    at::Tensor kept;
    std::optional<std::int64_t> version;  // inference tensors have none
  };
  std::vector<Input> inputs_;
};

}  // namespace penstock::graph
