// Properties of a replay other than its results: the modes that kernels see, its memory use, what results
// share, which calls a capture is valid for.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/trace/capture.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/graph/call_trace.h"

namespace penstock::graph {
namespace replay_contract_test {

// An operator that reports the grad mode under which its kernel runs.
at::Tensor grad_mode_seen(const at::Tensor& like) {
  return at::full_like(like, c10::GradMode::is_enabled() ? 1.0 : 0.0);
}

TORCH_LIBRARY(penstock_replay_test, library) { library.def("grad_mode_seen(Tensor like) -> Tensor"); }
TORCH_LIBRARY_IMPL(penstock_replay_test, CPU, library) { library.impl("grad_mode_seen", &grad_mode_seen); }
TORCH_LIBRARY_IMPL(penstock_replay_test, Meta, library) { library.impl("grad_mode_seen", &grad_mode_seen); }

at::Tensor ask_grad_mode(const at::Tensor& like) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock_replay_test::grad_mode_seen", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(like);
}

constexpr std::int64_t kItems = 1 << 18;
constexpr std::int64_t kBytes = kItems * 4;

TEST(ReplayContract, KernelsSeeTheGradModeTheyWereRecordedWith) {
  Compiled compiled(over_tensors([](const Tensors& in) {
    const at::Tensor with = ask_grad_mode(in[0]);
    at::Tensor without;
    {
      const at::NoGradGuard no_grad;
      without = ask_grad_mode(in[0]);
    }
    return Tensors{in[0] * 2, with, without};
  }));
  for (int call = 0; call < 2; ++call) {
    const Values results = compiled(values_of({leaf({3})}));
    EXPECT_TRUE(at::equal(results[1].toTensor(), at::ones({3}))) << "call " << call;
    EXPECT_TRUE(at::equal(results[2].toTensor(), at::zeros({3}))) << "call " << call;
  }
}

// Casts are recorded as nodes of the graph: a replay inside an autocast scope adds none.
TEST(ReplayContract, AutocastActsOnceOnly) {
  const AutocastScope scope(at::kCPU, at::kBFloat16);
  const auto function = [](const Tensors& in) {
    const at::Tensor cast = in[0].mm(in[1]);
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    return Tensors{cast, in[0].mm(in[1])};
  };
  const Tensors inputs{torch::randn({4, 4}), torch::randn({4, 4})};
  const Tensors expected = function(inputs);
  ASSERT_EQ(expected[0].scalar_type(), at::kBFloat16);
  ASSERT_EQ(expected[1].scalar_type(), at::kFloat);
  Compiled compiled(over_tensors(function));
  for (int call = 0; call < 2; ++call) {
    const Values results = compiled(values_of(inputs));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(results[i].toTensor().scalar_type(), expected[i].scalar_type())
          << "result " << i << " of call " << call;
      EXPECT_TRUE(at::equal(results[i].toTensor(), expected[i])) << "result " << i << " of call " << call;
    }
  }
}

TEST(ReplayContract, ATensorIsFreedAfterItsLastUse) {
  count_cpu_memory();
  const auto squares = [](const Values& in) {
    at::Tensor x = in[0].toTensor();
    // Occurs twice among the arguments, so it cannot be moved into the call.
    for (int i = 0; i < 16; ++i) x = x * x;
    return Values{x};
  };
  const Executor run(capture_forward(squares, {at::ones({kItems})}));
  const at::Tensor input = at::ones({kItems});
  reset_cpu_peak();
  const std::int64_t before = cpu_memory().live;
  run({input});
  EXPECT_LE(cpu_memory().peak - before, 3 * kBytes);
}

TEST(ReplayContract, BackwardFreesWhatForwardSavedAsItGoes) {
  count_cpu_memory();
  constexpr int kLayers = 16;
  Compiled compiled(over_tensors([](const Tensors& in) {
    at::Tensor x = in[0];
    for (int i = 0; i < kLayers; ++i) x = (x * in[static_cast<std::size_t>(i) + 1]).tanh();
    return Tensors{x.sum()};
  }));
  Tensors inputs{at::full({kItems}, 0.5)};
  for (int i = 0; i < kLayers; ++i) inputs.push_back(at::ones({kItems}).requires_grad_());
  for (int call = 0; call < 2; ++call) {
    for (at::Tensor& input : inputs) input.mutable_grad() = at::Tensor();
    const at::Tensor loss = compiled(values_of(inputs))[0].toTensor();
    reset_cpu_peak();
    const std::int64_t before = cpu_memory().live;
    loss.backward();
    // One gradient is allocated for every two tensors that are freed.
    EXPECT_LE(cpu_memory().peak - before, 6 * kBytes) << "call " << call;
  }
}

TEST(ReplayContract, AResultAndItsDetachedTwinShareMemory) {
  Compiled compiled(over_tensors([](const Tensors& in) {
    const at::Tensor y = in[0] * 2;
    return Tensors{y, y.detach()};
  }));
  for (int call = 0; call < 2; ++call) {
    const Values results = compiled(values_of({leaf({3})}));
    {
      const at::NoGradGuard no_grad;
      results[0].toTensor().fill_(7);
    }
    EXPECT_TRUE(at::equal(results[1].toTensor(), at::full({3}, 7.0))) << "call " << call;
    EXPECT_FALSE(results[1].toTensor().requires_grad());
  }
  EXPECT_EQ(compiled.meta(0).outputs[1].kind, OutputKind::AliasOfIntermediateBaseIsUserOutput);
}

// Inputs of the same shapes that now overlap are a different kind of call.
TEST(ReplayContract, ACaptureForSeparateInputsDoesNotServeOverlappingOnes) {
  const auto function = [](const Tensors& in) {
    in[0].add_(1);
    return Tensors{in[0] * in[1]};
  };
  Compiled compiled(over_tensors(function));
  const auto run = [&](const auto& call, bool overlap) {
    const at::Tensor memory = at::arange(6, at::kFloat);
    const at::Tensor a = memory.narrow(0, 0, 3),
                     b = overlap ? memory.narrow(0, 0, 3) : at::arange(3, at::kFloat);
    return call(Tensors{a, b});
  };
  const auto plain = [&](const Tensors& in) { return function(in)[0]; };
  const auto replayed = [&](const Tensors& in) { return compiled(values_of(in))[0].toTensor(); };
  for (const bool overlap : {false, false, true, true, false})
    EXPECT_TRUE(at::equal(run(replayed, overlap), run(plain, overlap))) << overlap;
  EXPECT_EQ(compiled.captures(), 2u);
}

}  // namespace replay_contract_test
}  // namespace penstock::graph
