// Reference data of the section `fsdp`: layouts exactly, training trajectories within rounding.
//
// Where PyTorch 2.14 throws (dims other than 0 that do not divide, uneven strided shards), the layout here
// must be the documented one, and gathering must return the whole tensor.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/gradients.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/shard/state/shard_info.h"
#include "penstock/shard/state/shard_state.h"
#include "penstock/tensor_parallel.h"
#include "tests/golden_data.h"

namespace penstock {
namespace golden_fsdp_test {

using namespace std::chrono_literals;
using nlohmann::json;
using Numbers = std::vector<std::int64_t>;

at::Tensor tensor_of(const json& part) {
  return at::tensor(part.at("values").get<std::vector<float>>(), at::kFloat)
      .view(part.at("shape").get<Numbers>());
}

at::Tensor counted(const Numbers& shape) {
  return at::arange(c10::multiply_integers(shape), at::kFloat).view(shape);
}

std::filesystem::path section() {
  const json top = test::read_json(test::golden_folder() / "index.json");
  return (test::golden_folder() / top.at("sections").at("fsdp").get<std::string>()).parent_path();
}

std::vector<json> cases_of(const std::string& kind) {
  std::vector<json> cases;
  const json index = test::golden_index("fsdp");
  std::map<std::string, json> files;
  for (const json& entry : index.at("cases")) {
    if (entry.at("kind") != kind) continue;
    const auto file = entry.at("file").get<std::string>();
    if (!files.contains(file)) files[file] = test::read_json(section() / file);
    const json& content = files[file];
    if (!content.contains("cases")) {
      cases.push_back(content);
      continue;
    }
    for (const json& item : content.at("cases"))
      if (item.at("id") == entry.at("id")) cases.push_back(item);
  }
  return cases;
}

struct One : torch::nn::Module {
  explicit One(const at::Tensor& value) { parameter = register_parameter("p", value); }
  at::Tensor parameter;
};

// The shape of nested lists of ranks, and the ranks in order.
struct Grid {
  explicit Grid(const json& mesh) {
    for (const json* level = &mesh; level->is_array(); level = &level->at(0))
      shape.push_back(static_cast<std::int64_t>(level->size()));
    add(mesh);
  }
  void add(const json& part) {
    if (!part.is_array()) return ranks.push_back(part.get<int>());
    for (const json& inner : part) add(inner);
  }
  Numbers shape;
  std::vector<int> ranks;
};

int world_of(const json& item) {
  return item.contains("world") ? item.at("world").get<int>()
                                : static_cast<int>(Grid(item.at("mesh")).ranks.size());
}

comm::MeshGroups mesh_of_case(comm::World& world, const json& item) {
  if (item.contains("mesh")) {
    const Grid grid(item.at("mesh"));
    return {world, DeviceMesh("cpu", grid.shape, grid.ranks,
                              item.value("mesh_dims", std::vector<std::string>{"dp", "tp"}), world.rank())};
  }
  return {world, init_device_mesh("cpu", {world.size()}, {"dp"}, world.rank(), world.size())};
}

void expect_layout(const ShardInfo& info, const json& expected, const at::Tensor& sharded) {
  const ShardedParameter& p = info.parameter();
  const int rank = info.group->mesh().shard_rank();
  EXPECT_EQ(p.layout().piece_shape(rank), expected.at("sharded_size").get<Numbers>());
  EXPECT_EQ(p.layout().padded_shape(), expected.at("padded_sharded_size").get<Numbers>());
  Placements placements;
  for (const json& text : expected.at("placements"))
    placements.push_back(parse_placement(text.get<std::string>()));
  EXPECT_EQ(placements_of(sharded), placements);
  EXPECT_EQ(sharded.sizes().vec(), expected.at("global_shape").get<Numbers>());
  EXPECT_EQ(sharded.strides().vec(), expected.at("global_stride").get<Numbers>());
  const at::Tensor local = to_local(sharded.detach());
  EXPECT_EQ(local.sizes().vec(), expected.at("local_shape").get<Numbers>());
  if (local.numel() > 0) {
    EXPECT_EQ(local.strides().vec(), expected.at("local_stride").get<Numbers>());
  }
  EXPECT_TRUE(at::equal(local.reshape({-1}),
                        at::tensor(expected.at("local_values").get<std::vector<float>>(), at::kFloat)));
  EXPECT_TRUE(at::equal(p.padded,
                        at::tensor(expected.at("flat_padded_values").get<std::vector<float>>(), at::kFloat)));
  EXPECT_EQ(mesh_of(sharded).shape(), expected.at("mesh_shape").get<Numbers>());
  EXPECT_EQ(mesh_of(sharded).coordinate(), expected.at("mesh_coord").get<Numbers>());
}

void run_layout(const json& item, int ranks) {
  SCOPED_TRACE(item.at("id").get<std::string>());
  comm::run_ranks(ranks, 60s, [&](comm::World& world) {
    const at::Tensor value = counted(item.at("param_shape").get<Numbers>());
    One module(value.clone());
    Shard shard{0};
    if (item.contains("placement")) shard.dim = std::stoll(item.at("placement").get<std::string>().substr(6));
    const comm::MeshGroups mesh = mesh_of_case(world, item);
    const auto state = fully_shard(
        module, mesh, {.shard_placement = [&](const std::string&, const at::Tensor&) { return shard; }});
    const ShardInfo info = shard_of(module.parameter).value();
    if (!item.contains("error_type")) {
      expect_layout(info, item.at("ranks").at(static_cast<std::size_t>(world.rank())), module.parameter);
    } else {
      const LocalShard mine =
          local_shape_and_offset(value.sizes().vec(), mesh.mesh(), placements_of(module.parameter));
      const at::Tensor local = to_local(module.parameter.detach());
      EXPECT_EQ(local.sizes().vec(), mine.shape);
      at::Tensor part = value;
      for (std::size_t d = 0; d < mine.shape.size(); ++d)
        part = part.narrow(static_cast<std::int64_t>(d),
                           std::min(mine.offset[d], value.size(static_cast<std::int64_t>(d))), mine.shape[d]);
      EXPECT_TRUE(at::equal(local, part));
    }
    EXPECT_TRUE(at::equal(full_tensor(module.parameter.detach()), value));
    state->unshard();
    EXPECT_TRUE(at::equal(module.parameter.detach(), value));
    EXPECT_EQ(module.parameter.strides().vec(), value.strides().vec());
    state->reshard();
    EXPECT_TRUE(at::equal(full_tensor(module.parameter.detach()), value));
  });
}

TEST(GoldenFsdp, Counts) {
  const json top = test::read_json(test::golden_folder() / "index.json");
  std::map<std::string, int> kinds;
  const json index = test::golden_index("fsdp");
  for (const json& item : index.at("cases")) ++kinds[item.at("kind").get<std::string>()];
  EXPECT_EQ(kinds["trajectory"], top.at("counts").at("fsdp").at("trajectories").get<int>());
  int layouts = 0;
  for (const auto& [kind, count] : kinds)
    if (kind != "trajectory") layouts += count;
  EXPECT_EQ(layouts, top.at("counts").at("fsdp").at("layouts").get<int>());
  const std::set<std::string> run{"trajectory",  "shard_layout", "shard_layout_hsdp",
                                  "param_group", "fsdp_tp",      "strided_shard"};
  for (const auto& [kind, count] : kinds)
    EXPECT_TRUE(run.contains(kind)) << kind << ": no test runs this kind";
}

TEST(GoldenFsdp, ShardLayouts) {
  const auto cases = cases_of("shard_layout");
  ASSERT_FALSE(cases.empty());
  for (const json& item : cases) run_layout(item, item.at("world").get<int>());
}

TEST(GoldenFsdp, ShardLayoutsWithReplicas) {
  const auto cases = cases_of("shard_layout_hsdp");
  ASSERT_FALSE(cases.empty());
  for (const json& item : cases) run_layout(item, item.at("world").get<int>());
}

TEST(GoldenFsdp, StridedShards) {
  const auto cases = cases_of("strided_shard");
  ASSERT_FALSE(cases.empty());
  for (const json& item : cases) {
    SCOPED_TRACE(item.at("id").get<std::string>());
    comm::run_ranks(world_of(item), 60s, [&](comm::World& world) {
      const comm::MeshGroups mesh = mesh_of_case(world, item);
      const auto text = item.at("placements").at(0).get<std::string>();
      const Placements placements{StridedShard{0, std::stoll(text.substr(text.rfind('=') + 1))}, Shard{0}};
      const at::Tensor whole = counted(item.at("shape").get<Numbers>());
      const at::Tensor distributed = distribute_tensor(whole, mesh, placements);
      if (item.contains("ranks")) {
        EXPECT_TRUE(at::equal(to_local(distributed),
                              tensor_of(item.at("ranks").at(static_cast<std::size_t>(world.rank())))));
      }
      EXPECT_TRUE(at::equal(full_tensor(distributed), whole));
    });
  }
}

TEST(GoldenFsdp, TensorParallelParameters) {
  const auto cases = cases_of("fsdp_tp");
  ASSERT_FALSE(cases.empty());
  for (const json& item : cases) {
    SCOPED_TRACE(item.at("id").get<std::string>());
    comm::run_ranks(world_of(item), 60s, [&](comm::World& world) {
      const comm::MeshGroups mesh = mesh_of_case(world, item);
      const auto shape = item.at("weight_shape").get<Numbers>();
      torch::nn::Linear linear(shape[1], shape[0]);
      const at::Tensor weight = counted(shape), bias = counted({shape[0]}) * 100;
      {
        const at::NoGradGuard no_grad;
        linear->weight.copy_(weight);
        linear->bias.copy_(bias);
      }
      const comm::MeshGroups tp = mesh.with_mesh(mesh.mesh()["tp"]), dp = mesh.with_mesh(mesh.mesh()["dp"]);
      parallelize_module(*linear, tp,
                         {{"", item.at("tp_style") == "col" ? colwise_parallel() : rowwise_parallel()}});
      const auto at_rank = static_cast<std::size_t>(world.rank());
      const json& before = item.at("after_tp").at(at_rank);
      EXPECT_TRUE(at::equal(to_local(linear->weight.detach()), tensor_of(before.at("weight"))));
      const std::int64_t dim = item.at("fsdp_shard_dim").get<std::int64_t>();
      const auto state =
          fully_shard(*linear, dp, {.shard_placement = [&](const std::string&, const at::Tensor& p) {
            return Shard{p.dim() > dim ? dim : 0};
          }});
      const json& after = item.at("after_fsdp").at(at_rank);
      if (!after.is_null()) {
        for (const std::string name : {"weight", "bias"}) {
          const at::Tensor parameter = linear->named_parameters()[name];
          Placements placements;
          for (const json& text : after.at(name + "_placements"))
            placements.push_back(parse_placement(text.get<std::string>()));
          EXPECT_EQ(placements_of(parameter), placements) << name;
          const at::Tensor expected = tensor_of(after.at(name)), local = to_local(parameter.detach());
          EXPECT_EQ(local.sizes(), expected.sizes()) << name;
          EXPECT_TRUE(at::equal(local, expected)) << name;
          EXPECT_EQ(shard_of(parameter)->parameter().layout().padded_shape(),
                    after.at("padded_sizes").at(name == "weight" ? 0 : 1).get<Numbers>())
              << name;
          EXPECT_EQ(mesh_of(parameter).coordinate(), after.at("coord").get<Numbers>());
        }
      }
      EXPECT_TRUE(at::equal(full_tensor(linear->weight.detach()), weight));
      EXPECT_TRUE(at::equal(full_tensor(linear->bias.detach()), bias));
      state->unshard();
      EXPECT_TRUE(at::equal(to_local(linear->weight.detach()), tensor_of(before.at("weight"))));
      EXPECT_TRUE(at::equal(to_local(linear->bias.detach()), tensor_of(before.at("bias"))));
      state->reshard();
    });
  }
}

// ---- the multilayer perceptron of definition.json ----

struct Perceptron : torch::nn::Module {
  explicit Perceptron(const json& values) {
    l1 = register_module("l1", torch::nn::Linear(6, 5));
    l2 = register_module("l2", torch::nn::Linear(torch::nn::LinearOptions(5, 7).bias(false)));
    l3 = register_module("l3", torch::nn::Linear(7, 3));
    const at::NoGradGuard no_grad;
    for (auto& item : named_parameters()) item.value().copy_(tensor_of(values.at(item.key())));
  }
  at::Tensor forward(const at::Tensor& input) {
    const ForwardScope scope(*this);
    at::Tensor x = scope.input(input);
    // A layer that is sharded separately has its own policy.
    const auto layer = [](torch::nn::Linear& linear, const at::Tensor& value) {
      const ForwardScope inner(*linear);
      return inner.output(linear(inner.input(value)));
    };
    return scope.output(layer(l3, at::gelu(layer(l2, at::tanh(layer(l1, x))))));
  }
  torch::nn::Linear l1{nullptr}, l2{nullptr}, l3{nullptr};
};

TEST(GoldenFsdp, ParameterGroups) {
  const auto cases = cases_of("param_group");
  ASSERT_FALSE(cases.empty());
  const json definition = test::read_json(section() / "definition.json");
  for (const json& item : cases) {
    SCOPED_TRACE(item.at("id").get<std::string>());
    ASSERT_EQ(item.at("model"), "mlp");
    comm::run_ranks(item.at("world").get<int>(), 60s, [&](comm::World& world) {
      Perceptron model(definition.at("initial_params"));
      const auto state = fully_shard(model, mesh_of_case(world, item));
      const json& mine = item.at("ranks").at(static_cast<std::size_t>(world.rank()));
      const auto parameters = model.parameters();
      ASSERT_EQ(mine.size(), parameters.size());
      std::vector<float> sent;
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        expect_layout(shard_of(parameters[i]).value(), mine.at(i), parameters[i]);
        EXPECT_EQ(shard_of(parameters[i])->index, i);
        for (const json& value : mine.at(i).at("flat_padded_values")) sent.push_back(value.get<float>());
      }
      const at::Tensor first = first_group(*state)->parameters().front().padded;
      const at::Tensor flat = first.as_strided({static_cast<std::int64_t>(sent.size())}, {1}, 0);
      EXPECT_TRUE(at::equal(flat, at::tensor(sent, at::kFloat))) << "what a rank sends";
    });
  }
}

std::optional<at::ScalarType> dtype_of(const json& precision, const char* name) {
  if (precision.is_null() || !precision.contains(name) || precision.at(name).is_null()) return std::nullopt;
  const auto text = precision.at(name).get<std::string>();
  if (text == "bf16") return at::kBFloat16;
  if (text == "fp32") return at::kFloat;
  if (text == "fp16") return at::kHalf;
  throw std::runtime_error("a dtype that is not known here: " + text);
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const json& options,
                                                      const std::vector<at::Tensor>& parameters) {
  const std::set<std::string> known{"kind",         "lr",    "momentum", "dampening", "nesterov",
                                    "weight_decay", "betas", "eps",      "amsgrad"};
  for (const auto& [name, value] : options.items())
    if (!known.contains(name))
      throw std::runtime_error("an option of an optimizer that is not known here: " + name);
  const double lr = options.at("lr").get<double>();
  if (options.at("kind") == "SGD")
    return std::make_unique<torch::optim::SGD>(parameters,
                                               torch::optim::SGDOptions(lr)
                                                   .momentum(options.value("momentum", 0.0))
                                                   .dampening(options.value("dampening", 0.0))
                                                   .nesterov(options.value("nesterov", false))
                                                   .weight_decay(options.value("weight_decay", 0.0)));
  if (options.at("kind") == "AdamW") {
    const auto betas = options.at("betas").get<std::vector<double>>();
    return std::make_unique<torch::optim::AdamW>(parameters,
                                                 torch::optim::AdamWOptions(lr)
                                                     .betas({betas[0], betas[1]})
                                                     .eps(options.at("eps").get<double>())
                                                     .weight_decay(options.at("weight_decay").get<double>())
                                                     .amsgrad(options.value("amsgrad", false)));
  }
  throw std::runtime_error("an optimizer that is not known here: " + options.at("kind").get<std::string>());
}

void expect_near(const at::Tensor& ours, const at::Tensor& theirs, double relative, double absolute,
                 const std::string& what) {
  ASSERT_EQ(ours.sizes(), theirs.sizes()) << what;
  if (ours.numel() == 0) return;
  // Relative to the largest: small values result from sums of such numbers.
  const double most = theirs.to(at::kDouble).abs().max().item<double>();
  EXPECT_LE((ours.to(at::kDouble) - theirs.to(at::kDouble)).abs().max().item<double>(),
            relative * most + absolute)
      << what;
}

// "HSDP 2x4 (outer replicate, inner shard)" -> {2, 4}; "FSDP world 3" -> {3}.
Numbers grid_of(const std::string& mode, int ranks) {
  if (!mode.starts_with("HSDP")) return {ranks};
  std::int64_t replicas = 0, shards = 0;
  if (std::sscanf(mode.c_str(), "HSDP %" SCNd64 "x%" SCNd64, &replicas, &shards) != 2 ||
      replicas * shards != ranks)
    throw std::runtime_error(fmt::format("a mesh that is not known here: {} on {} ranks", mode, ranks));
  return {replicas, shards};
}

void run_trajectory(const json& item, const json& definition) {
  SCOPED_TRACE(item.at("id").get<std::string>());
  const int ranks = item.at("world").get<int>();
  const Numbers shape = grid_of(item.at("mode").get<std::string>(), ranks);
  const json precision = item.value("mixed_precision", json());
  const bool low = !precision.is_null();
  // The tolerances of the reference data. In bfloat16, versions of LibTorch round differently inside their
  // kernels; FullyShard.HalfPrecisionAccumulationBitForBit shows that sums and averages here round exactly
  // where they should.
  const double relative = low ? 2e-2 : 1e-5, absolute = low ? 5e-3 : 1e-6;
  const bool layers = item.value("wrap", "root") == "layers";
  const json resharding = item.value("reshard_after_forward", json());
  const std::string sync = item.value("sync", "every microbatch");
  ASSERT_TRUE(sync == "every microbatch" || sync == "only last microbatch") << sync;
  const int microbatches = item.value("microbatches", 1);
  comm::run_ranks(ranks, 60s, [&](comm::World& world) {
    Perceptron model(definition.at("initial_params"));
    const DeviceMesh grid = init_device_mesh(
        "cpu", shape,
        shape.size() == 2 ? std::vector<std::string>{"replicate", "shard"} : std::vector<std::string>{"dp"},
        world.rank(), ranks);
    const comm::MeshGroups mesh(world, grid);
    ShardOptions options;
    options.mixed_precision = {dtype_of(precision, "param_dtype"), dtype_of(precision, "reduce_dtype"),
                               dtype_of(precision, "output_dtype")};
    if (!resharding.is_null()) options.reshard_after_forward = resharding.get<bool>();
    if (layers)
      for (const auto& child : model.children()) fully_shard(*child, mesh, options);
    const auto state = fully_shard(model, mesh, options);
    if (const json factor = item.value("gradient_divide_factor", json()); !factor.is_null())
      state->set_gradient_divide_factor(factor.get<double>());
    const auto optimizer = optimizer_of(item.at("optimizer"), model.parameters());
    for (const json& step : item.at("steps")) {
      const auto at = step.at("step").get<std::size_t>();
      SCOPED_TRACE(fmt::format("{}, step {}, rank {}", item.at("id").get<std::string>(), at, world.rank()));
      const json& batch = definition.at("batches").at(at % definition.at("batches").size());
      const auto share = [&](const char* name) {
        const at::Tensor whole = tensor_of(batch.at(name));
        const std::int64_t first = whole.size(0) * world.rank() / ranks,
                           end = whole.size(0) * (world.rank() + 1) / ranks;
        return whole.narrow(0, first, end - first);
      };
      const at::Tensor x = share("x"), target = share("target");
      Numbers rows = item.value("microbatch_rows", Numbers{});
      if (rows.empty())
        for (const at::Tensor& part : x.chunk(microbatches)) rows.push_back(part.size(0));
      const auto inputs = x.split_with_sizes(rows), targets = target.split_with_sizes(rows);
      optimizer->zero_grad();
      for (int micro = 0; micro < microbatches; ++micro) {
        const bool last = micro + 1 == microbatches;
        state->set_requires_gradient_sync(sync == "every microbatch" || last);
        if (item.value("require_all_reduce_only_last", false)) state->set_requires_all_reduce(last);
        const at::Tensor y = model.forward(inputs[static_cast<std::size_t>(micro)]);
        const at::Tensor loss =
            (y.to(at::kFloat) - targets[static_cast<std::size_t>(micro)]).pow(2).mean() / microbatches;
        const double expected = step.at("rank_micro_losses")
                                    .at(static_cast<std::size_t>(world.rank()))
                                    .at(static_cast<std::size_t>(micro))
                                    .get<double>();
        const double ours = loss.item<double>();
        EXPECT_NEAR(ours, expected, relative * std::abs(expected) + absolute);
        loss.backward();
      }
      for (const auto& parameter : model.named_parameters()) {
        const at::Tensor grad = parameter.value().grad();
        ASSERT_TRUE(grad.defined()) << parameter.key();
        expect_near(full_tensor(grad), tensor_of(step.at("grads_full").at(parameter.key())), relative,
                    absolute, "gradient of " + parameter.key());
        if (step.contains("grads_local_by_rank"))
          expect_near(to_local(grad),
                      tensor_of(step.at("grads_local_by_rank")
                                    .at(static_cast<std::size_t>(world.rank()))
                                    .at(parameter.key())),
                      relative, absolute, "local gradient of " + parameter.key());
      }
      if (const json clip = item.value("clip", json()); !clip.is_null()) {
        std::vector<optim::NamedParameter> named;
        for (const auto& parameter : model.named_parameters())
          named.push_back({parameter.key(), parameter.value()});
        const double norm = optim::clip_grad_norm(named, clip.get<double>()).value();
        EXPECT_NEAR(norm, step.at("total_grad_norm").get<double>(), relative * norm);
      }
      optimizer->step();
      for (const auto& parameter : model.named_parameters())
        expect_near(full_tensor(parameter.value().detach()),
                    tensor_of(step.at("params_full_after").at(parameter.key())), relative, absolute,
                    parameter.key());
    }
  });
}

TEST(GoldenFsdp, Trajectories) {
  const json definition = test::read_json(section() / "definition.json");
  const auto cases = cases_of("trajectory");
  ASSERT_FALSE(cases.empty());
  for (const json& item : cases) run_trajectory(item, definition);
}

}  // namespace golden_fsdp_test
}  // namespace penstock
