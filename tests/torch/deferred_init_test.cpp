#include "penstock/fake.h"

#include <gtest/gtest.h>

#include "tests/torch/module_zoo.h"

namespace penstock {
namespace deferred_init_test {

namespace nn = torch::nn;

class DeferredZoo : public ::testing::TestWithParam<zoo::Entry> {};

// Parameters and buffers equal those of a module built for real, bit for bit.
TEST_P(DeferredZoo, EqualsBuildingForReal) {
  zoo::Case expected = GetParam().make();
  if (!expected.module) return;
  DeferredInit deferred;
  zoo::Case made;
  {
    const ModeGuard guard(deferred);
    made = GetParam().make();
  }
  for (const at::Tensor& parameter : made.module->parameters()) EXPECT_TRUE(is_fake(parameter));
  torch::manual_seed(11);                     // the seed that the zoo uses
  std::vector<at::Tensor> all = made.inputs;  // drawn from the same generator
  for (const at::Tensor& parameter : made.module->parameters()) all.push_back(parameter);
  for (const at::Tensor& buffer : made.module->buffers()) all.push_back(buffer);
  deferred.materialize(all);
  const auto names = [](const nn::Module& module) { return module.named_parameters().keys(); };
  EXPECT_EQ(names(*expected.module), names(*made.module));
  const auto compare = [](const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_FALSE(is_fake(b[i]));
      EXPECT_EQ(a[i].requires_grad(), b[i].requires_grad());
      EXPECT_EQ(a[i].strides(), b[i].strides());
      EXPECT_TRUE(at::equal(a[i], b[i])) << i;
    }
  };
  compare(expected.module->parameters(), made.module->parameters());
  compare(expected.module->buffers(), made.module->buffers());
  // And it trains the same way.
  const auto run = [](zoo::Case& made, const zoo::Tensors& inputs) {
    torch::manual_seed(1);
    const at::Tensor loss = zoo::loss_of(made.forward(inputs));
    if (loss.defined()) loss.backward();
    return loss;
  };
  const at::Tensor a = run(expected, expected.inputs), b = run(made, expected.inputs);
  ASSERT_EQ(a.defined(), b.defined());
  EXPECT_TRUE(!a.defined() || at::equal(a, b));
}

INSTANTIATE_TEST_SUITE_P(Zoo, DeferredZoo, ::testing::ValuesIn(zoo::all()),
                         [](const auto& info) { return info.param.name; });

struct Tied : nn::Module {
  Tied() {
    first = register_module("first", nn::Linear(4, 4));
    second = register_module("second", nn::Linear(4, 4));
    second->weight.set_data(first->weight);  // one memory block, two parameters
    scale = register_buffer("scale", torch::full({4}, 2.0) * first->weight.detach().sum(0));
  }
  nn::Linear first{nullptr}, second{nullptr};
  at::Tensor scale;
};

TEST(DeferredInit, PartByPartKeepsTies) {
  DeferredInit deferred;
  std::shared_ptr<Tied> model;
  {
    const ModeGuard guard(deferred);
    model = std::make_shared<Tied>();
  }
  deferred.materialize(*model->second);
  EXPECT_FALSE(is_fake(model->second->weight));
  EXPECT_TRUE(is_fake(model->first->weight));
  deferred.materialize(*model);
  EXPECT_TRUE(model->first->weight.is_alias_of(model->second->weight));
  EXPECT_TRUE(at::equal(model->scale, 2 * model->first->weight.detach().sum(0)));
}

TEST(DeferredInit, OneLayerOfAHugeModel) {
  DeferredInit deferred;
  nn::Sequential model{nullptr};
  {
    const ModeGuard guard(deferred);
    model = nn::Sequential(nn::Linear(65536, 65536), nn::Linear(65536, 65536), nn::Linear(8, 2));
  }
  deferred.materialize(*model[2]);
  EXPECT_FALSE(is_fake(model->parameters().back()));
  EXPECT_TRUE(is_fake(model->parameters().front()));
  EXPECT_LE(model->parameters()[4].abs().max().item<float>(), 1.0f / std::sqrt(8.0f))
      << "initialized as nn::Linear does";
  EXPECT_GT(model->parameters()[4].abs().max().item<float>(), 0.0f);
}

TEST(DeferredInit, OptimizersSeeTheMemory) {
  DeferredInit deferred;
  nn::Linear layer{nullptr};
  {
    const ModeGuard guard(deferred);
    layer = nn::Linear(4, 2);
  }
  torch::optim::SGD optimizer(layer->parameters(), 0.1);
  deferred.materialize(*layer);
  const at::Tensor before = layer->weight.detach().clone();
  layer->forward(torch::ones({1, 4})).sum().backward();
  optimizer.step();
  EXPECT_TRUE(at::allclose(layer->weight.detach(), before - 0.1));
}

TEST(DeferredInit, ForeignFakeTensorsAreReported) {
  nn::Linear layer(4, 2);
  replace_data(layer->weight, to_fake(layer->weight.detach()));
  DeferredInit deferred;
  EXPECT_THROW(deferred.materialize(*layer), StateError);
  deferred.materialize({torch::ones({2})});  // has memory: nothing to do
  materialize_empty(*layer);
  EXPECT_FALSE(is_fake(layer->weight));
  EXPECT_EQ(layer->weight.sizes(), at::IntArrayRef({2, 4}));
  layer->forward(torch::ones({1, 4}));
}

TEST(DeferredInit, EmptyMemoryKeepsTies) {
  DeferredInit deferred;
  std::shared_ptr<Tied> model;
  {
    const ModeGuard guard(deferred);
    model = std::make_shared<Tied>();
  }
  materialize_empty(*model);
  EXPECT_TRUE(model->first->weight.is_alias_of(model->second->weight));
  EXPECT_TRUE(model->first->weight.requires_grad());
}

// The values of a real run are only known without random numbers, foreign fake tensors, and real tensors that
// it would have written.
TEST(DeferredInit, WhatCanBeReplayed) {
  const at::Tensor foreign = make_fake({3}), real = at::full({3}, 2.0), written = at::ones({3});
  DeferredInit deferred;
  at::Tensor table, part, drawn, of_foreign, filled_by_foreign, of_written, of_real;
  {
    const ModeGuard guard(deferred);
    table = at::arange(6, at::kFloat).cos();
    part = table.narrow(0, 2, 3);
    drawn = at::rand({3});
    of_foreign = foreign + 1;
    filled_by_foreign = at::zeros({3});
    filled_by_foreign.copy_(foreign);
    written.add_(1);
    of_written = written * 2;
    of_real = real * 2;
  }
  const std::vector<at::Tensor> found = deferred.replayable(
      {table, part, drawn, of_foreign, filled_by_foreign, of_written, of_real, foreign, real});
  ASSERT_EQ(found.size(), 3U);
  EXPECT_TRUE(found[0].is_same(table) && found[1].is_same(part) && found[2].is_same(of_real));
  deferred.materialize(found);
  EXPECT_TRUE(table.equal(at::arange(6, at::kFloat).cos()));
  EXPECT_TRUE(part.is_alias_of(table) && part.equal(table.narrow(0, 2, 3)));
  EXPECT_TRUE(of_real.equal(at::full({3}, 4.0)));
  EXPECT_TRUE(written.equal(at::ones({3})));
}

}  // namespace deferred_init_test
}  // namespace penstock
