#include "penstock/pipeline/contract/stage_meta.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/base/warnings.h"
#include "penstock/errors.h"
#include "penstock/pipeline/contract/record_checks.h"
#include "tests/throws.h"
#include "tests/torch/fake_shard.h"
#include "tests/torch/record_generators.h"

namespace penstock {
namespace stage_meta_test {

using test::FakeShards;
using test::message_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

TensorRecord plain(std::vector<std::int64_t> shape, bool requires_grad = false,
                   at::ScalarType dtype = at::kFloat) {
  return TensorRecord::contiguous(std::move(shape), dtype, requires_grad);
}

DistributedRecord distributed(bool requires_grad = false) {
  return test::distributed_variants()[0].with_requires_grad(requires_grad);
}

// ---- extraction ----

TEST(Metas, OfTensors) {
  FakeShards shards;
  const at::Tensor x = at::ones({2});
  const at::Tensor whole = shards.make(4, 3);
  const TensorMetas metas = metas_of(std::vector<at::Tensor>{x, whole});
  ASSERT_THAT(metas, SizeIs(2));
  EXPECT_EQ(metas[0], TensorMeta(record_of(x)));
  EXPECT_TRUE(is_distributed(metas[1]));
  EXPECT_THAT(metas_of(std::vector<at::Tensor>{}), IsEmpty());
}

TEST(Metas, NothingInNothingOut) {
  EXPECT_FALSE(metas_of(std::optional<std::vector<at::Tensor>>()).has_value());
  EXPECT_FALSE(optional_metas_of(std::optional<std::vector<at::Tensor>>()).has_value());
  EXPECT_THAT(*metas_of(std::optional(std::vector<at::Tensor>{at::ones({1})})), SizeIs(1));
  EXPECT_THAT(*optional_metas_of(std::optional(std::vector<at::Tensor>{at::Tensor()})), SizeIs(1));
}

TEST(Metas, MissingEntriesOnlyWhereAllowed) {
  const std::vector<at::Tensor> tensors = {at::ones({1}), at::Tensor()};
  EXPECT_THAT(message_of<PipeliningMetadataError>([&] { metas_of(tensors); }),
              AllOf(HasSubstr("nothing at [1]"), HasSubstr("optional_metas_of")));
  const OptionalTensorMetas kept = optional_metas_of(tensors);
  EXPECT_TRUE(kept[0].has_value());
  EXPECT_FALSE(kept[1].has_value());
}

// ---- arguments ----

TEST(StageArguments, EveryAcceptedForm) {
  const at::Tensor x = at::ones({1});
  const at::Tensor y = at::ones({2});
  EXPECT_FALSE(stage_arguments(Tree()).has_value());
  EXPECT_FALSE(stage_arguments(at::Tensor()).has_value());
  const auto is = [](const std::optional<std::vector<at::Tensor>>& list,
                     const std::vector<at::Tensor>& expected) {
    if (!list || list->size() != expected.size()) return false;
    for (std::size_t i = 0; i < expected.size(); ++i)
      if (!(*list)[i].is_same(expected[i])) return false;
    return true;
  };
  EXPECT_TRUE(is(stage_arguments(x), {x}));
  EXPECT_TRUE(is(stage_arguments(std::vector<at::Tensor>{x, y}), {x, y}));
  EXPECT_TRUE(is(stage_arguments(Tree::tuple({x, y})), {x, y}));
  EXPECT_TRUE(is(stage_arguments(std::tuple(x, y)), {x, y}));
  EXPECT_TRUE(is(stage_arguments(Tree::tuple({})), {}));
  const auto with_gap = stage_arguments(Tree::tuple({x, Tree(), y}), Missing::Allow);
  ASSERT_TRUE(with_gap.has_value());
  ASSERT_THAT(*with_gap, SizeIs(3));
  EXPECT_FALSE((*with_gap)[1].defined());
}

TEST(StageArguments, EveryRefusalNamesPlaceAndType) {
  const at::Tensor x = at::ones({1});
  const auto refused = [](const Tree& args, Missing missing = Missing::Refuse) {
    return message_of<PipeliningMetadataError>([&] { stage_arguments(args, missing, "stage 2 args"); });
  };
  EXPECT_THAT(
      refused(Tree::tuple({x, Tree()})),
      AllOf(HasSubstr("stage 2 args[1]: got None, expected a tensor"), HasSubstr("keyword argument")));
  EXPECT_THAT(refused(Tree::tuple({x, 3})), HasSubstr("stage 2 args[1]: got an int"));
  EXPECT_THAT(refused(Tree::list({"s"}), Missing::Allow), HasSubstr("stage 2 args[0]: got a string"));
  EXPECT_THAT(refused(Tree::tuple({x, Tree::tuple({x})})), HasSubstr("stage 2 args[1]: got a tuple"));
  EXPECT_THAT(refused(Tree::tuple({x, Tree::object(c10::Device(at::kCPU))})),
              HasSubstr("args[1]: got an object"));
  EXPECT_THAT(refused(Tree::dict({{"x", x}})),
              HasSubstr("stage 2 args: got a dictionary, expected a tensor, or a tuple or list of tensors"));
  EXPECT_THAT(refused(5), HasSubstr("got an int"));
}

// ---- validation of one record ----

TEST(CheckMeta, ReturnsDifferencesByDefault) {
  const TensorMeta expected = plain({2, 3});
  const WarningCapture capture;
  EXPECT_THAT(check_meta("x", expected, at::ones({2, 3})), IsEmpty());
  EXPECT_THAT(check_meta("x", expected, at::ones({2, 3}).requires_grad_(true)), IsEmpty());
  EXPECT_THAT(check_meta("x", expected, at::ones({2, 4})),
              ElementsAre("shape: got [2, 4], expected [2, 3]", "stride: got [4, 1], expected [3, 1]"));
  EXPECT_THAT(check_meta("x", expected, TensorMeta(plain({2, 3}, false, at::kLong))),
              ElementsAre("dtype: got int64, expected float32"));
  EXPECT_THAT(capture.warnings(), IsEmpty());
}

TEST(CheckMeta, RaisesWithAllDifferences) {
  const auto text = message_of<PipeliningMetadataError>([] {
    check_meta("stage 1 input", plain({2, 3}), at::ones({3, 2}, at::kLong), OnMismatch::Raise);
  });
  EXPECT_THAT(text, AllOf(HasSubstr("stage 1 input: shape: got [3, 2], expected [2, 3]; stride: got [2, 1], "
                                    "expected [3, 1]; dtype: got int64, expected float32; "),
                          HasSubstr("pass examples that match")));
  EXPECT_THAT(check_meta("x", plain({2}), at::ones({2}), OnMismatch::Raise), IsEmpty());
}

TEST(CheckMeta, Warns) {
  const WarningCapture capture;
  EXPECT_THAT(check_meta("stage 1 input", plain({2}), at::ones({3}), OnMismatch::Warn), SizeIs(1));
  ASSERT_THAT(capture.warnings(), SizeIs(1));
  EXPECT_EQ(capture.warnings()[0].category, "pipeline");
  EXPECT_EQ(capture.warnings()[0].message,
            "stage 1 input: shape: got [3], expected [2]; the dynamically inferred record is used instead");
  EXPECT_THAT(check_meta("stage 1 input", plain({2}), at::ones({2}), OnMismatch::Warn), IsEmpty());
  EXPECT_THAT(capture.warnings(), SizeIs(1));
}

TEST(CheckMeta, KindsAreComparedFirstAndAlone) {
  FakeShards shards;
  const at::Tensor whole = shards.make(8, 5);
  EXPECT_THAT(check_meta("x", plain({2, 3}), whole),
              ElementsAre("kind: got a distributed tensor, expected a plain tensor"));
  EXPECT_THAT(check_meta("x", distributed(), at::ones({7})),
              ElementsAre("kind: got a plain tensor, expected a distributed tensor"));
  EXPECT_THROW(check_meta("x", distributed(), at::ones({7}), OnMismatch::Raise), PipeliningMetadataError);
  const WarningCapture capture;
  EXPECT_THAT(check_meta("x", distributed(), at::ones({7}), OnMismatch::Warn), SizeIs(1));
  ASSERT_THAT(capture.warnings(), SizeIs(1));
  EXPECT_THAT(capture.warnings()[0].message, HasSubstr("dynamically inferred"));
  EXPECT_THAT(check_meta("x", meta_of(whole), whole), IsEmpty());
}

// ---- validation of lists ----

TEST(CheckMetas, RaisesByDefaultAtTheFirstMismatch) {
  const TensorMetas expected = {plain({1}), plain({2}), plain({3})};
  EXPECT_THAT(
      check_metas("inputs", expected, std::vector<at::Tensor>{at::ones({1}), at::ones({2}), at::ones({3})}),
      IsEmpty());
  const auto text = message_of<PipeliningMetadataError>([&] {
    check_metas("inputs", expected, std::vector<at::Tensor>{at::ones({1}), at::ones({4}), at::ones({5})});
  });
  EXPECT_THAT(text, AllOf(HasSubstr("inputs[1]: shape: got [4], expected [2]"), Not(HasSubstr("inputs[2]"))));
}

TEST(CheckMetas, LengthsThatDifferAreTheOnlyDifference) {
  const TensorMetas expected = {plain({1}), plain({2})};
  const TensorMetas actual = {plain({9})};
  EXPECT_THAT(message_of<PipeliningMetadataError>([&] { check_metas("inputs", expected, actual); }),
              HasSubstr("inputs: tensors: got 1, expected 2"));
  EXPECT_THAT(check_metas("inputs", expected, actual, OnMismatch::Collect),
              ElementsAre("inputs: tensors: got 1, expected 2"));
  const WarningCapture capture;
  EXPECT_THAT(check_metas("inputs", expected, actual, OnMismatch::Warn), SizeIs(1));
  EXPECT_THAT(capture.warnings(), SizeIs(1));
}

TEST(CheckMetas, MissingOnBothSidesMatches) {
  const OptionalTensorMetas expected = {plain({1}), std::nullopt};
  EXPECT_THAT(check_metas("grads", expected, std::vector<at::Tensor>{at::ones({1}), at::Tensor()}),
              IsEmpty());
  EXPECT_THAT(message_of<PipeliningMetadataError>([&] {
                check_metas("grads", expected, std::vector<at::Tensor>{at::ones({1}), at::ones({1})});
              }),
              HasSubstr("grads[1]: entry: got a plain tensor, expected nothing"));
  EXPECT_THAT(message_of<PipeliningMetadataError>([&] {
                check_metas("grads", expected, std::vector<at::Tensor>{at::Tensor(), at::Tensor()});
              }),
              HasSubstr("grads[0]: entry: got nothing, expected a plain tensor"));
}

TEST(CheckMetas, CollectsEverythingElse) {
  const OptionalTensorMetas expected = {plain({1}), std::nullopt, plain({3}), distributed(), plain({5})};
  const OptionalTensorMetas actual = {plain({2}), plain({2}), std::nullopt, plain({4}), plain({5}, true)};
  const std::vector<std::string> all = {"g[0]: shape: got [2], expected [1]",
                                        "g[1]: entry: got a plain tensor, expected nothing",
                                        "g[2]: entry: got nothing, expected a plain tensor",
                                        "g[3]: kind: got a plain tensor, expected a distributed tensor"};
  const WarningCapture capture;
  EXPECT_EQ(check_metas("g", expected, actual, OnMismatch::Collect), all);
  EXPECT_THAT(capture.warnings(), IsEmpty());
  EXPECT_EQ(check_metas("g", expected, actual, OnMismatch::Warn), all);
  EXPECT_THAT(capture.warnings(), SizeIs(4));
}

TEST(CheckMetas, RequiresGradIsComparedSeparately) {
  const OptionalTensorMetas expected = {plain({1}, true), std::nullopt, plain({1}), plain({1}, true)};
  const OptionalTensorMetas actual = {plain({1}), plain({1}, true), plain({1}), std::nullopt};
  EXPECT_THAT(requires_grad_differences(expected, actual),
              ElementsAre("[0]: requires_grad: got false, expected true"));
  EXPECT_THAT(check_metas("x", TensorMetas{plain({1}, true)}, TensorMetas{plain({1})}), IsEmpty());
  EXPECT_THAT(
      requires_grad_differences(TensorMetas{plain({1}, true)}, std::vector<at::Tensor>{at::ones({1})}),
      SizeIs(1));
}

// ---- the containers ----

TEST(StageMeta, Queries) {
  StageMeta meta;
  EXPECT_FALSE(meta.has_any());
  EXPECT_FALSE(meta.complete_for_forward());
  EXPECT_FALSE(meta.has_distributed());
  meta.inputs = TensorMetas{};
  EXPECT_TRUE(meta.has_any());  // known to be empty counts as known
  EXPECT_FALSE(meta.complete_for_forward());
  meta.outputs = TensorMetas{plain({1})};
  EXPECT_TRUE(meta.complete_for_forward());
  EXPECT_FALSE(meta.has_distributed());
  StageMeta grads;
  grads.input_grads = OptionalTensorMetas{distributed(), std::nullopt};
  EXPECT_TRUE(grads.has_any());
  EXPECT_FALSE(grads.has_distributed());  // gradients are not considered
  grads.output_grads = OptionalTensorMetas{distributed()};
  EXPECT_FALSE(grads.has_distributed());
  StageMeta only_grads;
  only_grads.output_grads = OptionalTensorMetas{};
  EXPECT_TRUE(only_grads.has_any());
  meta.outputs->push_back(distributed());
  EXPECT_TRUE(meta.has_distributed());
  StageMeta inputs;
  inputs.inputs = TensorMetas{distributed()};
  EXPECT_TRUE(inputs.has_distributed());
  EXPECT_NE(meta, inputs);
}

TEST(StageMeta, Text) {
  StageMeta meta;
  meta.inputs = TensorMetas{plain({1}), plain({2})};
  meta.input_grads = OptionalTensorMetas{std::nullopt};
  EXPECT_EQ(to_string(meta),
            "inputs (float32[1]; float32[2]), outputs unknown, input_grads (nothing), output_grads unknown");
}

TEST(StageMeta, MessagesCarryRecords) {
  const StageForwardMeta forward({plain({1}), distributed()});
  EXPECT_THAT(forward.outputs(), SizeIs(2));
  EXPECT_EQ(forward, StageForwardMeta({plain({1}), distributed()}));
  EXPECT_NE(forward, StageForwardMeta({plain({1})}));
  const StageBackwardMeta backward({std::nullopt, plain({1})});
  EXPECT_FALSE(backward.input_grads()[0].has_value());
  EXPECT_NE(backward, StageBackwardMeta());
}

TEST(DeriveGradients, KeepsLayoutAndDropsWhatNeedsNone) {
  const TensorRecord transposed({2, 3}, {1, 2}, at::kHalf, true);
  const OptionalTensorMetas grads =
      derive_gradient_metas({transposed, plain({4}), plain({2}, false, at::kLong), plain({}, true)});
  ASSERT_THAT(grads, SizeIs(4));
  EXPECT_EQ(grads[0], TensorMeta(transposed.with_requires_grad(false)));
  EXPECT_FALSE(grads[1].has_value());
  EXPECT_FALSE(grads[2].has_value());
  EXPECT_EQ(grads[3], TensorMeta(plain({})));
  EXPECT_THAT(derive_gradient_metas({}), IsEmpty());
}

TEST(DeriveGradients, RefusesDistributedTensorsThatNeedOne) {
  EXPECT_FALSE(derive_gradient_metas({distributed(false)})[0].has_value());
  EXPECT_THAT(message_of<PipeliningMetadataError>([] {
                derive_gradient_metas({plain({1}, true), distributed(true)});
              }),
              AllOf(HasSubstr("tensor [1]"), HasSubstr("dynamic mode")));
}

// ---- the contract of static mode ----

TEST(GradientContract, AcceptsValidGradients) {
  const WarningCapture capture;
  DistributedRecord other_placement = test::distributed_variants()[10];  // a partial gradient
  check_gradient_contract(1, StageSide::Input,
                          {plain({1}, true), plain({2}), distributed(true), distributed(false)},
                          {plain({1}), std::nullopt, other_placement, std::nullopt});
  check_gradient_contract(1, StageSide::Input, {}, {});
  check_gradient_contract(1, StageSide::Output, {plain({1}, true)},
                          {distributed()});  // exactly what the contract requires
  EXPECT_THAT(capture.warnings(), IsEmpty());
}

TEST(GradientContract, EachViolationNamesStageSideAndIndex) {
  const auto refused = [](StageSide side, const TensorMetas& tensors, const OptionalTensorMetas& grads) {
    return message_of<PipeliningMetadataError>([&] { check_gradient_contract(3, side, tensors, grads); });
  };
  EXPECT_THAT(refused(StageSide::Input, {plain({1})}, {}),
              HasSubstr("stage 3: input gradients: got 0, expected 1"));
  EXPECT_THAT(refused(StageSide::Output, {plain({1}, true), plain({2})}, {plain({1}), plain({2})}),
              HasSubstr("stage 3: gradient of output[1]: got a plain tensor, expected nothing"));
  EXPECT_THAT(refused(StageSide::Input, {distributed(false)}, {distributed()}),
              HasSubstr("stage 3: gradient of input[0]: got a distributed tensor, expected nothing"));
  EXPECT_THAT(
      refused(StageSide::Input, {distributed(true)}, {plain({2, 3})}),
      AllOf(HasSubstr("stage 3: gradient of input[0]: got a plain tensor, expected a distributed one"),
            HasSubstr("placements may differ")));
}

TEST(GradientContract, AMissingGradientOnlyWarns) {
  const WarningCapture capture;
  check_gradient_contract(0, StageSide::Input, {plain({1}, true), distributed(true)},
                          {std::nullopt, std::nullopt});
  ASSERT_THAT(capture.warnings(), SizeIs(2));
  EXPECT_THAT(capture.warnings()[0].message,
              AllOf(HasSubstr("stage 0: gradient of input[0]: got nothing"), HasSubstr("legal at the ends")));
  EXPECT_THAT(capture.warnings()[1].message, HasSubstr("input[1]"));
}

}  // namespace stage_meta_test
}  // namespace penstock
