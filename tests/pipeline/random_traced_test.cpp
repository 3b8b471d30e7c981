// Random models whose results depend on the step, the mode, the example and autocast, traced and cut at
// random places, equal the module itself stage by stage under random StepContexts: results, gradients and
// buffers, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "penstock/dropout.h"
#include "penstock/errors.h"
#include "penstock/step_context.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/trace_pipeline.h"
#include "tests/graph/random_net.h"
#include "tests/has_text.h"
#include "tests/pipeline/traced_models.h"

namespace penstock {
namespace random_traced_test {

using test::kNetWidth;
using test::values;

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  int below(int count) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(count)); }
  bool one_in(int count) { return below(count) == 0; }

 private:
  std::mt19937_64 engine_;
};

struct MixedLayerImpl : torch::nn::Module {
  enum Kind { Dense, Keyed, Dropped, Normed, Masked, Scaled, Added, Function, Nested, Cast, kKinds };

  MixedLayerImpl(Kind kind, int number, bool reports, bool frozen)
      : kind(kind), number(number), reports(reports), frozen(frozen) {
    const auto dense = [&](int which) {
      torch::nn::Linear made(kNetWidth, kNetWidth);
      const at::NoGradGuard no_grad;
      made->weight.copy_(values({kNetWidth, kNetWidth}, 100 * number + which) * 0.5);
      made->bias.copy_(values({kNetWidth}, 100 * number + which + 50) * 0.1);
      return made;
    };
    const KeyedDropoutOptions keyed_options(0.4, static_cast<std::int64_t>(number));
    if (kind == Dense || kind == Cast) linear = register_module("linear", dense(0));
    if (kind == Keyed) keyed = register_module("keyed", KeyedDropout(keyed_options));
    if (kind == Dropped) dropped = register_module("dropped", torch::nn::Dropout(0.3));
    if (kind == Normed) norm = register_module("norm", torch::nn::BatchNorm1d(kNetWidth));
    if (kind == Masked || kind == Scaled || kind == Function)
      gain = register_parameter("gain", values({kNetWidth}, 100 * number));
    if (kind == Nested)
      nested = register_module("nested", torch::nn::Sequential(dense(1), KeyedDropout(keyed_options),
                                                               torch::nn::Tanh(), dense(2)));
  }

  at::Tensor forward(const at::Tensor& x, const at::Tensor& before, const Tree& kwargs) {
    std::optional<ModuleScope> scope;
    if (reports) scope.emplace(*this);
    switch (kind) {
      case Dense:
        return torch::tanh(linear->forward(x));
      case Keyed:
        return keyed->forward(x);
      case Dropped:
        return dropped->forward(x) * 1.5;
      case Normed:
        return norm->forward(x);
      case Masked: {
        const Tree* mask = kwargs.find("mask");
        return mask && mask->is_tensor() ? x * mask->tensor() * gain : x - gain;
      }
      case Scaled:
        return x * gain * kwargs["by"].number();
      case Added:
        return x + 0.5 * before;
      case Function:
        return test::CubeFunction::apply(x.tanh(), gain.sum());
      case Nested:
        return nested->forward(x);
      case Cast: {
        const AutocastScope casts(at::kCPU, at::kBFloat16);
        return linear->forward(x).to(x.scalar_type());
      }
      default:
        throw InvariantError("an unknown kind");
    }
  }

  // Modules in evaluation stay in it while the others are trained.
  void set_mode(bool training) {
    train(training);
    if (norm && frozen) norm->eval();
  }

  const Kind kind;
  const int number;
  const bool reports, frozen;
  torch::nn::Linear linear{nullptr};
  KeyedDropout keyed{nullptr};
  torch::nn::Dropout dropped{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Sequential nested{nullptr};
  at::Tensor gain;
};

struct MixedNetImpl : torch::nn::Module {
  explicit MixedNetImpl(std::uint64_t seed) {
    Dice dice(seed);
    const int count = 5 + dice.below(6);
    for (int i = 0; i < count; ++i) {
      const auto kind = i % 3 == 0 ? MixedLayerImpl::Dense
                                   : static_cast<MixedLayerImpl::Kind>(dice.below(MixedLayerImpl::kKinds));
      layers.push_back(std::make_shared<MixedLayerImpl>(kind, i, dice.one_in(2), dice.one_in(2)));
      register_module("layer" + std::to_string(i), layers.back());
      from.push_back(dice.below(i + 1));
    }
    gain = register_parameter("gain", values({kNetWidth}, 77));
    set_mode(true);
  }
  at::Tensor forward(const at::Tensor& x, const Tree& kwargs) {
    std::vector<at::Tensor> made = {x};
    for (std::size_t i = 0; i < layers.size(); ++i)
      made.push_back(layers[i]->forward(made.back(), made[static_cast<std::size_t>(from[i])], kwargs));
    return torch::relu(made.back()) * gain;
  }
  void set_mode(bool training) {
    train(training);
    for (const auto& layer : layers) layer->set_mode(training);
  }
  std::vector<std::shared_ptr<MixedLayerImpl>> layers;
  std::vector<int> from;
  at::Tensor gain;
};

// The stages of a pipe in one process. Each gets the keyword arguments that Pipe::keywords names.
class StageByStage {
 public:
  explicit StageByStage(const Pipe& pipe) : pipe_(pipe), skips_(pipe.skips()) {
    for (int stage = 0; stage < pipe.stages(); ++stage)
      stages_.push_back(stage_module(pipe, stage, at::kCPU));
  }

  at::Tensor forward(const at::Tensor& x, const Tree& kwargs) {
    arrived_.assign(stages_.size(), {});
    results_.assign(stages_.size(), {});
    std::vector<at::Tensor> main = {x};
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      std::vector<Tree> inputs(main.begin(), main.end());
      for (std::size_t skip = 0; skip < skips_.size(); ++skip)
        if (static_cast<std::size_t>(skips_[skip].to) == s) {
          arrived_[s].push_back(skipping_.at(skip));
          inputs.emplace_back(skipping_.at(skip));
        }
      if (s > 0) arrived_[s].insert(arrived_[s].begin(), main.begin(), main.end());
      const Tree result = stages_[s].forward(Tree::tuple(inputs), of_stage(static_cast<int>(s), kwargs));
      if (s + 1 == stages_.size()) return result.tensor();
      results_[s] = tensors_of(result);
      skipping_.resize(skips_.size());
      std::size_t leaving = 0;
      for (const auto& skip : skips_) leaving += static_cast<std::size_t>(skip.from) == s ? 1 : 0;
      main.clear();
      std::size_t next = 0;
      for (; next + leaving < results_[s].size(); ++next) main.push_back(as_leaf(results_[s][next]));
      for (std::size_t skip = 0; skip < skips_.size(); ++skip)
        if (static_cast<std::size_t>(skips_[skip].from) == s) skipping_[skip] = as_leaf(results_[s][next++]);
    }
    throw InvariantError("no stages");
  }

  // After backward() of the last stage.
  void finish_backward() {
    for (std::size_t s = stages_.size() - 1; s-- > 0;) {
      std::vector<at::Tensor> roots, gradients;
      std::size_t leaving = 0;
      for (const auto& skip : skips_) leaving += static_cast<std::size_t>(skip.from) == s ? 1 : 0;
      const std::size_t main = results_[s].size() - leaving;
      const auto add = [&](const at::Tensor& made, const at::Tensor& leaf) {
        if (!leaf.grad().defined()) return;
        roots.push_back(made);
        gradients.push_back(leaf.grad());
      };
      for (std::size_t i = 0; i < main; ++i) add(results_[s][i], arrived_[s + 1][i]);
      std::size_t next = main;
      for (std::size_t skip = 0; skip < skips_.size(); ++skip)
        if (static_cast<std::size_t>(skips_[skip].from) == s) add(results_[s][next++], skipping_[skip]);
      if (!roots.empty()) torch::autograd::backward(roots, gradients);
    }
  }

  void set_mode(bool training, const std::set<std::string>& frozen) {
    for (const StageModule& stage : stages_) {
      stage.modules()[0]->train(training);
      for (const auto& item : stage.modules()[0]->named_modules())
        if (frozen.contains(item.key())) item.value()->eval();
    }
  }

 private:
  static at::Tensor as_leaf(const at::Tensor& tensor) {
    return tensor.detach().set_requires_grad(tensor.requires_grad());
  }
  Tree of_stage(int stage, const Tree& kwargs) const {
    std::vector<Tree::Item> items;
    for (const std::string& name : pipe_.keywords(stage))
      if (const Tree* value = kwargs.find(name)) items.emplace_back(name, *value);
    return Tree::dict(std::move(items));
  }

  const Pipe& pipe_;
  const std::vector<SkipTensor> skips_;
  std::vector<StageModule> stages_;
  std::vector<at::Tensor> skipping_;              // by skip
  std::vector<std::vector<at::Tensor>> arrived_;  // by stage: from the stage before, then skips
  std::vector<std::vector<at::Tensor>> results_;  // by stage
};

StepContext random_step(Dice& dice) {
  StepContext step;
  step.seed = static_cast<std::uint64_t>(dice.below(1000));
  step.step = dice.below(1000);
  step.microbatches = 1 + dice.below(5);
  step.microbatch = dice.below(static_cast<int>(step.microbatches));
  step.loss_scale = dice.one_in(2) ? 1024.0 : 1.0;
  const int replicas = 1 + dice.below(3);
  if (!dice.one_in(3)) step.rows = BatchRows{2 * replicas, 2 * dice.below(replicas), 2};
  return step;
}

struct Example {
  std::int64_t rows;
  bool mask;
  double by;

  at::Tensor x(int number) const { return values({rows, kNetWidth}, 300 + number); }
  Tree kwargs(int number) const {
    return Tree::dict({{"by", by}, {"mask", mask ? Tree(values({rows, 1}, 400 + number)) : Tree()}});
  }
};

PipeSplit random_split(Dice& dice, const MixedNetImpl& net, int stages) {
  if (dice.one_in(2)) return PipeSplit::into(stages);
  std::set<int> at;
  const int dense = static_cast<int>((net.layers.size() + 2) / 3);
  for (int i = 1; i < stages; ++i) at.insert(3 * dice.below(dense));
  std::vector<SplitAt> splits;
  for (const int layer : at) {
    // Before the first layer there is nothing to compute.
    const SplitPoint point = layer == 0 || dice.one_in(2) ? SplitPoint::After : SplitPoint::Before;
    splits.push_back({"layer" + std::to_string(layer), point});
  }
  return PipeSplit::at(std::move(splits));
}

void expect_same(const torch::nn::Module& actual, const torch::nn::Module& expected) {
  const auto a = actual.named_parameters(), b = expected.named_parameters();
  for (std::size_t i = 0; i < b.size(); ++i) {
    const at::Tensor x = a[i].value().grad(), y = b[i].value().grad();
    ASSERT_EQ(x.defined(), y.defined()) << "gradient of " << b[i].key();
    if (y.defined()) {
      EXPECT_TRUE(x.equal(y)) << "gradient of " << b[i].key();
    }
  }
  const auto buffers = actual.named_buffers(), wanted = expected.named_buffers();
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_TRUE(buffers[i].value().equal(wanted[i].value())) << wanted[i].key();
}

void forget_gradients(torch::nn::Module& module) {
  for (at::Tensor& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
}

// What a run compared.
struct Compared {
  int pipes = 0, trainings = 0, evaluations = 0, refused = 0, not_evaluated = 0;
};

void run_one(std::uint64_t seed, Compared& compared) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Dice dice(1000 + seed);
  const auto net = std::make_shared<MixedNetImpl>(seed), original = std::make_shared<MixedNetImpl>(seed);
  std::set<std::string> frozen;
  for (const auto& item : net->named_modules())
    if (!item.value()->is_training()) frozen.insert(item.key());
  std::vector<Example> examples = {{4, dice.one_in(2), 2.0}};
  if (dice.one_in(2)) examples.push_back({4, !examples[0].mask, 2.0});
  if (dice.one_in(2)) examples.push_back({4, examples[0].mask, 3.0});
  if (dice.one_in(2)) examples.push_back({2, examples[0].mask, 2.0});
  TraceOptions options;
  for (std::size_t i = 1; i < examples.size(); ++i)
    options.more.push_back({Tree::tuple({examples[i].x(0)}), examples[i].kwargs(0)});
  std::optional<AutocastScope> casts;
  if (dice.one_in(4)) casts.emplace(at::kCPU, at::kBFloat16);
  std::optional<Pipe> pipe;
  try {
    std::optional<StepGuard> step;
    if (dice.one_in(3)) step.emplace(random_step(dice));
    pipe = trace_pipeline(StageModule(net), Tree::tuple({examples[0].x(0)}), examples[0].kwargs(0),
                          random_split(dice, *net, 1 + dice.below(4)), options);
  } catch (const ValueError&) {
    ++compared.refused;  // two splits at one place, more stages than places
    return;
  }
  ++compared.pipes;
  StageByStage stages(*pipe);
  for (int run = 0; run < 5; ++run) {
    SCOPED_TRACE("run " + std::to_string(run) + "\n" + pipe->to_text());
    const bool training = !dice.one_in(3);
    const Example& example =
        examples[static_cast<std::size_t>(dice.below(static_cast<int>(examples.size())))];
    const at::Tensor x = example.x(run);
    const Tree kwargs = example.kwargs(run);
    net->set_mode(training);
    original->set_mode(training);
    stages.set_mode(training, frozen);
    forget_gradients(*net);
    forget_gradients(*original);
    at::Tensor actual, expected;
    {
      const StepGuard step(random_step(dice));
      torch::manual_seed(seed);
      expected = original->forward(x, kwargs);
      torch::manual_seed(seed);
      try {
        actual = stages.forward(x, kwargs);
      } catch (const ValueError& error) {
        // A border within a dropout has other values in evaluation.
        if (training || !test::has_text(error.what(), "a mode that was not traced")) throw;
        ++compared.not_evaluated;
        continue;
      }
    }
    ASSERT_TRUE(actual.equal(expected)) << (training ? "training" : "evaluation");
    // Backward runs in the context of another microbatch, or outside of any step.
    std::optional<StepGuard> later;
    if (dice.one_in(2)) later.emplace(random_step(dice));
    expected.to(at::kFloat).square().sum().backward();
    actual.to(at::kFloat).square().sum().backward();
    stages.finish_backward();
    expect_same(*net, *original);
    if (::testing::Test::HasFailure()) return;
    ++(training ? compared.trainings : compared.evaluations);
  }
}

TEST(RandomTraced, EqualTheModuleInEveryStepModeAndExample) {
  constexpr int kModels = 120;
  Compared compared;
  for (std::uint64_t seed = 0; seed < kModels; ++seed) {
    run_one(seed, compared);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(compared.pipes * 4, kModels * 3) << compared.refused << " were refused";
  EXPECT_GE(compared.trainings, kModels);
  EXPECT_GE(compared.evaluations, kModels / 2);
  EXPECT_LE(compared.not_evaluated * 3, compared.evaluations);
}

}  // namespace random_traced_test
}  // namespace penstock
