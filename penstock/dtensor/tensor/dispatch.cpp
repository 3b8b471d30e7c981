// Runs one operator on distributed tensors: finds the decision, redistributes inputs, runs on the local
// parts, wraps the results.
#include <ATen/ATen.h>
#include <ATen/core/enum_tag.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/graph_task.h>

#include <bit>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/decision_cache.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/torch/compat/dtype.h"

namespace penstock::detail {
namespace {

// Properties shared by all calls of an operator.
struct OperatorInfo {
  std::uint64_t generation = 0;
  const RegisteredRule* rule = nullptr;
  std::vector<bool> ignored;  // numbers that change the result but not the layout
};

bool is_number(const c10::TypePtr& type) {
  c10::TypePtr bare = type;
  if (const auto optional = bare->cast<c10::OptionalType>()) bare = optional->getElementType();
  return bare->kind() == c10::TypeKind::NumberType || bare->kind() == c10::TypeKind::FloatType;
}

const OperatorInfo& info_of(const c10::OperatorHandle& op, const OperatorTraits& traits) {
  thread_local std::vector<OperatorInfo> all;
  const std::size_t index = operator_index(op);
  if (index >= all.size()) all.resize(index + 64);
  OperatorInfo& info = all[index];
  if (const std::uint64_t generation = rule_generation(); info.generation != generation) [[unlikely]] {
    // Drop decisions made by older rules; an operator that is merely new to this thread leaves the others
    // unchanged.
    thread_local std::uint64_t decided_by = 0;
    if (decided_by != generation) decision_cache().clear();
    decided_by = generation;
    info.generation = generation;
    info.rule = find_rule(traits.name);
    if (info.rule && info.rule->handler) record_rule_use(*info.rule);
    info.ignored.clear();
    for (const c10::Argument& argument : op.schema().arguments())
      info.ignored.push_back(is_number(argument.type()) && !(info.rule && info.rule->options.numbers_matter));
  }
  return info;
}

enum class Word : std::uint64_t {
  None,
  Distributed,
  Plain,
  List,
  Int,
  Bool,
  Double,
  Number,
  IntList,
  DoubleList,
  BoolList,
  Text,
  Device
};

void add_word(CallKey& key, Word tag) { key.push_back(static_cast<std::uint64_t>(tag)); }

[[noreturn]] void refuse_plain(const OperatorTraits& traits, const at::Tensor& tensor) {
  throw TypeError(
      describe(fmt::format("{}: an argument", traits.name),
               fmt::format("a plain tensor [{}] among distributed ones", fmt::join(tensor.sizes(), ", ")),
               "only distributed tensors",
               "distribute it (distribute_tensor, from_local), or use ImplicitReplicationGuard if every rank "
               "has equal values"));
}

// Derivative formulas create zeros, ones and index tensors, which are equal on every rank.
bool in_backward() { return torch::autograd::get_current_graph_task_exec_info() != nullptr; }

void add_tensor(CallKey& key, const OperatorTraits& traits, const at::Tensor& tensor) {
  if (!tensor.defined()) return add_word(key, Word::None);
  if (const DTensorPayload* payload = dtensor_payload(tensor)) {
    add_word(key, Word::Distributed);
    key.push_back(reinterpret_cast<std::uint64_t>(payload->spec.get()));
    return;
  }
  if (tensor.dim() > 0 && !ImplicitReplicationGuard::active() && !in_backward()) [[unlikely]]
    refuse_plain(traits, tensor);
  add_word(key, Word::Plain);
  key.push_back(static_cast<std::uint64_t>(tensor.scalar_type()) |
                static_cast<std::uint64_t>(tensor.unsafeGetTensorImpl()->is_wrapped_number()) << 8 |
                static_cast<std::uint64_t>(tensor.dim()) << 16 |
                static_cast<std::uint64_t>(tensor.device().type()) << 32);
  for (const std::int64_t size : tensor.sizes()) key.push_back(static_cast<std::uint64_t>(size));
  for (const std::int64_t stride : tensor.strides()) key.push_back(static_cast<std::uint64_t>(stride));
}

// Returns false for an argument that cannot be part of a key: the call is then decided anew each time.
bool add_value(CallKey& key, const OperatorTraits& traits, const c10::IValue& value, bool ignored) {
  if (value.isTensor()) {
    add_tensor(key, traits, value.toTensor());
  } else if (value.isNone()) {
    add_word(key, Word::None);
  } else if (value.isInt()) {
    add_word(key, ignored ? Word::Number : Word::Int);
    key.push_back(ignored ? 0 : static_cast<std::uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    add_word(key, Word::Bool);
    key.push_back(value.toBool());
  } else if (value.isDouble()) {
    add_word(key, Word::Double);
    key.push_back(ignored ? 0 : std::bit_cast<std::uint64_t>(value.toDouble()));
  } else if (value.isIntList()) {
    const auto list = value.toListRef();
    add_word(key, Word::IntList);
    key.push_back(list.size());
    for (const c10::IValue& element : list) key.push_back(static_cast<std::uint64_t>(element.toInt()));
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    const auto list = value.toListRef();
    add_word(key, Word::List);
    key.push_back(list.size());
    for (const c10::IValue& element : list)
      if (element.isTensor())
        add_tensor(key, traits, element.toTensor());
      else
        add_word(key, Word::None);
  } else if (value.isDoubleList()) {
    const auto list = value.toListRef();
    add_word(key, Word::DoubleList);
    key.push_back(list.size());
    for (const c10::IValue& element : list) key.push_back(std::bit_cast<std::uint64_t>(element.toDouble()));
  } else if (value.isBoolList()) {
    const auto list = value.toListRef();
    add_word(key, Word::BoolList);
    key.push_back(list.size());
    for (const c10::IValue& element : list) key.push_back(element.toBool());
  } else if (value.isString()) {
    add_word(key, Word::Text);
    const std::string& text = value.toStringRef();
    key.push_back(text.size());
    for (std::size_t at = 0; at < text.size(); at += 8) {
      std::uint64_t word = 0;
      for (std::size_t i = at; i < std::min(at + 8, text.size()); ++i)
        word = word << 8 | static_cast<unsigned char>(text[i]);
      key.push_back(word);
    }
  } else if (value.isDevice()) {
    add_word(key, Word::Device);
    key.push_back(static_cast<std::uint64_t>(value.toDevice().type()) << 16 |
                  static_cast<std::uint16_t>(value.toDevice().index()));
  } else {
    return false;
  }
  return true;
}

std::string placements_text(const std::vector<ShardingInput>& inputs) {
  std::string text;
  for (const ShardingInput& input : inputs)
    text += fmt::format("{}[{}] {}", text.empty() ? "" : ", ", fmt::join(input.whole.shape, ", "),
                        input.plain ? "plain" : to_string(input.placements));
  return text;
}

// The inputs of the call, and the mesh they all share.
const DTensorPayload& collect_inputs(const OperatorTraits& traits, ShardingCall& call,
                                     std::vector<Decision::Input>& inputs) {
  const DTensorPayload* first = nullptr;
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    int element = call.arguments[i].isTensor() ? -1 : 0;
    const auto consider = [&](const at::Tensor& tensor) {
      ShardingInput input;
      input.argument = static_cast<int>(i);
      input.element = element < 0 ? -1 : element;
      input.whole = global_geometry_of(tensor);
      input.written = traits.arguments[i].written;
      const DTensorPayload* payload = dtensor_payload(tensor);
      if (payload) {
        if (!first) first = payload;
        if (payload->spec->mesh_id() != first->spec->mesh_id())
          throw ValueError(describe(
              fmt::format("{}: the meshes of its arguments", traits.name),
              fmt::format("{} and {}", first->mesh.mesh().to_string(), payload->mesh.mesh().to_string()),
              "one mesh",
              "create all tensors of one operator on the same MeshGroups; convert a tensor of a sub-mesh "
              "with full_tensor() or to_local() and from_local()"));
        input.placements = payload->spec->placements();
      } else {
        input.plain = true;
        if (input.written)
          throw TypeError(describe(fmt::format("{}: the tensor that is written", traits.name),
                                   "a plain tensor", "a distributed tensor, like the other arguments",
                                   "use the out-of-place form, or distribute it first"));
      }
      inputs.push_back({payload ? payload->spec : nullptr, nullptr});
      call.inputs.push_back(std::move(input));
    };
    if (call.arguments[i].isTensor()) {
      if (call.arguments[i].toTensor().defined()) consider(call.arguments[i].toTensor());
    } else if (call.arguments[i].isList()) {
      for (const c10::IValue& value : call.arguments[i].toListRef()) {
        if (value.isTensor() && value.toTensor().defined()) consider(value.toTensor());
        if (value.isTensor() || value.isNone()) ++element;
      }
    }
  }
  PENSTOCK_INVARIANT(first, "an operator reaches distributed tensors through one of them");
  for (ShardingInput& input : call.inputs)
    if (input.plain) input.placements = Placements(first->spec->placements().size());
  return *first;
}

// The geometry of the results, from a shape-only run on the whole tensors.
std::vector<GlobalGeometry> global_results(const ShardingCall& call, std::vector<std::int64_t>& offsets) {
  Stack stack;
  for (const c10::IValue& value : call.arguments)
    stack.push_back(map_tensors(value, [](const at::Tensor& tensor) {
      const DTensorPayload* payload = dtensor_payload(tensor);
      if (!payload) return to_fake(tensor);
      const GlobalGeometry& whole = payload->spec->geometry();
      return make_fake_strided(whole.shape, whole.stride,
                               at::TensorOptions(whole.dtype).device(whole.device));
    }));
  {
    // The whole tensors must stay invisible: a recording mode would take them for a part of the program.
    const NoModesGuard unseen;
    call.op.callBoxed(&stack);
  }
  std::vector<GlobalGeometry> results;
  for (const c10::IValue& value : stack)
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      results.push_back(global_geometry_of(tensor));
      offsets.push_back(tensor.storage_offset());
    });
  return results;
}

std::unique_ptr<Decision> decide(const c10::OperatorHandle& op, const OperatorTraits& traits,
                                 const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  std::unique_ptr<Decision> decision(
      new Decision{{traits, op, arguments.vec(), {}, {}, {}, {}}, {}, {}, {}, {}, false, false});
  ShardingCall& call = decision->call;
  const DTensorPayload& first = collect_inputs(traits, call, decision->inputs);
  call.mesh_shape = first.spec->mesh_shape();
  call.coordinate = first.spec->coordinate();
  if (!info.rule)
    throw NotImplemented(
        fmt::format("{}: no sharding rule for distributed tensors ({}); add one with "
                    "register_sharding_rule(\"{}\", ...), or compute it on "
                    "full_tensor() or to_local() parts",
                    traits.name, placements_text(call.inputs), traits.name));
  try {
    if (info.rule->options.shape_known) call.outputs = global_results(call, decision->offsets);
  } catch (const DataDependentError&) {
    refuse_unknown_shape(traits);
  }
  record_rule_use(*info.rule);
  Sharding& sharding = decision->sharding = info.rule->rule(call);
  PENSTOCK_INVARIANT(
      sharding.inputs.size() == call.inputs.size() && sharding.outputs.size() == call.outputs.size(),
      fmt::format("the sharding rule of {} must return placements for {} inputs and {} outputs", traits.name,
                  call.inputs.size(), call.outputs.size()));
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    Decision::Input& input = decision->inputs[i];
    if (!input.now) {
      // Every rank has a whole plain tensor and takes its part without communication.
      const SpecPtr whole = DTensorSpec::get(*first.spec, call.inputs[i].placements, call.inputs[i].whole);
      const SpecPtr part = whole->with_placements(sharding.inputs[i]);
      if (part != whole) input.transfer = transfer_between(whole, part, PartialTarget::Allow);
      continue;
    }
    const SpecPtr to = input.now->with_placements(sharding.inputs[i]);
    if (to == input.now) continue;
    if (call.inputs[i].written)
      throw ValueError(describe(fmt::format("{}: the tensor that is written", traits.name),
                                to_string(input.now->placements()), to_string(to->placements()),
                                "redistribute it first, or use the out-of-place form"));
    input.transfer = transfer_between(input.now, to, PartialTarget::Allow);
  }
  for (std::size_t i = 0; i < call.outputs.size(); ++i)
    decision->outputs.push_back(DTensorSpec::get(*first.spec, sharding.outputs[i], call.outputs[i]));
  decision->moves_dims = op.hasTag(at::Tag::inplace_view);
  decision->transposes = traits.name == "aten::t" || traits.name == "aten::transpose.int";
  for (c10::IValue& value : call.arguments)
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList() || value.isGenerator())
      value = c10::IValue();
  return decision;
}

// The local arguments. Every rank redistributes in the order of the inputs.
Stack local_arguments(const Decision& decision, const comm::MeshGroups& mesh,
                      const std::vector<c10::IValue>& arguments, const OperatorTraits& traits) {
  Stack local;
  local.reserve(std::max(arguments.size(), traits.returns.size()));
  std::size_t next = 0;
  const auto map = [&](const at::Tensor& tensor) -> at::Tensor {
    const Decision::Input& input = decision.inputs[next];
    const bool written = decision.call.inputs[next++].written;
    if (!input.now) return input.transfer ? input.transfer->run(mesh, tensor) : tensor;
    const DTensorPayload* payload = dtensor_payload(tensor);
    if (written && payload->copied_view)
      throw StateError(
          fmt::format("{}: the tensor that is written is a view that had to be redistributed, so its base "
                      "would not change; clone() it, or "
                      "redistribute its base first",
                      traits.name));
    // An operator that changes the shape in place gets its own handle: other distributed tensors may hold the
    // same part.
    if (written && decision.moves_dims) return at::alias(payload->local());
    return input.transfer ? input.transfer->run(payload->mesh, payload->local()) : payload->local();
  };
  for (const c10::IValue& value : arguments)
    local.push_back(value.isTensor() || value.isList() ? map_tensors(value, map) : value);
  for (const auto& [argument, value] : decision.sharding.arguments)
    local[static_cast<std::size_t>(argument)] = value;
  return local;
}

void check_result(const OperatorTraits& traits, const at::Tensor& local, const DTensorSpec& spec) {
  if (local.sizes() != c10::IntArrayRef(spec.local_shape()) || local.scalar_type() != spec.geometry().dtype)
      [[unlikely]]
    throw InvariantError(
        fmt::format("{}: the local result is {}[{}], but this rank's part of {} is [{}]; the operator's "
                    "sharding rule does not fit it",
                    traits.name, dtype_name(local.scalar_type()), fmt::join(local.sizes(), ", "),
                    spec.to_string(), fmt::join(spec.local_shape(), ", ")));
}

void run(const Decision& decision, const c10::OperatorHandle& op, const OperatorTraits& traits,
         const comm::MeshGroups& mesh, Stack* stack) {
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(traits.arguments.size());
  std::vector<c10::IValue> arguments(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
  stack->erase(first, stack->end());

  Stack local = local_arguments(decision, mesh, arguments, traits);
  if (decision.sharding.local)
    decision.sharding.local({mesh, decision.call, decision.sharding.inputs, decision.sharding.outputs}, op,
                            &local);
  else
    op.callBoxed(&local);

  std::size_t output = 0;
  for (std::size_t i = 0; i < traits.returns.size(); ++i) {
    const ReturnAlias& alias = traits.returns[i];
    const c10::IValue& value = local[i];
    if (alias.kind == ReturnAlias::Kind::Same) {
      const c10::IValue& argument = arguments[static_cast<std::size_t>(alias.argument)];
      if (argument.isTensor() && argument.toTensor().defined() && value.isTensor() &&
          value.toTensor().defined()) {
        const SpecPtr& spec = decision.outputs[output++];
        DTensorPayload* payload = dtensor_payload(argument.toTensor());
        check_result(traits, value.toTensor(), *spec);
        if (payload->spec != spec) {
          payload->spec = spec;
          payload->set_local(value.toTensor());
          sync_geometry(argument.toTensor(), spec->geometry().shape, spec->geometry().stride,
                        argument.toTensor().storage_offset());
        }
      } else if (argument.isTensorList()) {
        output += argument.toListRef().size();
      }
      stack->push_back(argument);
      continue;
    }
    const at::Tensor* viewed = nullptr;
    const DTensorPayload* source = nullptr;
    // An undeclared view is a tensor of its own for whoever called the operator: a copy may be written.
    if (alias.kind == ReturnAlias::Kind::View && alias.declared) {
      const c10::IValue& argument = arguments[static_cast<std::size_t>(alias.argument)];
      if (argument.isTensor()) source = dtensor_payload(argument.toTensor());
      if (source) viewed = &argument.toTensor();
    }
    stack->push_back(map_tensors(value, [&](const at::Tensor& tensor) {
      const std::int64_t offset = viewed ? viewed->storage_offset() + decision.offsets[output] : 0;
      const SpecPtr& spec = decision.outputs[output++];
      check_result(traits, tensor, *spec);
      at::Tensor result = make_dtensor(tensor, spec, mesh, viewed, offset);
      if (source) {
        DTensorPayload* payload = dtensor_payload(result);
        if (source->copied_view || !tensor.is_alias_of(source->local())) payload->mark_copied(*viewed);
        // Modules use their weights transposed.
        if (source->boundary && decision.transposes) payload->boundary = source->boundary;
      }
      return result;
    }));
  }
}

}  // namespace

void DTensorPayload::dispatch(const c10::OperatorHandle& op, Stack* stack) {
  const OperatorTraits& traits = traits_of(op);
  const OperatorInfo& info = info_of(op, traits);
  if (info.rule && info.rule->handler) return info.rule->handler(op, stack);
  const c10::ArrayRef<c10::IValue> arguments(stack->data() + (stack->size() - traits.arguments.size()),
                                             traits.arguments.size());
  CallKey key;
  key.push_back(operator_index(op));
  key.push_back(static_cast<std::uint64_t>(c10::typeMetaToScalarType(at::get_default_dtype())));
  bool cached = true;
  for (std::size_t i = 0; i < arguments.size(); ++i)
    cached &= add_value(key, traits, arguments[i], info.ignored[i]);
  if (!cached) {
    const std::unique_ptr<Decision> decision = decide(op, traits, info, arguments);
    return run(*decision, op, traits, mesh, stack);
  }
  DecisionCache& cache = decision_cache();
  std::shared_ptr<const Decision> decision = cache.find(key);
  if (!decision) [[unlikely]]
    decision = cache.insert(key, decide(op, traits, info, arguments));
  run(*decision, op, traits, mesh, stack);
}

}  // namespace penstock::detail
