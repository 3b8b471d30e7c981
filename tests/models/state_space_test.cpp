// The state-space block against its formulas in float64, token by token; its memory for generation; its
// capture.
#include "penstock/models/blocks/state_space.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/random.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::models {
namespace state_space_test {

using penstock::test::has_text;
using penstock::test::message_of;

StateSpaceOptions small_options(std::int64_t groups = 2) {
  return {.width = 12,
          .state_size = 5,
          .state_head_width = 6,
          .state_expand = 2,
          .state_groups = groups,
          .state_kernel = 4,
          .state_chunk = 4};
}

StateSpace made_block(const StateSpaceOptions& options, at::ScalarType dtype = at::kDouble) {
  StateSpace block(options, 3);
  block->to(dtype);
  block->initialize("blocks.3.state_space", {.seed = 7, .deviation = 0.4, .residual = 0.4});
  return block;
}

at::Tensor random_documents(std::int64_t batch, std::int64_t length) {
  return at::cumsum(at::rand({batch, length}).lt(0.2).to(at::kLong), 1);
}

// The formulas of state_space.h with one operator at a time, in the dtype of the parameters.
at::Tensor plain_forward(const StateSpace& block, const StateSpaceOptions& o, const at::Tensor& x,
                         const at::Tensor& documents) {
  const std::int64_t batch = x.size(0), length = x.size(1), heads = o.heads(), p = o.state_head_width;
  const auto begins = [&](std::int64_t b, std::int64_t t) {
    return t == 0 || (documents.defined() &&
                      documents[b][t].item<std::int64_t>() != documents[b][t - 1].item<std::int64_t>());
  };
  std::vector<at::Tensor> rows;
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto convolved = [&](const torch::nn::Linear& projection, const ChannelTaps& taps) {
      const at::Tensor in = at::matmul(x[b], projection->weight.t());
      std::vector<at::Tensor> tokens;
      for (std::int64_t t = 0; t < length; ++t) {
        at::Tensor sum = taps->bias;
        for (std::int64_t back = 0; back < o.state_kernel && t - back >= 0; ++back) {
          sum = sum + taps->weight.select(1, o.state_kernel - 1 - back) * in[t - back];
          if (begins(b, t - back)) break;
        }
        tokens.push_back(sum / (1 + at::exp(-sum)));
      }
      return at::stack(tokens);
    };
    const at::Tensor values = convolved(block->value, block->value_convolution).view({length, heads, p});
    const at::Tensor keys = convolved(block->key, block->key_convolution)
                                .view({length, o.state_groups, o.state_size})
                                .repeat_interleave(heads / o.state_groups, 1);
    const at::Tensor queries = convolved(block->query, block->query_convolution)
                                   .view({length, o.state_groups, o.state_size})
                                   .repeat_interleave(heads / o.state_groups, 1);
    const at::Tensor steps = at::log1p(at::exp(at::matmul(x[b], block->step->weight.t()) + block->step_bias));
    at::Tensor state = at::zeros({heads, p, o.state_size}, x.options());
    std::vector<at::Tensor> tokens;
    for (std::int64_t t = 0; t < length; ++t) {
      if (begins(b, t)) state = at::zeros_like(state);
      const at::Tensor factor = at::exp(-at::exp(block->decay_log) * steps[t]);
      state = factor.view({heads, 1, 1}) * state +
              steps[t].view({heads, 1, 1}) * values[t].unsqueeze(2) * keys[t].unsqueeze(1);
      tokens.push_back((state * queries[t].unsqueeze(1)).sum(2) + block->skip.unsqueeze(1) * values[t]);
    }
    const at::Tensor gate = at::matmul(x[b], block->gate->weight.t());
    const at::Tensor gated = at::stack(tokens).view({length, o.inner()}) * (gate / (1 + at::exp(-gate)));
    const at::Tensor scale = (gated * gated).mean(1, true).add(o.norm_epsilon).rsqrt();
    rows.push_back(at::matmul(gated * scale * block->norm->weight, block->output->weight.t()));
  }
  return at::stack(rows);
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.detach().to(at::kDouble) - b.detach().to(at::kDouble)).abs().max().item<double>();
}

TEST(StateSpace, EqualsItsFormulasWithGradients) {
  torch::manual_seed(1);
  for (int number = 0; number < 8; ++number) {
    SCOPED_TRACE(number);
    StateSpaceOptions options = small_options(number % 2 + 1);
    options.state_kernel = number % 4 + 1;
    // With and without a rest of a chunk; the last one with one product for all projections.
    const std::int64_t length = number == 0 ? 1 : number == 7 ? 40 : 3 + 2 * number;
    const at::Tensor documents = number % 3 == 1 ? random_documents(2, length) : at::Tensor();
    StateSpace block = made_block(options);
    const at::Tensor x = at::randn({2, length, 12}, at::kDouble).set_requires_grad(true),
                     by = at::randn({2, length, 12}, at::kDouble);
    const auto gradients_of = [&](const at::Tensor& y) {
      std::vector<at::Tensor> inputs = block->parameters();
      inputs.push_back(x);
      return torch::autograd::grad({(y * by).sum()}, inputs);
    };
    const at::Tensor y = block->forward(x, documents), wanted = plain_forward(block, options, x, documents);
    EXPECT_LT(difference(y, wanted), 1e-11);
    const auto own = gradients_of(y), expected = gradients_of(wanted);
    const std::vector<std::string> names = block->named_parameters().keys();
    for (std::size_t i = 0; i < own.size(); ++i)
      EXPECT_LT(difference(own[i], expected[i]), 1e-9 * (1 + expected[i].abs().max().item<double>()))
          << (i < names.size() ? names[i] : "x");
  }
}

// 16-bit products: within the rounding of the projections.
TEST(StateSpace, UnderAutocast) {
  torch::manual_seed(2);
  const StateSpaceOptions options = small_options();
  StateSpace block = made_block(options, at::kFloat);
  for (const std::int64_t length : {10, 70}) {  // several products, and one
    const at::Tensor x = at::randn({1, length, 12}).set_requires_grad(true);
    const at::Tensor exact = block->forward(x);
    at::Tensor y;
    {
      const AutocastScope casts(at::kCPU, at::kBFloat16);
      y = block->forward(x);
    }
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_LT(difference(y, exact), 0.05 * exact.abs().max().item<double>()) << length;
    y.to(at::kFloat).pow(2).sum().backward();
    for (const auto& parameter : block->named_parameters()) {
      ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
      EXPECT_EQ(parameter.value().grad().scalar_type(), at::kFloat) << parameter.key();
      EXPECT_GT(parameter.value().grad().abs().max().item<double>(), 0) << parameter.key();
    }
    block->zero_grad();
  }
}

// One token at a time, and in pieces: equal to the whole row.
TEST(StateSpace, MemoryEqualsTheWholeRow) {
  torch::manual_seed(3);
  const at::NoGradGuard no_grad;
  for (const std::int64_t taps : {1, 2, 4})
    for (const bool with_documents : {false, true}) {
      StateSpaceOptions options = small_options();
      options.state_kernel = taps;
      StateSpace block = made_block(options);
      const std::int64_t length = 17;
      const at::Tensor x = at::randn({3, length, 12}, at::kDouble),
                       documents = with_documents ? random_documents(3, length) : at::Tensor();
      const at::Tensor whole = block->forward(x, documents);
      for (const std::vector<std::int64_t>& sizes :
           {std::vector<std::int64_t>(17, 1), {9, 1, 1, 5, 1}, {17}, {2, 6, 9}}) {
        StateSpaceCache cache;
        std::vector<at::Tensor> pieces;
        for (const std::int64_t size : sizes) {
          const std::int64_t from = cache.length();
          pieces.push_back(block->forward(x.narrow(1, from, size),
                                          with_documents ? documents.narrow(1, from, size) : at::Tensor(),
                                          &cache));
          cache.advance(size);
        }
        EXPECT_EQ(cache.length(), length);
        EXPECT_LT(difference(at::cat(pieces, 1), whole), 1e-11)
            << taps << " taps, " << sizes.size() << " pieces, documents " << with_documents;
      }
    }
}

// Pieces of which only the first tokens count: equal to the row of the tokens that count.
TEST(StateSpace, MemoryKeepsTheTokensThatCount) {
  torch::manual_seed(5);
  const at::NoGradGuard no_grad;
  for (const std::int64_t taps : {1, 2, 4})
    for (const bool with_documents : {false, true}) {
      StateSpaceOptions options = small_options();
      options.state_kernel = taps;
      StateSpace block = made_block(options);
      StateSpaceCache cache;
      std::vector<std::vector<at::Tensor>> tokens(2), numbers(2), results(2);
      for (const std::int64_t size : {4, 1, 1, 6, 1, 3}) {
        const at::Tensor x = at::randn({2, size, 12}, at::kDouble),
                         documents = with_documents ? random_documents(2, size) : at::Tensor(),
                         counted = at::randint(0, size + 1, {2}, at::kLong);
        const at::Tensor y = block->forward(x, documents, &cache, counted);
        for (std::int64_t row = 0; row < 2; ++row) {
          const auto count = counted[row].item<std::int64_t>();
          tokens[row].push_back(x[row].narrow(0, 0, count));
          results[row].push_back(y[row].narrow(0, 0, count));
          if (with_documents) numbers[row].push_back(documents[row].narrow(0, 0, count));
        }
        cache.advance(size);
      }
      for (std::size_t row = 0; row < 2; ++row) {
        const at::Tensor x = at::cat(tokens[row]).unsqueeze(0);
        ASSERT_GT(x.size(1), 2);
        const at::Tensor whole =
            block->forward(x, with_documents ? at::cat(numbers[row]).unsqueeze(0) : at::Tensor());
        EXPECT_LT(difference(at::cat(results[row]), whole[0]), 1e-11)
            << taps << " taps, row " << row << ", documents " << with_documents;
      }
    }
}

TEST(StateSpace, MemoryRefusesOtherRows) {
  StateSpace block = made_block(small_options());
  StateSpaceCache cache;
  const at::Tensor x = at::randn({2, 3, 12}, at::kDouble);
  block->forward(x, at::Tensor(), &cache);
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { block->forward(x.narrow(0, 0, 1), at::Tensor(), &cache); }),
               "StateSpaceCache: batch: got 1, expected 2, as before"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         block->forward(x, at::zeros({2, 3}, at::kLong), &cache);
                       }),
                       "documents"));
  cache.clear();
  EXPECT_EQ(cache.length(), 0);
  block->forward(x.narrow(0, 0, 1), at::Tensor(), &cache);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { block->forward(x[0]); }), "[batch, length, 12]"));
}

// Captured and replayed: three steps bit for bit.
TEST(StateSpace, CompiledEqualsEager) {
  for (const bool with_documents : {false, true}) {
    torch::manual_seed(4);
    StateSpace plain = made_block(small_options()), original = made_block(small_options());
    struct Module : torch::nn::Module {
      explicit Module(StateSpace inner) : block(std::move(inner)) { register_module("block", block); }
      at::Tensor forward(const at::Tensor& x, const at::Tensor& documents) {
        return block->forward(x, documents);
      }
      StateSpace block;
    };
    auto fast = graph::compile(std::make_shared<Module>(original));
    const at::Tensor documents = with_documents ? random_documents(2, 9) : at::Tensor();
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      const at::Tensor x = at::randn({2, 9, 12}, at::kDouble).set_requires_grad(true),
                       other = x.detach().clone().set_requires_grad(true);
      const at::Tensor expected = plain->forward(x, documents), actual = fast->forward(other, documents);
      EXPECT_TRUE(at::equal(actual, expected));
      expected.pow(2).sum().backward();
      actual.pow(2).sum().backward();
      EXPECT_TRUE(at::equal(x.grad(), other.grad()));
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
        const at::Tensor a = original->parameters()[i], b = plain->parameters()[i];
        ASSERT_TRUE(a.grad().defined()) << plain->named_parameters().keys()[i];
        EXPECT_TRUE(at::equal(a.grad(), b.grad())) << plain->named_parameters().keys()[i];
        a.sub_(a.grad(), 0.01);
        b.sub_(b.grad(), 0.01);
      }
      plain->zero_grad();
      original->zero_grad();
    }
    EXPECT_EQ(fast->captures(), 1u);
    EXPECT_TRUE(has_text(fast->graph_text(), "penstock::selective_scan_backward"));
  }
}

TEST(StateSpace, FakeTensorsHaveTheShapes) {
  FakeMode fake;
  const ModeGuard guard(fake);
  StateSpace block(StateSpaceOptions{.width = 64}, 0);
  const at::Tensor x = at::empty({2, 300, 64}).set_requires_grad(true);
  const at::Tensor y = block->forward(x);
  EXPECT_EQ(y.sizes(), x.sizes());
  y.sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  for (const auto& parameter : block->named_parameters())
    EXPECT_EQ(parameter.value().grad().sizes(), parameter.value().sizes()) << parameter.key();
}

TEST(StateSpaceOptions, ShapesAreThoseOfTheModule) {
  for (const StateSpaceOptions& options :
       {small_options(), StateSpaceOptions{.width = 64}, StateSpaceOptions{.width = 32, .state_kernel = 1}}) {
    StateSpace block(options, 0);
    const std::vector<ParameterShape> shapes = parameter_shapes(options, "");
    const auto parameters = block->named_parameters();
    ASSERT_EQ(shapes.size(), parameters.size());
    std::int64_t elements = 0;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      EXPECT_EQ(shapes[i].name, parameters[i].key());
      EXPECT_EQ(at::IntArrayRef(shapes[i].shape), parameters[i].value().sizes()) << shapes[i].name;
      elements += parameters[i].value().numel();
    }
    EXPECT_EQ(parameter_count(options), elements);
  }
}

TEST(StateSpaceOptions, OperationsOfAKnownBlock) {
  // width 768: inner 1536, 24 heads, keys 128.
  const StateSpaceOptions options{.width = 768};
  const double projections = 2.0 * 768 * (1536 + 1536 + 128 + 128 + 24) + 2.0 * 1536 * 768;
  const double convolutions = 2.0 * 4 * (1536 + 128 + 128);
  const double scan = 2.0 * 128 * (128 + 1536) + 2 * 2.0 * 128 * 1536;
  EXPECT_DOUBLE_EQ(flops_per_token(options, 1024), projections + convolutions + scan);
  EXPECT_LT(flops_per_token(options, 16), flops_per_token(options, 1024));
  EXPECT_EQ(flops_per_token(options, 16384), flops_per_token(options, 1024)) << "linear in the length";
}

TEST(StateSpaceOptions, ErrorsNameTheKey) {
  const auto message = [](const auto& spoil) {
    StateSpaceOptions options{.width = 64};
    spoil(options);
    return message_of<ConfigError>([&] { StateSpace(options, 0); });
  };
  EXPECT_TRUE(
      has_text(message([](auto& o) { o.state_size = 0; }), "model.state_size: got 0, expected at least 1"));
  EXPECT_TRUE(has_text(message([](auto& o) { o.state_kernel = -1; }), "model.state_kernel: got -1"));
  EXPECT_TRUE(has_text(message([](auto& o) { o.state_chunk = 0; }), "model.state_chunk"));
  EXPECT_TRUE(has_text(message([](auto& o) { o.state_head_width = 48; }),
                       "model.state_head_width: got 48, expected a divisor of the inner width"));
  EXPECT_TRUE(has_text(message([](auto& o) { o.state_groups = 3; }),
                       "model.state_groups: got 3, expected a divisor of the number of heads"));
  EXPECT_TRUE(has_text(message([](auto& o) { o.norm_epsilon = 0; }), "model.norm_epsilon"));
}

// Functions of seed, name and element, whatever the index of the block and the part that a rank holds.
TEST(StateSpace, InitialValuesDependOnNameAndElement) {
  const StateSpaceOptions options{.width = 64, .state_size = 16, .state_head_width = 16};
  StateSpace block(options, 0), again(options, 9), other(options, 0);
  block->initialize("blocks.0.state_space", {.seed = 5});
  again->initialize("blocks.0.state_space", {.seed = 5});
  other->initialize("blocks.1.state_space", {.seed = 5});
  for (std::size_t i = 0; i < block->parameters().size(); ++i) {
    const std::string name = block->named_parameters().keys()[i];
    EXPECT_TRUE(at::equal(block->parameters()[i], again->parameters()[i])) << name;
    if (name != "skip" && name != "norm.weight") {
      EXPECT_FALSE(at::equal(block->parameters()[i], other->parameters()[i])) << name;
    }
  }
  // A rank that holds the rows 40 to 79 of a parameter computes them alone.
  at::Tensor rows = at::empty({40, 64});
  keyed_normal_(
      rows,
      {.seed = 5, .layer = layer_from_name("blocks.0.state_space.gate.weight"), .purpose = purpose::kInit}, 0,
      0.02, {.global_shape = {128, 64}, .offset = {40, 0}});
  EXPECT_TRUE(at::equal(rows, block->gate->weight.narrow(0, 40, 40)));

  const at::NoGradGuard no_grad;
  const at::Tensor decay = at::exp(block->decay_log), step = at::softplus(block->step_bias);
  EXPECT_GE(decay.min().item<double>(), 0.9999);
  EXPECT_LE(decay.max().item<double>(), 16.0001);
  EXPECT_GT(decay.std(/*unbiased=*/true).item<double>(), 1);
  EXPECT_GE(step.min().item<double>(), 0.999e-3);
  EXPECT_LE(step.max().item<double>(), 1.001e-1);
  EXPECT_LE(block->value_convolution->weight.abs().max().item<double>(), 0.5);
  EXPECT_GT(block->value_convolution->weight.abs().max().item<double>(), 0.4);
  EXPECT_TRUE(at::equal(block->skip, at::ones({8})));
}

}  // namespace state_space_test
}  // namespace penstock::models
