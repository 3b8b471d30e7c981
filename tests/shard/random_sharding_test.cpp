// Random meshes, placements, batches and modules: training on shards equals training in one process.
//
// Each case is generated from its seed: a mesh over 2 to 4 ranks (1 to 3 axes, ranks in any order, slices,
// flattened axes), parameters that are plain, tensor parallel on a mesh beside the data-parallel one, or
// distributed over one mesh with it, a batch with any placements, layers of uneven sizes with derived weights
// (W + B A, gains), recomputation inside backward, accumulation, gradients set to none or zeroed. Numbers are
// float64: 1e-9 is far above the rounding of a few hundred terms and far below the effect of any wrong
// factor.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/tensor_parallel.h"
#include "penstock/tensor_subclass.h"
#include "tests/has_text.h"
#include "tests/shard/recomputed.h"
#include "tests/throws.h"

namespace penstock {
namespace random_sharding_test {

using namespace std::chrono_literals;
using namespace penstock::test;
namespace nn = torch::nn;

constexpr double kTolerance = 1e-9;
constexpr std::int64_t kRows = 72;  // any number of ranks times any number of microbatches divides it
constexpr int kSteps = 2;

struct LayerShape {
  std::int64_t in, out;
  bool low_rank, gain, unused, frozen_bias, recompute, grouped;
};

enum class Kind { Plain, TwoMeshes, OneMesh };

struct Case {
  std::uint64_t seed;
  int ranks;
  Kind kind;
  std::vector<std::int64_t> mesh_shape;
  std::vector<int> order;                       // of the ranks in the mesh
  std::vector<int> shard_axes, replicate_axes;  // of the mesh
  bool flatten = false, replicating = false, whole_batch = false, with_hooks = false;
  // OneMesh: of the mesh passed to fully_shard, if different.
  std::vector<int> other_order;
  std::vector<LayerShape> layers;
  std::vector<Placement> batch;  // OneMesh: one per axis
  // For everything with many possible values: placements and dims of parameters.
  std::vector<std::int64_t> choices;
  std::optional<ReshardAfterForward> reshard;
  int microbatches = 1;
  bool sync_each = true, all_reduce_each = true, zeroed = false, prefetch = true, inference = false;
};

std::vector<std::string> axis_names(std::size_t axes) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < axes; ++i) names.push_back(fmt::format("m{}", i));
  return names;
}

std::string text_of(const Case& c) {
  std::vector<std::string> layers;
  for (const LayerShape& l : c.layers)
    layers.push_back(fmt::format("{}x{}{}{}{}{}{}{}", l.out, l.in, l.low_rank ? " low-rank" : "",
                                 l.gain ? " gain" : "", l.unused ? " unused" : "",
                                 l.frozen_bias ? " frozen" : "", l.recompute ? " recomputed" : "",
                                 l.grouped ? " group" : ""));
  const std::string reshard = !c.reshard ? "default"
                              : std::holds_alternative<bool>(*c.reshard)
                                  ? (std::get<bool>(*c.reshard) ? "true" : "false")
                                  : "to 2";
  return fmt::format(
      "seed {}: {} ranks, {} on ({}) of [{}], shard axes [{}], replicate axes [{}]{}{}{}{}, other mesh [{}], "
      "batch {}, layers [{}], reshard {}, {} microbatches{}{}, gradients {}{}",
      c.seed, c.ranks,
      c.kind == Kind::Plain       ? "plain"
      : c.kind == Kind::TwoMeshes ? "two meshes"
                                  : "one mesh",
      fmt::join(c.mesh_shape, ", "), fmt::join(c.order, ", "), fmt::join(c.shard_axes, ", "),
      fmt::join(c.replicate_axes, ", "), c.flatten ? ", flattened" : "", c.replicating ? ", replicate()" : "",
      c.whole_batch ? ", whole batch" : "", c.with_hooks ? ", distribute_parameter" : "",
      fmt::join(c.other_order, ", "), to_string(c.batch), fmt::join(layers, "; "), reshard, c.microbatches,
      c.sync_each ? "" : ", reduced once", c.all_reduce_each ? "" : ", all-reduced once",
      c.zeroed ? "zeroed" : "set to none", c.inference ? ", inference mode" : "");
}

Case draw(std::uint64_t seed, int ranks) {
  std::mt19937_64 random(seed);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  const auto chance = [&](int percent) { return below(100) < percent; };
  Case c{.seed = seed, .ranks = ranks, .kind = static_cast<Kind>(below(3))};
  std::vector<std::vector<std::int64_t>> shapes{{ranks}, {1, ranks}, {ranks, 1}, {1, ranks, 1}};
  if (ranks == 4) shapes.insert(shapes.end(), {{2, 2}, {2, 2}, {2, 2}, {2, 2, 1}, {1, 2, 2}, {2, 1, 2}});
  c.mesh_shape = shapes[static_cast<std::size_t>(below(static_cast<std::int64_t>(shapes.size())))];
  const auto axes = static_cast<int>(c.mesh_shape.size());
  c.order.resize(static_cast<std::size_t>(ranks));
  std::iota(c.order.begin(), c.order.end(), 0);
  if (chance(60)) std::shuffle(c.order.begin(), c.order.end(), random);
  // The purpose of each axis. Without data-parallel axes there is nothing to test.
  for (int axis = 0; axis < axes; ++axis) {
    const std::int64_t use = below(c.kind == Kind::Plain ? 2 : 3);
    if (use == 0) c.replicate_axes.push_back(axis);
    if (use == 1) c.shard_axes.push_back(axis);
  }
  if (c.shard_axes.empty()) {
    c.shard_axes.push_back(static_cast<int>(below(axes)));
    std::erase(c.replicate_axes, c.shard_axes[0]);
  }
  if (c.kind == Kind::TwoMeshes && static_cast<int>(c.shard_axes.size() + c.replicate_axes.size()) == axes)
    c.kind = Kind::OneMesh;
  c.flatten = c.kind == Kind::Plain && chance(25);
  c.replicating = c.kind == Kind::Plain && chance(15);
  c.whole_batch = c.kind != Kind::OneMesh && chance(20);
  c.with_hooks = chance(30);
  if (c.kind == Kind::OneMesh && chance(25)) {
    c.other_order = c.order;
    std::shuffle(c.other_order.begin(), c.other_order.end(), random);
  }
  for (int axis = 0; axis < axes; ++axis)
    c.batch.push_back(chance(50) ? Placement(Shard{0}) : Placement(Replicate{}));
  // Several shard axes must divide evenly or not shard at all.
  const bool even = !c.flatten && c.shard_axes.size() > 1;
  const auto size = [&] { return even ? 12 * (1 + below(2)) : 1 + below(7); };
  const std::int64_t layers = 1 + below(3);
  std::int64_t in = size();
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::int64_t out = size();
    c.layers.push_back({in, out, chance(30), chance(30), chance(15), chance(15), chance(30), chance(60)});
    in = out;
  }
  for (int i = 0; i < 32; ++i) c.choices.push_back(below(1000));
  int shard_ranks = 1;
  for (const int axis : c.shard_axes)
    shard_ranks *= static_cast<int>(c.mesh_shape[static_cast<std::size_t>(axis)]);
  if (chance(60)) c.reshard = ReshardAfterForward(chance(50));
  if (shard_ranks == 4 && chance(40)) c.reshard = ReshardTo{2};
  c.microbatches = static_cast<int>(1 + below(3));
  c.sync_each = chance(60);
  c.all_reduce_each = chance(70);
  c.zeroed = chance(50);
  c.prefetch = chance(70);
  c.inference = chance(30);
  return c;
}

// ---- the module ----

struct LayerImpl : nn::Module {
  LayerImpl(const LayerShape& shape, std::uint64_t seed) : shape(shape) {
    at::Generator generator = at::detail::createCPUGenerator(seed);
    const auto parameter = [&](const char* name, std::vector<std::int64_t> sizes) {
      return register_parameter(name, at::randn(sizes, generator, at::TensorOptions(at::kDouble)) * 0.6);
    };
    weight = parameter("weight", {shape.out, shape.in});
    bias = parameter("bias", {shape.out});
    if (shape.frozen_bias) bias.set_requires_grad(false);
    if (shape.low_rank) a = parameter("a", {12, shape.in}), b = parameter("b", {shape.out, 12});
    if (shape.gain) gain = parameter("gain", {shape.out});
    if (shape.unused) parameter("unused", {12, 12});
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor w = weight;
    if (shape.low_rank) w = w + b.mm(a) * 0.5;
    if (shape.gain) w = gain.unsqueeze(1) * w;
    return at::tanh(at::linear(x, w, bias));
  }
  LayerShape shape;
  at::Tensor weight, bias, a, b, gain;
};
TORCH_MODULE(Layer);

struct StackImpl : nn::Module {
  explicit StackImpl(const Case& c) {
    for (std::size_t i = 0; i < c.layers.size(); ++i)
      layers.push_back(register_module(fmt::format("layer{}", i), Layer(c.layers[i], 100 * c.seed + i)));
    scale = register_parameter("scale",
                               at::randn({c.layers.back().out}, at::detail::createCPUGenerator(c.seed + 7),
                                         at::TensorOptions(at::kDouble)));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = x;
    for (Layer& layer : layers)
      h = layer->shape.recompute && at::GradMode::is_enabled()
              ? recomputed(h, [layer](const at::Tensor& t) mutable { return layer(t); })
              : layer(h);
    return h * scale;
  }
  std::vector<Layer> layers;
  at::Tensor scale;
};
TORCH_MODULE(Stack);

at::Tensor batch_of(const Case& c, int step) {
  return at::randn({kRows, c.layers[0].in},
                   at::detail::createCPUGenerator(c.seed * 31 + static_cast<std::uint64_t>(step)),
                   at::TensorOptions(at::kDouble));
}

// ---- a training run, distributed or not ----

struct Outcome {
  std::vector<double> losses;
  std::vector<std::map<std::string, at::Tensor>> gradients;  // of every step; only existing ones
  std::map<std::string, at::Tensor> parameters;
  at::Tensor evaluated;
};

at::Tensor whole(const at::Tensor& tensor) {
  return (is_dtensor(tensor) ? full_tensor(tensor.detach()) : tensor.detach()).clone();
}

struct Way {
  std::function<at::Tensor(const at::Tensor& rows)> place = [](const at::Tensor& rows) { return rows; };
  std::function<double(const at::Tensor& loss)> value = [](const at::Tensor& loss) {
    return loss.item<double>();
  };
  std::function<void(int micro)> before_micro = [](int) {};
};

Outcome train(Stack& model, const Case& c, const Way& way) {
  Outcome outcome;
  const auto parameters = model->named_parameters();
  for (int step = 0; step < kSteps; ++step) {
    double loss_sum = 0;
    for (int micro = 0; micro < c.microbatches; ++micro) {
      way.before_micro(micro);
      // A recomputed layer needs an input that requires gradients.
      const at::Tensor x = way.place(batch_of(c, step).chunk(c.microbatches)[static_cast<std::size_t>(micro)])
                               .set_requires_grad(true);
      const at::Tensor loss = model(x).pow(2).mean() / c.microbatches;
      loss.backward();
      loss_sum += way.value(loss.detach());
    }
    outcome.losses.push_back(loss_sum);
    const at::NoGradGuard no_grad;
    ensure_sharded(model->parameters());
    outcome.gradients.emplace_back();
    for (const auto& item : parameters) {
      const at::Tensor& parameter = item.value();
      if (!parameter.grad().defined()) continue;
      outcome.gradients.back()[item.key()] = whole(parameter.grad());
      at::Tensor(parameter).add_(parameter.grad(), -0.3);
      if (c.zeroed)
        parameter.grad().zero_();
      else
        parameter.mutable_grad().reset();
    }
  }
  {
    const at::NoGradGuard no_grad;
    std::optional<c10::InferenceMode> inference;
    if (c.inference) inference.emplace();
    outcome.evaluated = whole(model(way.place(batch_of(c, 99))));
  }
  ensure_sharded(model->parameters());
  for (const auto& item : parameters) outcome.parameters[item.key()] = whole(item.value());
  return outcome;
}

void expect_near(const at::Tensor& ours, const at::Tensor& theirs, const std::string& what) {
  ASSERT_EQ(ours.sizes(), theirs.sizes()) << what;
  EXPECT_LT(theirs.numel() == 0 ? 0 : (ours - theirs).abs().max().item<double>(), kTolerance) << what;
}

void compare(const Outcome& ours, const Outcome& theirs) {
  for (int step = 0; step < kSteps; ++step) {
    const auto at = static_cast<std::size_t>(step);
    EXPECT_NEAR(ours.losses[at], theirs.losses[at], kTolerance) << "loss of step " << step;
    ASSERT_EQ(ours.gradients[at].size(), theirs.gradients[at].size()) << "gradients of step " << step;
    for (const auto& [name, gradient] : theirs.gradients[at]) {
      ASSERT_TRUE(ours.gradients[at].contains(name)) << name;
      expect_near(ours.gradients[at].at(name), gradient, fmt::format("gradient of {}, step {}", name, step));
    }
  }
  for (const auto& [name, value] : theirs.parameters) expect_near(ours.parameters.at(name), value, name);
}

// ---- the distributed side ----

// The number of data-parallel ranks, and which of them this rank is, computed from the case alone.
std::pair<int, int> place_in_batch(const Case& c, const DeviceMesh& mesh) {
  const std::vector<std::int64_t> coordinate = *mesh.coordinate();
  int index = 0, count = 1;
  for (int axis = 0; axis < mesh.ndim(); ++axis) {
    const auto in = [&](const std::vector<int>& axes) {
      return std::find(axes.begin(), axes.end(), axis) != axes.end();
    };
    if (!in(c.shard_axes) && !in(c.replicate_axes)) continue;
    const auto size = static_cast<int>(mesh.size(axis));
    index = index * size + static_cast<int>(coordinate[static_cast<std::size_t>(axis)]);
    count *= size;
  }
  return {index, count};
}

// The coordinate of a rank in a mesh of these ranks.
std::vector<std::int64_t> coordinate_in(const std::vector<int>& order, const std::vector<std::int64_t>& shape,
                                        int rank) {
  std::int64_t index = std::find(order.begin(), order.end(), rank) - order.begin();
  std::vector<std::int64_t> coordinate(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    coordinate[axis] = index % shape[axis];
    index /= shape[axis];
  }
  return coordinate;
}

// Whether both meshes join the same ranks in the same order along the data-parallel axes.
bool meshes_agree(const Case& c) {
  for (const std::vector<int>* axes : {&c.shard_axes, &c.replicate_axes})
    for (const int axis : *axes)
      for (int a = 0; a < c.ranks; ++a)
        for (int b = 0; b < c.ranks; ++b) {
          const auto joined = [&](const std::vector<int>& order) -> std::pair<bool, std::int64_t> {
            auto first = coordinate_in(order, c.mesh_shape, a),
                 second = coordinate_in(order, c.mesh_shape, b);
            const std::int64_t step =
                second[static_cast<std::size_t>(axis)] - first[static_cast<std::size_t>(axis)];
            second[static_cast<std::size_t>(axis)] = first[static_cast<std::size_t>(axis)];
            return {first == second, first == second ? step : 0};
          };
          if (joined(c.order) != joined(c.other_order)) return false;
        }
  return true;
}

void run_case(comm::World& world, const Case& c, const Outcome& expected) {
  const std::vector<std::string> names = axis_names(c.mesh_shape.size());
  const auto named = [&](const std::vector<int>& axes) {
    std::vector<std::string> chosen;
    for (const int axis : axes) chosen.push_back(names[static_cast<std::size_t>(axis)]);
    return chosen;
  };
  const comm::MeshGroups mesh(world, DeviceMesh("cpu", c.mesh_shape, c.order, names, world.rank()));
  std::vector<int> data_axes = c.shard_axes;
  data_axes.insert(data_axes.end(), c.replicate_axes.begin(), c.replicate_axes.end());
  std::sort(data_axes.begin(), data_axes.end());

  Stack model(c);
  std::size_t next_choice = 0;
  const auto choose = [&](std::int64_t n) { return c.choices[next_choice++ % c.choices.size()] % n; };
  // Parameters that are distributed before they are sharded.
  const auto distribute = [&](const comm::MeshGroups& on, const std::function<bool(std::size_t)>& is_data) {
    for (const auto& module : model->modules())
      for (auto& item : module->named_parameters(/*recurse=*/false)) {
        Placements placements(on.shape().size());
        for (std::size_t axis = 0; axis < placements.size(); ++axis)
          if (const std::int64_t choice = choose(item.value().dim() + 1); choice > 0 && !is_data(axis))
            placements[axis] = Shard{choice - 1};
        if (c.with_hooks) {
          distribute_parameter(item.value(), on, placements);
          continue;
        }
        // A leaf without the hook that makes its gradient whole: gradients keep the placements that operators
        // produce.
        const at::Tensor value =
            distribute_tensor(item.value().detach(), on, placements, {.source_axis_rank = std::nullopt});
        const bool requires_grad = item.value().requires_grad();
        item.value().set_requires_grad(false);
        replace_data(item.value(), value);
        item.value().set_requires_grad(requires_grad);
      }
  };

  Way way;
  const auto [index, count] = place_in_batch(c, mesh.mesh());
  const auto own_rows = [&c, index = index, count = count](const at::Tensor& rows) {
    return c.whole_batch ? rows : rows.chunk(count)[static_cast<std::size_t>(index)];
  };
  way.place = own_rows;
  way.value = [&world](const at::Tensor& loss) {
    at::Tensor mine = whole(loss).reshape({1});
    world.group().all_reduce(mine, comm::ReduceOp::Avg).wait();
    return mine.item<double>();
  };
  ShardOptions options{.reshard_after_forward = c.reshard};
  options.shard_placement = [&c](const std::string& name, const at::Tensor& p) -> std::optional<Shard> {
    const std::int64_t choice = c.choices[name.size() % c.choices.size()];
    return choice % 3 == 0 ? std::nullopt : std::optional<Shard>(Shard{choice % p.dim()});
  };
  comm::MeshGroups data = mesh;
  if (c.kind == Kind::Plain) {
    if (c.flatten) {
      data = mesh.with_mesh(mesh.mesh().flatten({}, "flat"));
    } else {
      options.shard_axes = named(c.shard_axes);
      options.replicate_axes = named(c.replicate_axes);
    }
  } else if (c.kind == Kind::TwoMeshes) {
    std::vector<std::string> own, rest;
    for (std::size_t axis = 0; axis < names.size(); ++axis)
      (std::find(data_axes.begin(), data_axes.end(), static_cast<int>(axis)) == data_axes.end() ? own : rest)
          .push_back(names[axis]);
    const comm::MeshGroups tensor_mesh = mesh.with_mesh(mesh.mesh().slice(own));
    data = mesh.with_mesh(mesh.mesh().slice(rest));
    options.shard_axes = named(c.shard_axes);
    options.replicate_axes = named(c.replicate_axes);
    distribute(tensor_mesh, [](std::size_t) { return false; });
    way.place = [own_rows, tensor_mesh](const at::Tensor& rows) {
      return distribute_tensor(own_rows(rows), tensor_mesh, Placements(tensor_mesh.shape().size()),
                               {.source_axis_rank = std::nullopt});
    };
  } else {
    options.shard_axes = named(c.shard_axes);
    options.replicate_axes = named(c.replicate_axes);
    distribute(mesh, [&](std::size_t axis) {
      return std::find(data_axes.begin(), data_axes.end(), static_cast<int>(axis)) != data_axes.end();
    });
    way.place = [&c, mesh](const at::Tensor& rows) {
      return distribute_tensor(rows, mesh, c.batch, {.source_axis_rank = std::nullopt});
    };
    if (!c.other_order.empty())
      data = comm::MeshGroups(world, DeviceMesh("cpu", c.mesh_shape, c.other_order, names, world.rank()));
  }

  const auto shard = [&](nn::Module& module) {
    if (c.replicating)
      replicate(module, data, {.reshard_after_forward = c.reshard});
    else
      fully_shard(module, data, options);
  };
  if (c.kind == Kind::OneMesh && !c.other_order.empty() && !meshes_agree(c)) {
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { shard(*model); }), "of the mesh of parameter"));
    return;
  }
  if (c.replicating && c.reshard && std::holds_alternative<ReshardTo>(*c.reshard)) return;
  for (Layer& layer : model->layers)
    if (layer->shape.grouped) shard(*layer);
  shard(*model);
  ShardState& root = *shard_state_of(*model);
  root.set_automatic_prefetch(c.prefetch);
  way.before_micro = [&](int micro) {
    const bool last = micro + 1 == c.microbatches;
    root.set_requires_gradient_sync(c.sync_each || last);
    root.set_requires_all_reduce(c.all_reduce_each || last);
    root.set_is_last_backward(last || c.all_reduce_each);
  };
  const Outcome ours = train(model, c, way);
  compare(ours, expected);
  const at::Tensor expected_rows =
      c.kind == Kind::OneMesh ? expected.evaluated : own_rows(expected.evaluated);
  expect_near(ours.evaluated, expected_rows, "evaluation without gradients");
}

int cases_of(int ranks) {
  const char* times = std::getenv("PENSTOCK_RANDOM_CASES");
  return (ranks == 4 ? 100 : 40) * (times ? std::stoi(times) : 1);
}

void check_worlds(int ranks) {
  std::vector<Case> cases;
  std::vector<Outcome> expected;
  for (int i = 0; i < cases_of(ranks); ++i) {
    cases.push_back(draw(static_cast<std::uint64_t>(1000 * ranks + i), ranks));
    Stack model(cases.back());
    expected.push_back(train(model, cases.back(), {}));
  }
  std::atomic<bool> failed = false;
  comm::run_ranks(ranks, 1200s, [&](comm::World& world) {
    for (std::size_t i = 0; i < cases.size() && !failed; ++i) {
      SCOPED_TRACE(text_of(cases[i]));
      try {
        run_case(world, cases[i], expected[i]);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
        throw;
      }
      world.group().barrier().wait();
      if (testing::Test::HasFailure()) failed = true;
      world.group().barrier().wait();
    }
  });
}

TEST(RandomSharding, OnTwoRanksIsTrainingInOneProcess) { check_worlds(2); }
TEST(RandomSharding, OnThreeRanksIsTrainingInOneProcess) { check_worlds(3); }
TEST(RandomSharding, OnFourRanksIsTrainingInOneProcess) { check_worlds(4); }

}  // namespace random_sharding_test
}  // namespace penstock
