// A transformer of two blocks, trained with tensor, sequence and data parallelism, compared with one process.
#include "penstock/tensor_parallel.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>

#include "penstock/comm/record/recorder.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "tests/dtensor/rule_checker.h"
#include "tests/dtensor/small_transformer.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace parallel_style_test {

using namespace std::chrono_literals;
using namespace test;

// Sums are computed in another order; in float64 that is a few units in the last place, amplified by AdamW's
// division.
constexpr double kTolerance = 1e-9;

void expect_equal(const Training& expected, const Training& actual, double tolerance,
                  const std::string& where) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (std::size_t step = 0; step < expected.losses.size(); ++step)
    EXPECT_NEAR(actual.losses[step], expected.losses[step], tolerance) << where << ", step " << step;
  for (const auto& [name, value] : expected.parameters)
    EXPECT_TRUE(at::allclose(actual.parameters.at(name), value, tolerance, tolerance))
        << where << ", " << name << ": differs by "
        << (actual.parameters.at(name) - value).abs().max().item<double>();
}

void check_training(const std::vector<std::int64_t>& mesh_shape, const std::vector<std::string>& names,
                    const Plan& plan, const std::string& where, double tolerance = kTolerance) {
  const Training expected = train(make_model(), [](const at::Tensor& tokens) { return tokens; });
  std::vector<Model> models;  // created one after the other: the generator belongs to the process
  int size = 1;
  for (const std::int64_t n : mesh_shape) size *= static_cast<int>(n);
  for (int rank = 0; rank < size; ++rank) models.push_back(make_model());
  comm::run_ranks(size, 120s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", mesh_shape, names, world.rank(), size));
    Model model = models[static_cast<std::size_t>(world.rank())];
    parallelize_module(*model, mesh, plan, {.axis = "tp"});
    distribute_module(*model, mesh);
    Placements batch(mesh_shape.size());
    if (mesh_shape.size() > 1) batch[0] = Shard{0};
    const Training actual =
        train(model, [&](const at::Tensor& tokens) { return distribute_tensor(tokens, mesh, batch); });
    expect_equal(expected, actual, tolerance, where + ", rank " + std::to_string(world.rank()));
  });
}

TEST(TensorParallel, TwoRanks) { check_training({2}, {"tp"}, tensor_plan(), "tensor parallel 2"); }
TEST(TensorParallel, FourRanks) { check_training({4}, {"tp"}, tensor_plan(), "tensor parallel 4"); }
TEST(TensorParallel, ThreeRanksUneven) { check_training({3}, {"tp"}, tensor_plan(), "tensor parallel 3"); }
TEST(SequenceParallel, TwoRanks) { check_training({2}, {"tp"}, sequence_plan(), "sequence parallel 2"); }
TEST(SequenceParallel, FourRanksUneven) {
  check_training({4}, {"tp"}, sequence_plan(), "sequence parallel 4");
}
TEST(DataAndTensorParallel, TwoByTwo) { check_training({2, 2}, {"dp", "tp"}, tensor_plan(), "2 x 2"); }
TEST(DataAndTensorParallel, TwoByTwoWithSequence) {
  check_training({2, 2}, {"dp", "tp"}, sequence_plan(), "2 x 2 with sequence parallel");
}
// Nothing is summed over ranks: bitwise equal.
TEST(DataParallel, AllReplicated) { check_training({2}, {"tp"}, {}, "nothing parallel", 0); }

// ---- at the boundary of a module ----

// Operations of all ranks together while `body` runs on each.
std::map<std::string, comm::OperationTotals> totals_of(const comm::MeshGroups& mesh,
                                                       const std::function<void()>& body) {
  comm::Recorder& recorder = comm::Recorder::global();
  const auto meet = [&] { mesh.group(0).barrier().wait(); };
  meet();
  meet();
  if (mesh.coordinate()[0] == 0) recorder.reset_totals();
  meet();
  body();
  meet();
  auto totals = recorder.totals();
  meet();
  totals.erase("barrier");
  return totals;
}

void on_two(const std::function<void(const comm::MeshGroups&)>& body) {
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    body({world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2)});
  });
}

struct MlpImpl : nn::Module {
  MlpImpl() {
    up = register_module("up", nn::Linear(4, 6));
    down = register_module("down", nn::Linear(6, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }
  nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

// Plain tensors in, plain tensors out: the caller need not know.
TEST(ModuleBoundary, PlainInputsStayPlain) {
  torch::manual_seed(1);
  Mlp whole;
  const at::Tensor x = at::randn({5, 4});
  at::Tensor input = x.clone().requires_grad_();
  const at::Tensor expected = whole->forward(input);
  expected.square().sum().backward();
  std::vector<Mlp> models{Mlp(), Mlp()};
  for (Mlp& model : models) {
    const torch::NoGradGuard no_grad;
    for (const auto& item : whole->named_parameters())
      model->named_parameters()[item.key()].copy_(item.value());
  }
  on_two([&](const comm::MeshGroups& mesh) {
    Mlp model = models[static_cast<std::size_t>(mesh.coordinate()[0])];
    parallelize_module(*model, mesh, {{"up", colwise_parallel()}, {"down", rowwise_parallel()}});
    at::Tensor mine = x.clone().requires_grad_();
    const auto totals = totals_of(mesh, [&] {
      const at::Tensor y = model->forward(mine);
      EXPECT_FALSE(is_dtensor(y));
      EXPECT_TRUE(at::allclose(y, expected, 1e-5, 1e-6));
      y.square().sum().backward();
    });
    // One sum forward and one backward, over both ranks.
    EXPECT_EQ(totals.size(), 1u);
    EXPECT_EQ(totals.at("all_reduce").operations, 4u);
    EXPECT_TRUE(at::allclose(mine.grad(), input.grad(), 1e-5, 1e-6));
    EXPECT_EQ(placements_of(model->up->weight.grad()), (Placements{Shard{0}}));
    EXPECT_TRUE(at::allclose(full_tensor(model->up->weight.grad()), whole->up->weight.grad(), 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(full_tensor(model->down->bias.grad()), whole->down->bias.grad(), 1e-5, 1e-6));
  });
}

// The same with three dims, where torch::nn::Linear adds the bias itself, for all placements of inputs and
// outputs.
TEST(ModuleBoundary, PlainInputsOfThreeDims) {
  struct Layout {
    ColwiseOptions up;
    RowwiseOptions down;
    bool split_input, split_output;
  };
  const std::vector<Layout> layouts{
      {{}, {}, false, false},
      {{.input = Shard{1}}, {.output = Shard{1}}, true, true},
      {{.output = Replicate{}}, {.input = Replicate{}}, false, false},
      {{.input = Shard{1}, .output = Shard{1}}, {.input = Shard{1}, .output = Shard{1}}, true, true}};
  torch::manual_seed(1);
  Mlp whole;
  const at::Tensor x = at::randn({2, 4, 4});
  at::Tensor input = x.clone().requires_grad_();
  const at::Tensor expected = whole->forward(input);
  expected.square().sum().backward();
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    std::vector<Mlp> models{Mlp(), Mlp()};
    on_two([&](const comm::MeshGroups& mesh) {
      const Layout& layout = layouts[i];
      const std::int64_t rank = mesh.coordinate()[0];
      Mlp model = models[static_cast<std::size_t>(rank)];
      {
        const torch::NoGradGuard no_grad;
        for (const auto& item : whole->named_parameters())
          model->named_parameters()[item.key()].copy_(item.value());
      }
      parallelize_module(*model, mesh,
                         {{"up", colwise_parallel(layout.up)}, {"down", rowwise_parallel(layout.down)}});
      const auto part = [&](const at::Tensor& t, bool split) { return split ? t.narrow(1, 2 * rank, 2) : t; };
      at::Tensor mine = part(x, layout.split_input).clone().requires_grad_();
      const at::Tensor y = model->forward(mine);
      EXPECT_FALSE(is_dtensor(y)) << i;
      EXPECT_TRUE(at::allclose(y, part(expected, layout.split_output), 1e-5, 1e-6)) << i;
      y.square().sum().backward();
      EXPECT_TRUE(at::allclose(mine.grad(), part(input.grad(), layout.split_input), 1e-5, 1e-6)) << i;
      for (const auto& item : whole->named_parameters())
        EXPECT_TRUE(at::allclose(full_tensor(model->named_parameters()[item.key()].grad()),
                                 item.value().grad(), 1e-5, 1e-6))
            << i << " " << item.key();
    });
  }
}

// Query, key and value take one gathered input, and its gradient is scattered once.
TEST(ModuleBoundary, OneGatherServesAll) {
  on_two([](const comm::MeshGroups& mesh) {
    nn::Linear q(4, 4), k(4, 4), v(4, 4);
    for (nn::Linear layer : {q, k, v}) parallelize_module(*layer, mesh, {{"", colwise_parallel()}});
    at::Tensor x = distribute_tensor(at::ones({2, 4, 4}), mesh, {Shard{1}}).requires_grad_();
    auto totals = totals_of(mesh, [&] {
      const at::Tensor y = q(x) + k(x) + v(x);
      EXPECT_EQ(placements_of(y), (Placements{Shard{2}}));
      y.sum().backward();
      EXPECT_EQ(placements_of(x.grad()), (Placements{Shard{1}}));
    });
    std::uint64_t gathers = 0, scatters = 0;
    for (const auto& [name, total] : totals) {
      if (name.starts_with("all_gather")) gathers += total.operations;
      if (name.starts_with("reduce_scatter")) scatters += total.operations;
    }
    EXPECT_EQ(gathers, 2u);
    EXPECT_EQ(scatters, 2u);
  });
}

// The loss of logits that are split over classes sends a few numbers per row, never the logits.
TEST(LossParallel, SendsNoLogits) {
  on_two([](const comm::MeshGroups& mesh) {
    const at::Tensor logits = test::sample({6, 1000}), targets = test::sample_index({6}, 1000);
    at::Tensor whole = logits.clone().requires_grad_();
    const at::Tensor expected = nn::functional::cross_entropy(whole, targets);
    expected.backward();
    at::Tensor x = distribute_tensor(logits, mesh, {Shard{1}}).requires_grad_();
    const at::Tensor t = distribute_tensor(targets, mesh, {Replicate{}});
    const auto totals = totals_of(mesh, [&] {
      const at::Tensor loss = nn::functional::cross_entropy(x, t);
      EXPECT_NEAR(full_tensor(loss.detach()).item<double>(), expected.item<double>(), 1e-5);
      loss.backward();
    });
    for (const auto& [name, total] : totals) EXPECT_LT(total.bytes, 2000u) << name;
    EXPECT_EQ(placements_of(x.grad()), (Placements{Shard{1}}));
    EXPECT_TRUE(at::allclose(full_tensor(x.grad()), whole.grad(), 1e-5, 1e-7));
  });
}

// The boundary's axis is a position in its own mesh, which another mesh may not have.
TEST(ParallelizeModule, InputsOnAnotherMeshAreRefused) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world.rank(), 4));
    const comm::MeshGroups other(world, DeviceMesh("cpu", {2, 2}, {0, 2, 1, 3}, {"dp", "tp"}, world.rank()));
    Mlp model;
    parallelize_module(*model, mesh, {{"up", colwise_parallel()}, {"down", rowwise_parallel()}},
                       {.axis = "tp"});
    const at::Tensor x = at::ones({4, model->up->weight.size(1)}, model->up->weight.scalar_type());
    for (const comm::MeshGroups& wrong : {other, mesh.with_mesh(mesh.mesh()["tp"])}) {
      const at::Tensor input =
          distribute_tensor(x, wrong, Placements(wrong.shape().size()), {.source_axis_rank = std::nullopt});
      EXPECT_TRUE(
          has_text(message_of<ValueError>([&] { model->up(input); }), "the input of a parallelized module"));
      EXPECT_TRUE(
          has_text(message_of<ValueError>([&] { prepare_layout(input, mesh, Replicate{}, Shard{0}, "tp"); }),
                   "prepare_layout"));
    }
  });
}

TEST(ParallelizeModule, SaysWhatIsWrong) {
  on_two([](const comm::MeshGroups& mesh) {
    Mlp model;
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           parallelize_module(*model, mesh, {{"upp", colwise_parallel()}});
                         }),
                         "'upp', which matches no module"));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           parallelize_module(*model, mesh, {{"upp", colwise_parallel()}});
                         }),
                         "up, down"));
    EXPECT_TRUE(has_text(message_of<TypeError>([&] {
                           parallelize_module(*model, mesh, {{"", rowwise_parallel()}});
                         }),
                         "torch::nn::Linear"));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           parallelize_module(*model, mesh, {{"up", colwise_parallel()}}, {.axis = "dp"});
                         }),
                         "dp"));
    EXPECT_TRUE(has_text(message_of<TypeError>([&] {
                           parallelize_module(*model, mesh, {{"", prepare_module({})}});
                         }),
                         "prepare_layout"));
    // If a part of a plan is wrong, nothing of it is applied.
    EXPECT_THROW(
        parallelize_module(*model, mesh, {{"up", colwise_parallel()}, {"nowhere", colwise_parallel()}}),
        ValueError);
    EXPECT_FALSE(is_dtensor(model->up->weight));
    distribute_parameter(model->up->weight, mesh, {Shard{0}});
    distribute_parameter(model->up->weight, mesh, {Shard{0}});
    EXPECT_TRUE(
        has_text(message_of<StateError>([&] { distribute_parameter(model->up->weight, mesh, {Shard{1}}); }),
                 "same layout"));
  });
}

// All placements of inputs and outputs around a module that is replicated.
TEST(PrepareModule, LaysOutInputsAndOutputs) {
  struct Layout {
    PrepareOptions options;
    bool split_input, split_output;
  };
  const std::vector<Layout> layouts{
      {{.plain_input = Replicate{}}, false, false},
      {{.plain_input = Shard{1}}, true, true},
      {{.plain_input = Shard{1}, .desired_input = Replicate{}}, true, false},
      {{.plain_input = Shard{1}, .desired_input = Replicate{}, .output = Shard{1}}, true, true},
      {{.plain_input = Replicate{}, .desired_input = Shard{1}, .output = Replicate{}}, false, false}};
  torch::manual_seed(1);
  nn::Linear whole(4, 3);
  const at::Tensor x = at::randn({2, 4, 4});
  at::Tensor input = x.clone().requires_grad_();
  const at::Tensor expected = whole->forward(input);
  expected.square().sum().backward();
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    std::vector<nn::Linear> models{nn::Linear(4, 3), nn::Linear(4, 3)};
    on_two([&](const comm::MeshGroups& mesh) {
      const Layout& layout = layouts[i];
      const std::int64_t rank = mesh.coordinate()[0];
      nn::Linear model = models[static_cast<std::size_t>(rank)];
      {
        const torch::NoGradGuard no_grad;
        model->weight.copy_(whole->weight), model->bias.copy_(whole->bias);
      }
      parallelize_module(*model, mesh, {{"", prepare_module(layout.options)}});
      EXPECT_EQ(placements_of(model->weight), (Placements{Replicate{}}));
      const auto part = [&](const at::Tensor& t, bool split) { return split ? t.narrow(1, 2 * rank, 2) : t; };
      at::Tensor mine = part(x, layout.split_input).clone().requires_grad_();
      const at::Tensor y = model->forward(mine);
      EXPECT_FALSE(is_dtensor(y)) << i;
      EXPECT_TRUE(at::allclose(y, part(expected, layout.split_output), 1e-5, 1e-6)) << i;
      y.square().sum().backward();
      EXPECT_TRUE(at::allclose(mine.grad(), part(input.grad(), layout.split_input), 1e-5, 1e-6)) << i;
      EXPECT_TRUE(at::allclose(full_tensor(model->weight.grad()), whole->weight.grad(), 1e-5, 1e-6)) << i;
      EXPECT_TRUE(at::allclose(full_tensor(model->bias.grad()), whole->bias.grad(), 1e-5, 1e-6)) << i;
    });
  }
}

TEST(PrepareModule, KindsOfOutputs) {
  on_two([](const comm::MeshGroups& mesh) {
    const at::Tensor x = sample({2, 4, 6});
    nn::LayerNorm norm(nn::LayerNormOptions({6}));
    const at::Tensor expected = norm->forward(x).detach();
    parallelize_module(*norm, mesh,
                       {{"", prepare_module({.plain_input = Replicate{},
                                             .desired_input = Shard{1},
                                             .kind = BoundaryOutput::Distributed})}});
    const at::Tensor distributed = norm->forward(x);
    ASSERT_TRUE(is_dtensor(distributed));
    EXPECT_EQ(placements_of(distributed), (Placements{Shard{1}}));
    EXPECT_TRUE(at::allclose(full_tensor(distributed), expected, 1e-5, 1e-6));

    nn::LayerNorm other(nn::LayerNormOptions({6}));
    parallelize_module(*other, mesh,
                       {{"", prepare_module({.desired_input = Shard{0}, .kind = BoundaryOutput::Local})}});
    const at::Tensor local = other->forward(distribute_tensor(x, mesh, {Replicate{}}));
    EXPECT_FALSE(is_dtensor(local));
    EXPECT_TRUE(at::allclose(local, expected.narrow(0, mesh.coordinate()[0], 1), 1e-5, 1e-6));
  });
}

TEST(PrepareModule, SaysWhatIsWrong) {
  on_two([](const comm::MeshGroups& mesh) {
    nn::Linear linear(4, 4);
    parallelize_module(*linear, mesh, {{"", prepare_module({.desired_input = Shard{0}})}});
    const std::string plain = message_of<TypeError>([&] { linear->forward(sample({2, 4})); });
    EXPECT_TRUE(has_text(plain, "the input of a parallelized module"));
    EXPECT_TRUE(has_text(plain, "from_local()"));
    nn::LayerNorm without_weight(nn::LayerNormOptions({4}).elementwise_affine(false));
    EXPECT_TRUE(has_text(message_of<TypeError>([&] {
                           parallelize_module(*without_weight, mesh, {{"", prepare_module({})}});
                         }),
                         "prepare_layout"));
    EXPECT_TRUE(has_text(message_of<TypeError>([&] {
                           parallelize_module(*without_weight, mesh, {{"", sequence_parallel()}});
                         }),
                         "prepare_layout"));
  });
}

TEST(PrepareLayout, AlongOneAxis) {
  on_two([](const comm::MeshGroups& mesh) {
    const at::Tensor value = sample({4, 3});
    // A plain tensor is placed as `from`, and its gradient returns the same way.
    at::Tensor mine = value.narrow(0, 2 * mesh.coordinate()[0], 2).clone().requires_grad_();
    const at::Tensor whole = prepare_layout(mine, mesh, Shard{0}, Replicate{});
    EXPECT_EQ(placements_of(whole), (Placements{Replicate{}}));
    EXPECT_TRUE(at::equal(full_tensor(whole.detach()), value));
    whole.square().sum().backward();
    EXPECT_TRUE(at::equal(mine.grad(), 2 * mine.detach()));
    // A distributed tensor starts from its own placements; dims may be counted from the end.
    const at::Tensor split =
        prepare_layout(distribute_tensor(value, mesh, {Shard{0}}), mesh, Replicate{}, Shard{-1}, "tp");
    EXPECT_EQ(placements_of(split), (Placements{Shard{1}}));
    EXPECT_TRUE(at::equal(full_tensor(split), value));
  });
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world.rank(), 4));
    const at::Tensor value = sample({4, 6});
    const at::Tensor moved = prepare_layout(distribute_tensor(value, mesh, {Shard{0}, Replicate{}}), mesh,
                                            Replicate{}, Shard{1}, "tp");
    EXPECT_EQ(placements_of(moved), (Placements{Shard{0}, Shard{1}}));
    EXPECT_TRUE(at::equal(full_tensor(moved), value));
    EXPECT_TRUE(
        has_text(message_of<ValueError>([&] { prepare_layout(moved, mesh, Replicate{}, Replicate{}); }),
                 "the name of an axis"));
    EXPECT_TRUE(has_text(
        message_of<ValueError>([&] { prepare_layout(moved, mesh, Replicate{}, Replicate{}, "pp"); }), "pp"));
    EXPECT_TRUE(
        has_text(message_of<TypeError>([&] { prepare_layout(value, mesh, Replicate{}, Shard{0}, "tp"); }),
                 "from_local()"));
    EXPECT_THROW(prepare_layout(moved, mesh, Replicate{}, Shard{2}, "tp"), ValueError);
  });
}

TEST(SetBoundary, AnAxisOfTheParametersMesh) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world.rank(), 4));
    const comm::MeshGroups line(world, init_device_mesh("cpu", {4}, {"tp"}, world.rank(), 4));
    const at::Tensor parameter = distribute_tensor(sample({4, 4}), mesh, {Replicate{}, Shard{0}});
    const auto refuse = [&](const comm::MeshGroups& other, int axis) {
      return message_of<ValueError>([&] { set_boundary(parameter, {.mesh = other, .axis = axis}); });
    };
    EXPECT_TRUE(has_text(refuse(line, 0), "an axis of the parameter's mesh"));
    EXPECT_TRUE(has_text(refuse(line, 0), "dp"));
    EXPECT_TRUE(has_text(refuse(mesh, 2), "axis 2"));
    EXPECT_TRUE(has_text(refuse(mesh, -1), "axis -1"));
    set_boundary(parameter, {.mesh = mesh, .axis = 1});
    EXPECT_TRUE(has_text(message_of<TypeError>([&] {
                           set_boundary(sample({4, 4}), {.mesh = mesh, .axis = 0});
                         }),
                         "set_boundary"));
  });
}

}  // namespace parallel_style_test
}  // namespace penstock
