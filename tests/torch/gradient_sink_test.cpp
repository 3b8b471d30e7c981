// Gradients of leaves redirected to a sink, and callbacks at the end of a backward.
#include "penstock/torch/dispatch/gradient_sink.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"

namespace penstock {
namespace gradient_sink_test {

struct Collected final : GradientSink {
  void take(std::size_t slot, at::Tensor gradient) override {
    EXPECT_TRUE(in_backward());
    EXPECT_FALSE(at::GradMode::is_enabled());
    calls.push_back(slot);
    gradients[slot] = std::move(gradient);
  }
  std::vector<std::size_t> calls;
  std::map<std::size_t, at::Tensor> gradients;
};

TEST(GradientSink, TakesWhatWouldBeAccumulated) {
  Collected sink;
  at::Tensor weight = at::randn({4, 3}).requires_grad_(true), bias = at::randn({4}).requires_grad_(true);
  weight.mutable_grad() = at::ones({4, 3});
  const at::Tensor x = at::randn({2, 3});
  at::Tensor y;
  {
    const AccumulatorPtr hold = send_gradient_to(weight, sink, 3);
    y = at::linear(x, weight, bias);
  }
  y.sum().backward();
  ASSERT_EQ(sink.calls, std::vector<std::size_t>{3});
  EXPECT_TRUE(at::allclose(sink.gradients.at(3), at::ones({2, 4}).t().mm(x)));
  EXPECT_TRUE(at::equal(weight.grad(), at::ones({4, 3}))) << "unchanged";
  EXPECT_TRUE(at::equal(bias.grad(), at::full({4}, 2.0))) << "others are accumulated";
}

// Several uses in a graph produce one gradient, however often the sink was set.
TEST(GradientSink, OnceInABackward) {
  Collected sink;
  at::Tensor leaf = at::full({2}, 3.0).requires_grad_(true);
  const AccumulatorPtr first = send_gradient_to(leaf, sink, 0), second = send_gradient_to(leaf, sink, 0);
  EXPECT_EQ(first.get(), second.get());
  const at::Tensor y = (leaf * leaf + leaf).sum();
  y.backward();
  EXPECT_EQ(sink.calls.size(), 1u);
  EXPECT_TRUE(at::equal(sink.gradients.at(0), at::full({2}, 7.0)));
  EXPECT_FALSE(leaf.grad().defined());
  (leaf * 2).sum().backward();
  EXPECT_EQ(sink.calls.size(), 2u) << "as long as the accumulator is held";
}

// Without a new call there is no gradient once no graph holds the accumulator.
TEST(GradientSink, EndsWithTheLastGraph) {
  Collected sink;
  at::Tensor leaf = at::ones({2}).requires_grad_(true);
  {
    const AccumulatorPtr hold = send_gradient_to(leaf, sink, 0);
    (leaf * 2).sum().backward();
  }
  (leaf * 5).sum().backward();
  EXPECT_EQ(sink.calls.size(), 1u);
  EXPECT_TRUE(at::equal(leaf.grad(), at::full({2}, 5.0)));
}

TEST(GradientSink, HooksOfTheUserRunFirst) {
  Collected sink;
  at::Tensor leaf = at::ones({2}).requires_grad_(true);
  int calls = 0;
  leaf.register_hook([&](const at::Tensor& gradient) {
    ++calls;
    return gradient * 10;
  });
  const AccumulatorPtr hold = send_gradient_to(leaf, sink, 1);
  (leaf * 2).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(sink.gradients.at(1), at::full({2}, 20.0)));
}

TEST(GradientSink, WithoutAGradientItIsNotCalled) {
  Collected sink;
  at::Tensor leaf = at::ones({2}).requires_grad_(true), other = at::ones({2}).requires_grad_(true);
  const AccumulatorPtr hold = send_gradient_to(leaf, sink, 0);
  // The leaf is in the graph, but backward does not reach it.
  const at::Tensor unused = leaf * 2;
  (other * 3).sum().backward();
  EXPECT_TRUE(sink.calls.empty());
  EXPECT_TRUE(other.grad().defined());
}

// It would be lost without a word.
TEST(GradientSink, TheHistoryOfAGradientIsRefused) {
  Collected sink;
  at::Tensor leaf = at::full({2}, 3.0).requires_grad_(true);
  const AccumulatorPtr hold = send_gradient_to(leaf, sink, 0);
  const at::Tensor y = leaf.pow(3).sum();
  EXPECT_THROW(y.backward({}, /*retain_graph=*/true, /*create_graph=*/true), NotImplemented);
  EXPECT_TRUE(sink.calls.empty());
  // Derivatives that do not go to the sink have theirs.
  const at::Tensor first = torch::autograd::grad({y}, {leaf}, {}, true, /*create_graph=*/true)[0];
  EXPECT_TRUE(at::equal(torch::autograd::grad({first.sum()}, {leaf})[0], 6 * leaf));
}

TEST(EndOfBackward, ComesAfterEverythingElse) {
  struct Ends final : GradientSink {
    void take(std::size_t slot, at::Tensor) override {
      order.push_back("take");
      if (slot == 0)
        at_end_of_backward([this] { order.push_back(in_backward() ? "end, in backward" : "end"); });
    }
    std::vector<std::string> order;
  } sink;
  at::Tensor first = at::ones({2}).requires_grad_(true), last = at::ones({2}).requires_grad_(true);
  const AccumulatorPtr holds[] = {send_gradient_to(first, sink, 1), send_gradient_to(last, sink, 0)};
  EXPECT_FALSE(in_backward());
  ((first * 2).exp() * last).sum().backward();  // the gradient of `last` comes first
  EXPECT_FALSE(in_backward());
  ASSERT_EQ(sink.order.size(), 3u);
  EXPECT_EQ(sink.order[0], "take");
  EXPECT_EQ(sink.order[1], "take");
  EXPECT_TRUE(sink.order[2].starts_with("end"));
}

TEST(EndOfBackward, OutsideOfOneItIsAnError) {
  EXPECT_FALSE(in_backward());
  EXPECT_THROW(at_end_of_backward([] {}), StateError);
}

}  // namespace gradient_sink_test
}  // namespace penstock
