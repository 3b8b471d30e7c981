// What passes between stages: memory layouts, skip connections, announced shapes, thousands of tensors.
// Random models are compared with one process.
#include <gtest/gtest.h>

#include <mutex>
#include <random>
#include <set>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/pipeline/runtime/channel_groups.h"
#include "penstock/step_context.h"
#include "penstock/torch/tree/dense_layout.h"
#include "penstock/world.h"
#include "tests/pipeline/parity_check.h"

namespace penstock {
namespace border_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::Batch;
using test::Block;
using test::kWidth;
using test::Layout;
using test::OneProcess;
using test::Outcome;
using test::Scenario;
using Dims = std::vector<std::int64_t>;

// Random numbers that are the same on every rank that requests the same thing.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  int below(int count) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(count)); }
  bool one_in(int count) { return below(count) == 0; }
  Dims order(int dims) {
    Dims found(static_cast<std::size_t>(dims));
    for (std::size_t i = 0; i < found.size(); ++i) found[i] = static_cast<std::int64_t>(i);
    for (std::size_t i = found.size(); i-- > 1;)
      std::swap(found[i], found[static_cast<std::size_t>(below(static_cast<int>(i) + 1))]);
    return found;
  }

 private:
  std::mt19937_64 engine_;
};

Dims inverse(const Dims& order) {
  Dims found(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    found[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
  return found;
}

const std::vector<Layout> kLayouts = {{ScheduleKind::OneFOneB, 4},
                                      {ScheduleKind::GPipe, 3},
                                      {ScheduleKind::Interleaved1F1B, 2},
                                      {ScheduleKind::ZBVZeroBubble, 2},
                                      {ScheduleKind::DualPipeV, 2}};

// Runs random scenarios through every schedule. The number of a scenario is its seed.
void expect_parity(int cases, const std::function<Scenario(std::uint64_t)>& make, bool exact) {
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(schedule::to_text(layout.kind));
    std::vector<Scenario> scenarios;
    for (int i = 0; i < cases; ++i)
      scenarios.push_back(
          make(static_cast<std::uint64_t>(i) * 100 + static_cast<std::uint64_t>(layout.kind)));
    std::vector<Outcome> outcomes(scenarios.size());
    std::mutex mutex;
    std::size_t running = 0;
    try {
      comm::run_ranks(layout.ranks, 60s, [&](comm::World& world) {
        for (std::size_t i = 0; i < scenarios.size(); ++i) {
          if (world.rank() == 0) running = i;
          test::run_pipeline(world, scenarios[i], layout, outcomes[i], mutex);
        }
      });
    } catch (const std::exception& error) {
      FAIL() << scenarios[running].name << ": " << error.what();
    }
    for (std::size_t i = 0; i < scenarios.size(); ++i) {
      SCOPED_TRACE(scenarios[i].name);
      test::expect_same(outcomes[i], OneProcess(scenarios[i], layout.parts()).run(layout.microbatches()),
                        layout, exact);
    }
  }
}

// -------------------------------------------------------------------------------------------------------------------------
// skips

struct SkipModel {
  SkipModel(std::uint64_t seed, int stages) {
    Dice dice(seed);
    const int count = 1 + dice.below(4);
    for (int i = 0; i < count; ++i) {
      // Sometimes one that begins or ends where another one does.
      int from = dice.below(stages - 1);
      if (i > 0 && dice.one_in(3)) from = skips.back().from;
      int to = from + 1 + dice.below(stages - 1 - from);
      if (i > 0 && dice.one_in(3) && skips.back().to > from) to = skips.back().to;
      skips.push_back({"skip" + std::to_string(i), from, to});
    }
    for (int stage = 0; stage < stages; ++stage) {
      announced.push_back(dice.one_in(3));
      selects.push_back(dice.one_in(6));
      validates.push_back(dice.one_in(8));
    }
  }
  std::vector<SkipTensor> skips;
  std::vector<bool> announced, selects, validates;
};

Scenario skip_scenario(std::uint64_t seed) {
  Scenario scenario;
  scenario.name = "skips of seed " + std::to_string(seed);
  scenario.module = [seed](int stage, int stages) {
    Block block(stage);
    return StageModule(
        [block, stage, stages, model = SkipModel(seed, stages)](const Tree& args, const Tree&) mutable {
          at::Tensor h = args[0].tensor();
          // Selects rows by their values: their number is not known in advance.
          if (model.selects[static_cast<std::size_t>(stage)]) h = h.index({h.select(1, 0).gt(-0.3)});
          for (std::size_t i = 1; i < args.size(); ++i)
            h = h + 0.1 * static_cast<double>(i) * args[i].tensor().sin().sum(0, true);
          h = block->forward(h);
          std::vector<Tree> outputs = {h};
          for (const SkipTensor& skip : model.skips)
            if (skip.from == stage)
              outputs.emplace_back((h * (0.5 + static_cast<double>(outputs.size()))).cos());
          return stage == stages - 1 ? Tree(h) : Tree::tuple(outputs);
        },
        {block.ptr()});
  };
  scenario.batch = [](int step, int m) { return test::plain_batch(step, 3 * m); };
  scenario.loss = PipelineLoss([](const Tree& output, const Tree&) { return output.tensor().pow(2).sum(); });
  scenario.skips = [seed](int stages) { return SkipModel(seed, stages).skips; };
  scenario.options = [seed](int stage, int stages) {
    const SkipModel model(seed, stages);
    StageOptions options;
    options.announce_shapes = model.announced[static_cast<std::size_t>(stage)];
    options.validate = model.validates[static_cast<std::size_t>(stage)];
    return options;
  };
  return scenario;
}

TEST(Skips, OfAnyKindEqualOneProcess) { expect_parity(20, skip_scenario, true); }

TEST(Skips, PastAStageThatAnnouncesItsShapes) {
  Scenario scenario;
  scenario.name = "0 to 2, stage 1 announces";
  scenario.module = [](int stage, int) {
    Block block(stage);
    return StageModule(
        [block, stage](const Tree& args, const Tree&) mutable {
          const at::Tensor h = block->forward(args[0].tensor());
          if (stage == 0) return Tree::tuple({h, h.sin()});
          return Tree(stage == 2 ? h * args[1].tensor() : h);
        },
        {block.ptr()});
  };
  scenario.batch = [](int step, int m) { return test::plain_batch(step, 2 * m); };
  scenario.loss = test::square_loss();
  scenario.skips = [](int) { return std::vector<SkipTensor>{{"early", 0, 2}}; };
  scenario.options = [](int stage, int) {
    StageOptions options;
    options.announce_shapes = stage == 1;
    return options;
  };
  const Layout layout{ScheduleKind::OneFOneB, 3};
  Outcome outcome;
  std::mutex mutex;
  comm::run_ranks(3, 20s,
                  [&](comm::World& world) { test::run_pipeline(world, scenario, layout, outcome, mutex); });
  test::expect_same(outcome, OneProcess(scenario, 3).run(layout.microbatches()), layout);
}

// -----------------------------------------------------------------------------------------------------------------------
// layouts

// How a tensor is laid out when it leaves a stage, and how the next one reads it.
struct LayoutOf {
  enum Kind {
    Same,
    Permuted,
    ChannelsLast,
    DenseInOrder,
    Gaps,
    Expanded,
    Windows,
    Empty,
    Scalar,
    OneWide,
    Integers,
    Conjugated,
    kKinds
  };
  int kind;
  Dims order;

  static const char* name(int kind) {
    constexpr const char* kNames[] = {"same",   "permuted", "channels-last", "dense",
                                      "gaps",   "expanded", "windows",       "empty",
                                      "scalar", "one wide", "integers",      "conjugated"};
    return kNames[kind];
  }
  // Of x, which is contiguous: [rows, 3, 4, 2].
  at::Tensor make(const at::Tensor& x) const {
    switch (kind) {
      case Permuted:
        return x.permute(order);
      case ChannelsLast:
        return x.contiguous(at::MemoryFormat::ChannelsLast);
      case DenseInOrder:
        return x.permute(order).contiguous().permute(inverse(order));
      case Gaps:
        return at::stack({x, x * 2}, -1).select(-1, 0).permute(order).permute(inverse(order));
      case Expanded:
        return x.permute(order).unsqueeze(1).expand({-1, 3, -1, -1, -1});
      case Windows:
        return x.unfold(2, 2, 1);
      case Empty:
        return x.narrow(2, 0, 0).permute(order);
      case Scalar:
        return x.sin().mean();
      case OneWide:
        return x.unsqueeze(0).transpose(0, 2).contiguous().transpose(0, 2);
      case Integers:
        return x.detach().mul(100).to(at::kLong).permute(order);
      case Conjugated:
        return at::complex(x, x * 0.5).permute(order).conj();
      default:
        return x;
    }
  }
  // A tensor that broadcasts against x.
  at::Tensor read(const at::Tensor& t) const {
    switch (kind) {
      case Permuted:
        return t.permute(inverse(order));
      case Expanded:
        return t.mean(1).permute(inverse(order));
      case Windows:
        return t.mean(-1).sum(2, true);
      case Empty:
        return t.sum();
      case OneWide:
        return t.squeeze(0);
      case Integers:
        return t.permute(inverse(order)).to(at::kDouble) * 0.01;
      case Conjugated:
        return at::imag(t).permute(inverse(order)) + 0.3 * at::real(t).permute(inverse(order));
      default:
        return t;
    }
  }
  bool is_dense() const { return kind != Gaps && kind != Expanded && kind != Windows; }
};

// One dim, in memory order. A view: fails if the memory of a tensor that should be dense is not.
at::Tensor in_memory_order(const at::Tensor& t) {
  Dims dims(static_cast<std::size_t>(t.dim()));
  for (std::size_t i = 0; i < dims.size(); ++i) dims[i] = static_cast<std::int64_t>(i);
  std::stable_sort(dims.begin(), dims.end(),
                   [&](std::int64_t a, std::int64_t b) { return t.stride(a) > t.stride(b); });
  return t.permute(dims).view({-1});
}

struct LayoutModel {
  LayoutModel(std::uint64_t seed, int stages) {
    Dice dice(seed);
    const bool validated = dice.one_in(3), announced = dice.one_in(3);
    for (int stage = 0; stage < stages; ++stage) {
      auto& border = borders.emplace_back();
      const int count = 1 + dice.below(3);
      for (int i = 0; i < count; ++i) border.push_back({dice.below(LayoutOf::kKinds), dice.order(4)});
      StageOptions& each = options.emplace_back();
      each.validate = validated && dice.one_in(2);
      each.announce_shapes = announced && dice.one_in(2);
      if (dice.one_in(3)) each.trial = TrialRun::Real;
    }
  }
  std::vector<std::vector<LayoutOf>> borders;  // by the stage before the border
  std::vector<StageOptions> options;
};

struct MixImpl : torch::nn::Module {
  explicit MixImpl(int stage) {
    weight = register_parameter("weight", test::values({3, 1, 1}, 300 + stage).to(at::kDouble));
    bias = register_parameter("bias", test::values({4, 2}, 400 + stage).to(at::kDouble) * 0.1);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(x * weight + bias); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Mix);

Scenario layout_scenario(std::uint64_t seed) {
  Scenario scenario;
  scenario.name = "layouts of seed " + std::to_string(seed) + ":";
  const LayoutModel shown(seed, 4);
  for (const auto& border : shown.borders)
    for (const LayoutOf& each : border)
      scenario.name += std::string(&each == border.data() ? " | " : ", ") + LayoutOf::name(each.kind);
  scenario.module = [seed](int stage, int stages) {
    Mix mix(stage);
    return StageModule(
        [mix, stage, stages, model = LayoutModel(seed, stages)](const Tree& args, const Tree&) mutable {
          at::Tensor h;
          if (stage == 0) {
            h = args[0].tensor();
          } else {
            const auto& border = model.borders[static_cast<std::size_t>(stage) - 1];
            h = at::zeros({args[border.size()].tensor().size(0), 3, 4, 2}, at::kDouble);
            h = h + args[border.size()].tensor();
            for (std::size_t i = 0; i < border.size(); ++i) {
              const at::Tensor& t = args[i].tensor();
              h = h + (0.3 + 0.1 * static_cast<double>(i)) * border[i].read(t);
              if (!border[i].is_dense() || t.is_complex()) continue;
              // Another memory order produces another sum.
              const at::Tensor flat = in_memory_order(t);
              h = h + 0.05 * (flat * at::arange(flat.numel(), at::kDouble).cos()).sum();
            }
          }
          h = mix->forward(h).contiguous();
          if (stage == stages - 1) return Tree(h);
          std::vector<Tree> outputs;
          for (const LayoutOf& each : model.borders[static_cast<std::size_t>(stage)])
            outputs.emplace_back(each.make(h));
          outputs.emplace_back(h);
          return Tree::tuple(outputs);
        },
        {mix.ptr()});
  };
  scenario.batch = [](int step, int m) {
    return Batch{Tree::tuple({test::values({2 * m, 3, 4, 2}, 500 + step).to(at::kDouble)}),
                 {},
                 test::values({2 * m, 3, 4, 2}, 600 + step).to(at::kDouble)};
  };
  scenario.loss = test::square_loss();
  scenario.options = [seed](int stage, int stages) {
    return LayoutModel(seed, stages).options[static_cast<std::size_t>(stage)];
  };
  return scenario;
}

TEST(Borders, AnyLayoutEqualsOneProcess) { expect_parity(40, layout_scenario, false); }

StageModule on_trial_or_real(std::function<at::Tensor(at::Tensor)> body) {
  return StageModule([body](at::Tensor x) { return body(x); }, {});
}

// Two stages, on two ranks or on one; returns what `second` reported about its inputs.
Tree run_two(bool one_rank, const StageOptions& options, const std::function<at::Tensor(at::Tensor)>& first,
             const std::function<at::Tensor(at::Tensor)>& second, const at::Tensor& x) {
  Tree output;
  std::mutex mutex;
  comm::run_ranks(one_rank ? 1 : 2, 20s, [&](comm::World& world) {
    std::vector<PipelineStage> stages;
    if (one_rank || world.rank() == 0) stages.emplace_back(on_trial_or_real(first), 0, 2, at::kCPU, options);
    if (one_rank || world.rank() == 1) stages.emplace_back(on_trial_or_real(second), 1, 2, at::kCPU, options);
    PipelineRuntime pipeline = make_pipeline(one_rank ? "interleaved_1f1b" : "gpipe", stages, 2, {}, {world});
    const StepResult result = pipeline.eval(Tree::tuple({x}));
    const std::lock_guard lock(mutex);
    if (result.output) output = *result.output;
  });
  return output;
}

TEST(Borders, ChannelsLastAndPermutedViewsArriveAsTheyLeft) {
  const at::Tensor x = test::values({4, 3, 5, 2}, 3);
  const auto first = [](at::Tensor t) { return (t * 2).contiguous(at::MemoryFormat::ChannelsLast); };
  const auto second = [](at::Tensor t) {
    EXPECT_TRUE(t.is_contiguous(at::MemoryFormat::ChannelsLast)) << t.strides();
    return t.permute({0, 2, 3, 1}).view({t.size(0), -1});
  };
  const at::Tensor expected = (x * 2).permute({0, 2, 3, 1}).reshape({4, -1});
  StageOptions announced;
  announced.announce_shapes = true;
  for (const bool one_rank : {false, true})
    for (const StageOptions& options : {StageOptions(), announced})
      EXPECT_TRUE(run_two(one_rank, options, first, second, x).tensor().equal(expected));
}

TEST(Borders, ExamplesDetermineTheLayout) {
  // Static: the example of stage 0 is channels-last, and so is what arrives; the example of stage 1 agrees.
  comm::run_ranks(2, 20s, [](comm::World& world) {
    const at::Tensor plain = at::empty({2, 3, 5, 2}), last = plain.contiguous(at::MemoryFormat::ChannelsLast);
    StageOptions options;
    options.input_args = {world.rank() == 0 ? plain : last};
    options.output_args = {world.rank() == 0 ? last : plain};
    // Stage 0 nevertheless makes a contiguous output: it is sent as agreed.
    const StageModule module =
        world.rank() == 0 ? on_trial_or_real([](at::Tensor t) { return t * 2; })
                          : on_trial_or_real([](at::Tensor t) {
                              EXPECT_TRUE(t.is_contiguous(at::MemoryFormat::ChannelsLast)) << t.strides();
                              return t + 1;
                            });
    ScheduleGPipe pipeline(PipelineStage(module, world.rank(), 2, at::kCPU, options), 2, {}, {world});
    const at::Tensor x = test::values({4, 3, 5, 2}, 3);
    const StepResult result = pipeline.eval(Tree::tuple({x}));
    EXPECT_TRUE(pipeline.report().is_static);
    if (world.rank() == 1) {
      EXPECT_TRUE(result.output->tensor().equal(x * 2 + 1));
    }
  });
}

TEST(Borders, StagesOfOneRankShareTheTensor) {
  std::vector<const void*> made, taken;
  const at::Tensor x = test::values({4, 6, 4}, 3);
  const auto first = [&](at::Tensor t) {
    // A view with gaps, expanded: neither dense nor contiguous.
    const at::Tensor view = (t * 2).narrow(1, 1, 3).unsqueeze(1).expand({-1, 2, -1, -1});
    if (!StepContext::current()->trial) made.push_back(view.data_ptr());
    return view;
  };
  const auto second = [&](at::Tensor t) {
    EXPECT_EQ(t.strides().vec(), (Dims{24, 0, 4, 1}));
    if (!StepContext::current()->trial) taken.push_back(t.data_ptr());
    return t.sum(1);
  };
  for (const TrialRun trial : {TrialRun::Fake, TrialRun::Real}) {
    StageOptions options;
    options.trial = trial;
    EXPECT_TRUE(run_two(true, options, first, second, x).tensor().equal((x * 4).narrow(1, 1, 3)));
  }
  EXPECT_EQ(made, taken);
  EXPECT_EQ(made.size(), 4U);
}

TEST(Borders, NonDenseTensorsArriveDenseInTheirOrder) {
  const at::Tensor x = test::values({4, 6, 4}, 3);
  const auto first = [&](at::Tensor t) {
    return (t * 2).narrow(1, 1, 3).transpose(1, 2).unsqueeze(1).expand({-1, 2, -1, -1});
  };
  const auto second = [&](at::Tensor t) {
    EXPECT_TRUE(is_dense(t.sizes(), t.strides()));
    EXPECT_EQ(t.strides().vec(), first(test::values({2, 6, 4}, 3)).clone().strides().vec());
    return t.sum(1);
  };
  EXPECT_TRUE(run_two(false, {}, first, second, x).tensor().equal((x * 4).narrow(1, 1, 3).transpose(1, 2)));
}

// Records the layout of the gradient that is sent back to it.
struct NoteGradient : torch::autograd::Function<NoteGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::vector<Dims>* notes) {
    context->saved_data["notes"] = reinterpret_cast<std::int64_t>(notes);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (!StepContext::current()->trial)
      reinterpret_cast<std::vector<Dims>*>(context->saved_data["notes"].toInt())
          ->push_back(gradients[0].strides().vec());
    return {gradients[0], at::Tensor()};
  }
};

TEST(Borders, GradientsOfChannelsLastAreChannelsLast) {
  const at::Tensor x = test::values({4, 3, 5, 2}, 3), scale = test::values({3, 1, 1}, 4);
  for (const bool one_rank : {false, true})
    for (const bool announced : {false, true}) {
      std::vector<Dims> notes;
      comm::run_ranks(one_rank ? 1 : 2, 20s, [&](comm::World& world) {
        StageOptions options;
        options.announce_shapes = announced;
        options.trial = TrialRun::Real;
        const at::Tensor weight = at::ones({1}).requires_grad_();
        const StageModule first(
            [&notes, weight](at::Tensor t) {
              return NoteGradient::apply((t * weight).contiguous(at::MemoryFormat::ChannelsLast), &notes);
            },
            {});
        const StageModule second([&scale](at::Tensor t) { return t * scale; }, {});
        std::vector<PipelineStage> stages;
        if (one_rank || world.rank() == 0) stages.emplace_back(first, 0, 2, at::kCPU, options);
        if (one_rank || world.rank() == 1) stages.emplace_back(second, 1, 2, at::kCPU, options);
        PipelineRuntime pipeline =
            make_pipeline(one_rank ? "interleaved_1f1b" : "1f1b", stages, 2, test::square_loss(), {world});
        pipeline.step(Tree::tuple({x}), {}, at::zeros_like(x));
      });
      EXPECT_EQ(notes, (std::vector<Dims>(2, Dims{30, 1, 6, 3}))) << one_rank << announced;
    }
}

TEST(Borders, LocalPartsOfDistributedTensorsKeepTheirStrides) {
  for (const bool selects : {false, true}) {
    at::Tensor output;
    std::mutex mutex;
    const at::Tensor x = test::values({8, kWidth}, 21);
    comm::run_ranks(4, 30s, [&](comm::World& world) {
      const comm::MeshGroups whole(world,
                                   init_device_mesh("cpu", {2, 2}, {"pp", "tp"}, world.rank(), world.size()));
      const comm::MeshGroups columns = whole.with_mesh(whole.mesh()["tp"]);
      const int stage = world.rank() / 2, column = world.rank() % 2;
      StageOptions options;
      options.announce_shapes = selects;
      options.find_mesh = [columns](const auto&) { return columns; };
      const StageModule module = stage == 0 ? on_trial_or_real([=](at::Tensor t) {
        if (selects) t = t.index({t.select(1, 0).gt(0)});
        // The local part is stored column by column.
        const at::Tensor local = t.narrow(1, column * kWidth / 2, kWidth / 2).t().contiguous().t();
        return from_local(local, columns, {Shard{1}});
      })
                                            : on_trial_or_real([=](at::Tensor t) {
                                                EXPECT_EQ(t.size(1), kWidth);
                                                const at::Tensor local = to_local(t);
                                                EXPECT_EQ(local.size(0), t.size(0));
                                                if (local.size(0) > 1) {
                                                  EXPECT_EQ(local.strides().vec(), (Dims{1, local.size(0)}));
                                                }
                                                return full_tensor(t) * 2;
                                              });
      PipelineOptions pipeline_options{world};
      pipeline_options.ranks = {column, 2 + column};
      ScheduleGPipe pipeline(PipelineStage(module, stage, 2, at::kCPU, options), 4, {}, pipeline_options);
      const StepResult result = pipeline.eval(Tree::tuple({x}));
      const std::lock_guard lock(mutex);
      if (world.rank() == 2) output = result.output->tensor();
    });
    EXPECT_TRUE(output.equal((selects ? x.index({x.select(1, 0).gt(0)}) : x) * 2)) << selects;
  }
}

// --------------------------------------------------------------------------------------------------------------------
// many tensors

TEST(Borders, TagsNeverCollide) {
  comm::run_ranks(1, 20s, [](comm::World& world) {
    const schedule::StageMap map =
        schedule::generate(ScheduleKind::Interleaved1F1B,
                           {.ranks = 1, .stages_per_rank = 7, .microbatches = 4, .group_size = {}})
            .stages();
    const ChannelGroups groups(world, {0}, map, {}, comm::P2PTransport::Auto);
    std::set<int> tags;
    std::size_t count = 0;
    for (int stage = 0; stage < 7; ++stage) {
      const Channel channel{Channel::Kind::Activation, stage, stage + 1, -1, 0, 1};
      for (std::size_t tensor = 0; tensor < 3000; ++tensor, ++count) tags.insert(groups.tag(channel, tensor));
      tags.insert(groups.announcement_tag(channel));
      tags.insert(groups.warm_up_tag(channel));
      count += 2;
      EXPECT_LE(groups.tag(channel, groups.most_tensors() - 1), comm::Group::kMaxTag);
      EXPECT_THROW(groups.tag(channel, groups.most_tensors()), ValueError);
    }
    EXPECT_EQ(tags.size(), count);
    EXPECT_GT(groups.most_tensors(), 1'000'000U);
  });
}

void expect_many(int count, bool announced) {
  const at::Tensor x = test::values({2, 3}, 5);
  at::Tensor output;
  std::mutex mutex;
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    std::vector<PipelineStage> stages;
    for (const int index : {world.rank(), world.rank() + 2}) {
      StageOptions options;
      options.announce_shapes = announced;
      const StageModule module(
          [index, count](const Tree& args, const Tree&) {
            at::Tensor sum = at::zeros({1, 3});
            for (std::size_t i = 0; i < args.size(); ++i)
              sum = sum + args[i].tensor() * static_cast<double>(i % 7 + 1);
            if (index % 2 == 1) return Tree(sum / count);
            std::vector<Tree> outputs;
            for (int i = 0; i < count; ++i) outputs.emplace_back(sum + i);
            return Tree::tuple(outputs);
          },
          {});
      stages.emplace_back(module, index, 4, at::kCPU, options);
    }
    PipelineRuntime pipeline = make_pipeline("interleaved_1f1b", stages, 2, {}, {world});
    const StepResult result = pipeline.eval(Tree::tuple({x}));
    const std::lock_guard lock(mutex);
    if (result.output) output = result.output->tensor();
  });
  at::Tensor expected = x;
  for (int border = 0; border < 2; ++border) {
    at::Tensor sum = at::zeros({2, 3}, at::kDouble);
    for (int i = 0; i < count; ++i) sum = sum + (expected.to(at::kDouble) + i) * (i % 7 + 1);
    expected = sum / count;
  }
  EXPECT_TRUE(at::allclose(output.to(at::kDouble), expected, 1e-4, 1e-3)) << output << expected;
}

TEST(Borders, ThousandsOfTensors) { expect_many(2100, false); }
TEST(Borders, MoreThanAThousandAnnouncedTensors) { expect_many(1100, true); }

}  // namespace border_test
}  // namespace penstock
