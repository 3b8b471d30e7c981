// The functions of the reference data's section `aot`, written as steps over the dispatcher's operators, and what a plain run of
// them must give.
//
// A program is interpreted by the schemas of its operators, not by a table: any operator may occur. A step of an unknown form
// throws; none is skipped.
#pragma once

#include <torch/torch.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace penstock::test {

class Program {
 public:
  // Holds on to `json`.
  explicit Program(const nlohmann::json& json) : json_(json) {}

  struct Arguments {
    std::vector<at::Tensor> leaves;    // in the order of the reference's leaf gradients
    std::vector<c10::IValue> inputs;   // what the function is called with
  };
  // Fresh leaves and what is made of them.
  Arguments arguments() const;

  // The function itself; may leave the thread's grad mode changed, as it says.
  std::vector<c10::IValue> operator()(const std::vector<c10::IValue>& inputs) const;

 private:
  const nlohmann::json& json_;
};

// A tensor of the reference data; `dtype` and `stride` when they are given.
at::Tensor tensor_of(const nlohmann::json& json);

// The weights of output `index` in the loss.
at::Tensor cotangent(std::int64_t index, const at::Tensor& like);

// Loss over outputs and changed inputs, and the gradients of the leaves, as the reference computes them.
struct Gradients {
  double loss = 0;
  std::vector<at::Tensor> leaves;             // undefined: none
  std::vector<std::int64_t> on_outputs, on_inputs;
  bool differentiated = false;
};

// A tensor that is passed twice and written is one result: ahead-of-time autograd has one tangent for it. The loss of the recorded plain runs may weigh it
// once, or once for each place where it was passed.
enum class PassedTwice { OnceForEachPlace, Once };
Gradients gradients_of(const Program::Arguments& arguments, const std::vector<c10::IValue>& outputs, PassedTwice twice = PassedTwice::OnceForEachPlace);

}  // namespace penstock::test
