// Where a forward may be cut, what is said about places where it must not be, and the automatic cut.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/module_scope.h"
#include "tests/graph/traced_module.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace cut_places_test {

using test::has_text;
using test::message_of;
using traced_module::traced;
using traced_module::TracedForTest;

struct Activations : torch::nn::Module {
  Activations() {
    first = register_module("first", torch::nn::Linear(3, 3));
    act = register_module("act", torch::nn::ReLU(torch::nn::ReLUOptions(true)));
    second = register_module("second", torch::nn::Linear(3, 3));
    unused = register_module("unused", torch::nn::Linear(3, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = first->forward(x);
    {
      const ModuleScope scope(*act);
      h = act->forward(h);
    }
    return second->forward(h);
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, unused{nullptr};
  torch::nn::ReLU act{nullptr};
};

TracedForTest activations() { return traced(std::make_shared<Activations>(), at::ones({2, 3})); }

std::vector<std::size_t> cut_at(const TracedForTest& model, const std::vector<Split>& splits) {
  const CutPlaces places = model.places();
  std::vector<std::size_t> found;
  std::vector<std::string> names;
  for (const Split& split : splits) {
    found.push_back(places.at(split, model.modules));
    names.push_back((split.side == Split::Side::Before ? "before '" : "after '") + split.module + "'");
  }
  return places.checked(found, names);
}

TEST(CutPlaces, BeforeAndAfterAModule) {
  const TracedForTest model = activations();
  const auto before = cut_at(model, {{"second", Split::Side::Before}});
  EXPECT_EQ(before, cut_at(model, {{"act", Split::Side::After}}));
  EXPECT_EQ(model.trace.module_of_node[before[0]], "second");
}

TEST(CutPlaces, AChainOfWritesInPlaceStaysTogether) {
  const TracedForTest model = activations();
  for (const Split& split : {Split{"act", Split::Side::Before}, Split{"first", Split::Side::After}}) {
    const std::string message = message_of<ValueError>([&] { cut_at(model, {split}); });
    EXPECT_TRUE(has_text(message, "relu_"));
    EXPECT_TRUE(has_text(message, "in module 'act'"));
    EXPECT_TRUE(has_text(message, "in module 'first'"));
  }
}

TEST(CutPlaces, UnknownModulesAndModulesThatDoNotRun) {
  const TracedForTest model = activations();
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         cut_at(model, {{"secnd", Split::Side::Before}});
                       }),
                       "did you mean 'second'?"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         cut_at(model, {{"unused", Split::Side::Before}});
                       }),
                       "in which no operator ran"));
}

TEST(CutPlaces, StagesWithoutOperators) {
  const TracedForTest model = activations();
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         cut_at(model, {{"first", Split::Side::Before}});
                       }),
                       "between the beginning and before 'first'"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         cut_at(model, {{"second", Split::Side::After}});
                       }),
                       "between after 'second' and the end"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         cut_at(model, {{"second", Split::Side::Before}, {"act", Split::Side::After}});
                       }),
                       "has no operators"));
}

TEST(CutPlaces, ABufferIsWrittenInOneStage) {
  struct Counting : torch::nn::Module {
    Counting() {
      count = register_buffer("count", at::zeros({}));
      first = register_module("first", torch::nn::Linear(3, 3));
      second = register_module("second", torch::nn::Linear(3, 3));
    }
    at::Tensor forward(const at::Tensor& x) {
      count.add_(1);
      const at::Tensor h = first->forward(x);
      return second->forward(h) * count;
    }
    at::Tensor count;
    torch::nn::Linear first{nullptr}, second{nullptr};
  };
  const TracedForTest model = traced(std::make_shared<Counting>(), at::ones({2, 3}));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         cut_at(model, {{"second", Split::Side::Before}});
                       }),
                       "writes a buffer"));
}

// -------------------------------------------------------------------------------------------------------
// the automatic cut

// A chain of products, of which some places are forbidden: the search is compared with all cuts.
TEST(AutomaticCut, IsTheBestOfAllCuts) {
  struct Chain : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor h = x;
      for (int i = 0; i < 9; ++i) {
        h = h.sin();
        if (i % 3 == 1) h.add_(1);
      }
      return h;
    }
  };
  const TracedForTest model = traced(std::make_shared<Chain>(), at::ones({2, 3}));
  const CutPlaces places = model.places();
  const std::size_t nodes = model.trace.graph.nodes.size();
  std::mt19937_64 dice(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> costs(nodes);
    std::vector<std::int64_t> bytes(nodes + 1);
    for (double& cost : costs) cost = static_cast<double>(dice() % 8);
    for (std::int64_t& each : bytes) each = static_cast<std::int64_t>(dice() % 100);
    const int stages = 1 + static_cast<int>(dice() % 4);
    const double tolerance = round % 2 == 0 ? 0.0 : 0.3;
    const auto heaviest = [&](const std::vector<std::size_t>& cut) {
      double most = 0;
      std::size_t first = 0;
      for (std::size_t i = 0; i <= cut.size(); ++i) {
        const std::size_t end = i < cut.size() ? cut[i] : nodes;
        double sum = 0;
        for (std::size_t j = first; j < end; ++j) sum += costs[j];
        most = std::max(most, sum);
        first = end;
      }
      return most;
    };
    const auto sent = [&](const std::vector<std::size_t>& cut) {
      std::int64_t sum = 0;
      for (const std::size_t place : cut) sum += bytes[place];
      return sum;
    };
    std::vector<std::vector<std::size_t>> all = {{}};
    for (int cut = 1; cut < stages; ++cut) {
      std::vector<std::vector<std::size_t>> longer;
      for (const auto& prefix : all)
        for (std::size_t place = prefix.empty() ? 1 : prefix.back() + 1; place < nodes; ++place) {
          if (!places.why_not(place).empty()) continue;
          longer.push_back(prefix);
          longer.back().push_back(place);
        }
      all = std::move(longer);
    }
    double least = std::numeric_limits<double>::infinity();
    for (const auto& cut : all) least = std::min(least, heaviest(cut));
    std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
    for (const auto& cut : all)
      if (heaviest(cut) <= least * (1 + std::max(tolerance, 1e-9))) fewest = std::min(fewest, sent(cut));
    const std::vector<std::size_t> found =
        automatic_places(places, costs, bytes, stages, {.tolerance = tolerance});
    ASSERT_EQ(found.size(), static_cast<std::size_t>(stages - 1));
    for (const std::size_t place : found) EXPECT_TRUE(places.why_not(place).empty());
    EXPECT_LE(heaviest(found), least * (1 + std::max(tolerance, 1e-9))) << "round " << round;
    EXPECT_EQ(sent(found), fewest) << "round " << round;
  }
}

TEST(AutomaticCut, MoreStagesThanPlaces) {
  const TracedForTest model = activations();
  const CutPlaces places = model.places();
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         automatic_places(places, node_costs(model.trace.graph),
                                          bytes_across(model.trace, model.kinds), 50);
                       }),
                       "ask for fewer stages"));
}

// Equal layers are divided evenly, and cut where one tensor is alive.
TEST(AutomaticCut, EqualLayersAreDividedEvenly) {
  torch::nn::Sequential net;
  for (int i = 0; i < 8; ++i) net->push_back(torch::nn::Linear(32, 32));
  const TracedForTest model = traced(net.ptr(), at::ones({16, 32}));
  const auto bytes = bytes_across(model.trace, model.kinds);
  const auto places = automatic_places(model.places(), node_costs(model.trace.graph), bytes, 4);
  for (std::size_t i = 0; i < places.size(); ++i) {
    EXPECT_EQ(model.trace.module_of_node[places[i]], std::to_string(2 * (i + 1)));
    EXPECT_EQ(bytes[places[i]], 16 * 32 * 4);
  }
}

TEST(Costs, ProductsCountTheirFlops) {
  torch::nn::Linear layer(torch::nn::LinearOptions(32, 64).bias(false));
  const TracedForTest model = traced(layer.ptr(), at::ones({16, 32}));
  const std::vector<double> costs = node_costs(model.trace.graph);
  const double bytes = 4 * (16 * 32 + 32 * 64 + 16 * 64);
  EXPECT_EQ(costs.back(), 2.0 * 16 * 32 * 64 + kCostOfByte * bytes);
  // The transposed weight is a view.
  EXPECT_EQ(costs.front(), 0.0);
}

}  // namespace cut_places_test
}  // namespace penstock::graph
