// User-defined autograd functions inside captured ones: the views they return, what they write in forward,
// and what they write in backward.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/tools/signature.h"
#include "tests/graph/call_trace.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace backward_writes_test {

using test::has_text;
using test::message_of;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// An autograd function with the given forward and backward. It holds tensors that are not inputs by
// reference, like members and captured tensors.
struct Halves {
  std::function<at::Tensor(AutogradContext*, at::Tensor)> forward;
  std::function<at::Tensor(AutogradContext*, at::Tensor)> backward;
};

struct UsersFunction : torch::autograd::Function<UsersFunction> {
  static at::Tensor forward(AutogradContext* context, at::Tensor x, const Halves* halves) {
    context->saved_data["halves"] = reinterpret_cast<std::int64_t>(halves);
    return halves->forward(context, x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto* halves = reinterpret_cast<const Halves*>(context->saved_data["halves"].toInt());
    return {halves->backward(context, gradients[0]), at::Tensor()};
  }
};

at::Tensor doubled(AutogradContext*, at::Tensor x) { return x * 2; }

TEST(BackwardWrites, ABufferThatIsAnInput) {
  // Keeps the largest gradient seen, and gradients depend on it.
  const Function function = over_tensors([](const Tensors& in) {
    static Halves halves;
    halves.forward = doubled;
    halves.backward = [buffer = in[1]](AutogradContext*, at::Tensor gradient) {
      buffer.copy_(at::maximum(buffer, gradient.abs()));
      return gradient / buffer;
    };
    return Tensors{UsersFunction::apply(in[0], &halves).sin()};
  });
  Compiled compiled(function);
  const at::Tensor x = leaf({4}), expected_buffer = torch::full({4}, 0.1), buffer = expected_buffer.clone();
  for (int step = 0; step < 3; ++step) {
    const at::Tensor weights = torch::randn({4});
    at::Tensor gradients[2];
    for (int run = 0; run < 2; ++run) {
      x.mutable_grad() = at::Tensor();
      const Values in{x, run == 0 ? expected_buffer : buffer};
      (run == 0 ? function(in) : compiled(in))[0].toTensor().backward(weights);
      gradients[run] = x.grad().clone();
    }
    EXPECT_TRUE(torch::equal(buffer, expected_buffer)) << buffer << expected_buffer;
    EXPECT_TRUE(torch::equal(gradients[1], gradients[0])) << gradients[1] << gradients[0];
    EXPECT_FALSE(torch::equal(buffer, torch::full({4}, 0.1)));
  }
  EXPECT_EQ(compiled.captures(), 1u);
  ASSERT_EQ(compiled.joint(0).written_in_backward, (std::vector<std::size_t>{1}));
  EXPECT_FALSE(compiled.meta(0).inputs[1].mutates_data);  // forward does not
  EXPECT_EQ(count_writes(compiled.joint(0).graph), 0u);
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { make_signature(compiled.joint(0), compiled.inner_meta(0)); }),
               "backward writes primals_2"));
}

TEST(BackwardWrites, ABufferOfAModule) {
  struct Scaled : torch::nn::Module {
    Scaled() { calls = register_buffer("calls", torch::zeros({3})); }
    at::Tensor forward(const at::Tensor& x) {
      halves.forward = doubled;
      halves.backward = [this](AutogradContext*, at::Tensor gradient) {
        calls.add_(1);
        return gradient * calls;
      };
      return UsersFunction::apply(x, &halves);
    }
    at::Tensor calls;
    Halves halves;
  };
  const auto module = std::make_shared<Scaled>();
  auto fast = compile(module);
  const at::Tensor x = leaf({3});
  for (int step = 1; step < 4; ++step) {
    x.mutable_grad() = at::Tensor();
    fast->forward(x).sum().backward();
    EXPECT_TRUE(torch::equal(module->calls, torch::full({3}, static_cast<float>(step))));
    EXPECT_TRUE(torch::equal(x.grad(), torch::full({3}, static_cast<float>(step))));
  }
}

TEST(BackwardWrites, ASavedTensorOfItsOwn) {
  // Like cross entropy over a sharded vocabulary: what forward saved becomes the gradient.
  const Function function = over_tensors([](const Tensors& in) {
    static const Halves halves{[](AutogradContext* context, at::Tensor x) {
                                 const at::Tensor softmax = x.softmax(-1);
                                 context->save_for_backward({softmax});
                                 return softmax.log();
                               },
                               [](AutogradContext* context, at::Tensor gradient) {
                                 at::Tensor softmax = context->get_saved_variables()[0];
                                 softmax.mul_(gradient.sum(-1, true)).neg_().add_(gradient);
                                 return softmax;
                               }};
    return Tensors{UsersFunction::apply(in[0] * 1, &halves), in[0].exp()};
  });
  const Tensors leaves{leaf({2, 3})};
  const auto same = [](const Tensors& fresh) { return fresh; };
  const Trace expected = trace_of(function, leaves, same);
  for (const Partitioner partitioner : {Partitioner::Default, Partitioner::MinCut}) {
    Compiled compiled(function, {.partitioner = partitioner});
    for (int call = 0; call < 2; ++call) {
      const Trace actual = trace_of([&](const Values& inputs) { return compiled(inputs); }, leaves, same);
      expect_same(actual.outputs, expected.outputs, "output");
      expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
    }
  }
}

TEST(BackwardWrites, VisibleWritesAreRejected) {
  const auto refusal = [](const Halves& halves,
                          const std::function<Tensors(const Tensors&, const Halves*)>& function,
                          const Tensors& inputs) {
    Compiled compiled(over_tensors([&](const Tensors& in) { return function(in, &halves); }));
    return message_of<NotImplemented>([&] { compiled(values_of(inputs)); });
  };
  const auto applied = [](const Tensors& in, const Halves* halves) {
    return Tensors{UsersFunction::apply(in[0], halves) * 3};
  };
  const Halves in_gradient{doubled, [](AutogradContext*, at::Tensor gradient) { return gradient.mul_(2); }};
  EXPECT_TRUE(has_text(refusal(in_gradient, applied, {leaf({3})}),
                       "backward writes a gradient that was passed to it (aten::mul_"));
  // Whether the gradient of w shows the write as well depends on autograd's order.
  const auto shared = [](const Tensors& in, const Halves* halves) {
    return Tensors{UsersFunction::apply(in[0], halves) + in[1]};
  };
  EXPECT_TRUE(has_text(refusal(in_gradient, shared, {leaf({3}), leaf({3})}),
                       "backward writes a gradient that was passed to it"));
  const Halves in_result{[](AutogradContext* context, at::Tensor x) {
                           const at::Tensor y = x.exp();
                           context->saved_data["y"] = y;
                           return y;
                         },
                         [](AutogradContext* context, at::Tensor gradient) {
                           at::Tensor y = context->saved_data["y"].toTensor();
                           return y.mul_(gradient);
                         }};
  const auto returned = [](const Tensors& in, const Halves* halves) {
    return Tensors{UsersFunction::apply(in[0], halves)};
  };
  EXPECT_TRUE(has_text(refusal(in_result, returned, {leaf({3})}),
                       "backward writes a tensor that forward returned (aten::mul_"));
  // Inputs that require gradients, that forward writes, or that are passed twice.
  static at::Tensor held;
  const Halves in_held{doubled, [](AutogradContext*, at::Tensor gradient) {
                         const at::NoGradGuard no_grad;
                         held.add_(1);
                         return gradient * 2;
                       }};
  const auto holding = [](const Tensors& in, const Halves* halves) {
    held = in[1];
    return Tensors{UsersFunction::apply(in[0], halves) * in[1]};
  };
  EXPECT_TRUE(has_text(refusal(in_held, holding, {leaf({3}), leaf({3})}), "which requires a gradient"));
  const auto writing = [](const Tensors& in, const Halves* halves) {
    held = in[1].add_(1);
    return Tensors{UsersFunction::apply(in[0], halves)};
  };
  EXPECT_TRUE(has_text(refusal(in_held, writing, {leaf({3}), torch::ones({3})}),
                       "forward and backward both write primals_2"));
  const auto unread = [](const Tensors& in, const Halves* halves) {
    held = in[1];
    return Tensors{UsersFunction::apply(in[0], halves) * 2};
  };
  const at::Tensor buffer = torch::ones({3});
  EXPECT_TRUE(has_text(refusal(in_held, unread, {leaf({3}), buffer, buffer.view({3})}),
                       "backward writes primals_2, which shares memory with primals_3"));
  EXPECT_TRUE(has_text(refusal(in_held, unread, {leaf({3}), torch::ones({4}).unfold(0, 2, 1)}),
                       "primals_2 has elements that share memory (expand, unfold), and backward writes it"));
  // The memory that an input gets is none of an input.
  const auto giving = [](const Tensors& in, const Halves* halves) {
    in[1].set_(in[1] * 2);
    held = in[1];
    return Tensors{UsersFunction::apply(in[0], halves)};
  };
  EXPECT_TRUE(has_text(refusal(in_held, giving, {leaf({3}), torch::ones({3})}),
                       "backward writes memory that forward gave to an input by set_"));
  held = at::Tensor();
  // A tensor that is not an input.
  const at::Tensor outside = torch::ones({3});
  const Halves in_outside{doubled, [&](AutogradContext*, at::Tensor gradient) {
                            outside.add_(gradient);
                            return gradient;
                          }};
  Compiled compiled(
      over_tensors([&](const Tensors& in) { return Tensors{UsersFunction::apply(in[0], &in_outside)}; }));
  EXPECT_TRUE(
      has_text(message_of<StateError>([&] { compiled({leaf({3})}); }), "pass the tensor as an input"));
  EXPECT_TRUE(torch::equal(outside, torch::ones({3})));
}

TEST(BackwardWrites, HooksMayNotWriteGradientsEither) {
  Compiled compiled(over_tensors([](const Tensors& in) {
    const at::Tensor y = in[0] * 2;
    y.register_hook([](at::Tensor gradient) { return gradient.mul_(2); });
    return Tensors{y.sin()};
  }));
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] { compiled({leaf({3})}); }),
                       "create a new tensor in the function's backward or in the hook"));
}

TEST(BackwardWrites, ABufferThatChangedInBetweenIsAnError) {
  static const Halves halves{[](AutogradContext*, at::Tensor x) { return x * 2; }, nullptr};
  Halves counting = halves;
  static at::Tensor counter;
  counting.backward = [](AutogradContext*, at::Tensor gradient) {
    counter.add_(1);
    return gradient;
  };
  Compiled compiled(over_tensors([&](const Tensors& in) {
    counter = in[1];
    return Tensors{UsersFunction::apply(in[0], &counting)};
  }));
  const at::Tensor x = leaf({3}), buffer = torch::zeros({3});
  const at::Tensor first = compiled({x, buffer})[0].toTensor(), second = compiled({x, buffer})[0].toTensor();
  first.sum().backward();
  EXPECT_TRUE(torch::equal(buffer, torch::ones({3})));
  const std::string message =
      message_of<c10::Error>([&] { second.sum().backward(); });  // it was saved for backward
  EXPECT_TRUE(has_text(message, "modified by an inplace operation")) << message;
  EXPECT_TRUE(torch::equal(buffer, torch::ones({3})));
  // Also if backward only overwrites it, whatever part of it is saved.
  counting.backward = [](AutogradContext*, at::Tensor gradient) {
    counter.copy_(gradient);
    return gradient;
  };
  for (const Partitioner partitioner : {Partitioner::Default, Partitioner::MinCut}) {
    Compiled overwriting(over_tensors([&](const Tensors& in) {
                           counter = in[1];
                           return Tensors{UsersFunction::apply(in[0], &counting)};
                         }),
                         {.partitioner = partitioner});
    const at::Tensor third = overwriting({x, buffer})[0].toTensor(), before = buffer.add_(1).clone();
    EXPECT_ANY_THROW(third.sum().backward());
    EXPECT_TRUE(torch::equal(buffer, before));
  }
  counter = at::Tensor();
}

TEST(Functionalize, OutputsOfForwardAreAsBeforeBackward) {
  Graph graph = capture_forward(over_tensors([](const Tensors& in) {
                                  const at::Tensor y = in[0] + 1;
                                  y.mul_(3);
                                  return Tensors{y, y};
                                }),
                                {torch::ones({2})});
  graph.nodes.back().phase = Phase::Backward;
  const auto results = Executor(functionalize(graph, 1))({torch::ones({2})});
  EXPECT_TRUE(torch::equal(results[0].toTensor(), torch::full({2}, 2.f)));
  EXPECT_TRUE(torch::equal(results[1].toTensor(), torch::full({2}, 6.f)));
}

// ---- views made by a user-defined function ----

TEST(CustomFunctionViews, AreDifferentiatedByTheFunction) {
  // A view whose backward is not that of a view.
  static const Halves halves{[](AutogradContext*, at::Tensor x) { return x.t(); },
                             [](AutogradContext*, at::Tensor gradient) { return gradient.t() * 10; }};
  const auto apply = [](const at::Tensor& x) { return UsersFunction::apply(x, &halves); };
  const auto kinds = [](const std::function<Tensors(const Tensors&)>& function, const at::Tensor& x) {
    std::vector<OutputKind> kinds;
    for (const OutputInfo& info : analyze(over_tensors(function), {x}).outputs) kinds.push_back(info.kind);
    return kinds;
  };
  using enum OutputKind;
  const at::Tensor x = leaf({2, 3});
  const auto of_input = [&](const Tensors& in) { return Tensors{apply(in[0])}; };
  EXPECT_EQ(kinds(of_input, x), (std::vector{CustomFunctionView}));
  const auto view_of_it = [&](const Tensors& in) {
    return Tensors{apply(in[0]).select(0, 1), in[0].select(0, 1)};
  };
  EXPECT_EQ(kinds(view_of_it, x), (std::vector{CustomFunctionView, AliasOfInput}));
  const auto of_inner = [&](const Tensors& in) {
    const at::Tensor y = in[0].exp();
    return Tensors{y, apply(y)};
  };
  EXPECT_EQ(kinds(of_inner, x), (std::vector{NonAlias, CustomFunctionView}));
  for (const auto& function :
       std::vector<std::function<Tensors(const Tensors&)>>{of_input, view_of_it, of_inner}) {
    Compiled compiled(over_tensors(function));
    const auto same = [](const Tensors& fresh) { return fresh; };
    const Trace expected = trace_of(over_tensors(function), {x}, same);
    for (int call = 0; call < 2; ++call) {
      const Trace actual = trace_of([&](const Values& inputs) { return compiled(inputs); }, {x}, same);
      expect_same(actual.outputs, expected.outputs, "output");
      expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
      expect_same_look(actual.outputs, expected.outputs, "output");
    }
  }
  Compiled compiled(over_tensors(of_input));
  compiled({x})[0].toTensor().sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({2, 3}, 10.f)))
      << x.grad();  // not 1, as a transposed view would have
}

// ---- random functions ----

// A forward and a backward chosen by a number. `buffer` is held by reference.
struct RandomHalves : torch::autograd::Function<RandomHalves> {
  static at::Tensor forward(AutogradContext* context, at::Tensor x, at::Tensor buffer, std::int64_t choice) {
    context->saved_data["choice"] = choice;
    context->saved_data["buffer"] = buffer;
    const at::Tensor kept = x.detach() * 0.5 + 1;
    at::Tensor result;
    switch (choice % 6) {
      case 0:
        result = x.cos();
        break;
      case 1:
        result = x.t();
        break;
      case 2:
        result = x.mul_(2), context->mark_dirty({x});
        break;
      case 3:
        result = x * buffer;
        break;
      case 4:
        result = x.view({-1}).slice(0, 1);
        break;
      default:
        result = kept * 2;
        break;
    }
    context->save_for_backward({kept});
    return result;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::int64_t choice = context->saved_data["choice"].toInt();
    at::Tensor buffer = context->saved_data["buffer"].toTensor(), kept = context->get_saved_variables()[0],
               gradient = gradients[0];
    if (choice % 6 == 1) gradient = gradient.t();
    if (choice % 6 == 4) gradient = at::cat({gradient.new_zeros({1}), gradient}).view(kept.sizes());
    at::Tensor result;
    switch (choice / 6 % 7) {
      case 0:
        result = gradient * kept;
        break;
      case 1:
        result = kept.mul_(gradient);
        break;  // what it saved
      case 2:
        buffer.add_(gradient.sum(0)), result = gradient * buffer;
        break;  // the buffer
      case 3:
        result = gradient * 2, result.select(0, 0).add_(kept.select(0, 0));
        break;  // a new tensor
      // The gradient passed to it, or a copy of it.
      case 4:
        result = gradient.mul_(3);
        break;
      case 5:
        buffer.view({-1}).select(0, 0).add_(1), kept.add_(buffer), result = gradient * kept;
        break;
      default:
        result = gradient.t().contiguous().t();
        break;
    }
    return {result, at::Tensor(), at::Tensor()};
  }
};

TEST(BackwardWrites, RandomFunctions) {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  const unsigned programs = asked ? static_cast<unsigned>(std::stoul(asked)) : 500;
  unsigned legal = 0, compared = 0;
  for (unsigned seed = 0; seed < programs; ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    std::mt19937 random(seed);
    torch::manual_seed(seed);
    const std::int64_t choices[2] = {static_cast<std::int64_t>(random() % 42),
                                     static_cast<std::int64_t>(random() % 42)};
    const unsigned around = random();
    const Function function = over_tensors([&](const Tensors& in) {
      at::Tensor h = around & 1 ? in[0] * 1.5 : in[0].clone();
      if (around & 2) h.select(0, 1).mul_(2);
      at::Tensor y = RandomHalves::apply(h, in[1], choices[0]);
      if (around & 4) y = y + 1;
      if (around & 8) y.mul_(0.5);
      if (around & 16) y = RandomHalves::apply(y.reshape(-1).slice(0, 0, 4).view({2, 2}), in[1], choices[1]);
      Tensors results{around & 32 ? y.sin() : y};
      if (around & 64) results.push_back(h * in[1]);
      if (around & 128) results.push_back(y.unsqueeze(0));
      return results;
    });
    const Tensors leaves{leaf({3, 2}), torch::randn({2})};
    const auto prepare = [&](const Tensors& fresh) { return around & 256 ? cloned(fresh) : fresh; };
    Compiled compiled(function, {.partitioner = seed % 2 ? Partitioner::MinCut : Partitioner::Default});
    for (int call = 0; call < 2; ++call) {
      Trace expected;
      try {
        expected = trace_of(function, leaves, prepare);
      } catch (const c10::Error&) {
        break;  // not a legal program
      }
      legal += call == 0 ? 1 : 0;
      try {
        const Trace actual =
            trace_of([&](const Values& inputs) { return compiled(inputs); }, leaves, prepare);
        expect_same(actual.outputs, expected.outputs, "output");
        if (!expected.refused) {
          EXPECT_FALSE(actual.refused);
          expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
          expect_same(actual.inputs, expected.inputs, "input, after backward", Compare::Closely);
        }
        compared += call == 0 ? 1 : 0;
      } catch (const NotImplemented& error) {
        // Writes to gradients passed to backward, to results, and to buffers that forward and backward both
        // write are not captured; everything else is.
        EXPECT_TRUE(has_text(error.what(), "backward")) << error.what();
        break;
      } catch (const std::exception& error) {
        if (!expected.refused) ADD_FAILURE() << error.what();
        break;
      }
    }
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "halves " << choices[0] << ", " << choices[1] << ", around " << (around & 511)
                    << (compiled.captures() > 0 ? to_text(compiled.joint(0).graph) : "");
      return;
    }
  }
  EXPECT_GE(legal * 10, programs * 5) << legal << " legal ones of " << programs;
  EXPECT_GE(compared * 10, legal * 5) << compared << " of " << legal << " legal programs";
}

}  // namespace backward_writes_test
}  // namespace penstock::graph
