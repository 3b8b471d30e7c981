// Parts of a forward that are computed again in the backward: the bits of a plain forward, less memory.
#include "penstock/recompute.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <future>
#include <random>
#include <string>
#include <vector>

#include "penstock/dropout.h"
#include "penstock/errors.h"
#include "penstock/mode.h"
#include "penstock/step_context.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/torch/random_cases.h"

namespace penstock {
namespace recompute_test {

using test::has_text;
using test::same_bits;
using Tensors = std::vector<at::Tensor>;
using Part = std::function<at::Tensor(const at::Tensor&)>;

constexpr std::int64_t kWidth = 8;

StepContext a_step() {
  StepContext context;
  context.seed = 5;
  context.step = 3;
  context.microbatch = 1;
  context.microbatches = 4;
  return context;
}

// Saves its result and one of its arguments.
struct SquareTimes : torch::autograd::Function<SquareTimes> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& w) {
    const at::Tensor result = x * x * w;
    context->save_for_backward({x, w, result});
    return result;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {2 * gradients[0] * saved[0] * saved[1],
            (gradients[0] * saved[0] * saved[0] + 0 * saved[2]).sum(0)};
  }
};

// Kinds of parts that save in different ways.
class Parts {
 public:
  Parts() {
    torch::manual_seed(7);
    for (int i = 0; i < 4; ++i) weights.push_back((at::randn({kWidth, kWidth}) * 0.4).requires_grad_(true));
    gain = at::rand({kWidth}).requires_grad_(true);
  }

  Part part(int kind) {
    const at::Tensor w = weights[static_cast<std::size_t>(kind) % weights.size()], v = weights[1];
    switch (kind) {
      case 0:
        return [w, g = gain](const at::Tensor& x) {
          return x + at::linear(at::gelu(at::linear(at::layer_norm(x.to(at::kFloat), {kWidth}, g), w)), w);
        };
      case 1:  // keyed random numbers
        return [w, drop = KeyedDropout(KeyedDropoutOptions(0.3, "drop"))](const at::Tensor& x) mutable {
          return drop->forward(at::tanh(at::linear(x, w)));
        };
      case 2:  // numbers of the default generator
        return [w](const at::Tensor& x) { return at::dropout(at::linear(x, w).sigmoid(), 0.4, true); };
      case 3:
        return [w, g = gain](const at::Tensor& x) { return SquareTimes::apply(at::linear(x, w), g); };
      case 4:  // operators in place and views
        return [v](const at::Tensor& x) {
          at::Tensor y = at::linear(x, v);
          y.mul_(0.5);
          return y.exp().view({-1, 2, kWidth / 2}).transpose(1, 2).reshape(x.sizes()).softmax(-1);
        };
      default:  // another part inside
        return [this](const at::Tensor& x) {
          return recompute([inner = part(0)](const Tensors& in) { return inner(in[0]); }, {x}).sin();
        };
    }
  }
  static constexpr int kKinds = 6;

  Tensors parameters() const {
    Tensors all = weights;
    all.push_back(gain);
    return all;
  }

  Tensors weights;
  at::Tensor gain;
};

Tensors gradients_of(const Tensors& parameters) {
  Tensors all;
  for (const at::Tensor& parameter : parameters) {
    all.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    parameter.mutable_grad() = at::Tensor();
  }
  return all;
}

void expect_same(const Tensors& ours, const Tensors& plain) {
  ASSERT_EQ(ours.size(), plain.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    ASSERT_EQ(ours[i].defined(), plain[i].defined()) << i;
    EXPECT_TRUE(!plain[i].defined() || same_bits(ours[i], plain[i])) << i;
  }
}

TEST(Recompute, RandomChainsHaveTheBitsOfPlainOnes) {
  Parts parts;
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    std::vector<std::pair<int, bool>> chain;
    for (int i = 0; i < 5; ++i)
      chain.emplace_back(static_cast<int>(random() % Parts::kKinds), random() % 2 == 0);
    const bool low = random() % 3 == 0, leaf = random() % 2 == 0, second_thread = random() % 4 == 0;
    const bool early_stop = random() % 2 == 0;
    const at::Tensor x = at::randn({6, kWidth}).requires_grad_(leaf);
    const auto run = [&](bool again) {
      torch::manual_seed(round);
      at::Tensor y = x;
      {
        const StepGuard step(a_step());
        const AutocastScope autocast(at::kCPU, low ? std::optional(at::kBFloat16) : std::nullopt);
        for (const auto& [kind, chosen] : chain) {
          const Part part = parts.part(kind);
          y = again && chosen ? recompute([part](const Tensors& in) { return part(in[0]); }, {y},
                                          {.early_stop = early_stop})
                              : part(y);
        }
      }
      // Random numbers of the backward follow those of the forward either way.
      const at::Tensor seed = at::rand_like(y);
      const auto back = [&] { y.backward(seed); };
      second_thread ? std::async(std::launch::async, back).get() : back();
      Tensors all = gradients_of(parts.parameters());
      all.push_back(y.detach());
      all.push_back(at::rand({3}));
      if (leaf) all.push_back(gradients_of({x})[0]);
      return all;
    };
    const Tensors plain = run(false);
    expect_same(run(true), plain);
  }
}

TEST(Recompute, TheSecondRunIsMarkedAndOneOfItsKind) {
  const at::Tensor x = at::randn({4}).requires_grad_(true);
  struct Seen {
    bool step, marked;
    std::int64_t microbatch;
  };
  const auto seen = std::make_shared<std::vector<Seen>>();
  const auto twice = [seen](const Tensors& in) {
    const auto context = StepContext::current();
    seen->push_back({context->recompute, is_recomputing(), context->microbatch.value_or(-1)});
    return in[0].sin().exp();
  };
  at::Tensor in_step;
  {
    const StepGuard step(a_step());
    in_step = recompute(twice, {x});
  }
  const at::Tensor outside = recompute(twice, {x});
  EXPECT_EQ(seen->size(), 2u);
  in_step.sum().backward();
  outside.sum().backward();
  ASSERT_EQ(seen->size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ((*seen)[i].step, i >= 2) << i;
    EXPECT_EQ((*seen)[i].marked, i >= 2) << i;
    EXPECT_EQ((*seen)[i].microbatch, i % 2 == 0 ? 1 : -1) << i;
  }
  EXPECT_FALSE(StepContext::current()->recompute);
  EXPECT_FALSE(is_recomputing());
}

TEST(Recompute, PlainCallsWhereNothingIsKept) {
  const at::Tensor x = at::randn({4}).requires_grad_(true);
  int runs = 0;
  const auto counted = [&runs](const Tensors& in) {
    ++runs;
    return in[0].exp();
  };
  {
    const at::NoGradGuard no_grad;
    recompute(counted, {x});
  }
  StepContext trial = a_step();
  trial.trial = true;
  {
    const StepGuard step(trial);
    recompute(counted, {x}).sum().backward();
  }
  EXPECT_EQ(runs, 2);
  recompute(counted, {x});  // no backward
  recompute(counted, {x.detach()});
  EXPECT_EQ(runs, 4);
}

TEST(Recompute, SeveralBackwardsRecomputeOnce) {
  const at::Tensor x = at::randn({4}, at::kDouble).requires_grad_(true);
  int runs = 0;
  const at::Tensor y = recompute(
      [&runs](const Tensors& in) {
        ++runs;
        return in[0].sin() * in[0].exp();
      },
      {x});
  const at::Tensor ones = at::ones_like(y);
  const at::Tensor first = torch::autograd::grad({y}, {x}, {ones}, /*retain_graph=*/true, true)[0];
  const at::Tensor second = torch::autograd::grad({first.sum()}, {x}, {}, true)[0];
  const at::Tensor third = torch::autograd::grad({y}, {x}, {ones})[0];
  EXPECT_EQ(runs, 2);
  EXPECT_TRUE(same_bits(third, first.detach()));
  const at::Tensor z = x.detach();
  EXPECT_TRUE(at::allclose(first, z.exp() * (z.sin() + z.cos())));
  EXPECT_TRUE(at::allclose(second, 2 * z.exp() * z.cos()));
}

TEST(Recompute, OnlyInputsAreKept) {
  count_cpu_memory();
  constexpr std::int64_t kRows = 64, kColumns = 128, kBytes = kRows * kColumns * 4;
  const at::Tensor w = (at::randn({kColumns, kColumns}) * 0.1).requires_grad_(true);
  w.mutable_grad() = at::zeros_like(w);
  const at::Tensor x = at::randn({kRows, kColumns}).requires_grad_(true);
  const auto part = [w](const Tensors& in) {
    at::Tensor h = in[0];
    for (int i = 0; i < 6; ++i) h = at::linear(h.sin(), w).tanh();
    return h;
  };
  struct Held {
    std::int64_t forward, peak, after;
  };
  const auto held = [&](bool again) {
    const std::int64_t before = cpu_memory().live;
    at::Tensor y = x;
    for (int i = 0; i < 3; ++i) y = again ? recompute(part, {y}, {.preserve_generators = false}) : part({y});
    Held result{cpu_memory().live - before, 0, 0};
    reset_cpu_peak();
    y.sum().backward();
    y.reset();
    x.mutable_grad() = at::Tensor();
    result.peak = cpu_memory().peak - before;
    result.after = cpu_memory().live - before;
    return result;
  };
  held(true);
  const Held plain = held(false), again = held(true);
  // Per part 6 inputs of a sine, the results of tanh but for the first, and 6 inputs of a product; the
  // result.
  EXPECT_EQ(plain.forward, 3 * 12 * kBytes);
  EXPECT_EQ(again.forward, 3 * kBytes) << "the inputs of two parts and the result";
  EXPECT_LT(again.peak, plain.peak / 2 + 4 * kBytes);
  EXPECT_EQ(plain.after, 0);
  EXPECT_EQ(again.after, 0);
}

// Products that LibTorch computes while it exists.
struct CountProducts final : Mode {
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    if (op.operator_name().name == "aten::mm") ++products;
    op.callBoxed(stack);
  }
  int products = 0;
};

TEST(Recompute, EndsBeforeTheLastProduct) {
  const at::Tensor a = at::randn({kWidth, kWidth}).requires_grad_(true),
                   b = at::randn({kWidth, kWidth}).requires_grad_(true);
  const at::Tensor x = at::randn({3, kWidth}).requires_grad_(true);
  int ends = 0;
  const auto part = [a, b, &ends](const Tensors& in) {
    const at::Tensor y = in[0].mm(a).tanh().mm(b) + in[0];
    ++ends;
    return y;
  };
  // Runs that end, and products of the backward, 4 of which are those of the gradients.
  const auto counts = [&](bool early_stop) {
    ends = 0;
    const at::Tensor y = recompute(part, {x}, {.early_stop = early_stop});
    CountProducts count;
    const ModeGuard guard(count);
    y.sum().backward();
    return std::pair(ends, count.products);
  };
  EXPECT_EQ(counts(false), std::pair(2, 6));
  EXPECT_EQ(counts(true), std::pair(1, 5));
}

TEST(Recompute, AFunctionMayCatchTheEarlyEnd) {
  const at::Tensor w = at::randn({kWidth, kWidth}).requires_grad_(true);
  const at::Tensor x = at::randn({3, kWidth}).requires_grad_(true);
  int runs = 0;
  const auto part = [w, &runs](const Tensors& in) {
    ++runs;
    at::Tensor y = in[0].mm(w);
    try {
      y = y.sin();
    } catch (...) {
      y = y.cos();  // only in a second run, whose results are not used
    }
    return y;
  };
  const auto gradients = [&](const at::Tensor& y) {
    return torch::autograd::grad({y}, {x, w}, {at::ones_like(y)});
  };
  const Tensors plain = gradients(part({x}));
  const at::Tensor y = recompute(part, {x}, {.early_stop = true});
  runs = 0;
  expect_same(gradients(y), plain);
  EXPECT_EQ(runs, 1);
}

TEST(Recompute, RefusesWhatCouldNotHaveTheSameBits) {
  const at::Tensor x = at::randn({4}).requires_grad_(true);
  const auto message = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const StateError& error) {
      return error.what();
    }
    return "";
  };
  const at::Tensor input = x * 1;
  const at::Tensor y = recompute([](const Tensors& in) { return in[0].exp().sin(); }, {input});
  input.detach().add_(1);
  EXPECT_TRUE(has_text(message([&] { y.sum().backward(); }), "input 0: got written after the forward"));

  int runs = 0;
  const auto changing = [&](int more, std::int64_t length) {
    runs = 0;
    return recompute(
        [&runs, more, length](const Tensors& in) {
          at::Tensor h = in[0].sin();
          if (runs++ > 0) {
            h = at::cat({h, h}).narrow(0, 0, length);
            for (int i = 0; i < more; ++i) h = h.sin();
          }
          return h.sin().sum();
        },
        {x});
  };
  EXPECT_TRUE(has_text(message([&] { changing(1, 4).backward(); }), "more, beginning with Float [4]"));
  EXPECT_TRUE(has_text(message([&] { changing(0, 3).backward(); }), "Float [3] as number 2"));
  runs = 0;
  const at::Tensor fewer = recompute(
      [&runs](const Tensors& in) { return (runs++ > 0 ? in[0].sin() * 2 : in[0].sin().cos()).sum(); },
      {input});
  EXPECT_TRUE(has_text(message([&] { fewer.backward(); }), "saves for its backward: got 1, expected 2"));
  // Errors of the function are those of the backward.
  const at::Tensor failing = recompute(
      [](const Tensors& in) {
        if (is_recomputing()) throw ValueError("not again");
        return in[0].sin();
      },
      {input});
  EXPECT_THROW(failing.sum().backward(), ValueError);
  const at::Tensor written = recompute(
      [](const Tensors& in) {
        const at::Tensor saved = in[0].exp();
        at::Tensor sum = saved.detach();
        return saved + sum.add_(1);
      },
      {input});
  EXPECT_TRUE(has_text(message([&] { written.sum().backward(); }), "written by an operator in place"));
  x.exp().sum().backward();  // and the thread is as before
}

}  // namespace recompute_test
}  // namespace penstock
