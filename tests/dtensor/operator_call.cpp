#include "tests/dtensor/operator_call.h"

#include <memory>
#include <stdexcept>
#include <utility>

namespace penstock::test {
namespace {

c10::OperatorName name_of(const std::string& name) {
  const std::size_t dot = name.find('.', name.find("::"));
  return {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
}

bool is_tensor(const c10::Argument& argument) { return argument.type()->kind() == c10::TypeKind::TensorType; }

class StandIn final : public c10::OperatorKernel {
 public:
  explicit StandIn(std::function<void(const c10::OperatorHandle&, Stack*)> kernel)
      : kernel_(std::move(kernel)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { kernel_(op, stack); }

 private:
  std::function<void(const c10::OperatorHandle&, Stack*)> kernel_;
};

}  // namespace

c10::optional<c10::OperatorHandle> find_operator(const std::string& name) {
  return c10::Dispatcher::singleton().findSchema(name_of(name));
}

bool has_operator(const std::string& name) { return find_operator(name).has_value(); }

std::vector<at::Tensor> call_operator(const std::string& name, const std::vector<at::Tensor>& tensors,
                                      const std::map<std::string, c10::IValue>& named) {
  const auto op = find_operator(name);
  if (!op) throw std::invalid_argument(name + ": no such operator in this LibTorch");
  Stack stack;
  std::size_t next = 0, known = 0;
  for (const c10::Argument& argument : op->schema().arguments()) {
    if (const auto given = named.find(argument.name()); given != named.end()) {
      stack.push_back(given->second);
      ++known;
    } else if (is_tensor(argument) && next < tensors.size()) {
      stack.emplace_back(tensors[next++]);
    } else if (argument.default_value()) {
      stack.push_back(*argument.default_value());
    } else if (argument.type()->kind() == c10::TypeKind::OptionalType) {
      stack.emplace_back();
    } else {
      throw std::invalid_argument(name + ": no value for argument " + argument.name());
    }
  }
  if (known != named.size() || next != tensors.size())
    throw std::invalid_argument(name + ": more values than the schema has arguments");
  op->callBoxed(&stack);
  std::vector<at::Tensor> results;
  for (const c10::IValue& value : stack)
    for_each_tensor(value, [&](const at::Tensor& tensor) { results.push_back(tensor); });
  return results;
}

RuleCase each_of(const std::string& name, const Tensors& inputs, const std::vector<OperatorRow>& rows,
                 std::size_t most) {
  std::vector<OperatorRow> known;
  for (const OperatorRow& row : rows)
    if (has_operator("aten::" + row.name)) known.push_back(row);
  return {.name = name,
          .inputs = inputs,
          .body =
              [known](const Tensors& in) {
                Tensors out;
                for (const OperatorRow& row : known)
                  for (const at::Tensor& result : call_operator("aten::" + row.name, in, row.named))
                    out.push_back(result);
                return out;
              },
          .backward = false,
          .rtol = 1e-4,
          .atol = 1e-5,
          .most = most};
}

void stand_in(const std::string& name, std::function<void(const c10::OperatorHandle&, Stack*)> kernel) {
  const auto op = find_operator(name);
  if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return;
  // Never freed.
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
      name_of(name), c10::DispatchKey::CPU,
      c10::KernelFunction::makeFromBoxedFunctor<StandIn>(std::make_unique<StandIn>(std::move(kernel))),
      c10::nullopt, nullptr, "a test replacement"));
}

c10::IValue stacked(const c10::OperatorHandle& op, const Stack& stack, const std::string& name) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == name) return stack[stack.size() - arguments.size() + i];
  return {};
}

void give(const c10::OperatorHandle& op, Stack* stack, std::vector<c10::IValue> results) {
  stack->resize(stack->size() - op.schema().arguments().size());
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace penstock::test
