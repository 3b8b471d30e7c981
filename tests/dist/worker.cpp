// One rank of the tests with real processes: runs the scenario named on its command line. The test starts it
// with the launcher, with mpirun or directly, and checks exit codes and output.
#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <map>
#include <string>
#include <thread>

#include "penstock/base/env.h"
#include "penstock/base/leave_process.h"
#include "penstock/checkpoint/tensors/tensor_part.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/comm/group/self_test.h"
#include "penstock/comm/group/work_state.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/pipeline.h"
#include "penstock/pipeline/report/step_trace.h"
#include "penstock/step_context.h"
#include "penstock/tensor_parallel.h"
#include "penstock/world.h"
#include "tests/comm/late_owner.h"
#include "tests/pipeline/soak.h"

namespace {

using namespace penstock;
using namespace penstock::comm;
using namespace std::chrono_literals;

void print_line(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

// The rank that dies, stops or is absent.
int victim() { return static_cast<int>(env_int("PENSTOCK_TEST_VICTIM", 0, 1 << 20).value_or(2)); }

// Ends this process like kill -9 from outside, once the others are certainly inside the operation.
void die_later(World& world, std::chrono::milliseconds delay) {
  if (world.rank() == victim())
    std::thread([delay] {
      std::this_thread::sleep_for(delay);
      kill(getpid(), SIGKILL);
    }).detach();
}

int everything() {
  World world = World::from_env();
  bool ok = true;
  for (const auto& result : self_test(world.group(), at::kCPU))
    if (!result.ok) {
      print_line(fmt::format("{}: {}", result.operation, result.error));
      ok = false;
    }
  print_line(
      fmt::format("rank {} of {} over {}", world.rank(), world.size(), world.group().describe_backends()));
  return ok ? 0 : 1;
}

int killed_in_all_reduce() {
  World world = World::from_env();
  die_later(world, 700ms);
  at::Tensor tensor = at::ones({1 << 18});
  for (;;) world.group().all_reduce(tensor, ReduceOp::Avg, {.label = "endless sums"}).wait();
}

int killed_in_batch() {
  World world = World::from_env();
  die_later(world, 700ms);
  const int next = (world.rank() + 1) % world.size(),
            previous = (world.rank() + world.size() - 1) % world.size();
  const at::Tensor out = at::ones({1 << 18});
  at::Tensor in = at::zeros({1 << 18});
  for (;;) {
    auto works = world.group().batch_isend_irecv(
        {P2POp::send(out, next, {.label = "ring"}), P2POp::recv(in, previous, {.label = "ring"})});
    wait_all(works);
  }
}

// All other ranks wait for a message from a rank that is alive but waits too: only the monitor can detect the
// loss.
int killed_elsewhere() {
  World world = World::from_env();
  die_later(world, 700ms);
  if (world.rank() == victim()) std::this_thread::sleep_for(60s);
  at::Tensor in = at::zeros({4});
  world.group().recv(in, world.rank() == 0 ? 1 : 0, {.label = "from a living rank"});
  return 0;
}

int killed_in_rendezvous() {
  // Dies after it has joined the store and before the group is complete: there is no world yet that could
  // report it.
  const LaunchEnv env = launch_env();
  if (env.rank == victim()) {
    std::thread([] {
      std::this_thread::sleep_for(30ms);
      kill(getpid(), SIGKILL);
    }).detach();
    std::this_thread::sleep_for(10s);
  }
  World world = World::connect(env);
  return 0;
}

int stays_away() {
  if (launch_env().rank == victim()) std::this_thread::sleep_for(60s);
  World world = World::from_env();
  return 0;
}

int stopped_rank() {
  World world = World::from_env();
  at::Tensor tensor = at::ones({8});
  world.group().barrier().wait();
  if (world.rank() == victim()) kill(getpid(), SIGSTOP);
  world.group().all_reduce(tensor, ReduceOp::Sum, {.label = "after the stop"}).wait();
  return 0;
}

// Rank 0 is told of the other's failure while it releases its last handle to the world.
int told_while_leaving() {
  const auto deadline = Clock::now() + 20s;
  auto core = std::make_shared<WorldCore>(WorldCore{.env = launch_env(),
                                                    .store = Store::connect(launch_env(), deadline),
                                                    .liveness = std::make_shared<Liveness>(2),
                                                    .monitor = nullptr,
                                                    .timeout = 20s});
  core->monitor = std::make_unique<Monitor>(core->env, core->store, core->liveness, deadline);
  auto group = std::make_shared<GroupState>(core, "pair", std::vector<int>{0, 1}, 20s);
  group->follow_liveness();
  if (core->env.rank == 1) {
    core->store.get("waits", deadline, "rank 0 to wait");
    core->fail("for the test");
    return 0;
  }
  test::EndlessWait wait(group, {});
  core->store.set("waits", "1");
  while (!wait.late_owner.interrupted) std::this_thread::sleep_for(1ms);
  core.reset();
  group.reset();
  // If the monitor's thread is the last owner, it destroys the world, and with it the monitor, now.
  while (!wait.late_owner.returned) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(300ms);
  print_line("left in order");
  return 0;
}

int throws() {
  World world = World::from_env();
  if (world.rank() == victim()) throw ConfigError("the victim's own words");
  world.group().barrier().wait();
  return 0;
}

int leaves_early() {
  World world = World::from_env();
  if (world.rank() == victim()) return 0;
  at::Tensor tensor = at::ones({8});
  world.group().all_reduce(tensor).wait();
  return 0;
}

int mismatch() {
  World world = World::from_env();
  if (world.rank() == 0) {
    world.group().send(at::zeros({1 << 20}), 1, {.tag = 3, .label = "1F0"});
  } else if (world.rank() == 1) {
    at::Tensor in = at::zeros({8}, at::kInt);
    world.group().recv(in, 0, {.tag = 3, .label = "1F0"});
  } else {
    world.group().barrier().wait();
  }
  return 0;
}

int connects() {
  World world = World::from_env();
  print_line("connected");
  return 0;
}

// Traffic while a test inspects the sockets.
int lingers() {
  World world = World::from_env();
  world.group().barrier().wait();
  if (world.rank() == 0) print_line(fmt::format("pid {}", getpid()));
  std::this_thread::sleep_for(3s);
  world.group().barrier().wait();
  return 0;
}

// 4 ranks as 2 x 2 request the groups of their axes crosswise: each waits for a rank that waits for another.
int mesh_axes() {
  World world = World::from_env();
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world.rank(), world.size());
  const MeshGroups groups(world, mesh);
  const bool dp_first = world.rank() == 0 || world.rank() == 3;
  groups.group(dp_first ? "dp" : "tp");
  groups.group(dp_first ? "tp" : "dp");
  bool ok = true;
  for (const char* axis : {"dp", "tp"})
    for (const auto& result : self_test(groups.group(axis), at::kCPU))
      if (!result.ok) {
        print_line(fmt::format("{} over {}: {}", result.operation, axis, result.error));
        ok = false;
      }
  print_line(fmt::format("rank {}: dp {}, tp {}", world.rank(), groups.group("dp").name(),
                         groups.group("tp").name()));
  return ok ? 0 : 1;
}

int killed_before_group_of() {
  World world = World::from_env();
  die_later(world, 700ms);
  if (world.rank() == victim()) std::this_thread::sleep_for(60s);
  world.group_of({world.rank(), victim()});
  return 0;
}

// The victim gets a signal while the others agree on a checkpoint, through the store alone.
int checkpoint_with_signal(int signal) {
  World world = World::from_env();
  checkpoint::CheckpointWriter writer(world, env_text("PENSTOCK_TEST_FOLDER").value());
  world.group().barrier().wait();
  if (world.rank() == victim()) {
    std::this_thread::sleep_for(300ms);  // the others certainly wait
    kill(getpid(), signal);
  }
  writer.save(1, {.model = {checkpoint::tensor_part("weight", at::ones({8}))}});
  return 0;
}

int killed_before_checkpoint() { return checkpoint_with_signal(SIGKILL); }
int stopped_before_checkpoint() { return checkpoint_with_signal(SIGSTOP); }

int never_asks() {
  World world = World::from_env();
  if (world.rank() == victim()) {
    std::this_thread::sleep_for(60s);  // the launcher ends it
  } else {
    world.group_of({3, 2, 1, 0});
  }
  return 0;
}

// Trains a sequence of layers as distributed tensors on a mesh of all ranks; the loss must equal that of one
// process.
int distributed_training() {
  World world = World::from_env();
  const MeshGroups mesh(
      world, init_device_mesh("cpu", {2, world.size() / 2}, {"dp", "tp"}, world.rank(), world.size()));
  const at::Device device(env_choice("PENSTOCK_TEST_DEVICE", {"cpu", "cuda"}, "cpu"));
  const auto train = [&](bool distributed) {
    torch::manual_seed(3);
    torch::nn::Sequential model(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 4));
    model->to(device, at::kDouble);
    at::Tensor x = at::randn({8, 6}, at::kDouble).to(device), y = at::randn({8, 4}, at::kDouble).to(device);
    if (distributed) {
      parallelize_module(*model, mesh, {{"0", colwise_parallel()}, {"2", rowwise_parallel()}},
                         {.axis = "tp"});
      x = distribute_tensor(x, mesh, {Shard{0}, Replicate{}});
      y = distribute_tensor(y, mesh, {Shard{0}, Replicate{}});
    }
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    at::Tensor loss;
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      loss = (model->forward(x) - y).square().sum();
      loss.backward();
      optimizer.step();
    }
    return distributed ? full_tensor(loss.detach()).item<double>() : loss.item<double>();
  };
  const double expected = train(false), actual = train(true);
  print_line(fmt::format("rank {}: loss {:.9f}, of one process {:.9f}", world.rank(), actual, expected));
  return std::abs(actual - expected) < 1e-10 ? 0 : 1;
}

int killed_in_redistribute() {
  World world = World::from_env();
  die_later(world, 700ms);
  const MeshGroups mesh(world, init_device_mesh("cpu", {world.size()}, {"tp"}, world.rank(), world.size()));
  at::Tensor x = distribute_tensor(at::ones({64, 64}), mesh, {Shard{0}});
  for (;;) x = redistribute(redistribute(x, {Shard{1}}), {Shard{0}});
}

// One rank's part has another size: all ranks report it.
int parts_disagree() {
  World world = World::from_env();
  const MeshGroups mesh(world, init_device_mesh("cpu", {world.size()}, {"tp"}, world.rank(), world.size()));
  from_local(at::ones({world.rank() == 1 ? 5 : 4, 3}), mesh, {Shard{0}}, {.check = true});
  return 0;
}

// One rank fails by itself, during an operation that the others wait for.
int one_rank_throws_in_operator() {
  World world = World::from_env();
  const MeshGroups mesh(world, init_device_mesh("cpu", {world.size()}, {"tp"}, world.rank(), world.size()));
  const at::Tensor x = distribute_tensor(at::ones({8, 8}), mesh, {Shard{0}});
  if (world.rank() == victim()) x + at::ones({8, 8});
  full_tensor(x.sum());
  return 0;
}

// Ranks that share parameters train a step together. In the second step the victim dies where the others need
// it: before its gathers, or between its forward, for which everything is gathered and kept, and the
// reduction of its gradients.
int killed_sharded(const std::vector<std::int64_t>& shape, bool in_gather) {
  World world = World::from_env();
  const std::vector<std::string> names =
      shape.size() == 1 ? std::vector<std::string>{"shards"} : std::vector<std::string>{"replicas", "shards"};
  const MeshGroups mesh(world, init_device_mesh("cpu", shape, names, world.rank(), world.size()));
  torch::nn::Sequential model(torch::nn::Linear(64, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64));
  for (const auto& child : model->children())
    if (!child->parameters().empty()) fully_shard(*child, mesh, {.reshard_after_forward = in_gather});
  fully_shard(*model, mesh);
  const auto die = [&] {
    if (world.rank() != victim()) return;
    std::this_thread::sleep_for(700ms);  // the others certainly wait
    kill(getpid(), SIGKILL);
  };
  const at::Tensor x = at::ones({4, 64});
  model->forward(x).sum().backward();
  print_line(fmt::format("rank {}: one step", world.rank()));
  if (in_gather) die();
  const at::Tensor loss = model->forward(x).sum();
  if (!in_gather) die();
  loss.backward();
  return 0;
}

int killed_in_gather() { return killed_sharded({4}, true); }
int killed_in_reduction() { return killed_sharded({4}, false); }
int killed_in_gather_with_replicas() { return killed_sharded({2, 2}, true); }
int killed_in_reduction_with_replicas() { return killed_sharded({2, 2}, false); }

// A pipeline of one stage per rank. In the second step, in the forward of microbatch 1, the victim gets a
// signal, once what it sent before has arrived and the others certainly wait.
int pipeline_with_signal(int signal) {
  World world = World::from_env();
  const int stage = world.rank();
  torch::nn::Linear linear(8, 8);
  const StageModule module(
      [layer = linear.ptr(), signal, is_victim = stage == victim()](at::Tensor x) {
        const auto step = StepContext::current();
        if (is_victim && !step->trial && step->step == 1 && step->microbatch == 1) {
          std::this_thread::sleep_for(2s);
          kill(getpid(), signal);
        }
        return torch::tanh(layer->forward(x));
      },
      {linear.ptr()});
  const PipelineLoss loss(
      [](const at::Tensor& output, const at::Tensor& target) { return (output - target).square().mean(); });
  PipelineRuntime pipeline = make_pipeline("1F1B", {PipelineStage(module, stage, world.size(), at::kCPU)}, 6,
                                           loss, PipelineOptions{world});
  const at::Tensor x = at::ones({12, 8});
  for (;;) pipeline.step(Tree::tuple({x}), {}, x);
}

int killed_in_pipeline() { return pipeline_with_signal(SIGKILL); }
int stopped_in_pipeline() { return pipeline_with_signal(SIGSTOP); }

// Trains for two steps and writes the trace of the second one.
int traced_pipeline() {
  World world = World::from_env();
  const int stage = world.rank();
  torch::nn::Linear linear(64, 64);
  const PipelineLoss loss(
      [](const at::Tensor& output, const at::Tensor& target) { return (output - target).square().mean(); });
  PipelineRuntime pipeline =
      make_pipeline("1F1B", {PipelineStage(StageModule(linear), stage, world.size(), at::kCPU)}, 6, loss,
                    PipelineOptions{world});
  const at::Tensor x = at::ones({96, 64});
  for (int step = 0; step < 2; ++step) pipeline.step(Tree::tuple({x}), {}, x);
  pipeline.write_trace(env_text("PENSTOCK_TEST_TRACE").value());
  return 0;
}

// Runs random schedules, shapes and evaluations, and compares each step with one process.

int pipeline_soak() {
  World world = World::from_env();
  at::set_num_threads(1);
  const char* given = std::getenv("PENSTOCK_TEST_SOAK_STEPS");
  const int steps = given == nullptr ? 60 : std::stoi(given);
  const std::string wrong = test::soak(world, steps, 21);
  print_line(fmt::format("rank {}: {}", world.rank(),
                         wrong.empty() ? fmt::format("{} steps as in one process", steps) : wrong));
  return wrong.empty() ? 0 : 1;
}

}  // namespace

namespace {

int run_scenario(int argc, char** argv) {
  const std::map<std::string, int (*)()> scenarios = {
      {"everything", everything},
      {"killed_in_all_reduce", killed_in_all_reduce},
      {"killed_in_batch", killed_in_batch},
      {"killed_elsewhere", killed_elsewhere},
      {"killed_in_rendezvous", killed_in_rendezvous},
      {"stays_away", stays_away},
      {"stopped_rank", stopped_rank},
      {"throws", throws},
      {"told_while_leaving", told_while_leaving},
      {"leaves_early", leaves_early},
      {"mismatch", mismatch},
      {"connects", connects},
      {"lingers", lingers},
      {"mesh_axes", mesh_axes},
      {"killed_before_group_of", killed_before_group_of},
      {"never_asks", never_asks},
      {"killed_before_checkpoint", killed_before_checkpoint},
      {"stopped_before_checkpoint", stopped_before_checkpoint},
      {"distributed_training", distributed_training},
      {"killed_in_redistribute", killed_in_redistribute},
      {"parts_disagree", parts_disagree},
      {"one_rank_throws_in_operator", one_rank_throws_in_operator},
      {"killed_in_pipeline", killed_in_pipeline},
      {"killed_in_gather", killed_in_gather},
      {"killed_in_reduction", killed_in_reduction},
      {"killed_in_gather_with_replicas", killed_in_gather_with_replicas},
      {"killed_in_reduction_with_replicas", killed_in_reduction_with_replicas},
      {"stopped_in_pipeline", stopped_in_pipeline},
      {"traced_pipeline", traced_pipeline},
      {"pipeline_soak", pipeline_soak}};
  const auto found = argc == 2 ? scenarios.find(argv[1]) : scenarios.end();
  if (found == scenarios.end()) {
    fmt::print(stderr, "usage: {} SCENARIO\n", argv[0]);
    return 2;
  }
  try {
    return found->second();
  } catch (const ConfigError& error) {
    fmt::print(stderr, "ConfigError: {}\n", error.what());
  } catch (const PeerLostError& error) {
    fmt::print(stderr, "PeerLostError: {}\n", error.what());
  } catch (const TimeoutError& error) {
    fmt::print(stderr, "TimeoutError: {}\n", error.what());
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
  }
  return 3;
}

}  // namespace

int main(int argc, char** argv) { leave_process(run_scenario(argc, argv)); }
