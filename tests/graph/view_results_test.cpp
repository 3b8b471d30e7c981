// Results that interpret memory differently than their base: other dtypes, lazy conjugates and negatives,
// elements that share an address.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/saving_node.h"
#include "penstock/graph/tools/graph_file.h"
#include "tests/graph/call_trace.h"
#include "tests/graph/random_program.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace view_results_test {

using test::has_text;
using test::message_of;
using OverTensors = std::function<Tensors(const Tensors&)>;

// Expects what the function itself does: results, their memory, mutated inputs, gradients; captured and
// replayed, with and without gradients.
void expect_as_eager(const OverTensors& function, const Tensors& leaves,
                     const OverTensors& prepare = cloned) {
  for (const bool trained : {true, false}) {
    SCOPED_TRACE(trained ? "trained" : "not trained");
    const c10::AutoGradMode mode(trained);
    Compiled compiled(over_tensors(function));
    for (int call = 0; call < 2; ++call) {
      SCOPED_TRACE(call == 0 ? "captured" : "replayed");
      const Trace expected = trace_of(over_tensors(function), leaves, prepare);
      const Trace actual = trace_of([&](const Values& inputs) { return compiled(inputs); }, leaves, prepare);
      expect_same(actual.outputs, expected.outputs, "output");
      expect_same(actual.inputs, expected.inputs, "input");
      // They are summed in a different order.
      expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
      expect_same_look(actual.outputs, expected.outputs, "output");
      expect_same_memory(actual, expected);
    }
    EXPECT_EQ(compiled.captures(), 1u);
    EXPECT_EQ(count_writes(compiled.joint(0).graph), 0u);
  }
}

at::Tensor complex_leaf(at::IntArrayRef sizes, bool requires_grad = true) {
  return torch::randn(sizes, torch::kComplexFloat).set_requires_grad(requires_grad);
}

TEST(ViewResults, OfAnotherDtype) {
  torch::manual_seed(1);
  expect_as_eager([](const Tensors& in) { return Tensors{in[0].view(at::kInt)}; }, {leaf({3, 4})});
  expect_as_eager(
      [](const Tensors& in) {
        return Tensors{in[0].t().select(0, 1).view(at::kInt), in[0] * 2};
      },
      {leaf({3, 4})});
  expect_as_eager(
      [](const Tensors& in) {
        return Tensors{in[0].view(at::kByte), in[0].view(at::kDouble)};
      },
      {leaf({3, 4}, false)});
}

TEST(ViewResults, ComplexAndReal) {
  torch::manual_seed(2);
  expect_as_eager([](const Tensors& in) { return Tensors{at::view_as_complex(in[0])}; }, {leaf({3, 2})});
  expect_as_eager(
      [](const Tensors& in) {
        return Tensors{at::view_as_complex(in[0]).select(0, 1), in[0].select(1, 1)};
      },
      {leaf({3, 2})});
  expect_as_eager(
      [](const Tensors& in) {
        return Tensors{at::view_as_real(in[0]), at::real(in[0]), at::imag(in[0])};
      },
      {complex_leaf({3})});
}

TEST(ViewResults, LazyConjugates) {
  torch::manual_seed(3);
  expect_as_eager([](const Tensors& in) { return Tensors{in[0].conj()}; }, {complex_leaf({3})});
  expect_as_eager(
      [](const Tensors& in) {
        return Tensors{in[0].mH(), in[0].conj().resolve_conj()};
      },
      {complex_leaf({3, 2})});
  expect_as_eager(
      [](const Tensors& in) {
        return Tensors{at::imag(in[0].conj()), at::real(in[0].conj()), at::imag(in[0].conj()).resolve_neg()};
      },
      {complex_leaf({3})});
  expect_as_eager([](const Tensors& in) { return Tensors{in[0]._neg_view().select(0, 1)}; }, {leaf({3, 2})});
}

TEST(ViewResults, OfIntermediateTensors) {
  torch::manual_seed(4);
  expect_as_eager(
      [](const Tensors& in) {
        const at::Tensor y = in[0] * in[0];
        return Tensors{y.conj(), at::view_as_real(y), at::imag(y), y.select(0, 1)};
      },
      {complex_leaf({3, 2})});
  expect_as_eager(
      [](const Tensors& in) {
        const at::Tensor y = in[0].exp();
        return Tensors{y, y.view(at::kInt), at::view_as_complex(y), y.detach()};
      },
      {leaf({3, 2})});
  expect_as_eager(
      [](const Tensors& in) {
        const at::Tensor y = (in[0] + 1).conj();
        return Tensors{y, at::imag(y), y.t()};
      },
      {complex_leaf({3, 2})});
}

TEST(ViewResults, InputsThatAreLazyConjugatesOrNegatives) {
  torch::manual_seed(5);
  const auto conjugated = [](const Tensors& fresh) { return Tensors{fresh[0].clone().conj()}; };
  expect_as_eager(
      [](const Tensors& in) {
        return Tensors{in[0] * c10::Scalar(c10::complex<double>(0, 1)), in[0].conj(), at::imag(in[0]),
                       in[0].t()};
      },
      {complex_leaf({3, 2})}, conjugated);
  expect_as_eager(
      [](const Tensors& in) {
        in[0].mul_(2);
        return Tensors{in[0].conj(), in[0].sum()};
      },
      {complex_leaf({3, 2})}, conjugated);
  expect_as_eager(
      [](const Tensors& in) {
        return Tensors{in[0] * 2, in[0].select(0, 0), in[0].resolve_neg()};
      },
      {leaf({3, 2})}, [](const Tensors& fresh) { return Tensors{fresh[0].clone()._neg_view()}; });
  // Written through a view without the lazy bit, and conjugated after it was written.
  expect_as_eager(
      [](const Tensors& in) {
        at::imag(in[0]).add_(in[1]);
        return Tensors{in[0] * 2};
      },
      {complex_leaf({3, 2}), leaf({3, 2})},
      [](const Tensors& fresh) {
        return Tensors{fresh[0].clone().conj(), fresh[1].clone()};
      });
  expect_as_eager(
      [](const Tensors& in) {
        in[0].add_(in[0].clone());
        in[0].transpose_(0, 1);
        return Tensors{in[1] * 2};
      },
      {complex_leaf({3, 2}), leaf({3, 2})},
      [](const Tensors& fresh) {
        return Tensors{fresh[0].clone().conj(), fresh[1].clone()};
      });
  // An input that is written with a value that has a gradient is no longer a leaf.
  Compiled copied(over_tensors([](const Tensors& in) { return Tensors{in[0].copy_(in[1])}; }));
  const at::Tensor target = torch::zeros({3}, torch::kComplexFloat).conj();
  copied({target, complex_leaf({3})});
  EXPECT_FALSE(target.is_leaf());
  // A capture is valid for only one of them.
  Compiled once(over_tensors([](const Tensors& in) { return Tensors{in[0].conj()}; }), {.recapture = false});
  const at::Tensor x = complex_leaf({3}, false);
  once({x});
  EXPECT_TRUE(has_text(message_of<StateError>([&] { once({x.conj()}); }),
                       "input 0 is a lazy conjugate (conj()), in the capture it is not"));
  EXPECT_TRUE(has_text(message_of<StateError>([&] { once({x._neg_view()}); }),
                       "input 0 is a lazy negative, in the capture it is not"));
}

TEST(ViewResults, InputsWrittenThroughSuchViews) {
  torch::manual_seed(6);
  expect_as_eager(
      [](const Tensors& in) {
        in[0].view(at::kInt).add_(1);
        return Tensors{in[0] * 2};
      },
      {leaf({3, 4}, false)});
  expect_as_eager(
      [](const Tensors& in) {
        at::real(in[0]).mul_(3);
        return Tensors{in[0] * in[0], at::view_as_real(in[0])};
      },
      {complex_leaf({3})});
  expect_as_eager(
      [](const Tensors& in) {
        at::imag(in[0].conj()).add_(1);
        in[0].conj().select(0, 1).mul_(c10::Scalar(c10::complex<double>(1, 2)));
        return Tensors{in[0].conj(), in[0].abs()};
      },
      {complex_leaf({3, 2})});
  expect_as_eager(
      [](const Tensors& in) {
        at::view_as_complex(in[0].slice(0, 0, 2)).select(0, 1).fill_(c10::Scalar(c10::complex<double>(3, 4)));
        in[0].view(at::kByte).select(0, 2).select(0, 7).fill_(64);  // the last byte of the fifth float
        return Tensors{in[0].view(at::kInt), in[0].select(0, 2)};
      },
      {leaf({3, 2}, false)});
  expect_as_eager(  // at an address where no complex number begins, with an odd number of floats
      [](const Tensors& in) {
        const at::Tensor pair = at::view_as_complex(in[0].slice(0, 2, 4));
        pair.mul_(2);
        in[0].add_(1);
        return Tensors{pair, in[0].t_(), pair * 3};
      },
      {leaf({5}, false)});
  expect_as_eager(  // of an input that begins in the middle of a complex number
      [](const Tensors& in) {
        const at::Tensor pair = at::view_as_complex(in[0].slice(0, 1, 3));
        in[0].add_(1);
        return Tensors{pair * 2, in[0] * 3};
      },
      {leaf({5}, false)}, [](const Tensors& fresh) { return Tensors{fresh[0].clone().slice(0, 1)}; });
}

TEST(ViewResults, OfInputsWithElementsThatShareMemory) {
  torch::manual_seed(7);
  const auto expanded = [](const Tensors& fresh) { return Tensors{fresh[0].clone().expand({3, 2})}; };
  expect_as_eager([](const Tensors& in) { return Tensors{in[0].select(0, 0)}; }, {leaf({2})}, expanded);
  expect_as_eager(
      [](const Tensors& in) {
        return Tensors{in[0].slice(0, 1), in[0].t(), in[0] * 2};
      },
      {leaf({1, 2})}, expanded);
  expect_as_eager(
      [](const Tensors& in) {
        return Tensors{in[0].select(0, 1), in[0].select(1, 0)};
      },
      {leaf({5})}, [](const Tensors& fresh) { return Tensors{fresh[0].clone().unfold(0, 3, 1)}; });
  // The gradient of one element goes to that element and is not divided among all at its address.
  const at::Tensor x = torch::ones({1}).set_requires_grad(true), wide = x.expand({3});
  wide.retain_grad();
  Compiled first(over_tensors([](const Tensors& in) { return Tensors{in[0].slice(0, 0, 1)}; }));
  first({wide})[0].toTensor().sum().backward();
  EXPECT_TRUE(torch::equal(wide.grad(), torch::tensor({1.f, 0.f, 0.f}))) << wide.grad();
}

TEST(ViewResults, WritingElementsThatShareMemoryIsRefused) {
  const auto refusal = [](const OverTensors& function, const at::Tensor& input) {
    Compiled compiled(over_tensors(function));
    return message_of<NotImplemented>([&] { compiled({input}); });
  };
  const auto fill = [](const Tensors& in) { return Tensors{in[0].fill_(2)}; };
  EXPECT_TRUE(
      has_text(refusal(fill, torch::ones({1, 2}).expand({3, 2})),
               "input 0 has elements that share memory (expand, unfold), and the function writes it"));
  EXPECT_TRUE(has_text(refusal(fill, torch::ones({4}).unfold(0, 2, 1)), "elements that share memory"));
  EXPECT_TRUE(
      has_text(refusal([](const Tensors& in) { return Tensors{in[0].t_()}; }, leaf({1, 2}).expand({3, 2})),
               "changes its shape in place"));
  const at::Tensor z = torch::zeros({3}, torch::kComplexFloat);
  Compiled overlapping(over_tensors([](const Tensors& in) { return Tensors{in[0].add_(1), in[1] * 2}; }));
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] {
                         overlapping({at::real(z), at::real(z).slice(0, 1)});
                       }),
                       "different dtype"));
  EXPECT_TRUE(torch::equal(z, torch::zeros({3}, torch::kComplexFloat)));
}

TEST(ViewResults, ExpandedTensorsInsideMayBeFilled) {
  expect_as_eager(
      [](const Tensors& in) {
        const at::Tensor y = in[0] * 2;
        y.select(0, 0).unsqueeze(0).expand({3, 2}).fill_(5);
        return Tensors{y};
      },
      {leaf({2, 2}, false)});  // autograd itself cannot differentiate it
}

TEST(ViewResults, OfInputsThatAreMerged) {
  torch::manual_seed(8);
  expect_as_eager(
      [](const Tensors& in) {
        in[0].mul_(2);
        return Tensors{at::view_as_complex(in[1]), in[0].view(at::kInt), in[1] * in[0].sum()};
      },
      {leaf({4, 2}, false)},
      [](const Tensors& fresh) {
        const at::Tensor base = fresh[0].clone();
        return Tensors{base.slice(0, 0, 3), base.slice(0, 1, 4)};
      });
  expect_as_eager(  // one of the two merged inputs has elements that share memory
      [](const Tensors& in) {
        in[0].mul_(2);
        return Tensors{in[1].select(0, 1) * in[0], in[1].select(0, 0)};
      },
      {leaf({2})},
      [](const Tensors& fresh) {
        const at::Tensor base = fresh[0].clone();
        return Tensors{base, base.expand({3, 2})};
      });
}

TEST(ViewResults, OfAnInputWhoseShapeIsChangedToo) {
  torch::manual_seed(9);
  expect_as_eager(
      [](const Tensors& in) {
        in[0].t_();
        return Tensors{at::real(in[0]), in[0].conj()};
      },
      {complex_leaf({3, 2})});
  Compiled compiled(over_tensors([](const Tensors& in) {
    const at::Tensor before = in[0].conj();
    in[0].t_();
    return Tensors{before};
  }));
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] {
                         compiled({complex_leaf({3, 2}, false)});
                       }),
                       "result 0 is a view of another dtype, a conjugate"));
}

TEST(ViewResults, GradientsThatAreLazyConjugates) {
  Compiled compiled(over_tensors([](const Tensors& in) { return Tensors{at::view_as_complex(in[0] * 2)}; }));
  const at::Tensor x = leaf({3, 2});
  const at::Tensor gradient = torch::randn({3}, torch::kComplexFloat);
  compiled({x})[0].toTensor().backward(gradient.conj());
  EXPECT_TRUE(torch::allclose(x.grad(), 2 * at::view_as_real(gradient.conj().resolve_conj())));
}

TEST(ViewResults, DynamicDims) {
  Compiled compiled(over_tensors([](const Tensors& in) {
                      return Tensors{at::view_as_complex(in[0]).slice(0, 1),
                                     in[0].view(at::kInt).select(0, in[0].size(0) - 1)};
                    }),
                    {.dynamic = {.dims = {{0, 0, "B"}}}});
  for (const std::int64_t size : {5, 3, 8}) {
    const at::Tensor x = torch::randn({size, 2});
    const Values results = compiled({x});
    EXPECT_TRUE(torch::equal(results[0].toTensor(), at::view_as_complex(x).slice(0, 1)));
    EXPECT_TRUE(torch::equal(results[1].toTensor(), x.view(at::kInt).select(0, size - 1)));
    EXPECT_TRUE(results[0].toTensor().is_alias_of(x));
  }
  EXPECT_EQ(compiled.captures(), 1u);
  EXPECT_TRUE(compiled.is_dynamic(0)) << compiled.why_not_dynamic();
}

TEST(ViewResults, CopiesStayLazy) {
  const at::Tensor z = torch::randn({3}, torch::kComplexFloat);
  for (const at::Tensor& tensor : {z, z.conj(), z._neg_view(), z.conj()._neg_view()}) {
    const at::Tensor copy = copy_keeping_lazy_bits(tensor);
    EXPECT_TRUE(torch::equal(copy, tensor));
    EXPECT_FALSE(copy.is_alias_of(tensor));
    EXPECT_EQ(copy.is_conj(), tensor.is_conj());
    EXPECT_EQ(copy.is_neg(), tensor.is_neg());
  }
}

TEST(ViewReplay, IsAValueAndRunsOnAnotherTensor) {
  const auto replay_of = [](const OverTensors& function) {
    const ViewAndMutationMeta meta =
        analyze(over_tensors(function), {torch::zeros({4, 6}, torch::kComplexFloat)});
    EXPECT_TRUE(meta.outputs.at(0).has_view_replay);
    return meta.outputs.at(0).view;
  };
  const OverTensors view = [](const Tensors& in) {
    return Tensors{at::view_as_real(in[0].t().split(2)[1].conj().conj()).select(2, 1)};
  };
  const ViewReplay replay = replay_of(view);
  EXPECT_EQ(replay, replay_of(view));
  EXPECT_EQ(replay.steps.back().op.operator_name().name, "aten::select");
  const at::Tensor other = torch::randn({4, 6}, torch::kComplexFloat);
  const at::Tensor made = replay.apply(other);
  EXPECT_TRUE(torch::equal(made, view({other})[0]));
  EXPECT_TRUE(made.is_alias_of(other));
  EXPECT_NE(replay, replay_of([](const Tensors& in) {
              return Tensors{at::view_as_real(in[0].t().split(2)[2].conj().conj()).select(2, 1)};
            }));  // element
  EXPECT_NE(replay, replay_of([](const Tensors& in) {
              return Tensors{at::view_as_real(in[0].t().split(2)[1].conj().conj()).select(2, 0)};
            }));  // constant
  EXPECT_NE(replay, replay_of([](const Tensors& in) {
              return Tensors{at::view_as_real(in[0].t().split(2)[1]).select(2, 1)};
            }));  // steps
}

TEST(ViewReplay, GraphFilesHoldIt) {
  Compiled compiled(over_tensors([](const Tensors& in) {
    return Tensors{in[0].conj().select(0, 1), in[0].conj() * 2};
  }));
  compiled({complex_leaf({3, 2})});
  GraphFile file{.joint = compiled.joint(0), .meta = compiled.inner_meta(0)};
  const GraphFile back = decode_graph(encode_graph(file), "memory");
  EXPECT_TRUE(back.meta.same_in_every_field(file.meta));
  EXPECT_EQ(back.meta.outputs.at(0).view.steps.size(), 2u);
  EXPECT_EQ(to_text(back.joint.graph), to_text(file.joint.graph));
}

// Inputs of kinds chosen by a seed.
Tensors chosen_inputs(unsigned seed, const Tensors& fresh) {
  Tensors inputs = cloned(fresh);
  switch (seed % 7) {
    case 1:
      inputs[1] = inputs[1].conj();
      break;
    case 2:
      inputs[0] = inputs[0]._neg_view();
      break;
    case 3:
      inputs[2] = inputs[2].unsqueeze(0).expand({3, 4});
      break;
    case 4:
      inputs[2] = inputs[2].unfold(0, 2, 1);
      break;
    case 5:
      inputs.push_back(at::view_as_complex(inputs[0].view({3, 2, 2})));
      break;
    case 6:
      inputs.push_back(at::real(inputs[1]));
      break;
    default:
      break;
  }
  if (seed % 11 == 1) inputs.push_back(inputs[0].slice(0, 1));
  return inputs;
}

TEST(ViewResults, RandomProgramsOverAnyDtype) {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  const unsigned programs = asked ? static_cast<unsigned>(std::stoul(asked)) : 600;
  unsigned legal = 0, compared = 0;
  for (unsigned seed = 0; seed < programs; ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    torch::manual_seed(seed);
    const c10::AutoGradMode mode(seed % 5 != 0);
    const Tensors leaves{torch::randint(-4, 5, {3, 4}).to(at::kFloat).set_requires_grad(true),
                         at::complex(torch::randint(-4, 5, {3, 4}).to(at::kFloat),
                                     torch::randint(-4, 5, {3, 4}).to(at::kFloat))
                             .set_requires_grad(seed % 3 != 0),
                         torch::randint(-4, 5, {4}).to(at::kFloat).set_requires_grad(seed % 2 == 0)};
    const auto prepare = [&](const Tensors& fresh) { return chosen_inputs(seed, fresh); };
    const Function function =
        over_tensors([&](const Tensors& in) { return random_program(seed, in, Looks::AnyDtype); });
    const auto text = [&] {
      return "the program, as it is written: " +
             to_text(capture_forward(function, values_of(prepare(cloned(leaves)))));
    };
    Compiled compiled(function, {.partitioner = seed % 2 ? Partitioner::MinCut : Partitioner::Default});
    bool counted = false;
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
        expect_same(actual.inputs, expected.inputs, "input");
        expect_same_look(actual.outputs, expected.outputs, "output");
        if (!expected.refused) {
          EXPECT_FALSE(actual.refused);
          expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
        }
        expect_same_memory(actual, expected);
        EXPECT_EQ(count_writes(compiled.joint(0).graph), 0u);
        counted = true;
      } catch (const NotImplemented&) {
        break;  // a known limitation; the number of cases is bounded below
      } catch (const std::exception& error) {
        // A function whose own backward throws cannot be captured.
        if (!expected.refused) ADD_FAILURE() << error.what() << "\n" << text();
        break;
      }
    }
    compared += counted ? 1 : 0;
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << text()
                    << (compiled.captures() > 0 ? "and its graph: " + to_text(compiled.joint(0).graph) : "");
      return;
    }
  }
  EXPECT_GE(legal * 10, programs * 5) << legal << " legal ones of " << programs;
  EXPECT_GE(compared * 10, legal * 6) << compared << " of " << legal << " legal programs";
}

}  // namespace view_results_test
}  // namespace penstock::graph
