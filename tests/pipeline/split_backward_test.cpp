// The backward of a stage in one pass and in halves, compared with autograd: same bits, hooks run once,
// memory is freed.
#include "penstock/pipeline/backward/split_backward.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <map>
#include <thread>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/cpu_bfloat16.h"
#include "tests/pipeline/split_backward_check.h"

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#endif

namespace penstock {
namespace split_backward_test {

using namespace test;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

class SplitBackward : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(3); }

  const at::Tensor W = weight({16, 16}), V = weight({16, 16}), a = weight({16}), b = weight({16}),
                   R = weight({4, 16}), E = weight({10, 16});
  const Tensors all{W, V, a, b, R, E};
};

TEST_F(SplitBackward, Perceptron) {
  const Forward forward = [&](const Tensors& x) {
    return Tensors{at::linear(at::linear(x[0], W, a).tanh(), V, b)};
  };
  EXPECT_EQ(check(forward, random_inputs({{4, 16}}), all), 3);
}

Tensors transformer_block(const at::Tensor& x, const std::map<std::string, at::Tensor>& p, bool mask) {
  const auto B = x.size(0), T = x.size(1), C = x.size(2), H = std::int64_t{2};
  const auto norm = [&](const at::Tensor& t, const std::string& n) {
    return at::layer_norm(t, {C}, p.at(n + ".w"), p.at(n + ".b"));
  };
  const auto lin = [&](const at::Tensor& t, const std::string& n) {
    return at::linear(t, p.at(n + ".w"), p.at(n + ".b"));
  };
  const auto qkv = lin(norm(x, "ln1"), "qkv").view({B, T, 3, H, C / H}).permute({2, 0, 3, 1, 4}).unbind(0);
  at::Tensor scores = at::matmul(qkv[0], qkv[1].transpose(-2, -1)) * 0.4;
  if (mask) scores = scores.masked_fill(at::ones({T, T}, at::kBool).triu(1), -1e9);
  const at::Tensor y =
      x + lin(at::matmul(at::softmax(scores, -1), qkv[2]).transpose(1, 2).reshape({B, T, C}), "proj");
  return {y + lin(at::gelu(lin(norm(y, "ln2"), "up")), "down")};
}

std::map<std::string, at::Tensor> block_weights(std::int64_t C, at::ScalarType type = at::kFloat) {
  return {{"ln1.w", weight({C}, type)},         {"ln1.b", weight({C}, type)},
          {"ln2.w", weight({C}, type)},         {"ln2.b", weight({C}, type)},
          {"qkv.w", weight({3 * C, C}, type)},  {"qkv.b", weight({3 * C}, type)},
          {"proj.w", weight({C, C}, type)},     {"proj.b", weight({C}, type)},
          {"up.w", weight({4 * C, C}, type)},   {"up.b", weight({4 * C}, type)},
          {"down.w", weight({C, 4 * C}, type)}, {"down.b", weight({C}, type)}};
}

Tensors values(const std::map<std::string, at::Tensor>& weights) {
  Tensors list;
  for (const auto& [name, tensor] : weights) list.push_back(tensor);
  return list;
}

TEST_F(SplitBackward, TransformerBlock) {
  const auto p = block_weights(16);
  for (const bool mask : {false, true})
    EXPECT_EQ(check([&](const Tensors& x) { return transformer_block(x[0], p, mask); },
                    random_inputs({{2, 6, 16}}), values(p)),
              3);
}

TEST_F(SplitBackward, TransformerBlockInBfloat16) {
  ensure_cpu_bfloat16();
  const auto p = block_weights(16, at::kBFloat16);
  auto inputs = random_inputs({{2, 6, 16}});
  for (Tensors& x : inputs) x[0] = x[0].detach().to(at::kBFloat16).requires_grad_(true);
  EXPECT_EQ(check([&](const Tensors& x) { return transformer_block(x[0], p, true); }, inputs, values(p)), 3);
}

TEST_F(SplitBackward, NormalizationWeightsAreDoneInTheFirstHalf) {
  const at::Tensor x = torch::randn({4, 16}).requires_grad_(true);
  const at::Tensor y = at::linear(at::layer_norm(x, {16}, a, b), W);
  InputBackward half = stage_backward_input(OutputEdges::of({y}), {torch::ones_like(y)}, {x});
  EXPECT_TRUE(half.input_grads[0].defined());
  EXPECT_TRUE(a.grad().defined() && b.grad().defined());
  EXPECT_FALSE(W.grad().defined());
  ASSERT_TRUE(half.weights.pending());
  half.weights.run();
  EXPECT_TRUE(W.grad().defined());
  EXPECT_FALSE(half.weights.pending());
}

TEST_F(SplitBackward, FirstStageIsCutAboveItsLowestWeights) {
  const at::Tensor tokens = torch::randint(10, {4}, at::kLong);
  const auto stage = [&](const Tensors& x) {
    return Tensors{at::linear(at::layer_norm(at::embedding(E, x[0]), {16}, a, b).tanh(), W)};
  };
  EXPECT_EQ(check(stage, {{tokens}, {tokens.flip(0)}, {tokens * 0}}, all), 3);

  for (const at::Tensor& w : all) w.mutable_grad() = at::Tensor();
  const Tensors y = stage({tokens});
  InputBackward half = stage_backward_input(OutputEdges::of(y), {torch::ones_like(y[0])}, {tokens});
  EXPECT_FALSE(half.input_grads[0].defined());
  EXPECT_TRUE(a.grad().defined());  // everything above the embedding is done
  EXPECT_FALSE(E.grad().defined() || W.grad().defined());
  half.weights.run();
  EXPECT_TRUE(E.grad().defined() && W.grad().defined());
}

TEST_F(SplitBackward, FirstStageOfOtherKinds) {
  const auto data = random_inputs({{4, 16}}, false);
  check([&](const Tensors& x) { return Tensors{at::linear(at::linear(x[0], W, a).relu(), V, b)}; }, data,
        all);
  check([&](const Tensors& x) { return Tensors{at::linear(x[0] + R, W, a).relu()}; }, data, all);
  check([&](const Tensors& x) { return Tensors{(x[0] * a + b).mm(W)}; }, data, all);
  check(
      [&](const Tensors& x) {
        return Tensors{x[0].mm(W.t().to(at::kDouble).to(at::kFloat)).mm(V * at::softmax(a, 0))};
      },
      data, all);
  check([&](const Tensors& x) { return Tensors{W.t(), W, (W * W).sum(), x[0]}; }, data, all);
}

TEST_F(SplitBackward, TiedWeights) {
  const auto x = random_inputs({{4, 16}});
  check([&](const Tensors& x) { return Tensors{at::linear(at::linear(x[0], W, a).tanh(), W, b)}; }, x, all);
  // Three gradients and more, where the order of the additions matters.
  check(
      [&](const Tensors& x) {
        return Tensors{
            at::linear(at::linear(at::linear(at::linear(x[0], W, a).tanh(), W, b).sin(), W, a).tanh(), W, a)};
      },
      x, all);
  // Used as it is and transposed.
  check([&](const Tensors& x) { return Tensors{x[0].mm(W).tanh().mm(W.t()).tanh().mm(W).tanh().mm(W.t())}; },
        x, all);
  // With the weight of an operator that has only one dim.
  check(
      [&](const Tensors& x) {
        return Tensors{
            at::linear(at::layer_norm(at::linear(at::layer_norm(x[0], {16}, a, b), W, a), {16}, b, a), V, a) *
            a};
      },
      x, all);
  // Weights that are computed from others.
  check(
      [&](const Tensors& x) {
        const at::Tensor shared = W * at::softmax(a, 0);
        return Tensors{x[0].mm(shared).tanh().mm(shared).tanh().mm(shared) + b + a};
      },
      x, all);
}

TEST_F(SplitBackward, EmbeddingTiedToTheHead) {
  const at::Tensor tokens = torch::randint(10, {4}, at::kLong);
  check(
      [&](const Tensors& x) {
        return Tensors{at::linear(at::linear(at::embedding(E, x[0]), W, a).tanh(), E)};
      },
      {{tokens}, {tokens}, {tokens}}, all);
  auto inputs = random_inputs({{4, 16}});
  for (Tensors& x : inputs) x.push_back(tokens);
  check(
      [&](const Tensors& x) {
        return Tensors{at::linear(
            at::linear(x[0] + at::embedding(E, x[1]), W, a).tanh() + at::embedding(E, x[1].flip(0)), E)};
      },
      inputs, all);
}

TEST_F(SplitBackward, InPlaceOperatorsAndViews) {
  const auto x = random_inputs({{4, 16}, {4, 8}});
  check(
      [&](const Tensors& x) {
        at::Tensor h = x[0].mm(W);
        h.mul_(a);
        h.narrow(1, 0, 8).add_(1.5);
        return Tensors{h.tanh() + b};
      },
      x, all);
  check(
      [&](const Tensors& x) {  // weights and inputs are written into a part
        at::Tensor h = x[0].mm(W);
        h.narrow(1, 0, 8).mul_(x[1]);
        h.select(0, 1).mul_(a).add_(b);
        h.narrow(1, 4, 8).copy_(x[1].mm(V.narrow(0, 0, 8)).narrow(1, 0, 8));
        return Tensors{h.mm(W).tanh() * a};
      },
      x, all);
  check(
      [&](const Tensors& x) {  // a view whose base changes, tied three times
        at::Tensor h = x[0].mm(W);
        const at::Tensor view = h.view({8, 8});
        h.mul_(a);
        return Tensors{view.reshape({4, 16}).tanh().mm(W).sin().mm(W).tanh().mm(W), view.sum()};
      },
      x, all);
  check(
      [&](const Tensors& x) {
        at::Tensor h = at::linear(x[0], W, a);
        return Tensors{at::relu_(h).unflatten(1, {2, 8}).transpose(0, 1)};
      },
      x, all);
}

struct Product : Function<Product> {
  static inline int calls = 0;
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x.mm(w);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    ++calls;
    const auto saved = context->get_saved_variables();
    return {grads[0].mm(saved[1].t()), saved[0].t().mm(grads[0])};
  }
};

struct TwoResults : Function<TwoResults> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w,
                               const at::Tensor& v) {
    context->save_for_backward({x, w, v});
    return {x.mm(w), x * v};
  }
  static variable_list backward(AutogradContext* context, variable_list g) {
    const auto s = context->get_saved_variables();
    if (!g[0].defined()) g[0] = at::zeros({s[0].size(0), s[1].size(1)});
    if (!g[1].defined()) g[1] = at::zeros_like(s[0]);
    return {g[0].mm(s[1].t()) + g[1] * s[2], s[0].t().mm(g[0]), (g[1] * s[0]).sum(0)};
  }
};

// Recomputes its forward, with a backward of its own that adds to the weights.
struct Recomputed : Function<Recomputed> {
  static at::Tensor body(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
    return at::linear(x, w, b).tanh();
  }
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w,
                            const at::Tensor& b) {
    context->save_for_backward({x, w, b});
    return body(x, w, b);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    at::AutoGradMode on(true);
    const at::Tensor x = saved[0].detach().requires_grad_(true);
    torch::autograd::backward({body(x, saved[1], saved[2])}, {grads[0]});
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

TEST_F(SplitBackward, CustomFunctions) {
  const auto x = random_inputs({{4, 16}});
  Product::calls = 0;
  check([&](const Tensors& x) { return Tensors{Product::apply(x[0].relu(), W).sigmoid()}; }, x, all);
  EXPECT_EQ(Product::calls, 9);  // once per microbatch, in each of the three ways
  // Together with operators that are deferred, in every order.
  check(
      [&](const Tensors& x) {
        return Tensors{Product::apply(Product::apply(x[0].mm(W).tanh(), W).tanh().mm(W), W).tanh().mm(W)};
      },
      x, all);
  check([&](const Tensors& x) { return Tensors{Product::apply(x[0], W * a).mm(W * b)}; }, x, all);
  check(
      [&](const Tensors& x) {
        const auto r = TwoResults::apply(x[0].mm(V), W, a);
        return Tensors{r[0].mm(V) * b, r[1].mm(W)};
      },
      x, all);
  check([&](const Tensors& x) { return Tensors{TwoResults::apply(x[0].mm(V), W, a)[1].mm(W)}; }, x, all);
  check([&](const Tensors& x) { return Tensors{Product::apply(x[0], W)}; }, random_inputs({{4, 16}}, false),
        all);
}

TEST_F(SplitBackward, RecomputingFunctions) {
  check(
      [&](const Tensors& x) {
        return Tensors{at::linear(Recomputed::apply(at::linear(x[0], V, b), W, a), V)};
      },
      random_inputs({{4, 16}}), {W, V, a});
}

TEST_F(SplitBackward, HooksRunOnce) {
  int on_middle = 0, on_output = 0, on_weight = 0, on_input = 0, on_computed = 0;
  const at::Tensor hooked = weight({16, 16});
  hooked.register_hook([&](const at::Tensor& grad) {
    ++on_weight;
    return grad * 0.5;
  });
  at::Tensor kept;
  const Forward forward = [&](const Tensors& x) {
    x[0].register_hook([&](const at::Tensor& grad) {
      ++on_input;
      return grad * 2;
    });
    at::Tensor h = at::linear(x[0], hooked, a);
    h.register_hook([&](const at::Tensor& grad) {
      ++on_middle;
      return grad * 3;
    });
    h.register_hook([&](const at::Tensor& grad) {
      ++on_middle;
      return grad + 1;
    });
    h.retain_grad();
    kept = h;
    const at::Tensor computed = V * b;
    computed.register_hook([&](const at::Tensor& grad) {
      ++on_computed;
      return grad.tanh();
    });
    at::Tensor y = h.tanh().mm(computed);
    y.register_hook([&](const at::Tensor& grad) {
      ++on_output;
      return grad * 0.25;
    });
    return Tensors{y};
  };
  const auto inputs = random_inputs({{4, 16}});
  const Tensors weights{hooked, V, a, b};
  const Gradients wanted = run_way(Way::Autograd, forward, inputs, weights);
  const at::Tensor wanted_kept = kept.grad();
  for (const Way way : {Way::AtOnce, Way::Halves}) {
    on_middle = on_output = on_weight = on_input = on_computed = 0;
    expect_same(wanted, run_way(way, forward, inputs, weights), "hooks");
    EXPECT_EQ(on_middle, 6);
    EXPECT_EQ(on_output, 3);
    EXPECT_EQ(on_weight, 3);
    EXPECT_EQ(on_input, 3);
    EXPECT_EQ(on_computed, 3);
    EXPECT_TRUE(same(wanted_kept, kept.grad()));
  }
}

TEST_F(SplitBackward, OutputsOfEveryKind) {
  const auto x = random_inputs({{4, 16}, {4, 16}});
  // Independent of the inputs, alone and together.
  check([&](const Tensors& x) { return Tensors{at::linear(x[0], W, a), (R * 2).sin()}; }, x, all);
  check([&](const Tensors& x) { return Tensors{(R * 2).sin(), W.mm(V)}; }, x, all);
  check([&](const Tensors& x) { return Tensors{at::linear(x[0], W, a), W, a.sin(), V * W, W.t()}; }, x, all);
  // An input or a weight itself, one twice, one inside another.
  check([&](const Tensors& x) { return Tensors{x[0], W, x[1].mm(W)}; }, x, all);
  check([&](const Tensors& x) { return Tensors{x[0], x[0]}; }, x, all);
  check(
      [&](const Tensors& x) {
        const at::Tensor y = at::linear(x[0], W, a);
        return Tensors{y, y, y.tanh().mm(V), at::Tensor(), y.detach(), y.sum()};
      },
      x, all);
  // A loss.
  check([&](const Tensors& x) { return Tensors{(at::linear(x[0], W, a) - x[1]).pow(2).mean()}; }, x, all);
  // Several results of one node.
  check([&](const Tensors& x) { return at::linear(x[0], W, a).unbind(0); }, x, all);
  check([&](const Tensors& x) { return Tensors{at::linear(x[0], W, a).unbind(0)[2].mul(b)}; }, x, all);
}

TEST_F(SplitBackward, InputsOfEveryKind) {
  auto inputs = random_inputs({{4, 16}, {4, 16}, {4, 16}});
  for (Tensors& x : inputs) {
    x[1].requires_grad_(false);
    x.push_back(torch::randint(10, {4}, at::kLong));
    x.push_back(at::Tensor());
  }
  // The third is not used.
  check([&](const Tensors& x) { return Tensors{at::linear(x[0] * x[1] + at::embedding(E, x[3]), W, a)}; },
        inputs, all);
  // Frozen weights: nothing is left for the second half.
  const at::Tensor frozen = W.detach();
  EXPECT_EQ(
      check([&](const Tensors& x) { return Tensors{at::linear(x[0], frozen, a.detach())}; }, inputs, all), 0);
  EXPECT_EQ(check([&](const Tensors& x) { return Tensors{at::linear(x[0], frozen, a).tanh().mm(frozen)}; },
                  inputs, all),
            0);
  // One input twice.
  const at::Tensor x = torch::randn({4, 16}).requires_grad_(true), y = x.mm(W);
  const InputBackward half = stage_backward_input(OutputEdges::of({y}), {torch::ones_like(y)}, {x, x});
  EXPECT_TRUE(same(half.input_grads[0], half.input_grads[1]));
}

TEST_F(SplitBackward, UndefinedGradientsContributeNothing) {
  const auto x = random_inputs({{4, 16}});
  const Forward forward = [&](const Tensors& x) {
    return Tensors{at::linear(x[0], W, a), at::linear(x[0], V, b).tanh(), R * 2};
  };
  for (const std::vector<std::size_t>& silent :
       std::vector<std::vector<std::size_t>>{{0}, {1}, {2}, {0, 2}, {1, 2}, {0, 1}})
    check(forward, x, all, silent);
  EXPECT_EQ(check(forward, x, all, {0, 1, 2}), 0);
  for (const at::Tensor& w : all) EXPECT_FALSE(w.grad().defined());
}

TEST_F(SplitBackward, OtherModules) {
  const at::Tensor kernel = weight({4, 3, 3, 3}), bias = weight({4}), scale = weight({4}),
                   shift = weight({4}), head = weight({5, 4 * 6 * 6});
  const Forward forward = [&](const Tensors& x) {
    const at::Tensor h =
        at::batch_norm(at::conv2d(x[0], kernel, bias), scale, shift, {}, {}, true, 0.1, 1e-5, false);
    return Tensors{at::linear(at::relu(h).flatten(1), head)};
  };
  EXPECT_EQ(check(forward, random_inputs({{2, 3, 8, 8}}), {kernel, bias, scale, shift, head}), 3);
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(6, 5).num_layers(2));
  EXPECT_EQ(check([&](const Tensors& x) { return Tensors{std::get<0>(lstm(x[0]))}; },
                  random_inputs({{4, 2, 6}}), lstm->parameters()),
            3);
}

TEST_F(SplitBackward, GraphsOfSeveralThreads) {
  // Nodes of another thread have sequence numbers of their own: the engine's order is not that of the
  // numbers.
  check(
      [&](const Tensors& x) {
        at::Tensor h = x[0];
        for (int i = 0; i < 4; ++i)
          std::thread([&] {
            for (int k = 0; k < 7 * (4 - i); ++k) h = h * 1.01;
            h = h.mm(W).tanh();
          }).join();
        return Tensors{h.mm(W)};
      },
      random_inputs({{4, 16}}), all);
}

TEST_F(SplitBackward, GradientsOfInputsShareNoMemoryWithThoseOfWeights) {
  const at::Tensor x = torch::randn({4, 16}).requires_grad_(true);
  for (const bool halves : {false, true}) {
    R.mutable_grad() = at::Tensor();
    const at::Tensor y = (x.view({-1}) + R.view({-1})) * 2;
    Tensors grads;
    if (halves) {
      InputBackward half = stage_backward_input(OutputEdges::of({y}), {torch::ones_like(y)}, {x});
      half.weights.run();
      grads = half.input_grads;
    } else {
      grads = stage_backward(OutputEdges::of({y}), {torch::ones_like(y)}, {x});
    }
    EXPECT_TRUE(at::equal(grads[0], R.grad()));
    EXPECT_NE(grads[0].data_ptr(), R.grad().data_ptr());
  }
}

TEST_F(SplitBackward, Misuse) {
  const at::Tensor x = torch::randn({4, 16}).requires_grad_(true);
  const auto run = [&](const Tensors& grads, const Tensors& inputs) {
    stage_backward_input(OutputEdges::of({x.mm(W)}), grads, inputs);
  };
  EXPECT_THROW(run({}, {x}), ValueError);
  EXPECT_THROW(run({torch::ones({16, 4})}, {x}), ValueError);
  EXPECT_THROW(run({torch::ones({4, 16})}, {x.tanh()}), ValueError);
  EXPECT_THROW(stage_backward(OutputEdges(), {x}, {}), ValueError);
  EXPECT_THROW(OutputEdges::of({x}).needs_grad(1), ValueError);

  WeightBackward nothing;
  EXPECT_FALSE(nothing.pending());
  EXPECT_THROW(nothing.run(), StateError);
  InputBackward half = stage_backward_input(OutputEdges::of({x.mm(W)}), {torch::ones({4, 16})}, {x});
  half.weights.run();
  EXPECT_THROW(half.weights.run(), StateError);

  const OutputEdges edges = OutputEdges::of({x.mm(W), x.detach(), at::Tensor()});
  EXPECT_EQ(edges.size(), 3u);
  EXPECT_TRUE(edges.needs_grad(0));
  EXPECT_FALSE(edges.needs_grad(1) || edges.needs_grad(2));
  EXPECT_TRUE(OutputEdges().empty());
}

TEST_F(SplitBackward, GradModeDoesNotMatter) {
  const at::Tensor x = torch::randn({4, 16}).requires_grad_(true), y = x.mm(W).tanh();
  const torch::NoGradGuard off;
  InputBackward half = stage_backward_input(OutputEdges::of({y}), {torch::ones_like(y)}, {x});
  half.weights.run();
  EXPECT_TRUE(W.grad().defined() && !W.grad().requires_grad());
}

TEST_F(SplitBackward, DistributedTensors) {
  using namespace std::chrono_literals;
  const Tensors whole{at::randn({16, 16}), at::randn({16}), at::randn({16, 16}),
                      at::randn({16}),     at::randn({16}), at::randn({16})};
  const auto inputs = random_inputs({{4, 16}});
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2));
    const auto spread = [&](const at::Tensor& tensor, const Placement& placement) {
      return distribute_tensor(tensor.detach(), mesh, {placement}).requires_grad_(true);
    };
    const Tensors weights{spread(whole[0], Shard{0}),    spread(whole[1], Shard{0}),
                          spread(whole[2], Shard{1}),    spread(whole[3], Replicate{}),
                          spread(whole[4], Replicate{}), spread(whole[5], Replicate{})};
    // Column and row parallel, the weight of the normalization in the first half.
    const Forward forward = [&](const Tensors& x) {
      const at::Tensor h = at::layer_norm(x[0], {16}, weights[4], weights[5]);
      return Tensors{at::linear(at::linear(h, weights[0], weights[1]).tanh(), weights[2], weights[3]) + x[0]};
    };
    std::vector<Tensors> spread_inputs;
    for (const Tensors& x : inputs) spread_inputs.push_back({spread(x[0], Replicate{})});
    const auto local = [](Gradients gradients) {
      for (Tensors& grads : gradients.inputs)
        for (at::Tensor& grad : grads) EXPECT_TRUE(is_dtensor(grad)), grad = to_local(grad);
      for (at::Tensor& grad : gradients.weights) EXPECT_TRUE(is_dtensor(grad)), grad = to_local(grad);
      return gradients;
    };
    const Gradients wanted = local(run_way(Way::Autograd, forward, spread_inputs, weights));
    expect_same(wanted, local(run_way(Way::AtOnce, forward, spread_inputs, weights)), "in one pass");
    const Gradients halves = local(run_way(Way::Halves, forward, spread_inputs, weights));
    expect_same(wanted, halves, "in halves");
    EXPECT_EQ(halves.pending, 3);
  });
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK
// A random graph: each step takes earlier values and weights, some of them tied; some values are written in
// place.
TEST_F(SplitBackward, RandomGraphs) {
  struct Step {
    int kind, first, second, weight;
  };
  const bool held = rc::check([&] {
    const int count = *rc::gen::inRange(1, 14), needing = *rc::gen::inRange(0, 4);
    std::vector<Step> steps;
    for (int i = 0; i < count; ++i)
      steps.push_back({*rc::gen::inRange(0, 13), *rc::gen::inRange(0, i + 3), *rc::gen::inRange(0, i + 3),
                       *rc::gen::inRange(0, 2)});
    const auto outputs =
        *rc::gen::nonEmpty(rc::gen::container<std::vector<int>>(rc::gen::inRange(0, count + 3)));
    const auto silent = *rc::gen::container<std::vector<std::size_t>>(rc::gen::inRange<std::size_t>(0, 4));
    const Tensors matrices{W, V}, vectors{a, b};
    const Forward forward = [&](const Tensors& x) {
      Tensors values = x;
      for (const Step& step : steps) {
        const auto w = static_cast<std::size_t>(step.weight);
        const at::Tensor p = values[static_cast<std::size_t>(step.first)],
                         q = values[static_cast<std::size_t>(step.second)];
        switch (step.kind) {
          case 0:
            values.push_back(at::linear(p, matrices[w], vectors[w]));
            break;
          case 1:
            values.push_back(p.tanh().mm(matrices[w]));
            break;
          case 2:
            values.push_back(p.mm(matrices[w].t()).sin());
            break;
          case 3:
            values.push_back(p + q);
            break;
          case 4:
            values.push_back(p.tanh() * q.tanh());
            break;
          case 5:
            values.push_back(at::layer_norm(p, {16}, vectors[w], vectors[1 - w]));
            break;
          case 6:
            values.push_back((p * vectors[w]).tanh());
            break;
          case 7:
            values.push_back(Product::apply(p, matrices[w]).tanh());
            break;
          case 8:
            values.push_back(p.mm(matrices[w] * vectors[1 - w]).tanh());
            break;
          case 9:
            values.push_back(
                TwoResults::apply(p, matrices[w], vectors[w])[static_cast<std::size_t>(step.second % 2)]
                    .tanh());
            break;
          case 10: {
            at::Tensor h = p.sin();
            h.narrow(1, 0, 8).mul_(q.narrow(1, 8, 8).tanh());
            h.select(0, 0).add_(vectors[w]);
            values.push_back(h);
            break;
          }
          case 11: {
            at::Tensor h = at::linear(p, matrices[w]);
            const at::Tensor view = h.view({-1});
            h.mul_(vectors[w]);
            values.push_back(view.view({4, 16}).tanh());
            break;
          }
          default:
            values.push_back(matrices[w].narrow(0, 0, 4) * vectors[1 - w]);
            break;  // only from weights
        }
      }
      Tensors results;
      for (const int output : outputs) results.push_back(values[static_cast<std::size_t>(output)]);
      return results;
    };
    std::vector<Tensors> microbatches(2);
    for (Tensors& inputs : microbatches)
      for (int i = 0; i < 3; ++i) inputs.push_back(torch::randn({4, 16}).requires_grad_(i < needing));
    check(forward, microbatches, all, silent);
    RC_ASSERT(!testing::Test::HasFailure());
  });
  EXPECT_TRUE(held);
}
#endif

}  // namespace split_backward_test
}  // namespace penstock
