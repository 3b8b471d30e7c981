// The functions of the reference data's section `aot`, written as steps over dispatcher operators, and the
// expected results of a plain run.
//
// A program is interpreted by the schemas of its operators, not by a table: any operator may occur. A step of
// an unknown form throws; none is skipped.
#pragma once

#include <torch/torch.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace penstock::test {

class Program {
 public:
  // Keeps a reference to `json`.
  explicit Program(const nlohmann::json& json) : json_(json) {}

  struct Arguments {
    std::vector<at::Tensor> leaves;   // in the order of the recorded leaf gradients
    std::vector<c10::IValue> inputs;  // what the function is called with
  };
  // Creates fresh leaves and the inputs made from them.
  Arguments arguments() const;

  // The function itself; may change the thread's grad mode if the program says so.
  std::vector<c10::IValue> operator()(const std::vector<c10::IValue>& inputs) const;

 private:
  const nlohmann::json& json_;
};

// A tensor of the reference data; uses `dtype` and `stride` if given.
at::Tensor tensor_of(const nlohmann::json& json);

// The weights of output `index` in the loss.
at::Tensor cotangent(std::int64_t index, const at::Tensor& like);

// The loss over outputs and changed inputs, and the gradients of the leaves, as PyTorch 2.14 computes them.
struct Gradients {
  double loss = 0;
  std::vector<at::Tensor> leaves;  // undefined if there is none
  std::vector<std::int64_t> on_outputs, on_inputs;
  bool differentiated = false;
};

// A tensor that is passed twice and written is one result: ahead-of-time autograd has one tangent for it. The
// loss of the recorded plain runs may count it once, or once for each position where it was passed.
enum class PassedTwice { OnceForEachPlace, Once };
Gradients gradients_of(const Program::Arguments& arguments, const std::vector<c10::IValue>& outputs,
                       PassedTwice twice = PassedTwice::OnceForEachPlace);

}  // namespace penstock::test
