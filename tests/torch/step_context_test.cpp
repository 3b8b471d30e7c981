#include "penstock/step_context.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <future>
#include <thread>

#include "penstock/dropout.h"
#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/torch/random_cases.h"

namespace penstock {
namespace step_context_test {

using test::has_text;
using test::same_bits;

StepContext at_step(std::int64_t step, std::optional<std::int64_t> microbatch = {}) {
  StepContext context;
  context.seed = 42;
  context.step = step;
  context.microbatch = microbatch;
  context.microbatches = 8;
  return context;
}

std::int64_t step_here() { return StepContext::current()->running ? StepContext::current()->step : -1; }

// -------------------------------------------------------------------------------------------------------------
// scopes

TEST(StepContextScope, OutsideOfAnyStep) {
  const auto context = StepContext::current();
  EXPECT_FALSE(context->running);
  EXPECT_FALSE(context->microbatch.has_value());
  EXPECT_EQ(context->loss_scale, 1.0);
  EXPECT_FALSE(context->trial);
  EXPECT_FALSE(context->recompute);
  EXPECT_EQ(context->microbatches, 1);
}

TEST(StepContextScope, AModuleSeesWhatTheRuntimeSet) {
  StepContext given = at_step(7, 3);
  given.trial = true;
  given.loss_scale = 1024;
  given.rows = BatchRows{.global = 16, .first = 4, .count = 4};
  const StepGuard guard(given);
  const auto seen = StepContext::current();
  EXPECT_TRUE(seen->running);
  EXPECT_EQ(seen->step, 7);
  EXPECT_EQ(seen->microbatch, 3);
  EXPECT_EQ(seen->microbatches, 8);
  EXPECT_TRUE(seen->trial);
  EXPECT_EQ(seen->loss_scale, 1024);
  EXPECT_EQ(seen->rows, given.rows);
  EXPECT_FALSE(seen->recompute);
  EXPECT_TRUE(seen->recomputation().recompute);
}

TEST(StepContextScope, GuardsNestAndEnd) {
  EXPECT_EQ(step_here(), -1);
  {
    const StepGuard outer(at_step(1));
    EXPECT_EQ(step_here(), 1);
    {
      const StepGuard inner(at_step(2));
      EXPECT_EQ(step_here(), 2);
      const StepGuard same_scope(at_step(3));
      EXPECT_EQ(step_here(), 3);
    }
    EXPECT_EQ(step_here(), 1);
    try {
      const StepGuard inner(at_step(4));
      throw std::runtime_error("on the way out");
    } catch (const std::runtime_error&) {
      EXPECT_EQ(step_here(), 1);
    }
    EXPECT_THROW(StepGuard(at_step(5, 99)), ValueError);  // a guard whose constructor throws changes nothing
    EXPECT_EQ(step_here(), 1);
  }
  EXPECT_EQ(step_here(), -1);
}

TEST(StepContextScope, ASnapshotOutlivesItsScope) {
  std::shared_ptr<const StepContext> kept;
  {
    const StepGuard guard(at_step(9, 2));
    kept = StepContext::current();
  }
  EXPECT_EQ(kept->step, 9);
  const StepGuard again(kept);
  EXPECT_EQ(StepContext::current(), kept);
}

TEST(StepContextScope, ContradictionsAreRefused) {
  const auto refused = [](auto change) {
    StepContext context = at_step(1, 2);
    change(context);
    EXPECT_THROW(StepGuard{context}, ValueError);
  };
  refused([](StepContext& c) { c.microbatch = -1; });
  refused([](StepContext& c) { c.microbatch = 8; });
  refused([](StepContext& c) { c.microbatch.reset(), c.microbatches = 0; });
  refused([](StepContext& c) { c.loss_scale = 0; });
  refused([](StepContext& c) { c.loss_scale = std::numeric_limits<double>::infinity(); });
  refused([](StepContext& c) { c.rows = BatchRows{.global = 8, .first = 5, .count = 4}; });
  refused([](StepContext& c) { c.rows = BatchRows{.global = 8, .first = 0, .count = 0}; });
  refused([](StepContext& c) { c.running = false; });
  EXPECT_THROW(StepGuard(std::shared_ptr<const StepContext>()), ValueError);
}

class ForeignInfo : public c10::DebugInfoBase {};

TEST(StepContextScope, AnotherUserOfTheSameDebugInfoKindIsDetected) {
  const StepGuard guard(at_step(1));
  const c10::DebugInfoGuard foreign(c10::DebugInfoKind::PRODUCER_INFO, std::make_shared<ForeignInfo>());
  EXPECT_THROW(StepContext::current(), StateError);
}

// -------------------------------------------------------------------------------------------------------------
// threads

TEST(StepContextThreads, ThreadsDoNotSeeEachOther) {
  const StepGuard guard(at_step(1));
  EXPECT_EQ(std::async(std::launch::async, step_here).get(), -1);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([i] {
      for (int j = 0; j < 200; ++j) {
        const StepGuard own(at_step(100 * i + j));
        EXPECT_EQ(step_here(), 100 * i + j);
      }
      EXPECT_EQ(step_here(), -1);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(step_here(), 1);
}

TEST(StepContextThreads, CarriedByThreadLocalState) {
  std::optional<at::ThreadLocalState> state;
  {
    const StepGuard guard(at_step(5, 1));
    state.emplace();
  }
  std::thread([&] {
    EXPECT_EQ(step_here(), -1);
    {
      const at::ThreadLocalStateGuard carried(*state);
      EXPECT_EQ(step_here(), 5);
      EXPECT_EQ(StepContext::current()->microbatch, 1);
    }
    EXPECT_EQ(step_here(), -1);
  }).join();
}

TEST(StepContextThreads, CarriedByLaunch) {
  std::promise<std::pair<std::int64_t, std::thread::id>> seen;
  {
    const StepGuard guard(at_step(6));
    at::launch([&] { seen.set_value({step_here(), std::this_thread::get_id()}); });
  }
  const auto [step, thread] = seen.get_future().get();
  EXPECT_EQ(step, 6);
  EXPECT_NE(thread, std::this_thread::get_id());
}

TEST(StepContextThreads, HooksOfBackwardSeeTheContextOfTheCaller) {
  at::Tensor x = at::ones({3}).requires_grad_();
  at::Tensor y;
  {
    const StepGuard forward(at_step(1, 0));
    y = (x * 2).sum();
  }
  std::vector<std::int64_t> seen;
  x.register_hook([&](const at::Tensor& gradient) {
    seen.push_back(step_here());
    return gradient;
  });
  {
    const StepGuard backward(at_step(2, 0));
    y.backward({}, /*retain_graph=*/true);
  }
  // From another thread, with its own context.
  std::thread([&] {
    const StepGuard backward(at_step(3, 0));
    y.backward();
  }).join();
  EXPECT_EQ(seen, (std::vector<std::int64_t>{2, 3}));
}

// A backward that calls backward, deeper than autograd recurses on one thread: the rest runs on threads of
// its pool.
struct NestedBackward : torch::autograd::Function<NestedBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t depth, std::int64_t seen) {
    context->saved_data["depth"] = depth;
    context->saved_data["seen"] = seen;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    struct Seen {
      std::set<std::thread::id>* threads;
      std::vector<std::int64_t>* steps;
    };
    auto* seen = reinterpret_cast<Seen*>(context->saved_data["seen"].toInt());
    seen->threads->insert(std::this_thread::get_id());
    seen->steps->push_back(step_here());
    if (const auto depth = context->saved_data["depth"].toInt(); depth > 0) {
      const at::AutoGradMode record(true);
      at::Tensor inner = at::ones({1}).requires_grad_();
      NestedBackward::apply(inner, depth - 1, context->saved_data["seen"].toInt()).sum().backward();
    }
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

TEST(StepContextThreads, CarriedToAutogradsOwnThreads) {
  std::set<std::thread::id> threads;
  std::vector<std::int64_t> steps;
  struct {
    std::set<std::thread::id>* threads;
    std::vector<std::int64_t>* steps;
  } seen{&threads, &steps};
  at::Tensor x = at::ones({1}).requires_grad_();
  const at::Tensor y = NestedBackward::apply(x, 150, reinterpret_cast<std::int64_t>(&seen));
  const StepGuard guard(at_step(8, 0));
  y.sum().backward();
  EXPECT_EQ(steps, std::vector<std::int64_t>(151, 8));
  EXPECT_GT(threads.size(), 1u) << "nothing ran on another thread, so this test is vacuous";
}

// ------------------------------------------------------------------------------------------------------------
// keys, boxes

TEST(StepContextKeys, DependOnStepMicrobatchAndLayer) {
  const RandomKey key = at_step(7, 3).key(12, purpose::kDropout);
  EXPECT_EQ(key,
            (RandomKey{.seed = 42, .step = 7, .microbatch = 3, .layer = 12, .purpose = purpose::kDropout}));
  EXPECT_EQ(at_step(7).key(12, purpose::kNoise).microbatch, -1);
  StepContext trial = at_step(7, 3);
  trial.trial = true;
  EXPECT_EQ(trial.key(12, purpose::kDropout), key);
  EXPECT_EQ(at_step(7, 3).recomputation().key(12, purpose::kDropout), key);
  try {
    StepContext::current()->key(1, purpose::kDropout);
    ADD_FAILURE() << "a key outside of any step";
  } catch (const StateError& error) {
    EXPECT_TRUE(has_text(error.what(), "StepGuard"));
  }
}

TEST(StepContextKeys, RowsOfTheMicrobatch) {
  StepContext context = at_step(1, 0);
  EXPECT_TRUE(context.box_of({4, 5}).whole());
  context.rows = BatchRows{.global = 12, .first = 8, .count = 4};
  EXPECT_EQ(context.box_of({4, 5}).global_shape, (test::Sizes{12, 5}));
  EXPECT_EQ(context.box_of({4, 5}).offset, (test::Sizes{8, 0}));
  EXPECT_EQ(context.box_of({40, 5}).global_shape, (test::Sizes{120, 5}));  // ten tokens per row, flattened
  EXPECT_EQ(context.box_of({40, 5}).offset, (test::Sizes{80, 0}));
  EXPECT_THROW(context.box_of({6, 5}), ValueError);
  EXPECT_THROW(context.box_of({}), ValueError);
}

// -----------------------------------------------------------------------------------------------------------
// the module

TEST(KeyedDropoutModule, MaskOfTheStep) {
  KeyedDropout drop(KeyedDropoutOptions(0.3, "blocks.0.drop"));
  const at::Tensor x = at::ones({50, 8});
  const auto masked = [&](std::int64_t step, std::int64_t microbatch) {
    const StepGuard guard(at_step(step, microbatch));
    return drop->forward(x);
  };
  EXPECT_TRUE(same_bits(masked(1, 2), masked(1, 2)));
  EXPECT_FALSE(same_bits(masked(1, 2), masked(1, 3)));
  EXPECT_FALSE(same_bits(masked(1, 2), masked(2, 2)));
  KeyedDropout other(KeyedDropoutOptions(0.3, "blocks.1.drop"));
  const StepGuard guard(at_step(1, 2));
  EXPECT_FALSE(same_bits(other->forward(x), masked(1, 2)));
  EXPECT_TRUE(same_bits(
      drop->forward(x),
      keyed_dropout(x, 0.3,
                    StepContext::current()->key(layer_from_name("blocks.0.drop"), purpose::kDropout))));
}

TEST(KeyedDropoutModule, UsesWithinOneForwardAreDistinguished) {
  KeyedDropout drop(KeyedDropoutOptions(0.3, 4));
  const StepGuard guard(at_step(1, 2));
  const at::Tensor x = at::ones({50, 8});
  EXPECT_FALSE(same_bits(drop->forward(x, {}, 0), drop->forward(x, {}, 1)));
  EXPECT_TRUE(same_bits(drop->forward(x), drop->forward(x, {}, 0)));
  EXPECT_THROW(drop->forward(x, {}, -1), ValueError);
  EXPECT_THROW(drop->forward(x, {}, 1LL << 31), ValueError);
}

TEST(KeyedDropoutModule, EvaluationAndOutsideOfAnyStep) {
  KeyedDropout drop(KeyedDropoutOptions(0.3, 4));
  const at::Tensor x = at::ones({5});
  EXPECT_THROW(drop->forward(x), StateError);
  EXPECT_TRUE(KeyedDropout(KeyedDropoutOptions(0.0, 4))->forward(x).is_same(x));
  drop->eval();
  EXPECT_TRUE(drop->forward(x).is_same(x));
  EXPECT_THROW(KeyedDropoutOptions(1.5, 4), ValueError);
}

TEST(KeyedDropoutModule, DataParallelRanksHoldPartsOfOneMask) {
  KeyedDropout drop(KeyedDropoutOptions(0.3, 4));
  const at::Tensor whole_input = at::ones({12, 10, 8});
  at::Tensor whole;
  {
    const StepGuard guard(at_step(1, 2));
    whole = drop->forward(whole_input);
  }
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    StepContext context = at_step(1, 2);
    context.rows = BatchRows{.global = 12, .first = 4 * rank, .count = 4};
    const StepGuard guard(context);
    EXPECT_TRUE(same_bits(drop->forward(whole_input.narrow(0, 4 * rank, 4)), whole.narrow(0, 4 * rank, 4)));
    // The same with rows and tokens flattened, and for a column of a tensor-parallel split with an explicit
    // box.
    EXPECT_TRUE(same_bits(drop->forward(whole_input.narrow(0, 4 * rank, 4).reshape({40, 8})),
                          whole.narrow(0, 4 * rank, 4).reshape({40, 8})));
    EXPECT_TRUE(same_bits(
        drop->forward(whole_input.narrow(0, 4 * rank, 4).narrow(2, 2, 4), {{12, 10, 8}, {4 * rank, 0, 2}}),
        whole.narrow(0, 4 * rank, 4).narrow(2, 2, 4)));
  }
}

TEST(KeyedDropoutModule, InASequentialAndCloned) {
  torch::nn::Sequential model(torch::nn::Linear(8, 8), KeyedDropout(KeyedDropoutOptions(0.5, "drop")));
  const StepGuard guard(at_step(1, 2));
  const at::Tensor x = at::ones({20, 8}), y = model->forward(x);
  EXPECT_GT((y == 0).sum().item<std::int64_t>(), 40);
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  EXPECT_TRUE(same_bits(copy->forward(x), y));
  std::ostringstream text;
  text << *model[1];
  EXPECT_TRUE(has_text(text.str(), "KeyedDropout(p=0.5"));
}

// Activations are discarded after forward and recomputed during backward: the same mask, so the same
// gradients.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Body = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t body) {
    context->save_for_backward({x});
    context->saved_data["body"] = body;
    return (*reinterpret_cast<Body*>(body))(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::AutoGradMode record(true);
    at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    (*reinterpret_cast<Body*>(context->saved_data["body"].toInt()))(x).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

TEST(KeyedDropoutModule, RecomputationHasTheSameMask) {
  KeyedDropout drop(KeyedDropoutOptions(0.5, "drop"));
  at::Tensor x = at::arange(1.0, 101.0).requires_grad_(), again = at::arange(1.0, 101.0).requires_grad_();
  std::vector<bool> recomputes;
  std::shared_ptr<const StepContext> first;
  Recomputed::Body body = [&](const at::Tensor& input) {
    // Recomputation keeps the context of the first time.
    std::optional<StepGuard> guard;
    if (first) guard.emplace(first->recomputation());
    recomputes.push_back(StepContext::current()->recompute);
    return drop->forward(input.sin());
  };
  at::Tensor plain, recomputed;
  {
    const StepGuard guard(at_step(3, 1));
    plain = body(x);
    recomputed = Recomputed::apply(again, reinterpret_cast<std::int64_t>(&body));
    first = StepContext::current();
  }
  {
    const StepGuard other(at_step(3, 5));  // backward of another microbatch is running
    plain.sum().backward();
    recomputed.sum().backward();
  }
  EXPECT_TRUE(same_bits(plain, recomputed));
  EXPECT_TRUE(same_bits(x.grad(), again.grad()));
  EXPECT_EQ(recomputes, (std::vector<bool>{false, false, true}));
}

}  // namespace step_context_test
}  // namespace penstock
