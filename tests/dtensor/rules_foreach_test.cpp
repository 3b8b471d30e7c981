// Operators on lists, and norms, compared with one process.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "penstock/errors.h"
#include "penstock/operator_traits.h"
#include "penstock/sharding_rule.h"
#include "tests/dtensor/rule_checker.h"

namespace penstock::test {
namespace rules_foreach_test {

using namespace std::chrono_literals;

TEST(ForeachRules, ListsAgainstOneProcess) {
  check_rules({
      {.name = "unary",
       .inputs = {sample({5, 3}), sample({4}, 1)},
       .body =
           [](const Tensors& in) {
             Tensors out = at::_foreach_neg(in);
             for (const auto& more : {at::_foreach_abs(in), at::_foreach_exp(in), at::_foreach_mul(in, 3),
                                      at::_foreach_add(in, 2)})
               out.insert(out.end(), more.begin(), more.end());
             return out;
           },
       .backward = false,
       .most = 20},
      {.name = "two lists",
       .inputs = {sample({5, 3}), sample({4}, 1), sample({5, 3}, 2), sample({4}, 3)},
       .body =
           [](const Tensors& in) {
             const Tensors a{in[0], in[1]}, b{in[2], in[3]};
             Tensors out = at::_foreach_add(a, b, 0.5);
             for (const auto& more :
                  {at::_foreach_mul(a, b), at::_foreach_sub(a, b), at::_foreach_maximum(a, b)})
               out.insert(out.end(), more.begin(), more.end());
             return out;
           },
       .backward = false,
       .most = 30},
      {.name = "scalar lists",
       .inputs = {sample({5, 3}), sample({4}, 1)},
       .body =
           [](const Tensors& in) {
             const std::vector<at::Scalar> numbers{2, 0.5};
             Tensors out = at::_foreach_mul(in, numbers);
             const auto more = at::_foreach_div(in, numbers);
             out.insert(out.end(), more.begin(), more.end());
             return out;
           },
       .backward = false,
       .most = 12},
      {.name = "in place",
       .inputs = {sample({5, 3}), sample({4}, 1), sample_positive({5, 3}, 2), sample_positive({4}, 3)},
       .body =
           [](const Tensors& in) {
             Tensors a{in[0].clone(), in[1].clone()};
             const Tensors b{in[2], in[3]};
             at::_foreach_mul_(a, 0.5);
             at::_foreach_add_(a, b, 2);
             at::_foreach_addcdiv_(a, b, b, 0.25);
             at::_foreach_addcmul_(a, b, b, 0.25);
             at::_foreach_sqrt_(a);
             at::_foreach_zero_(a);
             at::_foreach_add_(a, b);
             return a;
           },
       .backward = false,
       .may_refuse = true,
       .most = 30},
      {.name = "broadcast",
       .inputs = {sample({5, 3}), sample({3}, 1)},
       .body = [](const Tensors& in) { return at::_foreach_mul(Tensors{in[0]}, Tensors{in[1]}); },
       .backward = false,
       .most = 20},
  });
}

TEST(ForeachRules, EveryOperatorOfTheDispatcherIsHandled) {
  std::size_t seen = 0;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op.name.rfind("aten::_foreach_", 0) != 0) continue;
    ++seen;
    EXPECT_TRUE(has_sharding_rule(c10::toString(op))) << c10::toString(op);
  }
  EXPECT_GT(seen, 100u);
}

// Arguments by their type: every list has two of the tensors.
Tensors call_on_lists(const c10::OperatorHandle& op, const Tensors& in, bool in_place) {
  Stack stack;
  std::size_t next = 0;
  Tensors first;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const std::string type = argument.type()->str();
    if (type == "Tensor[]") {
      Tensors list{in[next], in[next + 1]};
      next += 2;
      if (in_place && first.empty()) first = list = {list[0].clone(), list[1].clone()};
      stack.emplace_back(c10::List<at::Tensor>(list));
    } else if (type == "Tensor") {
      stack.emplace_back(argument.name() == "scalars" ? at::tensor({0.5, 2.0}) : at::full({}, 0.5));
    } else if (type == "Scalar[]" || type == "number[]") {
      stack.emplace_back(std::vector<at::Scalar>{0.5, 2.0});
    } else if (argument.default_value()) {
      stack.push_back(*argument.default_value());
    } else {
      stack.emplace_back(0.5);
    }
  }
  op.callBoxed(&stack);
  if (in_place) return first;
  Tensors out;
  for (const c10::IValue& value : stack)
    for_each_tensor(value, [&](const at::Tensor& tensor) { out.push_back(tensor); });
  return out;
}

// All that this LibTorch has; the in-place forms one by one, because each may be refused.
TEST(ForeachRules, EveryOperatorByName) {
  const Tensors inputs{sample_positive({5, 3}), sample_positive({4}, 1),    sample_positive({5, 3}, 2),
                       sample_positive({4}, 3), sample_positive({5, 3}, 4), sample_positive({4}, 5)};
  std::map<std::size_t, std::vector<c10::OperatorHandle>> functional;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.overload_name.find("out") != std::string::npos || name.name == "aten::_foreach_mm")
      continue;
    std::size_t lists = 0;
    for (const c10::Argument& argument : op->schema().arguments())
      lists += argument.type()->str() == "Tensor[]";
    if (!op->schema().returns().empty()) {
      functional[lists].push_back(*op);
      continue;
    }
    check_rule({.name = c10::toString(name),
                .inputs = {inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(2 * lists)},
                .body = [&](const Tensors& in) { return call_on_lists(*op, in, true); },
                .backward = false,
                .may_refuse = true,
                .rtol = 1e-4,
                .atol = 1e-5,
                .most = 8});
    if (::testing::Test::HasFailure()) return;
  }
  for (const auto& [lists, operators] : functional)
    check_rule({.name = "operators on " + std::to_string(lists) + " lists",
                .inputs = {inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(2 * lists)},
                .body =
                    [&operators = operators](const Tensors& in) {
                      Tensors out;
                      for (const c10::OperatorHandle& op : operators)
                        for (const at::Tensor& result : call_on_lists(op, in, false)) out.push_back(result);
                      return out;
                    },
                .backward = false,
                .rtol = 1e-4,
                .atol = 1e-5,
                .most = 8});
}

// Newer LibTorch multiplies lists of matrices; the shapes are not those of elementwise operators.
TEST(ForeachRules, ProductsOfMatrices) {
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::_foreach_mm", ""});
  if (!op) GTEST_SKIP() << "this LibTorch has no _foreach_mm";
  const auto products = [&](const Tensors& left, const Tensors& right) {
    Stack stack{c10::List<at::Tensor>(left), c10::List<at::Tensor>(right)};
    op->callBoxed(&stack);
    return stack.back().toTensorVector();
  };
  check_rule({.name = "_foreach_mm",
              .inputs = {sample({5, 3}), sample({2, 4}, 1), sample({3, 4}, 2), sample({4, 5}, 3)},
              .body =
                  [&](const Tensors& in) {
                    return products({in[0], in[1]}, {in[2], in[3]});
                  },
              .backward = false,
              .rtol = 1e-5,
              .most = 40});
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    const at::Tensor x = distribute_tensor(sample({4, 3}), mesh, {Shard{0}});
    EXPECT_THROW(products({x, x}, {x}), ValueError);
  });
}

TEST(ForeachRules, PlainPositionsAndMistakes) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    const at::Tensor x = distribute_tensor(sample({4, 3}), mesh, {Shard{0}});
    // A plain tensor is allowed at a position of its own.
    const Tensors out = at::_foreach_mul({x, sample({2}, 1)}, 2);
    EXPECT_TRUE(is_dtensor(out[0]));
    EXPECT_FALSE(is_dtensor(out[1]));
    EXPECT_TRUE(at::equal(full_tensor(out[0]), sample({4, 3}) * 2));
    EXPECT_TRUE(at::equal(out[1], sample({2}, 1) * 2));
    EXPECT_THROW(at::_foreach_add(Tensors{x}, Tensors{sample({4, 3})}), TypeError);
    {
      const ImplicitReplicationGuard guard;
      EXPECT_TRUE(at::equal(full_tensor(at::_foreach_add(Tensors{x}, Tensors{sample({4, 3}, 1)})[0]),
                            sample({4, 3}) + sample({4, 3}, 1)));
    }
    at::Tensor terms = spread(sample({4, 3}), mesh, {Partial{}});
    EXPECT_THROW(at::_foreach_sqrt_({terms}), ValueError);
    at::_foreach_mul_({terms}, 2);
    EXPECT_TRUE(at::equal(full_tensor(terms), sample({4, 3}) * 2));
  });
}

TEST(NormRules, AgainstOneProcess) {
  for (const double order : {2.0, 1.0, 3.0, 0.0, std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity(), -1.0}) {
    const bool smooth = order > 0 && !std::isinf(order);
    check_rules({
        {.name = "vector_norm " + std::to_string(order),
         .inputs = {sample({5, 3})},
         .body =
             [order](const Tensors& in) {
               return Tensors{at::linalg_vector_norm(in[0], order),
                              at::linalg_vector_norm(in[0], order, at::IntArrayRef{0}),
                              at::linalg_vector_norm(in[0], order, at::IntArrayRef{1}, true),
                              in[0].norm(order), in[0].norm(order, 0, true)};
             },
         .backward = false,
         .rtol = 1e-4,
         .most = 14},
    });
    if (smooth)
      check_rules({{.name = "gradient of vector_norm " + std::to_string(order),
                    .inputs = {sample({5, 3})},
                    .body =
                        [order](const Tensors& in) {
                          return Tensors{at::linalg_vector_norm(in[0], order), in[0].norm(order, 0, true)};
                        },
                    .partial = false,
                    .rtol = 1e-4,
                    .most = 14}});
  }
  check_rules({
      {.name = "_foreach_norm",
       .inputs = {sample({5, 3}), sample({4}, 1), sample({2, 3}, 2)},
       .body =
           [](const Tensors& in) {
             Tensors out = at::_foreach_norm(in);
             for (const auto& more :
                  {at::_foreach_norm(in, 1), at::_foreach_norm(in, std::numeric_limits<double>::infinity())})
               out.insert(out.end(), more.begin(), more.end());
             return out;
           },
       .backward = false,
       .most = 30},
      {.name = "norm in another dtype",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::linalg_vector_norm(in[0], 2, c10::nullopt, false, at::kDouble),
                            in[0].norm(2, at::kDouble), in[0].to(at::kBFloat16).norm().to(at::kFloat)};
           },
       .backward = false,
       .rtol = 1e-2},
  });
}

// NaN in the part of one rank is NaN on all.
TEST(NormRules, NotANumber) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    for (const std::int64_t where : {0, 3}) {
      at::Tensor value = sample({4});
      value[where] = std::nan("");
      const at::Tensor x = distribute_tensor(value, mesh, {Shard{0}});
      for (const double order :
           {2.0, std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()})
        EXPECT_TRUE(std::isnan(full_tensor(at::linalg_vector_norm(x, order)).item<float>())) << order;
    }
  });
}

// Split, replicated and partial gradients together, as one process clips them.
TEST(NormRules, ClipGradNorm) {
  const std::vector<std::vector<std::int64_t>> shapes{{5, 3}, {4}, {3, 4}, {2, 2}};
  const auto gradients = [&](double order, double most, double& norm) {
    Tensors parameters;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      at::Tensor p = at::zeros(shapes[i]).set_requires_grad(true);
      p.mutable_grad() = sample(shapes[i], static_cast<int>(i));
      parameters.push_back(p);
    }
    norm = torch::nn::utils::clip_grad_norm_(parameters, most, order);
    Tensors result;
    for (const at::Tensor& p : parameters) result.push_back(p.grad());
    return result;
  };
  for (const double order : {2.0, 1.0, std::numeric_limits<double>::infinity()})
    for (const double most : {0.5, 1e6}) {
      double expected_norm = 0;
      const Tensors expected = gradients(order, most, expected_norm);
      comm::run_ranks(4, 60s, [&](comm::World& world) {
        const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2, 2}, {}, world.rank(), 4));
        const std::vector<Placements> layouts{{Shard{0}, Shard{1}},
                                              {Replicate{}, Replicate{}},
                                              {StridedShard{0, 2}, Shard{0}},
                                              {Partial{}, Shard{0}}};
        Tensors parameters;
        for (std::size_t i = 0; i < shapes.size(); ++i) {
          Placements whole = layouts[i];
          for (Placement& placement : whole)
            if (placement.is_partial()) placement = Replicate{};
          at::Tensor p = distribute_tensor(at::zeros(shapes[i]), mesh, whole);
          p.set_requires_grad(true);
          p.mutable_grad() = spread(sample(shapes[i], static_cast<int>(i)), mesh, layouts[i]).detach();
          parameters.push_back(p);
        }
        const double norm = torch::nn::utils::clip_grad_norm_(parameters, most, order);
        EXPECT_NEAR(norm, expected_norm, 1e-4 * expected_norm);
        for (std::size_t i = 0; i < shapes.size(); ++i)
          EXPECT_TRUE(at::allclose(full_tensor(parameters[i].grad()), expected[i], 1e-5, 1e-6))
              << i << " order " << order;
      });
    }
}

}  // namespace rules_foreach_test
}  // namespace penstock::test
