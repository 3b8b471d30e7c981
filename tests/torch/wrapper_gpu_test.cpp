// Wrappers, modes and fake tensors over CUDA tensors: backward runs on autograd's worker thread there.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "penstock/fake.h"
#include "penstock/tensor_subclass.h"
#include "tests/torch/module_zoo.h"
#include "tests/torch/sample_wrappers.h"

namespace penstock {
namespace wrapper_gpu_test {

using sample::Boxed;
using zoo::Tensors;

struct Outcome {
  Tensors values;  // outputs, gradients of inputs and parameters
};

zoo::Case on_gpu(const zoo::Entry& entry) {
  zoo::Case made = entry.make();
  if (made.module) made.module->to(at::kCUDA);
  for (at::Tensor& input : made.inputs) input = input.to(at::kCUDA);
  return made;
}

Outcome run_case(zoo::Case& made, Tensors inputs) {
  for (at::Tensor& input : inputs)
    if (input.is_floating_point()) input.requires_grad_(true);
  torch::manual_seed(5);
  Outcome outcome{made.forward(inputs)};
  if (const at::Tensor loss = zoo::loss_of(outcome.values); loss.defined()) loss.backward();
  for (const at::Tensor& input : inputs) outcome.values.push_back(input.grad());
  if (made.module)
    for (const at::Tensor& parameter : made.module->parameters()) outcome.values.push_back(parameter.grad());
  return outcome;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || at::equal(a, b));
}

class GpuZoo : public ::testing::TestWithParam<zoo::Entry> {};

TEST_P(GpuZoo, BoxedEqualsPlain) {
  zoo::Case first = on_gpu(GetParam()), second = on_gpu(GetParam()), boxed = on_gpu(GetParam());
  const Outcome expected = run_case(first, first.inputs), again = run_case(second, second.inputs);
  if (boxed.module) {
    for (const at::Tensor& parameter : boxed.module->parameters())
      replace_data(parameter, Boxed::make(parameter.detach()));
    for (const at::Tensor& buffer : boxed.module->buffers())
      replace_data(buffer, Boxed::make(buffer.detach()));
  }
  Tensors inputs;
  for (const at::Tensor& input : boxed.inputs) inputs.push_back(Boxed::make(input));
  const Outcome actual = run_case(boxed, inputs);
  ASSERT_EQ(expected.values.size(), actual.values.size());
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    ASSERT_EQ(expected.values[i].defined(), actual.values[i].defined()) << i;
    if (!expected.values[i].defined()) continue;
    auto* payload = payload_as<Boxed>(actual.values[i]);
    ASSERT_TRUE(payload) << i;
    EXPECT_TRUE(payload->inner.is_cuda());
    // Kernels that add in order of arrival differ from run to run even without wrappers.
    const bool exact = same_bits(expected.values[i], again.values[i]);
    EXPECT_TRUE(exact ? same_bits(expected.values[i], payload->inner)
                      : at::allclose(expected.values[i], payload->inner, 1e-4, 1e-5))
        << i << (exact ? ", bit for bit" : "");
  }
}

TEST_P(GpuZoo, FakeSaysWhatTheGpuReturns) {
  if (GetParam().name == "LSTM" || GetParam().name == "GRU")
    return;  // cuDNN's recurrent kernels have no shape function
  zoo::Case real = on_gpu(GetParam()), shape = on_gpu(GetParam());
  const Outcome expected = run_case(real, real.inputs);
  FakeMode mode;
  const ModeGuard guard(mode);
  const Outcome actual = run_case(shape, shape.inputs);
  ASSERT_EQ(expected.values.size(), actual.values.size());
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    ASSERT_EQ(expected.values[i].defined(), actual.values[i].defined()) << i;
    if (!expected.values[i].defined()) continue;
    EXPECT_TRUE(is_fake(actual.values[i]));
    EXPECT_EQ(expected.values[i].sizes(), actual.values[i].sizes()) << i;
    EXPECT_EQ(expected.values[i].strides(), actual.values[i].strides()) << i;
    EXPECT_EQ(expected.values[i].scalar_type(), actual.values[i].scalar_type()) << i;
    EXPECT_EQ(expected.values[i].device(), actual.values[i].device()) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, GpuZoo, ::testing::ValuesIn(zoo::all()),
                         [](const auto& info) { return info.param.name; });

TEST(GpuMode, SeesBackwardOnTheWorkerThread) {
  struct Threads final : Mode {
    void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
      {
        const std::lock_guard lock(mutex);
        threads.insert(std::this_thread::get_id());
        ++calls;
      }
      op.callBoxed(stack);
    }
    std::mutex mutex;
    std::set<std::thread::id> threads;
    int calls = 0;
  } mode;
  const at::Tensor x = torch::ones({4, 4}, at::kCUDA).requires_grad_(true);
  const at::Tensor y = x.mm(x).sum();
  const ModeGuard guard(mode);
  y.backward();
  EXPECT_GT(mode.calls, 2);
  mode.threads.erase(std::this_thread::get_id());
  EXPECT_FALSE(mode.threads.empty()) << "no worker thread called the mode";
}

TEST(GpuMode, AThrowOnTheWorkerThreadReachesTheCaller) {
  struct Throws final : Mode {
    void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
      if (op.operator_name().name == "aten::mm") throw ValueError("on purpose");
      op.callBoxed(stack);
    }
  } mode;
  const at::Tensor x = torch::ones({4, 4}, at::kCUDA).requires_grad_(true);
  const at::Tensor y = x.mm(x).sum();
  {
    const ModeGuard guard(mode);
    EXPECT_ANY_THROW(y.backward());
    EXPECT_EQ(current_mode(), &mode);
  }
  EXPECT_EQ(current_mode(), nullptr);
  (x * 2).sum().backward();  // the engine still works
  EXPECT_TRUE(x.grad().defined());
}

TEST(GpuWrapper, ToAndFromTheGpu) {
  const at::Tensor x = Boxed::make(torch::ones({3}));
  const at::Tensor y = x.to(at::kCUDA);
  ASSERT_TRUE(payload_as<Boxed>(y));
  EXPECT_TRUE(y.is_cuda() && payload_as<Boxed>(y)->inner.is_cuda());
  torch::nn::Linear layer(4, 3);
  replace_data(layer->weight, Boxed::make(layer->weight.detach()));
  layer->to(at::kCUDA);
  EXPECT_TRUE(layer->weight.is_cuda() && payload_as<Boxed>(layer->weight));
}

TEST(GpuFake, MaterializesOnTheGpu) {
  DeferredInit deferred;
  torch::nn::Linear layer{nullptr};
  {
    const ModeGuard guard(deferred);
    layer = torch::nn::Linear(8, 4);
  }
  torch::manual_seed(3);
  deferred.materialize(*layer, at::Device(at::kCUDA, 0));
  torch::manual_seed(3);
  const torch::nn::Linear expected(8, 4);
  EXPECT_TRUE(layer->weight.is_cuda());
  EXPECT_TRUE(at::equal(layer->weight.cpu(), expected->weight));
}

}  // namespace wrapper_gpu_test
}  // namespace penstock
