#include "tests/graph/program.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

namespace penstock::test {
namespace {

using nlohmann::json;
using Values = std::vector<c10::IValue>;

at::ScalarType dtype_named(const std::string& name) {
  static const std::map<std::string, at::ScalarType> names = {
      {"float32", at::kFloat}, {"float64", at::kDouble}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16},
      {"int64", at::kLong},    {"int32", at::kInt},      {"int16", at::kShort},  {"int8", at::kChar},
      {"uint8", at::kByte},    {"bool", at::kBool}};
  return names.at(name);
}

at::MemoryFormat memory_format_named(const std::string& name) {
  static const std::map<std::string, at::MemoryFormat> names = {
      {"contiguous_format", at::MemoryFormat::Contiguous},
      {"preserve_format", at::MemoryFormat::Preserve},
      {"channels_last", at::MemoryFormat::ChannelsLast},
      {"channels_last_3d", at::MemoryFormat::ChannelsLast3d}};
  return names.at(name);
}

// Wraps a number in a tensor the way LibTorch does: not by an operator that a mode would see.
at::Tensor wrapped(const at::Scalar& number) {
  at::Tensor tensor = c10::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

at::Scalar scalar_of(const json& value) {
  if (value.contains("int")) return value.at("int").get<std::int64_t>();
  if (value.contains("float")) return value.at("float").get<double>();
  if (value.contains("bool")) return value.at("bool").get<bool>();
  throw std::runtime_error("not a number: " + value.dump());
}

// One run of a list of steps: names and the values they are bound to.
class Run {
 public:
  void bind(const std::string& name, c10::IValue value) {
    if (!names_.emplace(name, std::move(value)).second) throw std::runtime_error("bound twice: " + name);
  }

  // Values that are not converted by the type of a slot.
  c10::IValue free_value(const json& value) const {
    if (value.is_string()) return named(value.get<std::string>());
    if (value.is_null()) return {};
    if (value.contains("int")) return value.at("int").get<std::int64_t>();
    if (value.contains("float")) return value.at("float").get<double>();
    if (value.contains("bool")) return value.at("bool").get<bool>();
    if (value.contains("str")) return value.at("str").get<std::string>();
    throw std::runtime_error("a value of unknown form: " + value.dump());
  }

  void run(const json& steps) {
    for (const json& step : steps) run_step(step);
  }

 private:
  const c10::IValue& named(const std::string& reference) const {
    if (reference.empty() || reference[0] != '%') throw std::runtime_error("not a reference: " + reference);
    return names_.at(reference.substr(1));
  }

  c10::IValue convert(const json& value, const c10::TypePtr& type) const {
    using c10::TypeKind;
    if (type->kind() == TypeKind::OptionalType) {
      if (value.is_null()) return {};
      return convert(value, type->castRaw<c10::OptionalType>()->getElementType());
    }
    if (value.is_string()) {  // a reference
      const c10::IValue& bound = named(value.get<std::string>());
      if (type->kind() == TypeKind::TensorType && !bound.isTensor()) return wrapped(bound.toScalar());
      if (type->kind() == TypeKind::NumberType)
        return bound.isTensor() ? c10::IValue(bound.toTensor().item()) : c10::IValue(bound.toScalar());
      return bound;
    }
    if (type->kind() == TypeKind::ListType) {
      const c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
      if (!value.contains("list")) throw std::runtime_error("not a list: " + value.dump());
      return convert_list(value.at("list"), element);
    }
    if (type->kind() == TypeKind::TensorType) {
      if (value.is_null()) return at::Tensor();
      return wrapped(scalar_of(value));
    }
    if (value.contains("dtype")) return static_cast<std::int64_t>(dtype_named(value.at("dtype")));
    if (value.contains("layout")) {
      if (value.at("layout") != "strided") throw std::runtime_error("layout " + value.dump());
      return static_cast<std::int64_t>(at::kStrided);
    }
    if (value.contains("memory_format"))
      return static_cast<std::int64_t>(memory_format_named(value.at("memory_format")));
    if (value.contains("device")) return c10::Device(value.at("device").get<std::string>());
    if (value.contains("str")) return value.at("str").get<std::string>();
    if (type->kind() == TypeKind::NumberType) return scalar_of(value);
    if (type->kind() == TypeKind::FloatType) return scalar_of(value).toDouble();
    if (type->kind() == TypeKind::BoolType) return scalar_of(value).toBool();
    return scalar_of(value).toLong();  // int and SymInt
  }

  c10::IValue convert_list(const json& items, const c10::TypePtr& element) const {
    using c10::TypeKind;
    if (element->kind() == TypeKind::TensorType) {
      c10::List<at::Tensor> list;
      for (const json& item : items) list.push_back(convert(item, element).toTensor());
      return list;
    }
    if (element->kind() == TypeKind::OptionalType) {
      c10::List<c10::optional<at::Tensor>> list;
      for (const json& item : items) {
        const c10::IValue value = convert(item, element);
        list.push_back(value.isNone() ? c10::optional<at::Tensor>()
                                      : c10::optional<at::Tensor>(value.toTensor()));
      }
      return list;
    }
    if (element->kind() == TypeKind::FloatType) {
      c10::List<double> list;
      for (const json& item : items) list.push_back(convert(item, element).toDouble());
      return list;
    }
    if (element->kind() == TypeKind::BoolType) {
      c10::List<bool> list;
      for (const json& item : items) list.push_back(convert(item, element).toBool());
      return list;
    }
    if (element->kind() == TypeKind::NumberType) {
      c10::List<at::Scalar> list;
      for (const json& item : items) list.push_back(convert(item, element).toScalar());
      return list;
    }
    c10::List<std::int64_t> list;
    for (const json& item : items) list.push_back(convert(item, element).toInt());
    return list;
  }

  c10::IValue call(const json& step) const {
    const std::string full = step.at("op");
    const std::size_t dot = full.find('.');
    const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(
        full.substr(0, dot).c_str(), dot == std::string::npos ? "" : full.substr(dot + 1).c_str());
    const auto& schema = op.schema().arguments();
    const json& args = step.at("args");
    const json& kwargs = step.at("kwargs");
    if (args.size() > schema.size()) throw std::runtime_error("too many arguments: " + step.dump());
    std::size_t used = 0;
    torch::jit::Stack stack;
    for (std::size_t i = 0; i < schema.size(); ++i) {
      if (i < args.size()) {
        stack.push_back(convert(args[i], schema[i].type()));
      } else if (kwargs.contains(schema[i].name())) {
        stack.push_back(convert(kwargs.at(schema[i].name()), schema[i].type()));
        ++used;
      } else if (schema[i].default_value()) {
        stack.push_back(*schema[i].default_value());
      } else {
        throw std::runtime_error("argument '" + schema[i].name() + "' is missing: " + step.dump());
      }
    }
    if (used != kwargs.size()) throw std::runtime_error("an unknown keyword argument: " + step.dump());
    op.callBoxed(&stack);
    if (stack.size() == 1) return stack[0];
    if (stack.empty()) return {};
    return c10::ivalue::Tuple::create(std::move(stack));
  }

  void run_custom(const json& step);

  void run_step(const json& step) {
    if (step.contains("set_grad_enabled")) {
      torch::GradMode::set_enabled(step.at("set_grad_enabled").get<bool>());
      return;
    }
    const std::string out = step.at("out").at(0);
    if (step.at("out").size() != 1) throw std::runtime_error("more than one name: " + step.dump());
    if (step.contains("op")) {
      bind(out, call(step));
    } else if (step.contains("getitem")) {
      const c10::IValue& from = named(step.at("getitem").at(0));
      const auto position = step.at("getitem").at(1).get<std::size_t>();
      bind(out, from.isTuple() ? from.toTupleRef().elements().at(position) : from.toListRef().at(position));
    } else if (step.contains("alias")) {
      bind(out, named(step.at("alias")));
    } else if (step.contains("custom_function")) {
      run_custom(step);
    } else {
      throw std::runtime_error("a step of unknown form: " + step.dump());
    }
  }

  std::map<std::string, c10::IValue> names_;
};

// A user-defined autograd function whose forward and backward are programs.
struct ProgramFunction : torch::autograd::Function<ProgramFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const json* definition, at::TensorList args) {
    const json& half = definition->at("forward");
    Run run;
    for (std::size_t i = 0; i < args.size(); ++i) run.bind(half.at("inputs").at(i), args[i]);
    run.run(half.at("steps"));
    torch::autograd::variable_list saved;
    for (const json& value : half.at("saved")) saved.push_back(run.free_value(value).toTensor());
    context->save_for_backward(saved);
    context->saved_data["definition"] = reinterpret_cast<std::int64_t>(definition);
    if (half.at("returns").size() != 1) throw std::runtime_error("a custom function with several results");
    return {run.free_value(half.at("returns").at(0)).toTensor()};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto* definition = reinterpret_cast<const json*>(context->saved_data["definition"].toInt());
    const json& half = definition->at("backward");
    Run run;
    for (std::size_t i = 0; i < grads.size(); ++i) run.bind(half.at("inputs").at(i), grads[i]);
    const torch::autograd::variable_list saved = context->get_saved_variables();
    for (std::size_t i = 0; i < saved.size(); ++i) run.bind(half.at("saved").at(i), saved[i]);
    run.run(half.at("steps"));
    torch::autograd::variable_list results{at::Tensor()};  // of `definition`
    for (const json& value : half.at("returns")) {
      const c10::IValue result = run.free_value(value);
      results.push_back(result.isNone() ? at::Tensor() : result.toTensor());
    }
    return results;
  }
};

void Run::run_custom(const json& step) {
  torch::autograd::variable_list args;
  for (const json& value : step.at("args")) args.push_back(free_value(value).toTensor());
  bind(step.at("out").at(0), ProgramFunction::apply(&step.at("custom_function"), at::TensorList(args)).at(0));
}

at::Tensor seeded(const json& leaf) {
  const auto shape = leaf.at("shape").get<std::vector<std::int64_t>>();
  at::Tensor tensor = at::empty(shape);
  const auto seed = leaf.at("seed").get<std::int64_t>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i)
    tensor.data_ptr<float>()[i] = static_cast<float>((37 * i + 11 * seed) % 19 - 9) / 8;
  return tensor.set_requires_grad(leaf.at("requires_grad").get<bool>());
}

}  // namespace

at::Tensor tensor_of(const json& value) {
  const at::ScalarType dtype = value.contains("dtype") ? dtype_named(value.at("dtype")) : at::kFloat;
  std::vector<double> numbers;
  for (const json& number : value.at("values"))
    numbers.push_back(number.is_boolean() ? (number.get<bool>() ? 1 : 0) : number.get<double>());
  const auto shape = value.at("shape").get<std::vector<std::int64_t>>();
  return at::tensor(numbers, at::kDouble).to(dtype).reshape(shape);
}

Program::Arguments Program::arguments() const {
  Run run;
  Arguments arguments;
  for (const json& leaf : json_.at("leaves")) {
    arguments.leaves.push_back(seeded(leaf));
    run.bind(leaf.at("name"), arguments.leaves.back());
  }
  for (const json& constant : json_.at("constants")) run.bind(constant.at("name"), tensor_of(constant));
  run.run(json_.at("prepare"));
  for (const json& name : json_.at("inputs"))
    arguments.inputs.push_back(run.free_value("%" + name.get<std::string>()));
  return arguments;
}

Values Program::operator()(const Values& inputs) const {
  Run run;
  for (std::size_t i = 0; i < inputs.size(); ++i) run.bind(json_.at("inputs").at(i), inputs[i]);
  run.run(json_.at("steps"));
  Values results;
  for (const json& value : json_.at("returns")) results.push_back(run.free_value(value));
  return results;
}

at::Tensor cotangent(std::int64_t index, const at::Tensor& like) {
  const at::Tensor k = at::arange(like.numel(), at::kLong);
  return ((k * 5 + 3 * index).remainder(7) - 3).to(at::kFloat).div(4).reshape(like.sizes());
}

Gradients gradients_of(const Program::Arguments& arguments, const Values& outputs, PassedTwice twice) {
  Gradients result;
  at::Tensor loss;
  const auto add = [&](const at::Tensor& tensor, std::int64_t index) {
    const at::Tensor part = (tensor * cotangent(index, tensor)).sum();
    loss = loss.defined() ? loss + part : part;
  };
  const torch::AutoGradMode on(true);
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (outputs[i].isTensor() && outputs[i].toTensor().requires_grad()) {
      result.on_outputs.push_back(static_cast<std::int64_t>(i));
      add(outputs[i].toTensor(), static_cast<std::int64_t>(i));
    }
  for (std::size_t i = 0; i < arguments.inputs.size(); ++i) {
    const c10::IValue& input = arguments.inputs[i];
    if (!input.isTensor() || !input.toTensor().requires_grad() || input.toTensor().is_leaf()) continue;
    const bool again =
        std::any_of(arguments.inputs.begin(), arguments.inputs.begin() + static_cast<std::ptrdiff_t>(i),
                    [&](const c10::IValue& earlier) {
                      return earlier.isTensor() && earlier.toTensor().is_same(input.toTensor());
                    });
    if (again && twice == PassedTwice::Once) continue;
    result.on_inputs.push_back(static_cast<std::int64_t>(i));
    add(input.toTensor(), 100 + static_cast<std::int64_t>(i));
  }
  result.leaves.resize(arguments.leaves.size());
  if (!loss.defined()) return result;
  result.loss = loss.item<double>();
  result.differentiated = true;
  loss.backward();
  for (std::size_t i = 0; i < arguments.leaves.size(); ++i) result.leaves[i] = arguments.leaves[i].grad();
  return result;
}

}  // namespace penstock::test
