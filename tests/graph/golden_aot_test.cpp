// All functions of the reference data's section `aot`.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <set>
#include <utility>

#include "penstock/graph/run/compiled.h"
#include "penstock/graph/wrap/call_wrapper.h"
#include "penstock/graph/wrap/inputs_wrapper.h"
#include "tests/golden_data.h"
#include "tests/graph/program.h"

namespace penstock::graph {
namespace golden_aot_test {

using nlohmann::json;
using test::Program;

struct Case {
  std::string id;
  json data;
};

const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = [] {
    const json top = test::read_json(test::golden_folder() / "index.json");
    const std::filesystem::path path =
        test::golden_folder() / top.at("sections").at("aot").get<std::string>();
    const json index = test::read_json(path);
    std::vector<Case> read;
    for (const json& entry : index.at("cases"))
      read.push_back(
          {entry.at("id"), test::read_json(path.parent_path() / entry.at("file").get<std::string>())});
    EXPECT_EQ(read.size(), top.at("counts").at("aot").get<std::size_t>());
    EXPECT_FALSE(read.empty());
    return read;
  }();
  return cases;
}

bool is_random_case(const Case& item) { return !item.data.at("rng_seed").is_null(); }

// Tolerances for floating point as documented with the reference data: kernels of other versions round
// differently.
::testing::AssertionResult matches(const at::Tensor& actual, const json& expected, bool values = true) {
  if (expected.is_null())
    return actual.defined() ? ::testing::AssertionFailure() << "defined" : ::testing::AssertionSuccess();
  if (!actual.defined()) return ::testing::AssertionFailure() << "undefined";
  const at::Tensor wanted = test::tensor_of(expected);
  if (actual.sizes() != wanted.sizes())
    return ::testing::AssertionFailure() << "sizes " << actual.sizes() << ", expected " << wanted.sizes();
  if (actual.scalar_type() != wanted.scalar_type())
    return ::testing::AssertionFailure() << "dtype " << actual.scalar_type();
  if (values && !torch::allclose(actual.detach().to(at::kDouble), wanted.to(at::kDouble), 1e-5, 1e-6, true))
    return ::testing::AssertionFailure() << "values " << actual << "\nexpected " << wanted;
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult same_layout(const at::Tensor& actual, const json& expected) {
  if (actual.strides() != at::IntArrayRef(expected.at("stride").get<std::vector<std::int64_t>>()) ||
      actual.storage_offset() != expected.at("storage_offset").get<std::int64_t>())
    return ::testing::AssertionFailure()
           << "strides " << actual.strides() << " from " << actual.storage_offset() << ", expected "
           << expected.at("stride") << " from " << expected.at("storage_offset");
  return ::testing::AssertionSuccess();
}

bool shares_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

// How often the recorded loss counts a tensor that is passed twice: once or twice, as the data says.
test::PassedTwice passed_twice_in(const json& eager, const std::vector<c10::IValue>& inputs) {
  for (const json& place : eager.at("cotangent_on_inputs"))
    for (std::size_t earlier = 0; earlier < place.get<std::size_t>(); ++earlier)
      if (inputs[earlier].isTensor() &&
          inputs[earlier].toTensor().is_same(inputs[place.get<std::size_t>()].toTensor()))
        return test::PassedTwice::OnceForEachPlace;
  return test::PassedTwice::Once;
}

// Compares a call with the recorded plain run of PyTorch 2.14: `call` gets the arguments and may modify them
// like the function.
void expect_eager(const Case& item,
                  const std::function<std::vector<c10::IValue>(const std::vector<c10::IValue>&)>& call) {
  SCOPED_TRACE(item.id);
  const json& eager = item.data.at("eager");
  const bool values = !is_random_case(item);
  if (!values) torch::manual_seed(item.data.at("rng_seed").get<std::uint64_t>());
  const Program program(item.data.at("program"));
  const Program::Arguments arguments = program.arguments();
  const std::vector<c10::IValue>& inputs = arguments.inputs;
  ASSERT_EQ(inputs.size(), eager.at("inputs").size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_TRUE(matches(inputs[i].toTensor(), eager.at("inputs").at(i))) << "input " << i;
    EXPECT_TRUE(same_layout(inputs[i].toTensor(), eager.at("inputs").at(i))) << "input " << i;
  }
  std::vector<c10::IValue> outputs;
  {
    const torch::AutoGradMode restore(true);
    outputs = call(inputs);
    EXPECT_EQ(torch::GradMode::is_enabled(), eager.at("grad_mode_after").get<bool>());
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_TRUE(matches(inputs[i].toTensor(), eager.at("inputs_after").at(i), values))
        << "input " << i << " afterwards";
    EXPECT_TRUE(same_layout(inputs[i].toTensor(), eager.at("inputs_after").at(i)))
        << "input " << i << " afterwards";
    EXPECT_EQ(inputs[i].toTensor().requires_grad(), eager.at("input_requires_grad").at(i).get<bool>())
        << "input " << i << " afterwards";
    EXPECT_EQ(inputs[i].toTensor().is_leaf(), eager.at("input_is_leaf").at(i).get<bool>())
        << "input " << i << " afterwards";
  }
  ASSERT_EQ(outputs.size(), eager.at("outputs").size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const json& expected = eager.at("outputs").at(i);
    ASSERT_EQ(outputs[i].isTensor(), expected.at("tensor").get<bool>()) << "output " << i;
    if (!outputs[i].isTensor()) continue;
    const at::Tensor& output = outputs[i].toTensor();
    EXPECT_TRUE(matches(output, expected, values)) << "output " << i;
    EXPECT_TRUE(same_layout(output, expected)) << "output " << i;
    EXPECT_EQ(output.requires_grad(), expected.at("requires_grad").get<bool>()) << "output " << i;
    std::vector<std::size_t> is_input, with_inputs, with_outputs, same_objects;
    for (std::size_t j = 0; j < inputs.size(); ++j) {
      if (output.is_same(inputs[j].toTensor())) is_input.push_back(j);
      if (shares_storage(output, inputs[j].toTensor())) with_inputs.push_back(j);
    }
    for (std::size_t j = 0; j < outputs.size(); ++j) {
      if (j == i || !outputs[j].isTensor()) continue;
      if (shares_storage(output, outputs[j].toTensor())) with_outputs.push_back(j);
      if (output.is_same(outputs[j].toTensor())) same_objects.push_back(j);
    }
    EXPECT_EQ(json(is_input), expected.at("is_input")) << "output " << i;
    EXPECT_EQ(json(with_inputs), expected.at("shares_storage_with_inputs")) << "output " << i;
    EXPECT_EQ(json(with_outputs), expected.at("shares_storage_with_outputs")) << "output " << i;
    EXPECT_EQ(json(same_objects), expected.at("is_same_object_as_outputs")) << "output " << i;
  }
  if (!eager.at("grad_error").is_null()) {  // a tensor that backward needs was overwritten
    EXPECT_THROW(test::gradients_of(arguments, outputs), std::exception);
    return;
  }
  const test::Gradients gradients = test::gradients_of(arguments, outputs, passed_twice_in(eager, inputs));
  EXPECT_EQ(json(gradients.on_outputs), eager.at("cotangent_on_outputs"));
  EXPECT_EQ(json(gradients.on_inputs), eager.at("cotangent_on_inputs"));
  ASSERT_EQ(gradients.differentiated, !eager.at("loss").is_null());
  if (gradients.differentiated && values) {
    EXPECT_NEAR(gradients.loss, eager.at("loss").get<double>(), 1e-5);
  }
  ASSERT_EQ(gradients.leaves.size(), eager.at("leaf_grads").size());
  for (std::size_t i = 0; i < gradients.leaves.size(); ++i)
    EXPECT_TRUE(matches(gradients.leaves[i], eager.at("leaf_grads").at(i), values))
        << "gradient of leaf " << i;
}

TEST(GoldenAot, ProgramsMatchThePlainRun) {
  for (const Case& item : all_cases()) {
    const Program program(item.data.at("program"));
    expect_eager(item, [&](const auto& inputs) { return program(inputs); });
  }
}

json to_json(const InputInfo& info) {
  return {{"is_leaf", info.is_leaf},
          {"mutates_data", info.mutates_data},
          {"mutates_metadata", info.mutates_metadata},
          {"mutations_hidden_from_autograd", info.mutations_hidden_from_autograd},
          {"mutations_under_no_grad_or_inference_mode", info.mutations_under_no_grad},
          {"mutates_storage_metadata", info.mutates_storage_metadata},
          {"mutation_inductor_storage_resize", info.resizes_storage},
          {"requires_grad", info.requires_grad},
          {"keep_input_mutations", info.keep_input_mutations},
          {"mutation_type", std::string(to_text(info.mutation_type()))}};
}

json to_json(const OutputInfo& info) {
  return {{"output_type", std::string(to_text(info.kind))},
          {"base_idx", info.base_index ? json(*info.base_index) : json()},
          {"requires_grad", info.requires_grad},
          {"requires_grad_for_backward", info.requires_grad_for_backward},
          {"raw_type", std::string(to_text(info.type))},
          {"has_view_replay", info.has_view_replay},
          {"dynamic_dims", info.type == OutputType::Tensor ? json::array() : json()}};
}

json to_json(const ViewAndMutationMeta& meta) {
  json result;
  result["input_info"] = json::array();
  for (const InputInfo& info : meta.inputs) result["input_info"].push_back(to_json(info));
  result["output_info"] = json::array();
  for (const OutputInfo& info : meta.outputs) result["output_info"].push_back(to_json(info));
  result["num_intermediate_bases"] = meta.intermediate_bases;
  result["keep_input_mutations"] = meta.keep_input_mutations;
  result["mutated_inp_runtime_indices"] = meta.mutated_at_run_time();
  result["mutated_graph_handled_indices"] = meta.mutated_in_graph();
  result["mutated_graph_handled_indices_seen_by_autograd"] = meta.mutated_in_graph_seen_by_autograd();
  result["aliased_out_indices"] = meta.aliased_outputs();
  result["unsafe_view_out_indices"] = meta.unsafe_view_outputs();
  result["num_outputs"] = meta.outputs.size();
  result["num_outputs_non_aliased"] = meta.outputs_non_aliased();
  result["num_outputs_aliased_to_inputs"] = meta.outputs_aliased_to_inputs();
  result["num_outputs_aliased_to_intermediates"] = meta.outputs_aliased_to_intermediates();
  result["num_outputs_aliased"] = meta.aliased_outputs().size();
  result["num_unsafe_view_outputs"] = meta.unsafe_view_outputs().size();
  result["num_forward_returns"] = meta.forward_returns();
  result["num_forward"] = meta.forward_outputs();
  result["num_traced_tangents"] = meta.tangents.size();
  result["traced_tangent_shapes"] = json::array();
  result["traced_tangent_origin"] = json::array();
  for (const TangentInfo& tangent : meta.tangents) {
    result["traced_tangent_shapes"].push_back(
        std::vector<std::int64_t>(tangent.geometry.sizes.begin(), tangent.geometry.sizes.end()));
    const char* origin =
        tangent.kind == TangentInfo::Kind::MutatedInput ? "mutated_input" : "intermediate_base";
    result["traced_tangent_origin"].push_back(
        tangent.kind == TangentInfo::Kind::Output ? "output:" + std::to_string(tangent.index) : origin);
  }
  result["grad_enabled_mutation"] = meta.grad_mode_after ? json(*meta.grad_mode_after) : json();
  result["num_tokens"] = meta.tokens.size();
  result["is_rng_op_functionalized"] = meta.explicit_random_states;
  return result;
}

// The differing fields, one line each.
std::string difference(const json& actual, const json& expected) {
  std::string text;
  for (const auto& [key, value] : expected.items())
    if (!actual.contains(key) || actual.at(key) != value)
      text += key + ": " + (actual.contains(key) ? actual.at(key).dump() : "missing") + ", expected " +
              value.dump() + "\n";
  return text;
}

TEST(GoldenAot, MetadataOfTheFunctionAsCalled) {
  for (const Case& item : all_cases())
    for (const auto& [variant, expected] : item.data.at("variants").items()) {
      SCOPED_TRACE(item.id + " " + variant);
      const Program program(item.data.at("program"));
      const Program::Arguments arguments = program.arguments();
      const AnalyzeOptions options{.keep_input_mutations = variant == "default_keep"};
      EXPECT_EQ(difference(to_json(analyze([&](const Values& inputs) { return program(inputs); },
                                           arguments.inputs, options)),
                           expected.at("meta_user")),
                "");
    }
}

// Cases where derived metadata is less precise than an analysis of the inner function
// (InputsWrapper::derived_meta), or refers to an input by position for what belongs to no input.
bool derivation_is_inexact(const ViewAndMutationMeta& user, const Values& inputs) {
  std::set<const c10::TensorImpl*> written;  // a tensor passed twice counts once
  bool unseen = user.grad_mode_after.has_value();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (user.inputs[i].mutates_data) written.insert(inputs[i].toTensor().unsafeGetTensorImpl());
    unseen |= user.inputs[i].mutations_under_no_grad;
  }
  return unseen || written.size() > 1 ||
         std::any_of(user.outputs.begin(), user.outputs.end(), [](const OutputInfo& info) {
           return info.base_index && info.kind != OutputKind::AliasOfInput;
         });
}

TEST(GoldenAot, MetadataWithInputsMadeDistinct) {
  for (const Case& item : all_cases())
    for (const auto& [variant, expected] : item.data.at("variants").items()) {
      SCOPED_TRACE(item.id + " " + variant);
      const Program program(item.data.at("program"));
      const Function function = [&](const Values& inputs) { return program(inputs); };
      const Values inputs = program.arguments().inputs;
      const AnalyzeOptions options{.keep_input_mutations = variant == "default_keep"};
      const ViewAndMutationMeta user = analyze(function, inputs, options);
      FunctionForm form(function, inputs, options, user);
      ViewAndMutationMeta derived = user;
      bool changed = false;
      for (const auto& wrapper : default_call_wrappers()) {
        const Values outer_inputs = form.inputs();
        const auto applied = std::dynamic_pointer_cast<const InputsWrapper>(wrapper->apply(form));
        if (!applied) continue;
        derived = applied->derived_meta(std::move(derived), outer_inputs);
        changed = true;
      }
      const bool same = expected.at("meta_inner") == "same_as_meta_user";
      EXPECT_EQ(changed, !same);
      const json& wanted = same ? expected.at("meta_user") : expected.at("meta_inner");
      EXPECT_EQ(difference(to_json(derived), wanted), "");
      // What captured calls use.
      if (same || !derivation_is_inexact(user, inputs)) {
        EXPECT_EQ(difference(to_json(form.meta()), wanted), "");
      }
    }
}

// Captured on the first call, replayed on the second: results, mutated inputs, aliasing and gradients of the
// plain run.
void expect_compiled(Partitioner partitioner) {
  for (const Case& item : all_cases()) {
    SCOPED_TRACE(item.id);
    const Program program(item.data.at("program"));
    Compiled compiled([&](const Values& inputs) { return program(inputs); }, {.partitioner = partitioner});
    // Backward is captured with the call and rejected there.
    if (!item.data.at("eager").at("grad_error").is_null()) {
      const Program::Arguments arguments = program.arguments();
      EXPECT_THROW(test::gradients_of(arguments, compiled(arguments.inputs)), std::exception);
      continue;
    }
    for (int call = 0; call < 2; ++call)
      expect_eager(item, [&](const auto& inputs) { return compiled(inputs); });
    EXPECT_EQ(compiled.captures(), 1u);
    EXPECT_EQ(count_writes(compiled.joint(0).graph), 0u) << to_text(compiled.joint(0).graph);
  }
}

TEST(GoldenAot, CompiledFunctionsMatchThePlainRun) { expect_compiled(Partitioner::Default); }
TEST(GoldenAot, MinCutFunctionsMatchThePlainRun) { expect_compiled(Partitioner::MinCut); }

// A tensor that is passed twice and written is one input and one result of the graph: it has one tangent,
// however the caller uses its two names.
TEST(GoldenAot, ATensorPassedTwiceAndWrittenHasOneTangent) {
  std::size_t found = 0;
  for (const Case& item : all_cases()) {
    SCOPED_TRACE(item.id);
    if (!item.data.at("eager").at("grad_error").is_null() || is_random_case(item)) continue;
    const Program program(item.data.at("program"));
    const auto distinct_written = [](const ViewAndMutationMeta& meta, const Values& inputs) {
      std::set<const c10::TensorImpl*> tensors;
      std::size_t places = 0;
      for (std::size_t i = 0; i < inputs.size(); ++i)
        if (meta.inputs[i].mutates_data && meta.inputs[i].requires_grad)
          ++places, tensors.insert(inputs[i].toTensor().unsafeGetTensorImpl());
      return std::pair(places, tensors.size());
    };
    Compiled compiled([&](const Values& inputs) { return program(inputs); });
    const torch::AutoGradMode restore(true);
    const Program::Arguments arguments = program.arguments();
    const std::vector<c10::IValue> outputs = compiled(arguments.inputs);
    const auto [places, tensors] = distinct_written(compiled.meta(0), arguments.inputs);
    if (places == tensors) continue;
    ++found;
    const auto& tangents = compiled.joint(0).tangents;
    EXPECT_EQ(std::count_if(
                  tangents.begin(), tangents.end(),
                  [](const TangentInfo& tangent) { return tangent.kind == TangentInfo::Kind::MutatedInput; }),
              static_cast<std::ptrdiff_t>(tensors));
    // Counted once or twice, gradients match the plain run.
    for (const test::PassedTwice twice : {test::PassedTwice::Once, test::PassedTwice::OnceForEachPlace}) {
      const Program::Arguments plain = program.arguments(), captured = program.arguments();
      const test::Gradients expected = test::gradients_of(plain, program(plain.inputs), twice);
      const test::Gradients actual = test::gradients_of(captured, compiled(captured.inputs), twice);
      EXPECT_EQ(expected.on_inputs.size(), twice == test::PassedTwice::Once ? tensors : places);
      EXPECT_EQ(actual.on_inputs, expected.on_inputs);
      EXPECT_NEAR(actual.loss, expected.loss, 1e-5);
      for (std::size_t i = 0; i < expected.leaves.size(); ++i)
        EXPECT_TRUE(expected.leaves[i].defined() == actual.leaves[i].defined() &&
                    (!expected.leaves[i].defined() ||
                     torch::allclose(actual.leaves[i], expected.leaves[i], 1e-5, 1e-6)))
            << "gradient of leaf " << i;
    }
  }
  if (found == 0 && std::getenv("PENSTOCK_GOLDEN"))
    GTEST_SKIP() << "no case of this folder writes a tensor that it is passed twice";
  EXPECT_GE(found, 1u);
}

TEST(GoldenAot, NoMoreIsSavedForBackward) {
  for (const Case& item : all_cases())
    for (const Partitioner partitioner : {Partitioner::Default, Partitioner::MinCut}) {
      const std::string variant = partitioner == Partitioner::Default ? "default" : "mincut";
      SCOPED_TRACE(item.id + " " + variant);
      const json& expected = item.data.at("variants").at(variant);
      // PyTorch 2.14 could not compile it.
      if (!expected.contains("num_saved") || expected.at("num_saved").is_null()) continue;
      const Program program(item.data.at("program"));
      Compiled compiled([&](const Values& inputs) { return program(inputs); }, {.partitioner = partitioner});
      const torch::AutoGradMode restore(true);
      compiled(program.arguments().inputs);
      const Partition& halves = compiled.partition(0);
      EXPECT_LE(halves.saved.size(), expected.at("num_saved").get<std::size_t>())
          << to_text(compiled.joint(0).graph);
      if (!expected.contains("saved_numel_total") || expected.at("saved_numel_total").is_null()) continue;
      std::int64_t elements = 0;
      for (const ValueId value : halves.saved) elements += compiled.joint(0).graph[value].geometry.numel();
      EXPECT_LE(elements, expected.at("saved_numel_total").get<std::int64_t>())
          << to_text(compiled.joint(0).graph);
    }
}

}  // namespace golden_aot_test
}  // namespace penstock::graph
