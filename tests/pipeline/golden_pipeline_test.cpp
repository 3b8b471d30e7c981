// Training through every schedule against reference data of PyTorch 2.14 and against one process: losses,
// gradients, parameters, outputs, evaluation. Cases that PyTorch 2.14 rejects and Penstock runs (uneven
// microbatches, evaluation in V schedules) are compared with one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>

#include "penstock/dtensor.h"
#include "penstock/fully_shard.h"
#include "penstock/pipeline.h"
#include "penstock/shard/state/shard_info.h"
#include "tests/golden_data.h"

namespace penstock {
namespace golden_pipeline_test {

using nlohmann::json;
using namespace std::chrono_literals;

at::Tensor tensor_of(const json& item) {
  const auto shape = item.at("shape").get<std::vector<std::int64_t>>();
  if (item.at("dtype") == "int64")
    return at::tensor(item.at("values").get<std::vector<std::int64_t>>(), at::kLong).view(shape);
  return at::tensor(item.at("values").get<std::vector<float>>(), at::kFloat).view(shape);
}

struct Case {
  std::string schedule, feature, loss;
  bool scale_grads = false;
  int microbatches = 0, rows = 0, blocks = 0, stages = 0, world = 0, stages_per_rank = 0;
  double lr = 0;

  explicit Case(const json& item)
      : schedule(item.at("schedule")),
        feature(item.at("feature")),
        loss(item.at("loss")),
        scale_grads(item.at("scale_grads")),
        microbatches(item.at("n_microbatches")),
        rows(item.at("rows")),
        blocks(item.at("nblocks")),
        world(item.at("world")),
        stages_per_rank(item.at("stages_per_rank")),
        lr(item.at("lr")) {
    stages = world * stages_per_rank;
  }
};

// Consecutive blocks of the model, as defined by the reference data.
struct PartImpl : torch::nn::Module {
  PartImpl(const json& definition, const Case& config, int first_block, int block_count)
      : feature(config.feature), first(first_block), count(block_count), total(config.blocks) {
    for (int i = first; i < first + count; ++i) {
      const std::string name = "blk" + std::to_string(i);
      weights.push_back(
          register_parameter(name + "_weight", tensor_of(definition.at("params").at(name + ".weight"))));
      biases.push_back(
          register_parameter(name + "_bias", tensor_of(definition.at("params").at(name + ".bias"))));
    }
  }

  static at::Tensor activation(int block, const at::Tensor& x) {
    return block % 2 == 0 ? torch::tanh(x) : torch::gelu(x);
  }
  bool is_first() const { return first == 0; }
  bool is_last() const { return first + count == total; }

  Tree forward(const Tree& args, const Tree& kwargs) {
    at::Tensor h = args[0].tensor();
    at::Tensor s = feature == "tuple" ? (is_first() ? h : args[1].tensor()) : at::Tensor();
    for (int i = 0; i < count; ++i) {
      at::Tensor linear =
          torch::linear(h, weights[static_cast<std::size_t>(i)], biases[static_cast<std::size_t>(i)]);
      if (feature == "tuple") {
        h = activation(first + i, linear + 0.5 * s);
        s = s + h;
      } else {
        h = activation(first + i, linear);
        if (feature == "kwargs") h = h * kwargs["scale"].tensor();
      }
    }
    if (feature == "tuple") return is_last() ? Tree(h + s) : Tree::tuple({h, s});
    if (feature == "int") {
      const at::Tensor& idx = args[1].tensor();
      return is_last() ? Tree(h * (1 + 0.125 * idx.to(at::kFloat)).unsqueeze(1)) : Tree::tuple({h, idx});
    }
    return h;
  }

  std::string feature;
  int first, count, total;
  std::vector<at::Tensor> weights, biases;
};
TORCH_MODULE(Part);

PipelineLoss loss_of(const Case& config) {
  const bool mean = config.loss == "mean";
  return PipelineLoss([mean](const at::Tensor& output, const at::Tensor& target) {
    const at::Tensor square = (output - target).pow(2);
    return mean ? square.mean() : square.sum();
  });
}

struct Batch {
  Tree args, kwargs;
  at::Tensor target;
};

Batch batch_of(const json& definition, const Case& config, int step) {
  const json& data =
      definition.at("data").at("rows" + std::to_string(config.rows)).at(static_cast<std::size_t>(step));
  const at::Tensor x = tensor_of(data.at("x"));
  Batch batch{Tree::tuple({x}), {}, tensor_of(data.at("target"))};
  if (config.feature == "int") batch.args = Tree::tuple({x, tensor_of(data.at("idx"))});
  if (config.feature == "kwargs") batch.kwargs = Tree::dict({{"scale", tensor_of(data.at("scale"))}});
  return batch;
}

// The results of one step, under the names of the reference data; ranks add their parts.
struct StepRecord {
  std::vector<at::Tensor> losses;
  at::Tensor output;
  at::Tensor evaluation;  // of the last batch, after this step
  std::vector<at::Tensor> evaluation_losses;
  std::map<std::string, at::Tensor> grads, params;
};
using RunRecord = std::vector<StepRecord>;

constexpr int kSteps = 3;

void note_parameters(const Part& part, StepRecord& record, bool gradients) {
  for (int i = 0; i < part->count; ++i) {
    const std::string name = "blk" + std::to_string(part->first + i);
    auto& into = gradients ? record.grads : record.params;
    const at::Tensor& weight = part->weights[static_cast<std::size_t>(i)];
    const at::Tensor& bias = part->biases[static_cast<std::size_t>(i)];
    const auto whole = [](const at::Tensor& tensor) {
      return is_dtensor(tensor) ? full_tensor(tensor) : tensor.clone();
    };
    into[name + ".weight"] = whole(gradients ? weight.grad() : weight.detach());
    into[name + ".bias"] = whole(gradients ? bias.grad() : bias.detach());
  }
}

void sgd(const Part& part, double lr) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : part->parameters()) {
    parameter.add_(parameter.grad(), -lr);
    parameter.mutable_grad() = at::Tensor();
  }
}

RunRecord one_process(const json& definition, const Case& config) {
  Part model(definition, config, 0, config.blocks);
  const PipelineLoss loss = loss_of(config);
  RunRecord record;
  for (int step = 0; step < kSteps; ++step) {
    StepRecord& now = record.emplace_back();
    const Batch batch = batch_of(definition, config, step);
    const Microbatches parts = split_microbatches(batch.args, batch.kwargs, config.microbatches);
    const std::vector<Tree> targets = split_tree(batch.target, config.microbatches);
    std::vector<Tree> outputs;
    for (std::size_t m = 0; m < parts.count(); ++m) {
      const Tree output = model->forward(parts.args[m], parts.kwargs[m]);
      const at::Tensor value = loss(output, targets[m]);
      value.backward();
      now.losses.push_back(value.detach());
      outputs.emplace_back(output.tensor().detach());
    }
    now.output = merge_microbatches(outputs).tensor();
    if (config.scale_grads)
      for (const at::Tensor& parameter : model->parameters())
        parameter.mutable_grad().div_(config.microbatches);
    note_parameters(model, now, true);
    sgd(model, config.lr);
    note_parameters(model, now, false);
    const at::NoGradGuard no_grad;
    const Batch last = batch_of(definition, config, kSteps);
    const Microbatches rest = split_microbatches(last.args, last.kwargs, config.microbatches);
    const std::vector<Tree> last_targets = split_tree(last.target, config.microbatches);
    std::vector<Tree> evaluated;
    for (std::size_t m = 0; m < rest.count(); ++m) {
      evaluated.push_back(model->forward(rest.args[m], rest.kwargs[m]));
      now.evaluation_losses.push_back(loss(evaluated.back(), last_targets[m]));
    }
    now.evaluation = merge_microbatches(evaluated).tensor();
  }
  return record;
}

RunRecord pipeline_run(const json& definition, const Case& config) {
  RunRecord record(kSteps);
  std::mutex mutex;
  comm::run_ranks(config.world, 60s, [&](comm::World& world) {
    const auto kind = schedule::schedule_kind(config.schedule);
    const auto map = schedule::rank_to_stages(schedule::placement_of(kind), config.world, config.stages);
    const int per_stage = config.blocks / config.stages;
    std::vector<Part> parts;
    std::vector<PipelineStage> stages;
    for (const int index : map[static_cast<std::size_t>(world.rank())]) {
      parts.emplace_back(definition, config, index * per_stage, per_stage);
      stages.emplace_back(StageModule(parts.back()), index, config.stages, at::kCPU);
    }
    PipelineOptions options{world};
    options.scale_grads = config.scale_grads;
    PipelineRuntime pipeline =
        make_pipeline(config.schedule, stages, config.microbatches, loss_of(config), options);
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = batch_of(definition, config, step);
      const StepResult result = pipeline.step(batch.args, batch.kwargs, batch.target);
      std::unique_lock lock(mutex);
      StepRecord& now = record[static_cast<std::size_t>(step)];
      if (result.output) {
        now.output = result.output->tensor();
        now.losses = result.losses;
      }
      for (const Part& part : parts) {
        note_parameters(part, now, true);
        sgd(part, config.lr);
        note_parameters(part, now, false);
      }
      lock.unlock();
      const Batch last = batch_of(definition, config, kSteps);
      const StepResult evaluated = pipeline.eval(last.args, last.kwargs, last.target);
      lock.lock();
      if (evaluated.output) {
        now.evaluation = evaluated.output->tensor();
        now.evaluation_losses = evaluated.losses;
      }
    }
  });
  return record;
}

// Two replicas of the pipeline; each rank and its twin have half of the rows and half of every parameter.
// Records what each twin saw, with whole gradients and parameters.
std::vector<RunRecord> sharded_run(const json& definition, const Case& config, int pp) {
  const int dp = config.world / pp, count = pp * config.stages_per_rank;
  std::vector<RunRecord> records(static_cast<std::size_t>(dp), RunRecord(kSteps));
  std::mutex mutex;
  comm::run_ranks(config.world, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world,
                                init_device_mesh("cpu", {pp, dp}, {"pp", "dp"}, world.rank(), config.world));
    const int place = world.rank() / dp, twin = world.rank() % dp;
    const auto kind = schedule::schedule_kind(config.schedule);
    const auto map = schedule::rank_to_stages(schedule::placement_of(kind), pp, count);
    const int per_stage = config.blocks / count;
    std::vector<Part> parts;
    std::vector<PipelineStage> stages;
    for (const int index : map[static_cast<std::size_t>(place)]) {
      parts.emplace_back(definition, config, index * per_stage, per_stage);
      fully_shard(*parts.back(), mesh.with_mesh(mesh.mesh()["dp"]));
      stages.emplace_back(StageModule(parts.back()), index, count, at::kCPU);
    }
    PipelineOptions options{world};
    options.scale_grads = config.scale_grads;
    for (int rank = 0; rank < pp; ++rank) options.ranks.push_back(rank * dp + twin);
    PipelineRuntime pipeline =
        make_pipeline(config.schedule, stages, config.microbatches, loss_of(config), options);
    const std::int64_t rows = config.rows / dp;
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = batch_of(definition, config, step);
      const StepResult result =
          pipeline.step(Tree::tuple({batch.args[0].tensor().narrow(0, twin * rows, rows)}), {},
                        batch.target.narrow(0, twin * rows, rows));
      StepRecord mine;  // gathered before the lock is taken
      for (const Part& part : parts) {
        for (const at::Tensor& parameter : part->parameters())
          EXPECT_EQ(shard_of(parameter)->state(), ShardGroupState::Sharded);
        note_parameters(part, mine, true);
        sgd(part, config.lr);
        note_parameters(part, mine, false);
      }
      const std::lock_guard lock(mutex);
      StepRecord& now = records[static_cast<std::size_t>(twin)][static_cast<std::size_t>(step)];
      if (result.output) now.losses = result.losses;
      now.grads.merge(mine.grads);
      now.params.merge(mine.params);
    }
  });
  return records;
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  // Relative to the largest element: small elements are differences of large ones and carry their rounding
  // errors. Those of a gradient after a step on another processor were up to 1.2e-5 of it.
  const double allowed = 1e-6 + 2e-5 * expected.abs().max().item<double>();
  EXPECT_LE((actual - expected).abs().max().item<double>(), allowed) << what;
}

void expect_equal(const RunRecord& actual, const RunRecord& expected) {
  for (std::size_t step = 0; step < expected.size(); ++step) {
    const StepRecord &a = actual[step], &e = expected[step];
    const std::string at = "one process, step " + std::to_string(step) + " ";
    ASSERT_EQ(a.losses.size(), e.losses.size()) << at;
    // The schedule determines the order of microbatches in a sum, so gradients, and what follows from them,
    // may differ in the last bits.
    for (std::size_t m = 0; m < e.losses.size(); ++m) {
      EXPECT_TRUE(step > 0 || a.losses[m].equal(e.losses[m])) << at << "loss " << m;
      expect_close(a.losses[m], e.losses[m], at + "loss " + std::to_string(m));
    }
    EXPECT_TRUE(step > 0 || a.output.equal(e.output)) << at << "output";
    expect_close(a.output, e.output, at + "output");
    ASSERT_EQ(a.grads.size(), e.grads.size());
    for (const auto& [name, gradient] : e.grads)
      expect_close(a.grads.at(name), gradient, at + "gradient of " + name);
    for (const auto& [name, parameter] : e.params) expect_close(a.params.at(name), parameter, at + name);
    expect_close(a.evaluation, e.evaluation, at + "evaluation");
    ASSERT_EQ(a.evaluation_losses.size(), e.evaluation_losses.size()) << at;
    for (std::size_t m = 0; m < e.evaluation_losses.size(); ++m)
      expect_close(a.evaluation_losses[m], e.evaluation_losses[m],
                   at + "loss " + std::to_string(m) + " of the evaluation");
  }
}

// A tensor, or an object with the tensor under "output" and the losses of the microbatches.
void expect_evaluation(const StepRecord& actual, const json& expected) {
  for (const auto& [key, value] : expected.items())
    EXPECT_TRUE(key == "output" || key == "micro_losses" || key == "shape" || key == "values" ||
                key == "dtype" || key == "batch")
        << "evaluation: " << key << " is not known here";
  expect_close(actual.evaluation, tensor_of(expected.contains("output") ? expected.at("output") : expected),
               "reference, evaluation");
  if (!expected.contains("micro_losses")) return;
  const auto losses = expected.at("micro_losses").get<std::vector<float>>();
  ASSERT_EQ(actual.evaluation_losses.size(), losses.size());
  for (std::size_t m = 0; m < losses.size(); ++m)
    expect_close(actual.evaluation_losses[m], at::scalar_tensor(losses[m]),
                 "reference, loss " + std::to_string(m) + " of the evaluation");
}

void expect_reference(const RunRecord& actual, const json& expected) {
  for (const json& step : expected.at("steps")) {
    const StepRecord& a = actual.at(step.at("step").get<std::size_t>());
    const std::string at = "reference, step " + step.at("step").dump() + " ";
    const auto losses = step.at("micro_losses").get<std::vector<float>>();
    ASSERT_EQ(a.losses.size(), losses.size());
    for (std::size_t m = 0; m < losses.size(); ++m)
      expect_close(a.losses[m], at::scalar_tensor(losses[m]), at + "loss " + std::to_string(m));
    ASSERT_EQ(a.grads.size(), step.at("grads").size());
    for (const auto& [name, gradient] : step.at("grads").items())
      expect_close(a.grads.at(name), tensor_of(gradient), at + "gradient of " + name);
    for (const auto& [name, parameter] : step.at("params_after").items())
      expect_close(a.params.at(name), tensor_of(parameter), at + name);
    expect_close(a.output, tensor_of(step.at("output")), at + "output");
    if (step.contains("eval")) expect_evaluation(a, step.at("eval"));
  }
  if (expected.contains("eval") && expected.at("eval").is_object())
    expect_evaluation(actual.back(), expected.at("eval"));
}

struct Reference {
  json index, definition;
  std::filesystem::path folder;
};

Reference reference() {
  Reference read;
  read.index = test::golden_index("pipeline_numerics");
  const json top = test::read_json(test::golden_folder() / "index.json");
  read.folder =
      (test::golden_folder() / top.at("sections").at("pipeline_numerics").get<std::string>()).parent_path();
  read.definition = test::read_json(read.folder / "definition.json");
  EXPECT_EQ(read.index.at("cases").size(), top.at("counts").at("pipeline_numerics").get<std::size_t>());
  return read;
}

// Pipelines whose stages are sharded over data-parallel ranks.
TEST(GoldenPipeline, EveryShardedCase) {
  const auto [index, definition, folder] = reference();
  int run = 0;
  for (const json& item : index.at("cases")) {
    if (item.at("feature") != "fsdp") continue;
    SCOPED_TRACE(item.at("id").get<std::string>());
    ASSERT_EQ(item.at("mesh_dims"), (json{"pp", "dp"}));
    int next = 0;
    for (const json& row : item.at("mesh"))
      for (const json& rank : row)
        ASSERT_EQ(rank.get<int>(), next++) << "ranks in another order than sharded_run has them";
    const std::vector<RunRecord> actual =
        sharded_run(definition, Case(item), static_cast<int>(item.at("mesh").size()));
    const json expected = test::read_json(folder / item.at("file").get<std::string>());
    for (const json& step : expected.at("steps")) {
      const auto number = step.at("step").get<std::size_t>();
      const std::string at = "step " + std::to_string(number) + " ";
      for (std::size_t twin = 0; twin < actual.size(); ++twin) {
        const StepRecord& a = actual[twin].at(number);
        const auto losses = step.at("micro_losses_by_dp_rank").at(twin).get<std::vector<float>>();
        ASSERT_EQ(a.losses.size(), losses.size()) << at;
        for (std::size_t m = 0; m < losses.size(); ++m)
          expect_close(a.losses[m], at::scalar_tensor(losses[m]), at + "loss " + std::to_string(m));
        ASSERT_EQ(a.grads.size(), step.at("grads").size());
        for (const auto& [name, gradient] : step.at("grads").items())
          expect_close(a.grads.at(name), tensor_of(gradient), at + "gradient of " + name);
        for (const auto& [name, parameter] : step.at("params_after").items())
          expect_close(a.params.at(name), tensor_of(parameter), at + name);
      }
    }
    ++run;
  }
  EXPECT_GT(run, 0);
}

// Every other case that the index lists.
TEST(GoldenPipeline, EveryCase) {
  const auto [index, definition, folder] = reference();
  int run = 0;
  for (const json& item : index.at("cases")) {
    if (item.at("feature") == "fsdp") continue;
    SCOPED_TRACE(item.at("id").get<std::string>());
    const Case config(item);
    const RunRecord actual = pipeline_run(definition, config);
    expect_equal(actual, one_process(definition, config));
    if (!item.contains("error_type") || item.at("error_type").is_null())
      expect_reference(actual, test::read_json(folder / item.at("file").get<std::string>()));
    ++run;
  }
  EXPECT_GT(run, 0);
}

}  // namespace golden_pipeline_test
}  // namespace penstock
