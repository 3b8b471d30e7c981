// Calls dispatcher operators by name, for operators that not every LibTorch has and that no header declares.
//
//   if (has_operator("aten::_fused_rms_norm"))
//     Tensors out = call_operator("aten::_fused_rms_norm", {x}, {{"normalized_shape",
//         std::vector<std::int64_t>{4}}, {"weight", w}});
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "penstock/operator_traits.h"
#include "tests/dtensor/rule_checker.h"

namespace penstock::test {

// "aten::add.Tensor"; without a dot: the overload without a name.
c10::optional<c10::OperatorHandle> find_operator(const std::string& name);
bool has_operator(const std::string& name);

// `tensors` become the first arguments of type Tensor that are not in `named`, in order; the others get their
// defaults, or None. Throws std::invalid_argument for a name that the schema does not have and for an
// argument without a value. Returns every defined tensor of the results, lists flattened.
std::vector<at::Tensor> call_operator(const std::string& name, const std::vector<at::Tensor>& tensors,
                                      const std::map<std::string, c10::IValue>& named = {});

// An operator of the namespace aten, and its arguments other than tensors.
struct OperatorRow {
  std::string name;
  std::map<std::string, c10::IValue> named = {};
};
// Calls all operators of the rows that this LibTorch has, forward, on the same inputs.
RuleCase each_of(const std::string& name, const Tensors& inputs, const std::vector<OperatorRow>& rows,
                 std::size_t most = 12);

// Registers a CPU kernel for an operator that has none in this LibTorch (a cuDNN or GPU-only operator): what
// distributed tensors do around the kernel is the same. Does nothing if there is a kernel, or no such
// operator.
void stand_in(const std::string& name, std::function<void(const c10::OperatorHandle&, Stack*)> kernel);

// An argument of a call on the stack, by its schema name; None if the schema does not have it.
c10::IValue stacked(const c10::OperatorHandle& op, const Stack& stack, const std::string& name);
// Replaces the arguments by the results.
void give(const c10::OperatorHandle& op, Stack* stack, std::vector<c10::IValue> results);

}  // namespace penstock::test
