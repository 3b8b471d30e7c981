// Parameters that several stages use: sums of their gradients over any placement of the stages, ranks without
// a gradient, kinds of parameters, and invalid ties, which fail on every rank.
#include "penstock/shared_parameters.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/gradients.h"
#include "penstock/pipeline.h"
#include "penstock/torch/tree/distributed_type.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"
#include "tests/throws.h"

namespace penstock {
namespace shared_parameters_test {

using namespace std::chrono_literals;
using test::has_text;
using test::message_of;

at::Tensor parameter(std::vector<std::int64_t> shape = {3}, bool trainable = true) {
  return at::zeros(shape).set_requires_grad(trainable);
}

// Stages of each rank.
using Placed = std::vector<std::vector<int>>;

// Values whose sum in float32 depends on the order.
at::Tensor gradient_of(int stage) {
  static const std::vector<float> values = {1e8f, 1.f, -1e8f, 3.f, 0.1f, 7e7f};
  return at::full({3}, values.at(static_cast<std::size_t>(stage)));
}

// Sums the gradients of one table, of which every stage has a copy. `has` selects the stages with a gradient.
// Returns the result of the first uses of all ranks.
template <class Has>
std::vector<at::Tensor> summed(const Placed& placed, const Has& has) {
  std::vector<at::Tensor> sums(placed.size());
  comm::run_ranks(static_cast<int>(placed.size()), 20s, [&](comm::World& world) {
    std::vector<ParameterUse> uses;
    for (const int stage : placed[static_cast<std::size_t>(world.rank())])
      uses.push_back({"table", stage, parameter()});
    SharedParameters shared({tie({"table"})}, uses, {world});
    for (const ParameterUse& use : uses)
      if (has(use.stage)) use.parameter.mutable_grad() = gradient_of(use.stage).clone();
    shared.sum_gradients();
    if (uses.empty()) return;
    sums[static_cast<std::size_t>(world.rank())] = uses.front().parameter.grad();
    for (std::size_t i = 1; i < uses.size(); ++i) EXPECT_FALSE(uses[i].parameter.grad().defined());
  });
  return sums;
}

TEST(SharedParameters, SumsInTheOrderOfStagesWhereverTheyAre) {
  at::Tensor expected = gradient_of(0);
  for (int stage = 1; stage < 4; ++stage) expected = expected + gradient_of(stage);
  EXPECT_FALSE(expected.equal(gradient_of(3) + gradient_of(2) + gradient_of(1) + gradient_of(0)));
  for (const Placed& placed : {Placed{{0}, {1}, {2}, {3}}, Placed{{0, 3}, {1, 2}}, Placed{{0, 2}, {1, 3}},
                               Placed{{0, 1, 2, 3}}, Placed{{3}, {0}, {}, {1, 2}}})
    for (const at::Tensor& sum : summed(placed, [](int) { return true; })) {
      if (sum.defined()) {
        EXPECT_TRUE(sum.equal(expected)) << sum << expected;
      }
    }
}

TEST(SharedParameters, AUseWithoutAGradientCountsAsZeros) {
  for (const Placed& placed :
       {Placed{{0}, {1}, {2}}, Placed{{0, 2}, {1}}, Placed{{0}, {1}}, Placed{{0, 1}}}) {
    int stages = 0;
    for (const auto& each : placed) stages += static_cast<int>(each.size());
    for (int mask = 0; mask < 1 << stages; ++mask) {
      SCOPED_TRACE(mask);
      at::Tensor expected = at::zeros({3});
      for (int stage = 0; stage < stages; ++stage)
        if (mask >> stage & 1) expected = expected + gradient_of(stage);
      for (const at::Tensor& sum : summed(placed, [&](int stage) { return (mask >> stage & 1) != 0; })) {
        ASSERT_EQ(sum.defined(), mask != 0);
        if (mask != 0) {
          EXPECT_TRUE(sum.equal(expected)) << sum << expected;
        }
      }
    }
  }
}

// Autograd adds the gradients of a tensor that a stage has under two names; the tie must not do it again.
TEST(SharedParameters, TwoNamesOfOneTensorAreOneUse) {
  for (const std::int64_t elements : {std::int64_t{3}, std::int64_t{300'000}}) {
    std::vector<at::Tensor> sums(2);
    comm::run_ranks(2, 20s, [&](comm::World& world) {
      const at::Tensor table = parameter({elements});
      std::vector<ParameterUse> uses{{world.rank() == 0 ? "embed" : "head", world.rank(), table}};
      if (world.rank() == 1) uses.push_back({"second head", 1, table});
      SharedParameters shared({tie({"embed", "head", "second head"})}, uses, {world});
      table.mutable_grad() = at::full({elements}, world.rank() == 0 ? 1.0 : 10.0);
      shared.sum_gradients();
      sums[static_cast<std::size_t>(world.rank())] = table.grad();
      EXPECT_TRUE(shared.further_uses().empty());
      EXPECT_EQ(shared.each_once({{"head", table}, {"second head", table}}).size(), 1u);
    });
    for (const at::Tensor& sum : sums) EXPECT_TRUE(sum.equal(at::full({elements}, 11.0))) << sum;
  }
}

TEST(SharedParameters, LargeOnesAreTheSameOnAllRanks) {
  constexpr std::int64_t kElements = 300'000;
  std::vector<at::Tensor> sums(3);
  comm::run_ranks(3, 20s, [&](comm::World& world) {
    const ParameterUse use{"table", world.rank(), parameter({kElements})};
    SharedParameters shared({tie({"table"})}, {use}, {world});
    use.parameter.mutable_grad() =
        at::randn({kElements}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(world.rank())));
    shared.sum_gradients();
    sums[static_cast<std::size_t>(world.rank())] = use.parameter.grad();
  });
  at::Tensor expected = at::zeros({kElements});
  for (std::uint64_t rank = 0; rank < 3; ++rank)
    expected += at::randn({kElements}, at::detail::createCPUGenerator(rank));
  for (const at::Tensor& sum : sums) {
    EXPECT_TRUE(sum.equal(sums[0]));
    EXPECT_TRUE(at::allclose(sum, expected, 1e-6, 1e-6));
  }
}

// Only the ranks that have uses communicate, and none if all uses are on one rank.
TEST(SharedParameters, OtherRanksNeedNotTakePart) {
  comm::run_ranks(3, 20s, [](comm::World& world) {
    std::vector<ParameterUse> uses;
    if (world.rank() != 1) uses.push_back({"table", world.rank(), parameter()});
    if (world.rank() == 2) uses.insert(uses.end(), {{"in", 1, parameter()}, {"out", 3, parameter()}});
    SharedParameters shared({tie({"table"}), tie({"in", "out"})}, uses, {world});
    for (const ParameterUse& use : uses) use.parameter.mutable_grad() = at::ones({3});
    if (world.rank() == 1) return;
    shared.sum_gradients();
    // Sorted by stage: "in" comes before "table".
    for (const ParameterUse& use : uses) {
      if (use.name == "out") {
        EXPECT_FALSE(use.parameter.grad().defined());
      } else {
        EXPECT_TRUE(use.parameter.grad().equal(at::full({3}, 2.f))) << use.name;
      }
    }
  });
}

TEST(SharedParameters, UsesOnOneRankShareMemory) {
  comm::run_ranks(1, 20s, [](comm::World& world) {
    const std::vector<ParameterUse> uses{
        {"in", 0, parameter()}, {"out", 1, parameter()}, {"else", 0, parameter()}};
    SharedParameters shared({tie({"in", "out"})}, uses, {world});
    EXPECT_EQ(uses[0].parameter.data_ptr(), uses[1].parameter.data_ptr());
    EXPECT_FALSE(shared.is_further_use(uses[0].parameter));
    EXPECT_TRUE(shared.is_further_use(uses[1].parameter));
    EXPECT_TRUE(shared.counts(uses[0].parameter));
    EXPECT_FALSE(shared.counts(uses[1].parameter));
    EXPECT_TRUE(shared.counts(uses[2].parameter));
    EXPECT_FALSE(shared.is_shared(uses[2].parameter));
    const auto once = shared.each_once(
        {{"in", uses[0].parameter}, {"else", uses[2].parameter}, {"out", uses[1].parameter}});
    ASSERT_EQ(once.size(), 2U);
    EXPECT_EQ(once[0].name, "in");
    EXPECT_EQ(once[1].name, "else");
    uses[1].parameter.mutable_grad() = at::ones({3});
    shared.clear_gradients();
    EXPECT_FALSE(uses[1].parameter.grad().defined());
    EXPECT_TRUE(shared.report().empty());
  });
}

// Two copies of four parts, as DualPipe places them; both copies of a part have the same gradient.
TEST(SharedParameters, CopiesOfBidirectionalPipelinesCountOnce) {
  const Placed placed{{0, 3}, {1, 2}, {1, 2}, {0, 3}};
  const at::Tensor expected = ((gradient_of(0) + gradient_of(1)) + gradient_of(2)) + gradient_of(3);
  for (const at::Tensor& sum : summed(placed, [](int) { return true; })) EXPECT_TRUE(sum.equal(expected));
  std::mutex mutex;
  int counted = 0;
  comm::run_ranks(4, 20s, [&](comm::World& world) {
    std::vector<ParameterUse> uses;
    for (const int part : placed[static_cast<std::size_t>(world.rank())])
      if (part == 0 || part == 3) uses.push_back({part == 0 ? "in" : "out", part, parameter()});
    SharedParameters shared({tie({"in", "out"})}, uses, {world});
    for (const ParameterUse& use : uses) use.parameter.mutable_grad() = gradient_of(use.stage).clone();
    if (uses.empty()) return;
    // The rank that has both needs no other one.
    shared.sum_gradients();
    const std::lock_guard lock(mutex);
    for (const ParameterUse& use : uses) counted += shared.counts(use.parameter);
    if (world.rank() == 0) {
      EXPECT_EQ(
          shared.report(),
          (std::vector<std::string>{"shared parameter in, out: 2 uses at stages 0, 3; gradients are added on "
                                    "rank 0, without communication and on rank 3, without communication"}));
    }
  });
  EXPECT_EQ(counted, 1);
}

// A part of a model whose first and last layer are one, between blocks that have a copy of one table each.
struct PartImpl : torch::nn::Module {
  PartImpl(int the_part, int parts) : part(the_part) {
    if (part == 0) in = register_parameter("in", test::values({test::kWidth, test::kWidth}, 3));
    if (part == parts - 1) out = register_parameter("out", test::values({test::kWidth, test::kWidth}, 3));
    table = register_parameter("table", test::values({test::kWidth}, 4));
    block = register_module("block", test::Block(part));
  }
  at::Tensor forward(at::Tensor x) {
    if (in.defined()) x = x.matmul(in);
    x = block->forward(x * table);
    return out.defined() ? x.matmul(out) : x;
  }
  int part;
  at::Tensor in, out, table;
  test::Block block{nullptr};
};
TORCH_MODULE(Part);

TEST(SharedParameters, BidirectionalPipelinesAreEqualToOneProcess) {
  constexpr int kRanks = 4, kMicrobatches = 8;
  const test::Batch batch = test::plain_batch(0, 2 * kMicrobatches);
  std::map<std::string, at::Tensor> expected;
  {
    std::vector<Part> parts;
    at::Tensor x = batch.args[0].tensor();
    for (int part = 0; part < kRanks; ++part) x = parts.emplace_back(part, kRanks)->forward(x);
    test::square_loss()(Tree(x), batch.target).backward();
    expected["in"] = parts.front()->in.grad() + parts.back()->out.grad();
    expected["table"] = at::zeros({test::kWidth});
    for (const Part& part : parts) expected["table"] += part->table.grad();
  }
  const schedule::Schedule schedule = schedule::generate(
      schedule::ScheduleKind::DualPipe,
      {.ranks = kRanks, .stages_per_rank = 2, .microbatches = kMicrobatches, .group_size = {}});
  std::map<std::string, int> counted;
  std::mutex mutex;
  comm::run_ranks(kRanks, 30s, [&](comm::World& world) {
    std::vector<PipelineStage> stages;
    for (const int index : schedule.stages().stages_of(world.rank()))
      stages.emplace_back(StageModule(Part(index % kRanks, kRanks)), index, 2 * kRanks, at::kCPU);
    SharedParameters shared({tie({"in", "out"}), tie({"table"})}, parameter_uses(stages, schedule.stages()),
                            {world});
    PipelineRuntime pipeline(stages, schedule, test::square_loss(), {world});
    pipeline.step(batch.args, batch.kwargs, batch.target);
    shared.sum_gradients();
    std::vector<optim::NamedParameter> named;
    for (const ParameterUse& use : parameter_uses(stages)) named.push_back({use.name, use.parameter});
    const std::lock_guard lock(mutex);
    for (const optim::NamedParameter& each : shared.each_once(named)) {
      if (!shared.is_shared(each.tensor)) continue;
      EXPECT_TRUE(at::allclose(each.tensor.grad(), expected.at(each.name), 1e-4, 1e-6))
          << each.name << " on rank " << world.rank() << each.tensor.grad() << expected.at(each.name);
      counted[each.name] += shared.counts(each.tensor);
    }
  });
  EXPECT_EQ(counted, (std::map<std::string, int>{{"in", 1}, {"table", 1}}));
}

TEST(SharedParameters, TheReportNamesUsesAndRanks) {
  comm::run_ranks(4, 20s, [](comm::World& world) {
    std::vector<ParameterUse> uses{{"relations", world.rank(), parameter()}};
    if (world.rank() == 0 || world.rank() == 3)
      uses.push_back({world.rank() == 0 ? "embed" : "head", world.rank(), parameter({2, 2})});
    if (world.rank() == 2) uses.push_back({"alone", 2, parameter()});
    const SharedParameters shared({tie({"embed", "head"}), tie({"relations"}), tie({"alone"})}, uses,
                                  {world});
    EXPECT_EQ(
        shared.report(),
        (std::vector<std::string>{
            "shared parameter embed, head: 2 uses at stages 0, 3; gradients are added on ranks 0, 3",
            "shared parameter relations: 4 uses at stages 0, 1, 2, 3; gradients are added on ranks 0, 1, 2, "
            "3"}));
  });
}

// The error of all ranks of three; `make` returns the ties and uses of one.
struct Declared {
  std::vector<ParameterTie> ties;
  std::vector<ParameterUse> uses;
};
template <class Make>
std::string refusal(const Make& make) {
  std::set<std::string> texts;
  std::mutex mutex;
  comm::run_ranks(3, 20s, [&](comm::World& world) {
    const Declared declared = make(world.rank());
    const std::string text =
        message_of<ValueError>([&] { SharedParameters(declared.ties, declared.uses, {world}); });
    const std::lock_guard lock(mutex);
    texts.insert(text);
  });
  EXPECT_EQ(texts.size(), 1U);
  return *texts.begin();
}

TEST(SharedParameters, InvalidTiesFailOnEveryRank) {
  const auto pair = [](at::Tensor first, at::Tensor last) {
    return refusal([=](int rank) {
      std::vector<ParameterUse> uses;
      if (rank == 0) uses = {{"embed", 0, first}};
      if (rank == 2) uses = {{"head", 2, last}};
      return Declared{{tie({"embed", "head"})}, uses};
    });
  };
  const std::string shapes = pair(parameter({4, 2}), parameter({2, 4}));
  EXPECT_TRUE(has_text(shapes, "tie of (embed, head): head of stage 2 on the pipeline's rank 2"));
  EXPECT_TRUE(has_text(shapes, "Float[2, 4], trainable"));
  EXPECT_TRUE(has_text(shapes, "Float[4, 2], trainable, as embed of stage 0 on the pipeline's rank 0"));
  EXPECT_TRUE(has_text(pair(parameter(), parameter({3}, false)), "Float[3], frozen"));
  EXPECT_TRUE(has_text(pair(parameter(), at::zeros({3}, at::kDouble).set_requires_grad(true)), "Double[3]"));
  EXPECT_TRUE(has_text(refusal([](int rank) {
                         return Declared{{tie({"embed", "haed"})}, {{"embed", rank, parameter()}}};
                       }),
                       "got haed, which no stage has"));
  EXPECT_TRUE(has_text(refusal([](int rank) {
                         return Declared{{tie({rank == 1 ? "a" : "b"})}, {{"b", rank, parameter()}}};
                       }),
                       "tie 0 of the pipeline's rank 1: got (a), expected (b)"));
  EXPECT_TRUE(has_text(refusal([](int) { return Declared{{tie({})}, {}}; }), "no names"));
  EXPECT_TRUE(has_text(refusal([](int rank) {
                         return Declared{{tie({"a"}), tie({"b", "a"})}, {{"a", rank, parameter()}}};
                       }),
                       "a, which is named twice"));
  // The second copy of a part on one rank, without its other parts.
  EXPECT_TRUE(has_text(refusal([](int rank) {
                         return Declared{{tie({"a"})}, {{"a", rank == 2 ? 0 : rank, parameter()}}};
                       }),
                       "1 of 2 uses on the pipeline's ranks 2"));
}

// Two pipelines of two stages; the parameters of a stage are split over two ranks.
template <class Prepare>
void expect_split_ties_work(const Prepare& prepare) {
  comm::run_ranks(4, 20s, [&](comm::World& world) {
    const comm::MeshGroups grid = world.mesh("cpu", {{"pp", 2}, {"inner", 2}});
    const int stage = world.rank() / 2;
    torch::nn::Linear layer(torch::nn::LinearOptions(4, 6).bias(false));
    {
      const at::NoGradGuard no_grad;
      layer->weight.fill_(1 + stage);
    }
    prepare(layer, grid.with_mesh(grid.mesh()["inner"]));
    SharedParameters shared({tie({"weight"})}, {{"weight", stage, layer->weight}},
                            {world, {world.rank() % 2, world.rank() % 2 + 2}});
    shared.copy_values();
    ASSERT_TRUE(is_dtensor(layer->weight));
    EXPECT_TRUE(full_tensor(layer->weight.detach()).equal(at::ones({6, 4})));
    const at::Tensor whole = at::arange(24.f).reshape({6, 4}) * (1 + stage);
    layer->weight.mutable_grad() =
        distribute_tensor(whole, mesh_of(layer->weight), placements_of(layer->weight));
    shared.sum_gradients();
    EXPECT_TRUE(full_tensor(layer->weight.grad()).equal(at::arange(24.f).reshape({6, 4}) * 3));
    EXPECT_EQ(shared.counts(layer->weight), stage == 0);
    const optim::ClipResult norm = optim::clip_grad_norm(
        {{"weight", layer->weight}}, 1e9,
        {.groups = {grid.group("pp")},
         .counts = [&](const optim::NamedParameter& each) { return shared.counts(each.tensor); }});
    EXPECT_NEAR(norm.value(), (at::arange(24., at::kDouble) * 3).norm().item<double>(), 1e-5);
  });
}

TEST(SharedParameters, TensorParallelOnes) {
  expect_split_ties_work([](torch::nn::Linear& layer, const comm::MeshGroups& mesh) {
    layer->weight = distribute_tensor(layer->weight.detach(), mesh, {Shard{0}}).set_requires_grad(true);
  });
}

TEST(SharedParameters, ShardedOnes) {
  expect_split_ties_work(
      [](torch::nn::Linear& layer, const comm::MeshGroups& mesh) { fully_shard(*layer, mesh); });
}

}  // namespace shared_parameters_test
}  // namespace penstock
