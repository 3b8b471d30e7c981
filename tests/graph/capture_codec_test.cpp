// Captures as bytes: every stored field, random programs through the round trip, subclasses, symbols, and
// damage.
#include "penstock/graph/run/capture_codec.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <concepts>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "penstock/context_codec.h"
#include "penstock/errors.h"
#include "penstock/graph/codec/graph_decoder.h"
#include "penstock/graph/codec/graph_encoder.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_call.h"
#include "penstock/graph/run/generalize.h"
#include "penstock/graph/tools/graph_file.h"
#include "penstock/graph/wrap/duplicate_inputs.h"
#include "penstock/graph_compiler.h"
#include "tests/graph/random_program.h"
#include "tests/graph/registered_wrappers.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace capture_codec_test {

using sample::Boxed;
using test::has_text;
using test::message_of;
using test::same_tensor;

PartitionedCapture capture_of(const Function& function, const Values& inputs,
                              Partitioner partitioner = Partitioner::Default) {
  return partition(capture_function(function, inputs), partitioner);
}

// Writes an input, returns a view of it, and has numbers, text and a found tensor.
PartitionedCapture sample_capture() {
  static const at::Tensor found = torch::tensor({1.F, 2.F});
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor(), w = in[1].toTensor();
    w.detach().mul_(0.5);
    in[2].toTensor().add_(1);
    const at::Tensor y = torch::gelu(torch::mm(x, w) + found, "tanh");
    return {y, in[2].toTensor().t().view_as(in[2].toTensor().t()), y.view({-1}), 7, std::string("text")};
  };
  return capture_of(function,
                    {torch::randn({3, 4}).requires_grad_(), torch::randn({4, 2}), torch::randn({2, 5})});
}

void register_boxed_codec() {
  test::register_sample_kinds();
  if (find_context_codec("Boxed")) return;
  register_context_codec("Boxed",
                         {.encode = [](const Payload&) { return std::vector<std::uint8_t>(); },
                          .decode = [](const std::vector<std::uint8_t>&, const FlatWrapper& flat,
                                       const std::vector<at::Tensor>&) { return unflatten_wrapper(flat); }});
}

template <class T>
T again(const T& value) {
  GraphEncoder encoder("test");
  encoder(value);
  const Bytes bytes = encoder.finish();
  GraphDecoder decoder(bytes, "test", "");
  T read{};
  decoder(read);
  decoder.expect_end();
  return read;
}

// ---- fields ----

// One change of each field. That no field is missing is checked by the compiler (codec/fields.h).
template <class T>
using Changes = std::vector<std::pair<std::string, std::function<void(T&)>>>;

template <class T>
bool same(const T& a, const T& b) {
  if constexpr (std::same_as<T, ViewAndMutationMeta>)
    return a.same_in_every_field(b);
  else
    return a == b;
}

template <class T>
void expect_every_field(const T& plain, const Changes<T>& changes) {
  EXPECT_TRUE(same(again(plain), plain));
  for (const auto& [name, change] : changes) {
    T changed = plain;
    change(changed);
    EXPECT_FALSE(same(changed, plain)) << name << " is not compared";
    EXPECT_TRUE(same(again(changed), changed)) << name << " is lost";
  }
}

TEST(CaptureFields, OfInputs) {
  expect_every_field<InputInfo>(
      {}, {{"is_leaf", [](InputInfo& info) { info.is_leaf = true; }},
           {"mutates_data", [](InputInfo& info) { info.mutates_data = true; }},
           {"mutates_metadata", [](InputInfo& info) { info.mutates_metadata = true; }},
           {"hidden", [](InputInfo& info) { info.mutations_hidden_from_autograd = false; }},
           {"under no_grad", [](InputInfo& info) { info.mutations_under_no_grad = true; }},
           {"other memory",
            [](InputInfo& info) { info.mutates_metadata = info.mutates_storage_metadata = true; }},
           {"resizes_storage", [](InputInfo& info) { info.resizes_storage = true; }},
           {"requires_grad", [](InputInfo& info) { info.requires_grad = true; }},
           {"keep", [](InputInfo& info) { info.keep_input_mutations = true; }},
           {"touched", [](InputInfo& info) { info.is_touched = true; }},
           {"is_tensor", [](InputInfo& info) { info.is_tensor = false; }}});
}

Geometry some_geometry() { return geometry_of(torch::randn({3, 4}).t()); }

TEST(CaptureFields, OfGeometries) {
  const auto geometry = [](const std::function<void(Geometry&)>& change) {
    return [change](PlainTensorMeta& meta) { change(*meta.geometry); };
  };
  expect_every_field<PlainTensorMeta>(
      {0, geometry_of(torch::zeros({2, 3}, at::kComplexFloat))},
      {{"flat_index", [](PlainTensorMeta& meta) { meta.flat_index = 3; }},
       {"no geometry", [](PlainTensorMeta& meta) { meta.geometry.reset(); }},
       {"sizes", geometry([](Geometry& g) { g.sizes[0] = 5; })},
       {"dims", geometry([](Geometry& g) { g.sizes.push_back(1), g.strides.push_back(1); })},
       {"strides", geometry([](Geometry& g) { g.strides[1] = 9; })},
       {"offset", geometry([](Geometry& g) { g.storage_offset = 2; })},
       {"dtype", geometry([](Geometry& g) { g.dtype = at::kComplexDouble; })},
       {"device", geometry([](Geometry& g) { g.device = at::Device("cuda:1"); })},
       {"conjugated", geometry([](Geometry& g) { g.conjugated = true; })},
       {"negated", geometry([](Geometry& g) { g.negated = true; })},
       {"symbolic", geometry([](Geometry& g) { g.symbolic = 4; })}});
}

TEST(CaptureFields, OfOutputs) {
  OutputInfo plain;
  plain.geometry = some_geometry();
  const c10::OperatorHandle transpose =
      c10::Dispatcher::singleton().findSchema({"aten::transpose", "int"}).value();
  ViewStep step{
      transpose, {Operand::of(kNoValue), Operand::of(c10::IValue(0)), Operand::of(c10::IValue(1))}, 0, 0, {}};
  expect_every_field<OutputInfo>(
      plain, {{"kind", [](OutputInfo& info) { info.kind = OutputKind::CustomFunctionView; }},
              {"type", [](OutputInfo& info) { info.type = OutputType::String; }},
              {"base_index", [](OutputInfo& info) { info.base_index = 2; }},
              {"requires_grad", [](OutputInfo& info) { info.requires_grad = true; }},
              {"for backward", [](OutputInfo& info) { info.requires_grad_for_backward = true; }},
              {"same_as", [](OutputInfo& info) { info.same_as = 1; }},
              {"geometry", [](OutputInfo& info) { info.geometry.sizes[0] = 1; }},
              {"dynamic_dims", [](OutputInfo& info) { info.dynamic_dims = {1}; }},
              {"has_view_replay", [](OutputInfo& info) { info.has_view_replay = true; }},
              {"by_geometry", [](OutputInfo& info) { info.by_geometry = true; }},
              {"view", [&](OutputInfo& info) { info.view.steps = {step}; }},
              {"view's element",
               [&](OutputInfo& info) { info.view.steps = {step}, info.view.steps[0].element = 1; }},
              {"view's constant", [&](OutputInfo& info) {
                 info.view.steps = {step}, info.view.steps[0].arguments[2] = Operand::of(c10::IValue(3));
               }}});
}

TEST(CaptureFields, OfMetadata) {
  expect_every_field<TangentInfo>(
      {}, {{"kind", [](TangentInfo& info) { info.kind = TangentInfo::Kind::MutatedInput; }},
           {"index", [](TangentInfo& info) { info.index = 3; }},
           {"geometry", [](TangentInfo& info) { info.geometry = some_geometry(); }}});
  using Meta = ViewAndMutationMeta;
  expect_every_field<Meta>(
      {}, {{"inputs", [](Meta& meta) { meta.inputs.resize(2); }},
           {"outputs", [](Meta& meta) { meta.outputs.resize(3); }},
           {"bases", [](Meta& meta) { meta.intermediate_bases = 1; }},
           {"keep", [](Meta& meta) { meta.keep_input_mutations = true; }},
           {"tangents", [](Meta& meta) { meta.tangents.resize(1); }},
           {"grad mode on", [](Meta& meta) { meta.grad_mode_after = true; }},
           {"grad mode off", [](Meta& meta) { meta.grad_mode_after = false; }},
           {"symbols", [](Meta& meta) { meta.symbols_for_backward = 2; }},
           {"tokens", [](Meta& meta) { meta.tokens = {"ordered"}; }},
           {"backward tokens", [](Meta& meta) { meta.backward_tokens = 1; }},
           {"explicit random states", [](Meta& meta) { meta.explicit_random_states = true; }},
           {"random states", [](Meta& meta) { meta.random_states = {"cpu"}; }},
           {"backward random states", [](Meta& meta) { meta.backward_random_states = 3; }},
           {"static inputs", [](Meta& meta) {
              meta.static_inputs = {3, 5};
            }}});
}

// Those without an equality are compared by their bytes: a change that changes them was stored, and is read
// again.
using Capture = PartitionedCapture;
void expect_every_change(const Capture& plain, const Changes<Capture>& changes) {
  const Bytes bytes = encode_capture(plain);
  EXPECT_EQ(encode_capture(decode_capture(bytes)), bytes);
  for (const auto& [name, change] : changes) {
    Capture changed = decode_capture(bytes);
    change(changed);
    const Bytes other = encode_capture(changed);
    EXPECT_NE(other, bytes) << name << " is not stored";
    EXPECT_EQ(encode_capture(decode_capture(other)), other) << name << " is lost";
  }
}

TEST(CaptureFields, OfWholeCaptures) {
  expect_every_change(
      sample_capture(),
      {{"convention.found", [](Capture& c) { c.capture.convention.found = 1; }},
       {"convention.names",
        [](Capture& c) {
          c.capture.convention.names = {"a", "b", "c"};
        }},
       {"meta", [](Capture& c) { c.capture.meta.inputs[1].is_touched ^= true; }},
       {"primal_written", [](Capture& c) { c.capture.primal_written[0] ^= 1; }},
       {"primal_shares_changed", [](Capture& c) { c.capture.primal_shares_changed[0] ^= 1; }},
       {"geometry_after", [](Capture& c) { c.capture.geometry_after.at(0).storage_offset = 3; }},
       {"memory_after", [](Capture& c) { c.capture.memory_after.at(0) = 1; }},
       {"second_derivatives",
        [](Capture& c) { c.capture.second_derivatives = SecondDerivatives::RunAgainKeepingInputs; }},
       {"static_inputs", [](Capture& c) { c.capture.meta.static_inputs = {0}; }},
       {"memory_of_output", [](Capture& c) { c.capture.memory_of_output.at(0) = StorageId{77}; }},
       {"tangents", [](Capture& c) { c.capture.joint.tangents.at(0).geometry.strides.at(0) = 5; }},
       {"run_again", [](Capture& c) { c.capture.run_again = nullptr; }},
       {"guard",
        [](Capture& c) {
          c.capture.guard.for_each_geometry([](std::size_t, Geometry& g) { g.storage_offset = 1; });
        }},
       {"name of an input", [](Capture& c) { c.capture.joint.graph.inputs[0].name = "other"; }},
       {"constant's value",
        [](Capture& c) {
          c.capture.joint.graph.constants.at(0).tensor = torch::tensor({3.F, 4.F});
        }},
       {"phase", [](Capture& c) { c.capture.joint.graph.nodes[0].phase = Phase::Backward; }},
       {"grad_enabled", [](Capture& c) { c.capture.joint.graph.nodes[0].grad_enabled ^= true; }},
       {"forward", [](Capture& c) { c.halves.forward.nodes[0].grad_enabled ^= true; }},
       {"backward", [](Capture& c) { c.halves.backward.nodes[0].grad_enabled ^= true; }},
       {"saved", [](Capture& c) { std::reverse(c.halves.saved.begin(), c.halves.saved.end()); }}});
}

TEST(CaptureFields, OfCapturesForAllSizes) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor();
    return {x.mm(in[1].toTensor()).softmax(1) / x.size(0)};
  };
  const Values inputs{torch::randn({5, 3}).requires_grad_(), torch::randn({3, 2})};
  Generalized all =
      capture_for_all_sizes(function, inputs, {}, symbols_of({.dims = {{0, 0, "B"}}}, inputs, {}));
  ASSERT_TRUE(all.capture) << all.refused;
  const Capture plain = partition(std::move(*all.capture), Partitioner::Default);
  const auto table = [](const std::function<void(SymbolicTable&)>& change) {
    return [change](Capture& c) {
      SymbolicTable changed = *c.capture.joint.graph.table;
      change(changed);
      c.capture.joint.graph.table = std::make_shared<const SymbolicTable>(std::move(changed));
    };
  };
  const auto number = [](SymbolicTable& t) -> SymbolicConstant& {
    return *std::find_if(t.constants.begin(), t.constants.end(),
                         [](const SymbolicConstant& constant) { return constant.example.isInt(); });
  };
  expect_every_change(
      plain,
      {{"symbol's name", [](Capture& c) { c.capture.symbols.at(0).name = "C"; }},
       {"symbol's input", [](Capture& c) { c.capture.symbols.at(0).places.at(0).input = 1; }},
       {"symbol's dim", [](Capture& c) { c.capture.symbols.at(0).places.at(0).dim = 1; }},
       {"min", [](Capture& c) { c.capture.symbols.at(0).min = 2; }},
       {"max", [](Capture& c) { c.capture.symbols.at(0).max = 99; }},
       {"multiple_of", [](Capture& c) { c.capture.symbols.at(0).multiple_of = 2; }},
       {"symbols for backward", [](Capture& c) { c.capture.meta.symbols_for_backward ^= 1; }},
       {"used_by_calls", table([](SymbolicTable& t) { t.geometries.at(0).used_by_calls ^= true; })},
       {"size", table([](SymbolicTable& t) { t.geometries.at(0).sizes.at(0).reset(); })},
       {"offset",
        table([](SymbolicTable& t) { t.geometries.at(0).storage_offset = t.geometries.at(0).sizes.at(0); })},
       {"example", table([&](SymbolicTable& t) { number(t).example = c10::IValue(77); })},
       {"number", table([&](SymbolicTable& t) { number(t).numbers.at(0) = SizeExpression::constant(3); })}});
}

TEST(CaptureFields, OfSubclasses) {
  register_boxed_codec();
  const Function function = [](const Values& in) -> Values { return {in[0].toTensor() * in[1].toTensor()}; };
  const Values inputs{Boxed::make(torch::randn({3})).set_requires_grad(true), torch::randn({3})};
  const auto layout = [](const std::function<void(SubclassLayout&)>& change) {
    return [change](Capture& c) {
      SubclassLayout changed = *c.capture.joint.subclasses;
      change(changed);
      c.capture.joint.subclasses = std::make_shared<const SubclassLayout>(std::move(changed));
    };
  };
  const auto record = [&](std::vector<FlattenRecord> SubclassLayout::*list) {
    return layout([list](SubclassLayout& layout) {
      SubclassMeta meta = (layout.*list).at(0).subclass();
      meta.outer.storage_offset = 1;
      (layout.*list)[0] = FlattenRecord(std::move(meta));
    });
  };
  expect_every_change(
      capture_of(function, inputs),
      {{"inputs", record(&SubclassLayout::inputs)},
       {"forward outputs", record(&SubclassLayout::forward_outputs)},
       {"tangents", record(&SubclassLayout::tangents)},
       {"gradients", record(&SubclassLayout::input_gradients)},
       {"name of an inner tensor", layout([](SubclassLayout& layout) {
          SubclassMeta meta = layout.inputs[0].subclass();
          meta.attributes[0].first = "other";
          layout.inputs[0] = FlattenRecord(std::move(meta));
        })},
       {"in_mutated_input", layout([](SubclassLayout& layout) { layout.in_mutated_input.at(0) = 0; })}});
}

// Second derivatives run the function again, which is code of the program.
TEST(CaptureCodec, SecondDerivativesNeedTheFunction) {
  const Function function = [](const Values& in) -> Values {
    return {in[0].toTensor().sin() * in[1].toDouble()};
  };
  const at::Tensor x = torch::randn({3}).requires_grad_();
  PartitionedCapture read = decode_capture(encode_capture(capture_of(function, {x, 2.5})));
  const auto slope_of = [&](const PartitionedCapture& capture) {
    const CompiledCall call(capture, graph_compiler(kExecutorCompiler));
    return torch::autograd::grad({call.run({x, 2.5})[0].toTensor().sum()}, {x}, {}, true, true)[0];
  };
  EXPECT_TRUE(
      has_text(message_of<NotImplemented>([&] { slope_of(read); }), "the call was decoded without it"));
  read.capture.set_function(function);
  const at::Tensor slope = slope_of(read);
  EXPECT_TRUE(torch::equal(slope, x.cos() * 2.5));
  EXPECT_TRUE(torch::equal(torch::autograd::grad({slope.sum()}, {x})[0], -x.sin() * 2.5));
}

TEST(CaptureCodec, GraphsThatWriteTheirInputs) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor before = in[0].toTensor() + in[1].toTensor();
    in[0].toTensor().add_(2);
    return {before, in[0].toTensor() * in[1].toTensor()};
  };
  const auto inputs = [] {
    torch::manual_seed(3);
    return Values{torch::randn({3}), torch::randn({3}).requires_grad_()};
  };
  const PartitionedCapture made = partition(
      capture_function(function, inputs(), {}, default_call_wrappers(), true), Partitioner::Default);
  ASSERT_EQ(made.capture.joint.written_in_graph, std::vector<std::size_t>{0});
  const Bytes bytes = encode_capture(made);
  PartitionedCapture read = decode_capture(bytes);
  EXPECT_EQ(encode_capture(read), bytes);
  EXPECT_EQ(read.capture.joint.written_in_graph, std::vector<std::size_t>{0});
  const GraphFile file = decode_graph(encode_graph({made.capture.joint, made.capture.meta, {}, {}}));
  EXPECT_EQ(file.joint.written_in_graph, std::vector<std::size_t>{0});
  const CompiledCall call(std::move(read), graph_compiler(kExecutorCompiler));
  const Values in = inputs(), expected_in = inputs();
  const Values results = call.run(in), expected = function(expected_in);
  (results[0].toTensor() + results[1].toTensor()).sum().backward();
  (expected[0].toTensor() + expected[1].toTensor()).sum().backward();
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(torch::equal(results[i].toTensor(), expected[i].toTensor())) << i;
    EXPECT_TRUE(torch::equal(in[i].toTensor(), expected_in[i].toTensor())) << i;
  }
  EXPECT_TRUE(torch::equal(in[1].toTensor().grad(), expected_in[1].toTensor().grad()));
  EXPECT_EQ(in[0].toTensor()._version(), expected_in[0].toTensor()._version());
}

// After set_, an input is in the memory of another one.
TEST(CaptureCodec, InputsThatGetOtherMemory) {
  const Function function = [](const Values& in) -> Values {
    in[0].toTensor().set_(in[1].toTensor());
    in[1].toTensor().mul_(3);
    return {in[0].toTensor() + 1};
  };
  const auto inputs = [] {
    torch::manual_seed(4);
    return Values{torch::randn({3}), torch::randn({3})};
  };
  PartitionedCapture read = decode_capture(encode_capture(capture_of(function, inputs())));
  ASSERT_FALSE(read.capture.memory_after.empty());
  EXPECT_EQ(read.capture.memory_after[0], std::optional<std::size_t>(1));
  const CompiledCall call(std::move(read), graph_compiler(kExecutorCompiler));
  const Values in = inputs(), expected_in = inputs();
  const Values results = call.run(in), expected = function(expected_in);
  EXPECT_TRUE(torch::equal(results[0].toTensor(), expected[0].toTensor()));
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_TRUE(torch::equal(in[i].toTensor(), expected_in[i].toTensor())) << i;
  EXPECT_TRUE(in[0].toTensor().is_alias_of(in[1].toTensor()));
}

TEST(CaptureFields, OfGuards) {
  const Values inputs{torch::randn({3, 4}), 7, std::string("text"), 0.5, c10::IValue()};
  const CallGuard guard = decode_guard(encode_guard(CallGuard(inputs, {})), {}, "test");
  EXPECT_TRUE(guard.holds(inputs));
  const auto differs = [&](const Values& other) {
    return !guard.holds(other) && !guard.difference(other).empty();
  };
  for (std::size_t i = 1; i < 4; ++i) {
    Values other = inputs;
    other[i] = c10::IValue(8);
    EXPECT_TRUE(differs(other)) << i;
  }
  EXPECT_TRUE(differs({torch::randn({4, 3}).t(), 7, std::string("text"), 0.5, c10::IValue()}));
  EXPECT_TRUE(differs({torch::randn({3, 4}).requires_grad_(), 7, std::string("text"), 0.5, c10::IValue()}));
  {
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(has_text(guard.difference(inputs), "grad mode"));
  }
  at::globalContext().setDeterministicAlgorithms(true, false);
  EXPECT_TRUE(has_text(guard.difference(inputs), "deterministic"));
  at::globalContext().setDeterministicAlgorithms(false, false);
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  EXPECT_TRUE(has_text(guard.difference(inputs), "default dtype"));
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  const at::Tensor shared = torch::randn({4});
  const CallGuard sharing =
      decode_guard(encode_guard(CallGuard({shared, shared}, {2, {"a", "b"}})), {}, "test");
  EXPECT_TRUE(sharing.holds({shared, shared}));
  EXPECT_TRUE(
      has_text(sharing.difference({shared, shared.clone()}), "b shares memory with different inputs"));
}

// ---- programs ----

void expect_same_after_round_trip(const Looks looks, unsigned programs) {
  unsigned compared = 0;
  for (unsigned seed = 0; seed < programs; ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    torch::manual_seed(seed);
    const Tensors leaves{torch::randint(-4, 5, {3, 4}).to(at::kFloat).set_requires_grad(true),
                         torch::randint(-4, 5, {3, 4}).to(at::kFloat).set_requires_grad(seed % 3 != 0),
                         torch::randint(-4, 5, {4}).to(at::kFloat).set_requires_grad(seed % 2 == 0)};
    const auto prepare = [&](const Tensors& fresh) {
      Tensors inputs;
      for (const at::Tensor& tensor : fresh) inputs.push_back(tensor.clone());
      if (seed % 4 == 1) inputs.push_back(inputs[0].slice(0, 1));
      if (seed % 4 == 2) inputs.push_back(inputs[1]);
      return inputs;
    };
    const Function function =
        over_tensors([&](const Tensors& in) { return random_program(seed, in, looks); });
    Trace expected;
    try {
      expected = trace_of(function, leaves, prepare);
    } catch (const c10::Error&) {
      continue;  // not a legal program
    }
    if (expected.refused) continue;
    try {
      const auto call_from_bytes = [&](const Values& inputs) {
        const PartitionedCapture made =
            capture_of(function, inputs, seed % 2 ? Partitioner::MinCut : Partitioner::Default);
        const Bytes bytes = encode_capture(made);
        PartitionedCapture read = decode_capture(bytes);
        EXPECT_EQ(encode_capture(read), bytes);
        EXPECT_TRUE(read.capture.guard.holds(inputs)) << read.capture.guard.difference(inputs);
        return CompiledCall(std::move(read), graph_compiler(kExecutorCompiler)).run(inputs);
      };
      const Trace actual = trace_of(call_from_bytes, leaves, prepare);
      expect_same(actual.outputs, expected.outputs, "output");
      expect_same_look(actual.outputs, expected.outputs, "output");
      expect_same(actual.inputs, expected.inputs, "input");
      expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
      ++compared;
    } catch (const NotImplemented&) {
      // A limit of captures.
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(compared * 10, programs * 3) << "of " << programs << " programs";
}

unsigned programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::atoi(asked)) : 200;
}

TEST(CaptureCodec, RandomProgramsAreTheSameAfterARoundTrip) {
  expect_same_after_round_trip(Looks::Floats, programs());
}
TEST(CaptureCodec, RandomProgramsOfAnyDtypeAreTheSameAfterARoundTrip) {
  expect_same_after_round_trip(Looks::AnyDtype, programs());
}
TEST(CaptureCodec, RandomProgramsOfAnyWriteAreTheSameAfterARoundTrip) {
  expect_same_after_round_trip(Looks::AnyWrite, programs());
}

TEST(CaptureCodec, WrappersAreAppliedAgain) {
  const Function function = [](const Values& in) -> Values {
    in[0].toTensor().mul_(3);
    return {in[1].toTensor() + in[2].toTensor(), in[0], in[2].toTensor().view({-1}), in[3].toTensor() * 2};
  };
  const auto inputs = [] {
    torch::manual_seed(7);
    const at::Tensor memory = torch::randn({5}, at::kComplexFloat);
    const at::Tensor a = memory.slice(0, 0, 4);
    return Values{a, a, memory.slice(0, 1, 5), torch::randn({3}, at::kComplexFloat).conj()};
  };
  const Bytes bytes = encode_capture(capture_of(function, inputs()));
  PartitionedCapture read = decode_capture(bytes);
  ASSERT_EQ(read.capture.wrappers.size(), 3U);
  const CompiledCall call(std::move(read), graph_compiler(kExecutorCompiler));
  const Values in = inputs(), expected_in = inputs();
  const Values results = call.run(in), expected = function(expected_in);
  for (std::size_t i = 0; i < results.size(); ++i)
    EXPECT_TRUE(torch::equal(results[i].toTensor().resolve_conj(), expected[i].toTensor().resolve_conj()))
        << i;
  EXPECT_TRUE(results[1].toTensor().is_same(in[0].toTensor()));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { decode_capture(bytes, {}); }), "more wrappers"));
  const CallWrappers others{default_call_wrappers()[1], default_call_wrappers()[2],
                            default_call_wrappers()[1]};
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { decode_capture(bytes, others); }),
                       "the program has no wrapper named 'duplicate inputs'"));
}

// Each of them is found by a check of its own, before anything uses it.
TEST(CaptureCodec, WhatDoesNotFitTogetherIsRefused) {
  const PartitionedCapture sound = sample_capture();
  const auto refusal = [&](const std::function<void(PartitionedCapture&)>& spoil) {
    PartitionedCapture spoiled = sound;
    spoil(spoiled);
    return message_of<ValueError>([&] { decode_capture(encode_capture(spoiled)); });
  };
  EXPECT_TRUE(
      has_text(refusal([](auto& c) { c.halves.backward.outputs.pop_back(); }), "halves that do not fit"));
  const auto geometry = [](PartitionedCapture& c) -> Geometry& {
    return c.capture.joint.graph.values.at(0).geometry;
  };
  EXPECT_TRUE(has_text(refusal([&](auto& c) { geometry(c).conjugated = true; }),
                       "a conjugate of a tensor that is not complex"));
  EXPECT_TRUE(has_text(refusal([&](auto& c) { geometry(c).sizes[0] = geometry(c).strides[0] = 1LL << 40; }),
                       "a tensor that is too large"));
  Bytes longer = encode_capture(sound);
  longer.push_back(0);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { decode_capture(longer); }), "1 trailing bytes"));
  // A duplicate must be of an earlier input that is none itself.
  using Places = std::vector<std::size_t>;
  for (const auto& first : {Places{1, 1}, Places{0, 0, 1}}) {
    GraphEncoder encoder("test");
    encoder(first);
    const Bytes bytes = encoder.finish();
    GraphDecoder decoder(bytes, "test", "");
    EXPECT_TRUE(
        has_text(message_of<ValueError>([&] { DuplicateInputsWrapper().load(decoder, first.size()); }),
                 "a duplicate of an input that is none"));
  }
}

TEST(CaptureCodec, ConstantsKeepTheirMemory) {
  const at::Tensor memory = torch::arange(12.).to(at::kFloat);
  const at::Tensor strided = memory.as_strided({2, 3}, {1, 2}, 3),
                   repeated = memory.slice(0, 5, 6).expand({3});
  const Function function = [&](const Values& in) -> Values {
    return {in[0].toTensor() + strided, in[0].toTensor() * repeated};
  };
  const PartitionedCapture read =
      decode_capture(encode_capture(capture_of(function, {torch::randn({2, 3})})));
  const std::vector<ConstantTensor>& constants = read.capture.joint.graph.constants;
  ASSERT_EQ(constants.size(), 2U);
  EXPECT_TRUE(has_geometry(constants[0].tensor, geometry_of(strided)));
  EXPECT_TRUE(torch::equal(constants[0].tensor, strided));
  EXPECT_TRUE(torch::equal(constants[1].tensor, repeated));
  EXPECT_TRUE(constants[0].tensor.is_alias_of(constants[1].tensor));
  EXPECT_TRUE(read.halves.forward.constants.at(0).tensor.is_same(constants[0].tensor));
}

TEST(CaptureCodec, SubclassesNeedACodec) {
  test::register_sample_kinds();
  const Function function = [](const Values& in) -> Values { return {in[0].toTensor() * in[1].toTensor()}; };
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] {
                         const at::Tensor x = sample::Two::make(torch::randn({3}), torch::randn({3}));
                         encode_capture(capture_of(function, {x, torch::randn({3})}));
                       }),
                       "kind Two cannot be saved"));
  register_boxed_codec();
  EXPECT_THROW(register_context_codec("Boxed", {}), StateError);
  const Values inputs{Boxed::make(torch::randn({3})).set_requires_grad(true), torch::randn({3})};
  const PartitionedCapture made = capture_of(function, inputs);
  PartitionedCapture read = decode_capture(encode_capture(made));
  EXPECT_EQ(*read.capture.joint.subclasses, *made.capture.joint.subclasses);
  EXPECT_TRUE(read.capture.guard.holds(inputs)) << read.capture.guard.difference(inputs);
  const CompiledCall call(std::move(read), graph_compiler(kExecutorCompiler));
  const at::Tensor result = call.run(inputs)[0].toTensor();
  EXPECT_TRUE(same_tensor(result.detach(), function(inputs)[0].toTensor().detach()));
  result.sum().backward();
  EXPECT_TRUE(same_tensor(inputs[0].toTensor().grad(), Boxed::make(inputs[1].toTensor())));
}

TEST(CaptureCodec, DamageIsAnErrorNeverACrash) {
  const Bytes bytes = encode_capture(sample_capture());
  std::mt19937 random(5);
  const char* asked = std::getenv("PENSTOCK_FUZZ_FILES");
  const int rounds = asked ? std::atoi(asked) : 3000;
  int sound = 0;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    Bytes damaged = bytes;
    switch (random() % 4) {
      case 0:
        damaged.resize(random() % damaged.size());
        break;
      case 1:
        damaged.push_back(static_cast<std::uint8_t>(random()));
        break;
      default:
        for (std::size_t flips = 1 + random() % 3; flips > 0; --flips)
          damaged[random() % damaged.size()] ^= static_cast<std::uint8_t>(1u << (random() % 8));
    }
    try {
      const CompiledCall call(decode_capture(damaged), graph_compiler(kExecutorCompiler));
      ++sound;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(sound, 0);
  EXPECT_LT(sound, rounds);
}

}  // namespace capture_codec_test
}  // namespace penstock::graph
