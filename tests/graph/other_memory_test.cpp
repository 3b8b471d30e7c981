// Tensors that a captured function gives other memory (set_) or another size of their own (resize_).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/run/compiled.h"
#include "tests/graph/call_trace.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace other_memory_test {

using test::has_text;
using test::message_of;
using OverTensors = std::function<Tensors(const Tensors&)>;

// Results, inputs, and which of them share memory are those of the plain run.
InputInfo expect_same_run(const OverTensors& plain, const std::function<Tensors()>& fresh,
                          std::size_t input = 0) {
  const Function function = over_tensors(plain);
  Compiled compiled(function);
  for (int call = 0; call < 2; ++call) {
    Trace expected, actual;
    for (Trace* trace : {&expected, &actual}) {
      const Tensors inputs = fresh();
      const Values results = trace == &expected ? function(values_of(inputs)) : compiled(values_of(inputs));
      trace->inputs = inputs;
      for (const c10::IValue& result : results) trace->outputs.push_back(result.toTensor());
    }
    expect_same(actual.outputs, expected.outputs, "output");
    expect_same(actual.inputs, expected.inputs, "input");
    expect_same_look(actual.outputs, expected.outputs, "output");
    expect_same_look(actual.inputs, expected.inputs, "input");
    for (std::size_t i = 0; i < expected.inputs.size(); ++i)
      for (std::size_t j = 0; j < expected.inputs.size(); ++j)
        EXPECT_EQ(actual.inputs[i].is_alias_of(actual.inputs[j]),
                  expected.inputs[i].is_alias_of(expected.inputs[j]))
            << i << " and " << j;
    expect_same_memory(actual, expected);
  }
  EXPECT_EQ(compiled.captures(), 1u);
  EXPECT_EQ(count_writes(compiled.joint(0).graph), 0u);
  return compiled.meta(0).inputs.at(input);
}

Tensors two() { return {torch::arange(6.).view({2, 3}), torch::arange(10., 16.).view({3, 2})}; }

TEST(OtherMemory, OfAnotherInput) {
  const InputInfo info = expect_same_run(
      [](const Tensors& in) {
        in[0].set_(in[1]);
        return Tensors{in[0] * 2};
      },
      two);
  EXPECT_TRUE(info.mutates_storage_metadata && info.mutates_metadata);
  EXPECT_FALSE(info.mutates_data);
  EXPECT_EQ(info.mutation_type(), MutationType::MutatedOutOfGraph);
  // A part of it, which is then written through either of the two.
  const InputInfo written = expect_same_run(
      [](const Tensors& in) {
        in[0].set_(in[1].select(1, 1));
        in[0].add_(100);
        in[1].mul_(2);
        return Tensors{in[0], in[1].sum()};
      },
      two, /*input=*/1);
  EXPECT_TRUE(written.mutates_data);
  EXPECT_FALSE(written.mutates_storage_metadata);
  // The input that had the memory is returned.
  expect_same_run(
      [](const Tensors& in) {
        in[0].set_(in[1]);
        return Tensors{in[1], in[0].view({6})};
      },
      two);
}

// Two inputs exchange their memory.
TEST(OtherMemory, OfAnInputThatGetsOtherMemoryItself) {
  expect_same_run(
      [](const Tensors& in) {
        const at::Tensor first = in[0].view({6}), second = in[1].detach();
        in[1].set_(in[0]);
        in[0].set_(second);
        return Tensors{in[0] * 2 + in[1].sum() + first.sum()};
      },
      two);
}

TEST(OtherMemory, OfAnInternalTensor) {
  expect_same_run(
      [](const Tensors& in) {
        const at::Tensor result = in[0] + in[1].view({2, 3});
        in[0].set_(result);
        in[0].mul_(3);
        return Tensors{in[0], in[1] * 2};
      },
      two);
  expect_same_run(
      [](const Tensors& in) {
        in[0].set_((in[1] * 2).t());  // another layout
        return Tensors{in[0].sum()};
      },
      two);
  expect_same_run(
      [](const Tensors& in) {
        const at::Tensor inner = in[0] * 1;
        inner.set_(in[1]);
        inner.add_(1);  // writes the input
        return Tensors{inner.t() * 2};
      },
      two, 1);
}

TEST(OtherMemory, BesideGradients) {
  const Function function = over_tensors([](const Tensors& in) {
    in[0].set_(in[1]);
    return Tensors{in[0] * in[2]};
  });
  const at::Tensor weight = leaf({3, 2});
  Compiled compiled(function);
  at::Tensor gradients[2];
  for (int run = 0; run < 2; ++run) {
    weight.mutable_grad() = at::Tensor();
    Tensors in = two();
    in.push_back(weight);
    const Values results = run == 0 ? function(values_of(in)) : compiled(values_of(in));
    EXPECT_TRUE(in[0].is_alias_of(in[1]));
    results[0].toTensor().sum().backward();
    gradients[run] = weight.grad().clone();
  }
  EXPECT_TRUE(torch::equal(gradients[0], gradients[1]));
}

// The gradient would be lost.
TEST(OtherMemory, WrittenWithAGradientIsRefused) {
  for (const bool internal : {false, true}) {
    Compiled compiled(over_tensors([internal](const Tensors& in) {
      in[0].set_(internal ? in[1] * 2 : in[1]);
      in[0].add_(in[2]);
      return Tensors{in[2] * 2};
    }));
    Tensors in = two();
    in.push_back(leaf(in[1].sizes()));
    EXPECT_TRUE(has_text(message_of<NotImplemented>([&] { compiled(values_of(in)); }),
                         "input 0 is given other memory (set_), into which values that require a gradient"));
  }
}

TEST(OtherMemory, SmallerSizes) {
  const InputInfo info = expect_same_run(
      [](const Tensors& in) {
        in[0].resize_({1, 2});
        in[0].add_(1);
        return Tensors{in[0] * 2, in[1].t()};
      },
      two);
  EXPECT_TRUE(info.mutates_metadata && info.mutates_data);
  EXPECT_FALSE(info.mutates_storage_metadata || info.resizes_storage);
  expect_same_run(
      [](const Tensors& in) {
        const at::Tensor inner = (in[0] + 1).resize_({3, 2});
        const at::Tensor before = inner.view(-1);
        inner.resize_({2});
        before.mul_(2);
        return Tensors{inner + 1, before};
      },
      two);
}

std::string refused(const OverTensors& function, const Tensors& inputs = two()) {
  const Tensors before = cloned(inputs);
  Compiled compiled(over_tensors(function));
  const std::string message = message_of<NotImplemented>([&] { compiled(values_of(inputs)); });
  for (std::size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(torch::equal(inputs[i], before[i])) << i;
  return message;
}

TEST(OtherMemory, WhatIsRefusedIsNamed) {
  // Elements that the input no longer has would have to be written, too: `view` is the caller's.
  EXPECT_TRUE(has_text(refused([](const Tensors& in) {
                         in[0].mul_(2);
                         in[0].resize_({2});
                         return Tensors{in[0] + 1};
                       }),
                       "input 0 is written, and has fewer elements"));
  EXPECT_TRUE(has_text(refused([](const Tensors& in) { return Tensors{in[0].resize_({8}).zero_()}; }),
                       "aten::resize_ from sizes [2, 3] to [8] needs more memory"));
  EXPECT_TRUE(has_text(refused([](const Tensors& in) {
                         in[0].add_(1);
                         in[0].set_(in[1]);
                         return Tensors{in[0] * 2};
                       }),
                       "input 0 is written and also given other memory"));
  EXPECT_TRUE(has_text(refused([](const Tensors& in) {
                         const at::Tensor view = in[0].view({6});
                         in[0].set_(in[1]);
                         return Tensors{view};
                       }),
                       "a view of an input that is given other memory"));
  EXPECT_TRUE(has_text(refused([](const Tensors& in) {
                         const at::Tensor inner = in[0] * 2;
                         in[0].set_(inner);
                         return Tensors{inner};
                       }),
                       "shares the memory that input 0 is given by set_"));
  EXPECT_TRUE(has_text(refused([](const Tensors& in) {
                         const at::Tensor inner = in[0] * 2;
                         in[0].set_(inner);
                         in[1].set_(inner);
                         return Tensors{in[0].sum()};
                       }),
                       "input 0 and input 1 are given the same memory"));
  EXPECT_TRUE(has_text(refused(
                           [](const Tensors& in) {
                             const at::NoGradGuard no_grad;
                             in[0].set_(in[1]);
                             return Tensors{in[0] * 2};
                           },
                           {torch::ones({2}), leaf({2})}),
                       "its source requires a gradient"));
}

}  // namespace other_memory_test
}  // namespace penstock::graph
