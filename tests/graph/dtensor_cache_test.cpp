// Captured calls with distributed tensors that are kept between runs: each world of threads is a run, with
// process groups of its own.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/warnings.h"
#include "penstock/compile.h"
#include "penstock/compile_artifact.h"
#include "penstock/context_codec.h"
#include "penstock/errors.h"
#include "penstock/graph/run/capture_codec.h"
#include "penstock/graph/run/compiled_call.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/graph/tools/graph_file.h"
#include "penstock/graph_compiler.h"
#include "penstock/tensor_parallel.h"
#include "tests/graph/cache_folder.h"
#include "tests/graph/random_dtensor_program.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace dtensor_cache_test {

using test::has_text;
using test::message_of;

// A function that counts how often it runs.
struct Counting {
  explicit Counting(Function function) : plain(std::move(function)) {}
  Function counted() const {
    return [plain = plain, runs = runs](const Values& in) {
      ++*runs;
      return plain(in);
    };
  }
  Function plain;
  std::shared_ptr<int> runs = std::make_shared<int>(0);
};

std::string rank_of(const comm::MeshGroups& mesh) { return "rank " + std::to_string(mesh.world().rank()); }

// All-reduce in forward, and collectives in backward.
Values sum_of_products(const Values& in) {
  const at::Tensor y = in[0].toTensor().matmul(in[1].toTensor());
  return {redistribute(y, {Replicate{}}).relu(), redistribute(y.sin(), {Shard{0}})};
}

std::vector<at::Tensor> factors(const comm::MeshGroups& mesh) {
  return {placed(numbers({4, 6}, 1), mesh, Shard{1}), placed(numbers({6, 2}, 2), mesh, Shard{0})};
}

TEST(DTensorCache, AWarmCallDoesNotRunTheFunction) {
  const CacheFolder folder;
  for (const bool warm : {false, true})
    on_ranks(2, [&](const comm::MeshGroups& mesh) {
      const Counting function(sum_of_products);
      Compiled compiled(function.counted(), folder.options());
      compare_call(rank_of(mesh), function.plain, compiled, [&] { return factors(mesh); });
      EXPECT_EQ(*function.runs > 0, !warm);
      EXPECT_EQ(compiled.loaded(), warm ? 1u : 0u) << compiled.cache_counts().text();
      EXPECT_TRUE(compiled.cache_counts().refused.empty()) << compiled.cache_counts().text();
      EXPECT_GE(collectives_in(compiled.joint(0).graph), 2u);
      EXPECT_EQ(compiled.wrappers(0).back(), "subclasses");  // applied again
      EXPECT_EQ(mesh_of(compiled({factors(mesh)[0], factors(mesh)[1]})[0].toTensor()), mesh);
    });
}

// What follows the capture is looked up by the graph, in which groups are stored by what they are.
TEST(DTensorCache, HalvesAreFoundByTheGraph) {
  const CacheFolder folder;
  for (const bool warm : {false, true})
    on_ranks(2, [&](const comm::MeshGroups& mesh) {
      Compiled compiled(sum_of_products, folder.options(/*identity=*/""));
      compare_call(rank_of(mesh), sum_of_products, compiled, [&] { return factors(mesh); });
      EXPECT_EQ(compiled.cache_counts().text(),
                warm ? "1 hit, 0 misses, 0 stored" : "0 hits, 1 miss, 1 stored");
    });
}

TEST(DTensorCache, AnotherMeshOrPlacementIsAnotherCall) {
  const CacheFolder folder;
  const Function function = [](const Values& in) -> Values { return {in[0].toTensor().sin()}; };
  const auto runs = [&](int ranks, const std::string& axis, const Placement& placement) {
    std::atomic<int> loaded{0};
    comm::run_ranks(ranks, 120s, [&](comm::World& world) {
      const comm::MeshGroups mesh = world.mesh("cpu", {{axis, ranks}});
      Compiled compiled(function, folder.options());
      compare_call(rank_of(mesh), function, compiled, [&] {
        return std::vector<at::Tensor>{placed(numbers({6, 6}, 1), mesh, placement)};
      });
      loaded += static_cast<int>(compiled.loaded());
    });
    return loaded.load();
  };
  EXPECT_EQ(runs(2, "tp", Shard{0}), 0);
  EXPECT_EQ(runs(2, "tp", Shard{1}), 0);
  EXPECT_EQ(runs(2, "dp", Shard{0}), 0);
  EXPECT_EQ(runs(3, "tp", Shard{0}), 0);
  EXPECT_EQ(runs(3, "tp", Shard{0}), 3);
  EXPECT_EQ(runs(2, "dp", Shard{0}), 2);
  EXPECT_EQ(runs(2, "tp", Shard{1}), 2);
  EXPECT_EQ(runs(2, "tp", Shard{0}), 2);
}

// A mesh is stored without its ranks. Of the replicas that capture at the same time, none waits for another
// one, which could be waiting for a group.
TEST(DTensorCache, ReplicasShareWhatOneHasStored) {
  const CacheFolder folder;
  for (const bool warm : {false, true})
    comm::run_ranks(4, 120s, [&](comm::World& world) {
      const comm::MeshGroups grid = world.mesh("cpu", {{"dp", 2}, {"tp", 2}});
      const comm::MeshGroups tp = grid.with_mesh(grid.mesh()["tp"]);
      const Counting function(sum_of_products);
      Compiled compiled(function.counted(), folder.options());
      compare_call(rank_of(tp), function.plain, compiled, [&] { return factors(tp); });
      if (warm) {
        EXPECT_EQ(compiled.loaded(), 1u) << compiled.cache_counts().text();
        EXPECT_EQ(*function.runs, 0);
      }
    });
  std::size_t entries = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder.path))
    entries += file.path().extension() == ".entry" ? 1 : 0;
  EXPECT_EQ(entries, 4u);  // for each coordinate along tp, the call and its halves
}

// The mesh is none of an input, so that the identity must name the rank.
TEST(DTensorCache, TensorsThatTheFunctionPlaces) {
  const CacheFolder folder;
  for (const bool warm : {false, true})
    on_ranks(2, [&](const comm::MeshGroups& mesh) {
      const Counting function([mesh](const Values& in) -> Values {
        const at::Tensor x = from_local(in[0].toTensor(), mesh, {Shard{0}});
        return {x.sin(), redistribute(x, {Replicate{}}) * 2};
      });
      Compiled compiled(function.counted(), folder.options(rank_of(mesh)));
      compare_call(rank_of(mesh), function.plain, compiled, [&] {
        return std::vector<at::Tensor>{numbers({2, 3}, 1).requires_grad_()};
      });
      EXPECT_EQ(compiled.loaded(), warm ? 1u : 0u) << compiled.cache_counts().text();
      EXPECT_EQ(*function.runs > 0, !warm);
    });
}

TEST(DTensorCache, LocalPartsThatAreSubclasses) {
  test::register_sample_kinds();
  if (!find_context_codec("Boxed"))
    register_context_codec(
        "Boxed", {.encode = [](const Payload&) { return std::vector<std::uint8_t>(); },
                  .decode = [](const std::vector<std::uint8_t>&, const FlatWrapper& flat,
                               const std::vector<at::Tensor>&) { return unflatten_wrapper(flat); }});
  const CacheFolder folder;
  const Function function = [](const Values& in) -> Values {
    return {redistribute(in[0].toTensor().sin(), {Replicate{}}) * 2};
  };
  for (const std::size_t loaded : {0u, 1u})
    on_ranks(2, [&](const comm::MeshGroups& mesh) {
      Compiled compiled(function, folder.options());
      compare_call(rank_of(mesh), function, compiled, [&] {
        const at::Tensor local = numbers({2, 3}, 20 * static_cast<int>(mesh.coordinate()[0]));
        return std::vector<at::Tensor>{
            from_local(sample::Boxed::make(local), mesh, {Shard{0}}).detach().set_requires_grad(true)};
      });
      EXPECT_EQ(compiled.loaded(), loaded) << compiled.cache_counts().text();
    });
}

TEST(DTensorCache, RandomProgramsAreLoaded) {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  const auto programs = static_cast<std::uint32_t>(asked ? std::atoi(asked) : 40);
  for (const int ranks : {2, 3}) {
    const CacheFolder folder;
    std::atomic<std::size_t> compared{0}, loaded{0};
    for (const bool warm : {false, true})
      on_ranks(ranks, [&](const comm::MeshGroups& mesh) {
        for (std::uint32_t seed = 1; seed <= programs; ++seed) {
          const RandomDTensorProgram program(seed, mesh);
          if (!program.is_legal()) continue;
          const std::string who = "program " + std::to_string(seed);
          Compiled compiled(program.function, folder.options(who));
          for (int step = 0; step < 2; ++step)
            compare_call(who + ", " + rank_of(mesh), program.function, compiled,
                         [&] { return program.inputs(step); });
          EXPECT_EQ(compiled.loaded(), warm ? 1u : 0u) << who << ": " << compiled.cache_counts().text();
          compared += 1;
          loaded += compiled.loaded();
        }
      });
    EXPECT_EQ(loaded * 2, compared);
    EXPECT_GE(loaded * 3, programs * static_cast<std::size_t>(ranks) * 2);
  }
}

// ---- parallel modules ----

torch::nn::Sequential make_mlp() {
  torch::manual_seed(11);
  return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::GELU(), torch::nn::Linear(16, 8));
}

void parallelize(torch::nn::Sequential& mlp, const comm::MeshGroups& mesh) {
  parallelize_module(*mlp, mesh, {{"0", colwise_parallel()}, {"2", rowwise_parallel()}});
}

// Parameters with a boundary, which redistributes what comes to the module; an optimizer over them.
TEST(DTensorCache, ParallelModulesAreTrained) {
  const CacheFolder folder;
  for (const bool warm : {false, true}) {
    std::vector<std::pair<torch::nn::Sequential, torch::nn::Sequential>> models;
    for (int rank = 0; rank < 2; ++rank) models.emplace_back(make_mlp(), make_mlp());
    on_ranks(2, [&](const comm::MeshGroups& mesh) {
      auto& [eager, captured] = models[static_cast<std::size_t>(mesh.coordinate()[0])];
      parallelize(eager, mesh);
      parallelize(captured, mesh);
      auto fast = compile(captured, folder.options());
      torch::optim::SGD one(eager->parameters(), 0.1), other(fast->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        one.zero_grad();
        other.zero_grad();
        const at::Tensor x = numbers({4, 8}, step);
        const at::Tensor actual = fast->forward(x).pow(2).sum(), expected = eager->forward(x).pow(2).sum();
        EXPECT_TRUE(same_tensor(actual.detach(), expected.detach())) << rank_of(mesh) << ", step " << step;
        actual.backward();
        expected.backward();
        one.step();
        other.step();
      }
      for (const auto& item : eager->named_parameters())
        EXPECT_TRUE(same_tensor(captured->named_parameters()[item.key()].detach(), item.value().detach()))
            << rank_of(mesh) << ", " << item.key();
      EXPECT_EQ(compiled_entry(*fast, 0).loaded(), warm ? 1u : 0u)
          << compiled_entry(*fast, 0).cache_counts().text();
      EXPECT_EQ(compiled_entry(*fast, 0).captures(), 1u);
    });
  }
}

TEST(DTensorCache, Artifacts) {
  const CacheFolder folder;
  const auto run = [&](const std::shared_ptr<Artifact>& artifact, const std::string& axis) {
    std::vector<torch::nn::Sequential> models{make_mlp(), make_mlp()};
    comm::run_ranks(2, 120s, [&](comm::World& world) {
      const comm::MeshGroups mesh = world.mesh("cpu", {{axis, 2}});
      torch::nn::Sequential& model = models[static_cast<std::size_t>(world.rank())];
      parallelize(model, mesh);
      CompileOptions options;
      options.cache = {.name = "mlp", .artifact = artifact};
      auto fast = compile(model, options);
      const at::Tensor x = numbers({4, 8}, 3);
      EXPECT_TRUE(same_tensor(fast->forward(x).detach(), model->forward(x).detach())) << rank_of(mesh);
      fast->forward(x).sum().backward();
      EXPECT_TRUE(is_dtensor(model->parameters()[0].grad()));
      EXPECT_EQ(compiled_entry(*fast, 0).loaded(), artifact->is_writable() ? 0u : 1u);
    });
  };
  const auto written = Artifact::create(folder.path / "artifact", {});
  run(written, "tp");
  written->finish();
  EXPECT_EQ(written->calls().size(), 2u);  // one for each rank
  const auto opened = Artifact::open(folder.path / "artifact", {});
  run(opened, "tp");
  const std::string error = message_of<StateError>([&] { run(opened, "other"); });
  EXPECT_TRUE(has_text(error, "mlp has no call like this one")) << error;
  EXPECT_TRUE(has_text(error, "axes [other]")) << error;
}

// ---- what does not fit ----

// Of rank 1 of two, without other processes.
comm::MeshGroups fake_mesh(const std::string& axis, int rank, int ranks) {
  return {comm::World::fake(rank, ranks), init_device_mesh("cpu", {ranks}, {axis}, rank, ranks)};
}

std::vector<at::Tensor> halves_of(const comm::MeshGroups& mesh) {
  return {from_local(numbers({2, 6}, 1), mesh, {Shard{0}}).detach().set_requires_grad(true),
          from_local(numbers({3, 2}, 2), mesh, {Shard{0}}).detach()};
}

// Gathers, multiplies and reduces.
PartitionedCapture sample_capture(const comm::MeshGroups& mesh) {
  const std::vector<at::Tensor> inputs = halves_of(mesh);
  return partition(capture_function(
                       [](const Values& in) -> Values {
                         const at::Tensor y =
                             redistribute(in[0].toTensor(), {Shard{1}}).matmul(in[1].toTensor());
                         return {redistribute(y, {Replicate{}}), y.sum()};
                       },
                       {inputs[0], inputs[1]}),
                   Partitioner::Default);
}

TEST(DTensorCache, AMeshThatDoesNotFitIsNamed) {
  Bytes bytes;
  {
    const comm::MeshGroups mesh = fake_mesh("tp", 1, 2);
    bytes = encode_capture(sample_capture(mesh));
    EXPECT_EQ(encode_capture(decode_capture(bytes)), bytes);
  }
  const auto error_with = [&](const std::string& axis, int rank, int ranks) {
    const comm::MeshGroups mesh = fake_mesh(axis, rank, ranks);
    return message_of<StateError>([&] { decode_capture(bytes); });
  };
  const std::string none = message_of<StateError>([&] { decode_capture(bytes); });
  EXPECT_TRUE(has_text(none, "cpu, axes [tp] of sizes [2], this rank at [1]; it has none")) << none;
  EXPECT_TRUE(has_text(error_with("dp", 1, 2), "with axes [dp];"));
  EXPECT_TRUE(has_text(error_with("tp", 1, 3), "with sizes [3];"));
  EXPECT_TRUE(has_text(error_with("tp", 0, 2), "with this rank at [0];"));
  EXPECT_TRUE(has_text(error_with("pp", 0, 4), "with axes [pp], sizes [4], this rank at [0];"));
  const comm::MeshGroups one = fake_mesh("tp", 1, 2), other = fake_mesh("tp", 1, 2);
  const std::string two = message_of<StateError>([&] { decode_capture(bytes); });
  EXPECT_TRUE(has_text(two, "which fits both")) << two;
  // The inputs of the call decide.
  const PartitionedCapture read = decode_capture(bytes, default_call_wrappers(), halves_of(other));
  EXPECT_TRUE(read.capture.guard.holds({halves_of(other)[0], halves_of(other)[1]}));
  EXPECT_FALSE(read.capture.guard.holds({halves_of(one)[0], halves_of(one)[1]}));
}

// Loading could not tell them apart.
TEST(DTensorCache, MeshesOfOneWorldNeedDifferentAxes) {
  const comm::World world = comm::World::fake(0, 4);
  const comm::MeshGroups near(world, DeviceMesh("cpu", {2}, {0, 1}, {"tp"}, 0));
  const PartitionedCapture capture = sample_capture(near);
  EXPECT_EQ(encode_capture(capture), encode_capture(capture));
  const comm::MeshGroups far(world, DeviceMesh("cpu", {2}, {0, 2}, {"tp"}, 0));
  const std::string error = message_of<NotImplemented>([&] { encode_capture(capture); });
  EXPECT_TRUE(has_text(error, "another mesh has the same axes")) << error;
}

// An entry that is sound, but of a mesh that this run does not have, stays as it is.
TEST(DTensorCache, AnEntryOfAnotherMeshIsNotReplaced) {
  const CacheFolder folder;
  const Function function = [](const Values& in) -> Values {
    // Of whichever world there is.
    const comm::MeshGroups mesh = comm::MeshGroups::all().front();
    return {from_local(in[0].toTensor(), mesh, {Shard{0}}).sin()};
  };
  const auto run = [&](const comm::MeshGroups& mesh) {
    const WarningCapture silent;
    Compiled compiled(function, folder.options());
    EXPECT_TRUE(same_tensor(compiled({numbers({2, 3}, 1)})[0].toTensor(),
                            from_local(numbers({2, 3}, 1), mesh, {Shard{0}}).sin()));
    return compiled.cache_counts();
  };
  run(fake_mesh("tp", 0, 2));
  const CacheCounts counts = run(fake_mesh("other", 0, 2));
  EXPECT_EQ(counts.refused.size(), 1u);
  EXPECT_TRUE(has_text(counts.text(), "a mesh that this process does not have")) << counts.text();
  EXPECT_TRUE(run(fake_mesh("tp", 0, 2)).refused.empty());
}

TEST(DTensorCache, GraphFiles) {
  const comm::MeshGroups mesh = fake_mesh("tp", 1, 2);
  const PartitionedCapture made = sample_capture(mesh);
  const GraphFile file{made.capture.joint, made.capture.meta, made.halves.saved, {}};
  const GraphFile read = decode_graph(encode_graph(file), "test", halves_of(mesh));
  EXPECT_EQ(to_text(read.joint.graph), to_text(file.joint.graph));
  EXPECT_EQ(*read.joint.subclasses, *file.joint.subclasses);
}

TEST(DTensorCache, DamageIsAnErrorNeverACrash) {
  const comm::MeshGroups mesh = fake_mesh("tp", 1, 2);
  const Bytes bytes = encode_capture(sample_capture(mesh));
  const std::vector<at::Tensor> samples = halves_of(mesh);
  std::mt19937 random(9);
  const char* asked = std::getenv("PENSTOCK_FUZZ_FILES");
  const int rounds = asked ? std::atoi(asked) : 2000;
  int sound = 0;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    Bytes damaged = bytes;
    if (random() % 4 == 0)
      damaged.resize(random() % damaged.size());
    else
      for (std::size_t flips = 1 + random() % 3; flips > 0; --flips)
        damaged[random() % damaged.size()] ^= static_cast<std::uint8_t>(1u << (random() % 8));
    try {
      const CompiledCall call(decode_capture(damaged, default_call_wrappers(), samples),
                              graph_compiler(kExecutorCompiler));
      ++sound;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(sound, 0);
  EXPECT_LT(sound, rounds);
}

// ---- second derivatives ----

TEST(DTensorCache, SecondDerivativesOfLoadedCalls) {
  const CacheFolder folder;
  const Function function = [](const Values& in) -> Values {
    return {in[0].toTensor().sin() * in[1].toTensor()};
  };
  for (const std::size_t loaded : {0u, 1u})
    on_ranks(2, [&](const comm::MeshGroups& mesh) {
      Compiled compiled(function, folder.options());
      const at::Tensor seed = placed(numbers({4, 3}, 4), mesh, Shard{0}, false);
      const auto second = [&](const Function& call) {
        const std::vector<at::Tensor> in{placed(numbers({4, 3}, 1), mesh, Shard{0}),
                                         placed(numbers({4, 3}, 2), mesh, Shard{0})};
        const at::Tensor slope =
            torch::autograd::grad({call({in[0], in[1]})[0].toTensor()}, {in[0]}, {seed}, true, true)[0];
        return torch::autograd::grad({slope}, {in[0], in[1]}, {seed});
      };
      const auto actual = second([&](const Values&in) { return compiled(in); }), expected = second(function);
      for (std::size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(same_tensor(actual[i].detach(), expected[i].detach())) << rank_of(mesh) << ", " << i;
      EXPECT_EQ(compiled.loaded(), loaded) << compiled.cache_counts().text();
    });
}

}  // namespace dtensor_cache_test
}  // namespace penstock::graph
