#include "penstock/graph/run/capture_codec.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/codec/graph_decoder.h"
#include "penstock/graph/codec/graph_encoder.h"
#include "penstock/graph/partition/backward_split.h"
#include "penstock/graph/run/capture_fields.h"
#include "penstock/graph/run/half_requests.h"

namespace penstock::graph {
namespace {

const std::string kWho = "stored capture";
const std::string kMakeAgain = "it is made again from the function";

void encode_wrapper(GraphEncoder& encoder, const WrapperInUse& used) {
  const auto& [wrapper, outer] = used;
  encoder(std::string(wrapper->name()), outer);
  wrapper->save(encoder);
}

WrapperInUse decode_wrapper(GraphDecoder& decoder, const CallWrappers& wrappers) {
  std::string name;
  WrapperInUse used;
  decoder(name, used.outer);
  const auto known = std::find_if(wrappers.begin(), wrappers.end(),
                                  [&](const auto& wrapper) { return wrapper->name() == name; });
  if (known == wrappers.end()) decoder.fail(fmt::format("the program has no wrapper named '{}'", name));
  used.wrapper = (*known)->load(decoder, used.outer.inputs.size());
  return used;
}

// What a capture begins with.
std::vector<WrapperInUse> decode_wrappers(GraphDecoder& decoder, const CallWrappers& wrappers) {
  std::uint32_t version = 0;
  decoder(version);
  if (version != kCaptureVersion)
    decoder.fail(fmt::format("version {}, expected {}", version, kCaptureVersion));
  std::size_t count = 0;
  decoder(count);
  if (count > wrappers.size()) decoder.fail("more wrappers than the program has");
  std::vector<WrapperInUse> used;
  for (; count > 0; --count) used.push_back(decode_wrapper(decoder, wrappers));
  return used;
}

// Checks the indices of a decoded capture.
class CaptureCheck {
 public:
  CaptureCheck(const PartitionedCapture& partitioned, const GraphDecoder& decoder)
      : partitioned_(partitioned), capture_(partitioned.capture), decoder_(decoder) {}

  void run() const {
    const JointGraph& joint = capture_.joint;
    require(capture_.guard.size() == capture_.user_meta().inputs.size(),
            "the guard has another number of inputs");
    for_each_meta(capture_, [&](const ViewAndMutationMeta& meta) { check(meta); });
    const std::size_t inputs = joint.graph.inputs.size(), outputs = joint.graph.outputs.size();
    require(joint.states.size() <= std::min(inputs, outputs) && joint.primals <= inputs &&
                joint.primals + joint.tangents.size() == joint.first_state_input(),
            "inconsistent number of inputs and tangents");
    require(joint.forward_outputs <= joint.first_state_output() &&
                joint.written_in_backward.size() <= joint.backward_returns(),
            "inconsistent number of outputs");
    check_states();
    for (const std::size_t primal : joint.written_in_backward)
      require(primal < joint.primals, "an input that does not exist is written in backward");
    require(joint.written_in_graph.size() <= joint.forward_outputs &&
                (joint.written_in_graph.empty() || !joint.subclasses),
            "inputs that are written in a graph that does not return them");
    for (const std::size_t primal : joint.written_in_graph)
      require(primal < joint.primals, "an input that does not exist is written in the graph");
    require(capture_.convention.found <= (joint.subclasses ? joint.subclasses->inputs.size() : joint.primals),
            "more parameters and buffers than tensors among the inputs");
    for (const Operand& output : joint.graph.outputs)
      require(output.kind == Operand::Kind::Constant || output.kind == Operand::Kind::Tensor,
              "an output that is a list");
    check_tensors();
    check_run_again();
    check_halves();
    if (joint.subclasses) check(*joint.subclasses);
    check_deferred();
    check_symbols();
  }

 private:
  void require(bool holds, const char* why) const {
    if (!holds) decoder_.fail(why);
  }
  void check(const Geometry& geometry) const {
    const SymbolicTable* table = capture_.joint.graph.table.get();
    require(geometry.symbolic == kNotSymbolic ||
                (table && geometry.symbolic >= 0 &&
                 static_cast<std::size_t>(geometry.symbolic) < table->geometries.size() &&
                 table->geometries[static_cast<std::size_t>(geometry.symbolic)].sizes.size() ==
                     geometry.sizes.size()),
            "a reference to an entry of the table of symbols that does not exist");
  }
  void check(const Operand& operand) const {
    const SymbolicTable* table = capture_.joint.graph.table.get();
    require(operand.symbolic == kNotSymbolic ||
                (table && operand.symbolic >= 0 &&
                 static_cast<std::size_t>(operand.symbolic) < table->constants.size()),
            "a reference to an entry of the table of symbols that does not exist");
  }
  void check(const ViewAndMutationMeta& meta) const {
    require(meta.intermediate_bases <= meta.outputs.size(), "more intermediate bases than outputs");
    for (std::size_t i = 0; i < meta.outputs.size(); ++i) {
      const OutputInfo& info = meta.outputs[i];
      check(info.geometry);
      require(!info.same_as || *info.same_as < i, "an output that is the same tensor as a later one");
      switch (info.kind) {
        case OutputKind::NonAlias:
        case OutputKind::UnsafeViewAlias:
        case OutputKind::CustomFunctionView:
          break;
        case OutputKind::AliasOfInput:
        case OutputKind::IsInput:
          require(info.base_index && *info.base_index < meta.inputs.size() &&
                      meta.inputs[*info.base_index].is_tensor,
                  "an alias of an input that does not exist");
          break;
        case OutputKind::AliasOfIntermediateSaveAsOutput:
        case OutputKind::AliasOfIntermediate:
          require(info.base_index && *info.base_index < meta.intermediate_bases,
                  "an alias of an intermediate base that does not exist");
          break;
        case OutputKind::AliasOfIntermediateBaseIsUserOutput:
          require(info.base_index && *info.base_index < meta.outputs.size(),
                  "an alias of an output that does not exist");
          break;
      }
      for (const ViewStep& step : info.view.steps)
        for (const Operand& operand : step.arguments) check(operand);
    }
    for (const TangentInfo& tangent : meta.tangents) check(meta, tangent);
    for (const std::size_t input : meta.static_inputs)
      require(input < meta.inputs.size(), "a parameter that does not exist");
  }
  void check(const ViewAndMutationMeta& meta, const TangentInfo& tangent) const {
    check(tangent.geometry);
    const std::size_t end = tangent.kind == TangentInfo::Kind::MutatedInput ? meta.inputs.size()
                            : tangent.kind == TangentInfo::Kind::Output     ? meta.outputs.size()
                                                                            : meta.intermediate_bases;
    require(tangent.index < end, "a tangent of something that does not exist");
    const std::vector<std::size_t> mutated = meta.mutated_at_run_time();
    require(tangent.kind != TangentInfo::Kind::MutatedInput ||
                std::find(mutated.begin(), mutated.end(), tangent.index) != mutated.end(),
            "a tangent of an input that is not written");
  }
  void check_states() const {
    const JointGraph& joint = capture_.joint;
    const auto in_order = [](const StateChain& a, const StateChain& b) {
      return a.phase < b.phase || (a.phase == b.phase && a.kind < b.kind);
    };
    require(std::is_sorted(joint.states.begin(), joint.states.end(), in_order), "states in another order");
    for (std::size_t i = 0; i < joint.states.size(); ++i) {
      const StateChain& state = joint.states[i];
      require(state.kind == StateKind::Token || state.device.is_cpu() || state.device.is_cuda(),
              "the state of a generator of another kind of device");
      const Operand& output = joint.graph.outputs[joint.first_state_output() + i];
      require(output.value() != kNoValue, "a state that is not returned");
    }
    for_each_meta(capture_, [&](const ViewAndMutationMeta& meta) {
      require(meta.tokens.size() == joint.states_of(Phase::Forward, StateKind::Token) &&
                  meta.backward_tokens == joint.states_of(Phase::Backward, StateKind::Token) &&
                  meta.random_states.size() == joint.states_of(Phase::Forward, StateKind::Generator) &&
                  meta.backward_random_states == joint.states_of(Phase::Backward, StateKind::Generator),
              "inconsistent number of states");
    });
  }
  void check_tensors() const {
    const JointGraph& joint = capture_.joint;
    const ViewAndMutationMeta& meta = capture_.meta;
    const auto tensors = static_cast<std::size_t>(std::count_if(
        meta.inputs.begin(), meta.inputs.end(), [](const InputInfo& info) { return info.is_tensor; }));
    require(capture_.primal_written.size() == tensors && capture_.primal_shares_changed.size() == tensors,
            "inconsistent number of tensors among the inputs");
    require(joint.subclasses || joint.primals == tensors, "inconsistent number of primals");
    require(joint.subclasses || joint.forward_returns() == meta.forward_returns(),
            "inconsistent number of results");
    require(capture_.memory_of_output.size() == joint.forward_outputs, "inconsistent number of outputs");
    require(capture_.geometry_after.size() == meta.mutated_at_run_time().size(),
            "inconsistent number of written inputs");
    require(capture_.memory_after.size() == capture_.geometry_after.size(),
            "inconsistent number of inputs with other memory");
    for (const auto& input : capture_.memory_after)
      require(!input || (*input < meta.inputs.size() && meta.inputs[*input].is_tensor),
              "an input in the memory of one that does not exist");
    for (const Geometry& geometry : capture_.geometry_after) check(geometry);
    for (const TangentInfo& tangent : joint.tangents) check(meta, tangent);
    capture_.guard.for_each_geometry([&](std::size_t, const Geometry& geometry) { check(geometry); });
  }
  void check_run_again() const {
    const JointGraph& joint = capture_.joint;
    require(!capture_.run_again ||
                capture_.run_again->fits(
                    capture_.meta.inputs.size(), capture_.primal_written.size(),
                    joint.subclasses ? joint.subclasses->tangents.size() : joint.tangents.size()),
            "a function that runs again with other inputs or results");
  }
  void check_halves() const {
    const Partition& halves = partitioned_.halves;
    const Graph &forward = halves.forward, &backward = halves.backward;
    const std::vector<ValueId>& saved = halves.saved;
    const JointGraph& joint = capture_.joint;
    for (const ValueId value : saved)
      require(static_cast<std::int32_t>(value) >= 0 && index_of(value) < joint.graph.values.size(),
              "a saved value that does not exist");
    const std::size_t of_forward = joint.states_of(Phase::Forward),
                      of_backward = joint.states_of(Phase::Backward);
    require(forward.inputs.size() == joint.primals + of_forward &&
                forward.outputs.size() == joint.forward_returns() + of_forward + saved.size() &&
                backward.inputs.size() == saved.size() + joint.tangents.size() + of_backward &&
                backward.outputs.size() == joint.backward_returns() + of_backward,
            "halves that do not fit the joint graph");
  }
  void check_deferred() const {
    const Partition& halves = partitioned_.halves;
    if (halves.deferred.empty()) return;
    require(!capture_.joint.tangents.empty(), "a backward that is split, of a function without one");
    const BackwardRoles roles = backward_roles(capture_, halves);
    require(roles.tensor.size() <= roles.results, "inconsistent number of gradients");
    const std::string why = why_not_deferred(halves.backward, roles, halves.deferred);
    require(why.empty(), why.c_str());
  }
  void check(const SubclassLayout& layout) const {
    const auto within = [&](const std::vector<FlattenRecord>& records, std::size_t count) {
      std::size_t next = 0;
      for (const FlattenRecord& record : records) {
        require((record.first_flat() == next || record.count() == 0) && record.first_flat() < count,
                "a subclass with tensors at other places");
        next = record.first_flat() + record.count();
        record.for_each_plain([&](const PlainTensorMeta& plain) {
          if (plain.geometry) check(*plain.geometry);
          require(plain.flat_index < count, "more tensors in subclasses than in the graph");
        });
      }
      require(next <= count, "more tensors in subclasses than in the graph");
    };
    const JointGraph& joint = capture_.joint;
    within(layout.inputs, joint.primals);
    within(layout.forward_outputs, joint.forward_outputs);
    within(layout.tangents, joint.tangents.size());
    within(layout.input_gradients, joint.backward_returns());
    require(layout.inputs.size() == capture_.primal_written.size() &&
                layout.forward_outputs.size() == capture_.meta.forward_returns() &&
                layout.in_mutated_input.size() == joint.forward_outputs,
            "inconsistent number of subclasses");
    for (const auto& input : layout.in_mutated_input)
      require(!input || *input < joint.primals, "a result in the memory of an input that does not exist");
    for (const FlattenRecord& record : layout.forward_outputs)
      record.for_each_plain([&](const PlainTensorMeta& plain) {
        require(plain.geometry || !layout.in_mutated_input[plain.flat_index],
                "a result in the memory of an input that is not a tensor");
      });
  }
  void check_symbols() const {
    const SymbolicTable* table = capture_.joint.graph.table.get();
    require(capture_.symbols.size() == (table ? table->symbols.symbols() : 0),
            "inconsistent number of symbols");
    for (const DynamicSymbol& symbol : capture_.symbols) {
      require(!symbol.places.empty() && symbol.multiple_of >= 1, "a symbol without a place");
      for (const DynamicSymbol::Place& place : symbol.places)
        require(place.input < capture_.guard.size(), "a symbol of an input that does not exist");
    }
  }

  const PartitionedCapture& partitioned_;
  const FunctionCapture& capture_;
  const GraphDecoder& decoder_;
};

}  // namespace

void check_capture(const PartitionedCapture& capture, const GraphDecoder& decoder) {
  CaptureCheck(capture, decoder).run();
}

Bytes encode_capture(const PartitionedCapture& partitioned) {
  const auto& [capture, halves] = partitioned;
  GraphEncoder encoder(kWho);
  encoder(kCaptureVersion, capture.wrappers.size());
  for (const WrapperInUse& used : capture.wrappers) encode_wrapper(encoder, used);
  encoder(capture, halves);
  return encoder.finish();
}

PartitionedCapture decode_capture(std::span<const std::uint8_t> bytes, const CallWrappers& wrappers,
                                  const std::vector<at::Tensor>& samples, const std::string& name) {
  GraphDecoder decoder(bytes, name, kMakeAgain, samples);
  PartitionedCapture partitioned;
  partitioned.capture.wrappers = decode_wrappers(decoder, wrappers);
  decoder(partitioned.capture);
  decoder.leave_verification_to_executor();
  decoder(partitioned.halves);
  decoder.expect_end();
  check_capture(partitioned, decoder);
  return partitioned;
}

CallGuard decode_guard_of_capture(std::span<const std::uint8_t> bytes, const std::vector<at::Tensor>& samples,
                                  const std::string& name) {
  GraphDecoder decoder(bytes, name, kMakeAgain, samples);
  decode_wrappers(decoder, default_call_wrappers());
  CallGuard guard;
  decoder(guard);
  return guard;
}

Bytes encode_guard(const CallGuard& guard) {
  GraphEncoder encoder(kWho);
  encoder(guard);
  return encoder.finish();
}

Bytes encode_kind(const CallGuard& guard) {
  CallGuard kind = guard;
  kind.for_each_geometry([](std::size_t, Geometry& geometry) {
    std::fill(geometry.sizes.begin(), geometry.sizes.end(), 0);
    std::fill(geometry.strides.begin(), geometry.strides.end(), 0);
    geometry.storage_offset = 0;
    geometry.symbolic = kNotSymbolic;
  });
  return encode_guard(kind);
}

CallGuard decode_guard(std::span<const std::uint8_t> bytes, const std::vector<at::Tensor>& samples,
                       const std::string& name) {
  GraphDecoder decoder(bytes, name, kMakeAgain, samples);
  CallGuard guard;
  decoder(guard);
  decoder.expect_end();
  return guard;
}

Bytes encode_joint(const FunctionCapture& capture) {
  GraphEncoder encoder(kWho);
  // What a compiler is told follows from these (CompileRequest).
  encoder(kCaptureVersion, capture.joint, capture.meta, capture.symbols, capture.convention.found,
          capture.primal_written);
  return encoder.finish();
}

}  // namespace penstock::graph
