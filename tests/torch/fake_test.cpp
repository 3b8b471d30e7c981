// Fake tensors: a shape-only run has the results of the real run, except for values.
#include "penstock/fake.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include "penstock/tensor_subclass.h"
#include "penstock/torch/fake/fake_parts.h"
#include "penstock/torch/fake/fake_watch.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/torch/module_zoo.h"
#include "tests/torch/sample_wrappers.h"

namespace penstock {
namespace fake_test {

using test::has_text;
using test::message_of;
using zoo::Tensors;

// Everything about a tensor except its values.
struct Facts {
  bool defined = false;
  WrapperGeometry geometry;
  bool requires_grad = false, is_leaf = false, is_view = false;
  bool operator==(const Facts&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Facts& facts) {
  if (!facts.defined) return out << "undefined";
  return out << facts.geometry.dtype << at::IntArrayRef(facts.geometry.sizes) << " strides "
             << at::IntArrayRef(facts.geometry.strides) << " offset " << facts.geometry.storage_offset
             << " on " << facts.geometry.device << (facts.requires_grad ? " grad" : "")
             << (facts.is_leaf ? " leaf" : "") << (facts.is_view ? " view" : "");
}

Facts facts_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, geometry_of(tensor), tensor.requires_grad(), tensor.is_leaf(), tensor.is_view()};
}

struct Outcome {
  std::vector<Facts> outputs, input_grads, parameter_grads;
};

Outcome run_case(zoo::Case& made, Tensors inputs, bool expect_fake) {
  Outcome outcome;
  for (at::Tensor& input : inputs)
    if (input.is_floating_point()) input.requires_grad_(true);
  const Tensors outputs = made.forward(inputs);
  const at::Tensor loss = zoo::loss_of(outputs);
  if (loss.defined()) loss.backward();
  const auto note = [&](const at::Tensor& tensor, std::vector<Facts>& into) {
    if (tensor.defined()) {
      EXPECT_EQ(is_fake(tensor), expect_fake);
    }
    into.push_back(facts_of(tensor));
  };
  for (const at::Tensor& output : outputs) note(output, outcome.outputs);
  for (const at::Tensor& input : inputs) note(input.grad(), outcome.input_grads);
  if (made.module)
    for (const at::Tensor& parameter : made.module->parameters())
      note(parameter.grad(), outcome.parameter_grads);
  return outcome;
}

void expect_same(const Outcome& expected, const Outcome& actual) {
  EXPECT_EQ(expected.outputs, actual.outputs);
  EXPECT_EQ(expected.input_grads, actual.input_grads);
  EXPECT_EQ(expected.parameter_grads, actual.parameter_grads);
}

class FakeZoo : public ::testing::TestWithParam<zoo::Entry> {
 protected:
  static Outcome real_run() {
    zoo::Case real = GetParam().make();
    return run_case(real, real.inputs, false);
  }
};

TEST_P(FakeZoo, FakeParametersAndInputs) {
  const Outcome expected = real_run();
  zoo::Case made = GetParam().make();
  if (made.module) {
    for (const at::Tensor& parameter : made.module->parameters())
      replace_data(parameter, to_fake(parameter.detach()));
    for (const at::Tensor& buffer : made.module->buffers()) replace_data(buffer, to_fake(buffer));
  }
  Tensors inputs;
  for (const at::Tensor& input : made.inputs) inputs.push_back(to_fake(input));
  FakeMode mode;
  const ModeGuard guard(mode);
  expect_same(expected, run_case(made, inputs, true));
}

TEST_P(FakeZoo, RealModuleUnderTheModeIsUnchanged) {
  const Outcome expected = real_run();
  zoo::Case made = GetParam().make(), untouched = GetParam().make();
  torch::manual_seed(99);
  const at::Tensor next_random = torch::rand({4});
  torch::manual_seed(99);
  {
    FakeMode mode;
    const ModeGuard guard(mode);
    expect_same(expected, run_case(made, made.inputs, true));
  }
  EXPECT_TRUE(at::equal(torch::rand({4}), next_random)) << "random numbers were drawn";
  if (!made.module) return;
  const auto compare = [](const Tensors& a, const Tensors& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(!is_wrapper(a[i]) && at::equal(a[i], b[i])) << i;
  };
  compare(made.module->parameters(), untouched.module->parameters());
  compare(made.module->buffers(), untouched.module->buffers());
}

INSTANTIATE_TEST_SUITE_P(Zoo, FakeZoo, ::testing::ValuesIn(zoo::all()),
                         [](const auto& info) { return info.param.name; });

TEST(Fake, AHugeLayerTakesNoMemory) {
  FakeMode mode;
  const ModeGuard guard(mode);
  torch::nn::Linear layer(65536, 65536);
  EXPECT_TRUE(is_fake(layer->weight) && layer->weight.requires_grad());
  const at::Tensor y = layer->forward(torch::empty({8, 65536}));
  y.sum().backward();
  EXPECT_EQ(y.sizes(), at::IntArrayRef({8, 65536}));
  EXPECT_EQ(layer->weight.grad().sizes(), layer->weight.sizes());
}

TEST(Fake, SpreadsWithoutTheMode) {
  const at::Tensor x = make_fake({8, 16}, at::dtype(at::kHalf));
  const at::Tensor y = x.matmul(torch::ones({16, 4}, at::kHalf)).relu();
  EXPECT_TRUE(is_fake(y));
  EXPECT_EQ(y.sizes(), at::IntArrayRef({8, 4}));
  EXPECT_EQ(y.scalar_type(), at::kHalf);
}

TEST(Fake, LazyConjugatesAndNegatives) {
  const at::Tensor real = torch::randn({3, 2}, torch::kComplexFloat);
  for (const at::Tensor& z : {real, to_fake(real)}) {
    EXPECT_TRUE(z.conj().is_conj());
    EXPECT_FALSE(z.conj().conj().is_conj());
    EXPECT_TRUE(z.mH().is_conj());
    EXPECT_FALSE(z.conj().resolve_conj().is_conj());
    EXPECT_FALSE(z.conj().resolve_conj().is_alias_of(z));
    EXPECT_TRUE(at::imag(z.conj()).is_neg());
    EXPECT_FALSE(at::real(z.conj()).is_conj());
    EXPECT_TRUE(at::real(z.conj()).is_alias_of(z));
    EXPECT_FALSE((z.conj() * 2).is_conj());
    EXPECT_TRUE(z._neg_view().select(0, 1).is_neg());
    EXPECT_FALSE(z._neg_view().resolve_neg().is_neg());
  }
  EXPECT_TRUE(to_fake(real.conj()).is_conj());
  EXPECT_TRUE(to_fake(real._neg_view()).is_neg());
}

TEST(Fake, CudaNeedsNoGpu) {
  const at::Tensor x = make_fake({4, 4}, at::device(at::kCUDA));
  EXPECT_EQ((x.matmul(x) * 2).sum().device(), at::Device(at::kCUDA, 0));
  EXPECT_EQ(x.to(at::kCPU).device(), at::Device(at::kCPU));
  FakeMode mode;
  const ModeGuard guard(mode);
  EXPECT_EQ(torch::ones({2}, at::kCUDA).device(), at::Device(at::kCUDA, 0));
  EXPECT_EQ(torch::ones({2}).to(at::Device(at::kCUDA, 1)).device(), at::Device(at::kCUDA, 1));
}

TEST(Fake, CudaGradientsNeedCuda) {
  const auto leaf = [] { return make_fake({4, 4}, at::device(at::kCUDA).requires_grad(true)); };
  if (!at::hasCUDA()) {
    EXPECT_THROW(leaf(), StateError);
    return;
  }
  const at::Tensor x = leaf();
  (x.matmul(x) * 2).sum().backward();
  EXPECT_EQ(x.grad().device(), x.device());
}

TEST(Fake, DevicesThatDiffer) {
  const at::Tensor gpu = make_fake({2}, at::device(at::kCUDA)), cpu = torch::ones({2});
  std::string message = message_of<ValueError>([&] { gpu + cpu; });
  EXPECT_TRUE(has_text(message, "a fake tensor on cuda:0 and a real one on cpu")) << message;
  message = message_of<ValueError>([&] { gpu.mul_(make_fake({2}, at::device(at::Device(at::kCUDA, 1)))); });
  EXPECT_TRUE(has_text(message, "cuda:1")) << message;
  EXPECT_EQ((gpu + torch::tensor(2.0)).device().type(), at::kCUDA) << "scalars may be mixed in";
  EXPECT_EQ(gpu.copy_(cpu).device().type(), at::kCUDA) << "copies cross devices";
}

TEST(Fake, DataDependenceIsRefused) {
  const at::Tensor x = make_fake({4, 4});
  for (const std::function<void()>& action : std::vector<std::function<void()>>{
           [&] { x.sum().item(); },
           [&] { x.nonzero(); },
           [&] { x.masked_select(x > 0); },
           [&] { x.index({x > 0}); },
           [&] { at::_unique2(x); },
           [&] {
             if ((x.sum() > 0).is_nonzero()) return;
           },
           [&] { at::equal(x, x * 1); },
           [&] { torch::repeat_interleave(torch::ones({2}), make_fake({2}, at::kLong)); },
       }) {
    const std::string message = message_of<DataDependentError>(action);
    EXPECT_TRUE(has_text(message, "depends on values")) << message;
  }
}

TEST(Fake, ValuesOfRealTensorsMayBeReadUnderTheMode) {
  const at::Tensor steps = torch::tensor(3);
  FakeMode mode;
  const ModeGuard guard(mode);
  EXPECT_EQ(steps.item<std::int64_t>(), 3);
  EXPECT_THROW((steps + 1).item(), DataDependentError);
}

TEST(Fake, ViewsOfRealTensorsStayReal) {
  const at::Tensor sizes = torch::tensor({3, 4});
  FakeMode mode;
  const ModeGuard guard(mode);
  EXPECT_EQ(sizes[1].item<std::int64_t>(), 4);
  const at::Tensor repeated = make_fake({2, 3}).repeat_interleave(2, 1);
  EXPECT_EQ(repeated.sizes(), at::IntArrayRef({2, 6}));
}

TEST(Fake, ConstantsUnderTheMode) {
  FakeMode mode;
  const ModeGuard guard(mode);
  const at::Tensor constant = torch::tensor({1.0f, 2.0f});
  EXPECT_EQ((constant + make_fake({2})).sizes(), at::IntArrayRef({2}));
}

TEST(Fake, ARealTensorIsNotWritten) {
  at::Tensor real = torch::ones({2});
  const std::string message = message_of<TypeError>([&] { real.add_(make_fake({2})); });
  EXPECT_TRUE(has_text(message, "to_fake")) << message;
  FakeMode mode;
  const ModeGuard guard(mode);
  real.add_(1);
  const NoModesGuard off;
  EXPECT_TRUE(at::equal(real, torch::ones({2})));
}

TEST(Fake, ShapeErrorsAreThoseOfTheRealRun) {
  EXPECT_THROW(make_fake({2, 3}).mm(make_fake({2, 3})), c10::Error);
  EXPECT_THROW(make_fake({2, 3}) + make_fake({4}), c10::Error);
}

TEST(Fake, ViewsShareStorage) {
  const at::Tensor x = make_fake({4, 4});
  EXPECT_TRUE(x.t().is_alias_of(x));
  EXPECT_TRUE(x.select(0, 1).is_alias_of(x));
  EXPECT_FALSE((x + 1).is_alias_of(x));
  const at::Tensor y = make_fake({2, 3});
  y.transpose_(0, 1);
  EXPECT_EQ(y.sizes(), at::IntArrayRef({3, 2}));
}

TEST(Fake, ASubclassOfFakeTensors) {
  const at::Tensor two = sample::Two::make(make_fake({2, 3}), make_fake({2, 3}));
  const auto check = [&] {
    const at::Tensor y = two.matmul(make_fake({3, 5}));
    auto* payload = payload_as<sample::Two>(y);
    ASSERT_TRUE(payload);
    EXPECT_TRUE(is_fake(payload->a) && is_fake(payload->b));
    EXPECT_EQ(y.sizes(), at::IntArrayRef({2, 5}));
  };
  check();
  FakeMode mode;
  const ModeGuard guard(mode);
  check();
}

TEST(Fake, ACustomOperator) {
  static torch::Library library(torch::Library::DEF, "faketest", c10::nullopt, __FILE__, __LINE__);
  library.def("blur(Tensor image, int radius) -> Tensor");
  library.def("halve(Tensor image) -> Tensor");
  const auto blur = c10::Dispatcher::singleton().findSchemaOrThrow("faketest::blur", "");
  const auto call = [&](const c10::OperatorHandle& op, Stack stack) {
    op.callBoxed(&stack);
    return stack.back().toTensor();
  };
  const std::string message = message_of<NotImplemented>([&] { call(blur, {make_fake({4, 4}), 1}); });
  EXPECT_TRUE(has_text(message, "register_shape_function(\"faketest::blur\"")) << message;
  EXPECT_FALSE(has_shape_function("faketest::blur"));
  register_shape_function("faketest::blur", [](const at::Tensor& image, std::int64_t radius) {
    return at::empty({image.size(0) - radius, image.size(1) - radius}, image.options());
  });
  EXPECT_TRUE(has_shape_function("faketest::blur"));
  EXPECT_EQ(call(blur, {make_fake({4, 4}), 1}).sizes(), at::IntArrayRef({3, 3}));
  EXPECT_THROW(
      register_shape_function("faketest::blur", [](const at::Tensor& image, std::int64_t) { return image; }),
      StateError);
}

// ------------------------------------------------------------------------------------------------------
// leaves and leftovers of trial runs

TEST(FakeLeaves, AreFakeForAWhile) {
  const at::Tensor leaf = torch::ones({2, 3}, torch::requires_grad()), computed = leaf * 2,
                   saved = (leaf * leaf).sum();
  const auto version = leaf._version();
  {
    const FakeLeaves outer({leaf, computed});
    EXPECT_TRUE(is_fake(leaf));
    EXPECT_TRUE(leaf.requires_grad() && leaf.is_leaf());
    EXPECT_FALSE(is_fake(computed)) << "not a leaf";
    {
      const FakeLeaves again({leaf});
      EXPECT_TRUE(is_fake(leaf));
    }
    EXPECT_TRUE(is_fake(leaf));
    {
      const RealLeaves real;
      EXPECT_FALSE(is_fake(leaf));
      EXPECT_EQ(leaf.sum().item<float>(), 6);
    }
    EXPECT_TRUE(is_fake(leaf));
  }
  EXPECT_FALSE(is_fake(leaf));
  EXPECT_EQ(leaf._version(), version);
  saved.backward();
  EXPECT_TRUE(leaf.grad().equal(torch::full({2, 3}, 2.0)));
}

TEST(FakeWatch, KnowsWhatIsStillHeld) {
  FakeWatch watch;
  const at::Tensor before = make_fake({1});
  at::Tensor kept, view, real_again;
  {
    const FakeWatch::Guard guard(watch);
    kept = make_fake({2, 2}) + 1;
    view = kept[0];
    real_again = make_fake({2});
    make_fake({3});
  }
  const at::Tensor after = make_fake({1});
  replace_data(real_again, at::ones({2}));
  const std::vector<at::Tensor> found = watch.survivors();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_TRUE(found[0].is_same(kept) && found[1].is_same(view));
  mark_leftover(kept, "somebody kept it");
  const std::string message = message_of<StateError>([&] { at::ones({2, 2}) + kept; });
  EXPECT_TRUE(has_text(
      message, "aten::add.Tensor: an argument: got a fake tensor [2, 2] without values: somebody kept it"));
  // It can still be used in shape-only runs.
  FakeMode mode;
  const ModeGuard guard(mode);
  EXPECT_TRUE(is_fake(kept + 1));
}

}  // namespace fake_test
}  // namespace penstock
