// Folded graphs: nothing is lost, only equal parts are merged, and the pictures fit a screen.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/run/module_state.h"
#include "penstock/graph/tools/draw.h"
#include "penstock/graph/tools/fold.h"
#include "penstock/graph/trace/capture.h"
#include "penstock/transformer.h"
#include "tests/has_text.h"

namespace penstock::graph {
namespace fold_test {

using test::has_text;
using Tensors = std::vector<at::Tensor>;

// Blocks of different kinds on [4, 4], each with its own weight.
at::Tensor block(char kind, const at::Tensor& x, const at::Tensor& w) {
  switch (kind) {
    case 'A':
      return torch::relu(x.mm(w)) + x;
    case 'B':
      return (x * w).tanh().exp().mm(x.t());
    case 'C':
      return x.sub(w, 0.5).sigmoid();
    case 'D':
      return x.sub(w, 0.25).sigmoid();  // like C, with another constant
    case 'E':
      return x.mm(w).mm(w) - x.sum(1, true);
    default:
      return x + w;
  }
}

Graph captured(const std::string& kinds, bool backward) {
  Tensors inputs{torch::randn({4, 4})};
  Convention convention;
  convention.names.push_back("x");
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    inputs.push_back(torch::randn({4, 4}).requires_grad_(true));
    convention.names.push_back("blocks." + std::to_string(i) + ".weight");
  }
  const Function function = [&](const Values& in) -> Values {
    at::Tensor x = in[0].toTensor();
    for (std::size_t i = 0; i < kinds.size(); ++i) x = block(kinds[i], x, in[i + 1].toTensor());
    return {x.sum()};
  };
  const Values values(inputs.begin(), inputs.end());
  if (!backward) return capture_forward(function, values);
  const ViewAndMutationMeta meta = analyze(function, values);
  return capture_joint(function, values, meta, convention).graph;
}

// The nodes of parts, one instance after the other.
void expand(const std::vector<Fold>& parts, std::size_t shift, std::vector<std::size_t>& nodes) {
  for (const Fold& part : parts) {
    for (std::size_t k = 0; k < part.count; ++k) {
      if (part.is_node()) {
        nodes.push_back(part.first + shift + k);
      } else {
        expand(part.parts, shift + k * part.length, nodes);
      }
    }
  }
}

std::size_t shown(const std::vector<Fold>& parts) {
  std::size_t nodes = 0;
  for (const Fold& part : parts) nodes += part.is_node() ? 1 : shown(part.parts);
  return nodes;
}

// A sequence as text that does not depend on its position: values by the node that made them, others by their
// geometry.
std::string sequence_text(const Graph& graph, std::size_t first, std::size_t length) {
  std::map<ValueId, std::string> names;
  std::string text;
  for (std::size_t i = 0; i < length; ++i) {
    const Node& node = graph.nodes[first + i];
    text += c10::toString(node.op.operator_name()) + (node.phase == Phase::Forward ? " f(" : " b(");
    for (const Operand& operand : node.arguments) {
      if (operand.kind == Operand::Kind::Constant) text += to_text(operand) + ";";
      for (const ValueId value : operand.values)
        text += value == kNoValue       ? "none;"
                : names.contains(value) ? names[value] + ";"
                                        : "outside " + to_text(graph[value].geometry) + ";";
    }
    text += ")";
    std::size_t place = 0;
    for_each_value(node.results, [&](ValueId value) {
      names[value] = "%" + std::to_string(i) + "." + std::to_string(place++);
      text += to_text(graph[value].geometry);
    });
    text += "\n";
  }
  return text;
}

void expect_good(const Graph& graph, const std::vector<Fold>& parts, std::size_t max_parts,
                 const std::string& why) {
  std::vector<std::size_t> nodes, all(graph.nodes.size());
  expand(parts, 0, nodes);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  EXPECT_EQ(nodes, all) << why;
  const std::function<void(const std::vector<Fold>&)> look = [&](const std::vector<Fold>& some) {
    EXPECT_LE(some.size(), max_parts) << why;
    for (const Fold& part : some) {
      EXPECT_FALSE(part.name.empty()) << why;
      for (std::size_t i = part.first; i < part.end(); ++i)
        EXPECT_EQ(graph.nodes[i].phase, part.phase) << why;
      for (std::size_t k = 1; k < part.count; ++k)
        EXPECT_EQ(sequence_text(graph, part.first, part.length),
                  sequence_text(graph, part.first + k * part.length, part.length))
            << why << ", instance " << k << " of " << part.name;
      if (!part.is_node()) look(part.parts);
    }
  };
  look(parts);
}

TEST(Fold, RandomChainsOfBlocksLoseNothing) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    std::mt19937_64 chance(seed);
    std::string kinds;
    for (std::size_t sequences = 1 + chance() % 5; sequences > 0; --sequences) {
      std::string unit;
      for (std::size_t length = 1 + chance() % 3; length > 0; --length)
        unit += static_cast<char>('A' + chance() % 6);
      for (std::size_t times = 1 + chance() % 6; times > 0; --times) kinds += unit;
    }
    const FoldOptions options{.max_parts = 4 + chance() % 30};
    const Graph graph = captured(kinds, chance() % 2 == 0);
    expect_good(graph, fold_graph(graph, options),
                std::max<std::size_t>(options.max_parts, 2 * options.max_parts_per_phase),
                "seed " + std::to_string(seed) + ", " + kinds);
  }
}

TEST(Fold, EqualBlocksAreOne) {
  const Graph graph = captured("CAAAAAAAAD", false);
  const std::vector<Fold> parts = fold_graph(graph);
  expect_good(graph, parts, 32, "CA8D");
  const auto repeat =
      std::find_if(parts.begin(), parts.end(), [](const Fold& part) { return part.count > 1; });
  ASSERT_NE(repeat, parts.end());
  EXPECT_EQ(repeat->count, 8U);
  EXPECT_EQ(repeat->length, 3U);  // mm, relu, add
  EXPECT_EQ(shown(parts), graph.nodes.size() - 7 * 3);
}

TEST(Fold, BlocksThatDifferInAConstantOrInWhatTheyUseAreNotEqual) {
  const Graph constants = captured("CDCDC", false);
  // C and D together, not separately.
  for (const Fold& part : fold_graph(constants))
    EXPECT_TRUE(part.count == 1 || part.length == 4) << part.name;
  // The same operators, but the second one multiplies by itself.
  const auto other = capture_forward(
      [](const Values& in) -> Values {
        at::Tensor x = in[0].toTensor();
        for (int i = 0; i < 6; ++i) {
          const at::Tensor y = x.relu(), z = y.exp();
          x = i % 2 == 0 ? y * z : z * z;
        }
        return {x};
      },
      {torch::randn({4, 4})});
  const std::vector<Fold> parts = fold_graph(other);
  expect_good(other, parts, 32, "two kinds of use");
  for (const Fold& part : parts)
    EXPECT_TRUE(part.count == 1 || part.length % 6 == 0 || part.length == 1)
        << part.name << " " << part.length << " x " << part.count;
}

// The trainer's model: forward and backward of one microbatch.
Graph model_graph(std::int64_t layers) {
  models::TransformerStage model(models::TransformerOptions{
      .vocabulary = 64, .width = 16, .layers = layers, .heads = 2, .context = 8, .tie_head = true});
  const ModuleState state(*model);
  Values inputs(state.tensors.begin(), state.tensors.end());
  const at::Tensor tokens = at::zeros({2, 8}, at::kLong);
  inputs.emplace_back(tokens);
  inputs.emplace_back(at::zeros_like(tokens));
  Convention convention{state.tensors.size(), state.names};
  convention.names.insert(convention.names.end(), {"tokens", "targets"});
  const Function step = [&](const Values& in) -> Values {
    return {models::token_loss(model->forward(in[state.tensors.size()].toTensor()),
                               in[state.tensors.size() + 1].toTensor(), 16)};
  };
  AnalyzedCapture captured = analyze_and_capture(step, inputs, {.convention = convention});
  JointGraph joint =
      captured.joint ? std::move(*captured.joint) : capture_joint(step, inputs, captured.meta, convention);
  Graph graph = functionalize(std::move(joint.graph), joint.forward_outputs);
  remove_dead_nodes(graph);
  return graph;
}

TEST(Fold, BlocksOfTheModelAreCounted) {
  for (const std::int64_t layers : {4, 12}) {
    const Graph graph = model_graph(layers);
    const std::vector<Fold> parts = fold_graph(graph);
    expect_good(graph, parts, 32, std::to_string(layers) + " layers");
    std::size_t forward = 0, backward = 0;
    for (const Fold& part : parts) {
      if (part.count + 1 < static_cast<std::size_t>(layers))
        continue;  // backward may begin or end differently
      EXPECT_TRUE(part.name.starts_with("blocks.")) << part.name;
      (part.phase == Phase::Forward ? forward : backward) += part.count;
    }
    EXPECT_GE(forward, static_cast<std::size_t>(layers) - 1);
    EXPECT_GE(backward, static_cast<std::size_t>(layers) - 1);
    EXPECT_LE(parts.size(), 14U);
  }
}

struct ShownPart {
  std::size_t first = 0, length = 0, count = 0;
  bool is_node = false;
};
struct View {
  std::size_t times = 0, width = 0, height = 0;
  std::vector<ShownPart> parts;
};

std::vector<View> views_of(const std::string& page) {
  std::vector<View> views;
  static const std::regex picture("<svg [^>]*viewBox=\"0 0 ([0-9]+) ([0-9]+)\"[^>]*data-times=\"([0-9]+)\""),
      part(
          "<g class=\"part ([a-z ]+)\" data-first=\"([0-9]+)\" data-length=\"([0-9]+)\" "
          "data-count=\"([0-9]+)\"");
  std::istringstream lines(page);
  std::smatch found;
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_search(line, found, picture))
      views.push_back({std::stoul(found[3]), std::stoul(found[1]), std::stoul(found[2]), {}});
    if (std::regex_search(line, found, part))
      views.back().parts.push_back({std::stoul(found[2]), std::stoul(found[3]), std::stoul(found[4]),
                                    found[1].str().find(" node") != std::string::npos});
  }
  return views;
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size()))
    ++count;
  return count;
}

TEST(FoldedPictures, TheModelFitsAScreen) {
  for (const std::int64_t layers : {1, 4, 48}) {
    const std::string svg = to_svg(model_graph(layers), {.title = "a <model>"});
    const std::vector<View> views = views_of(svg);
    ASSERT_EQ(views.size(), 1U);
    EXPECT_LE(views[0].width, 1600U);
    EXPECT_LE(views[0].height, 1000U);
    EXPECT_GE(views[0].parts.size(), 3U);
    EXPECT_TRUE(has_text(svg, "a &lt;model&gt;"));
    EXPECT_EQ(count_of(svg, "<a "), 0U);   // nothing to open in an SVG
    EXPECT_EQ(count_of(svg, "http"), 1U);  // the SVG namespace
  }
}

TEST(FoldedPictures, EveryNodeIsReachedInThePage) {
  for (const std::int64_t layers : {1, 4, 12}) {
    const Graph graph = model_graph(layers);
    const std::string page = to_html(graph, {.title = "model"});
    const std::vector<View> views = views_of(page);
    std::size_t nodes = 0, opened = 0;
    for (const View& view : views) {
      EXPECT_LE(view.parts.size(), 32U);
      for (const ShownPart& part : view.parts) {
        if (part.is_node) {
          nodes += view.times * part.count;
        } else {
          ++opened;
        }
      }
    }
    EXPECT_EQ(nodes, graph.nodes.size());
    EXPECT_EQ(opened + 1, views.size());
    // Each link leads to a view, and each view except the whole has a link to it.
    std::set<std::string> ids, targets;
    static const std::regex section("<section id=\"([a-z0-9-]+)\""), link("<a href=\"#([a-z0-9-]+)\"");
    for (auto it = std::sregex_iterator(page.begin(), page.end(), section); it != std::sregex_iterator();
         ++it)
      EXPECT_TRUE(ids.insert((*it)[1]).second);
    for (auto it = std::sregex_iterator(page.begin(), page.end(), link); it != std::sregex_iterator(); ++it)
      targets.insert((*it)[1]);
    EXPECT_EQ(ids, targets);
    EXPECT_EQ(count_of(page, "http"), views.size());
    EXPECT_EQ(count_of(page, "src="), 0U);
  }
}

TEST(FoldedPictures, OfGraphsOfAnyShape) {
  const Graph nothing =
      capture_forward([](const Values& in) -> Values { return {in[0].toTensor()}; }, {torch::ones({2})});
  EXPECT_TRUE(has_text(to_html(nothing), "0 nodes"));
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::mt19937_64 chance(seed);
    std::string kinds;
    for (std::size_t count = 1 + chance() % 60; count > 0; --count)
      kinds += static_cast<char>('A' + chance() % 6);
    const Graph graph = captured(kinds, seed % 2 == 0);
    std::size_t nodes = 0;
    for (const View& view : views_of(to_html(graph)))
      for (const ShownPart& part : view.parts) nodes += part.is_node ? view.times * part.count : 0;
    EXPECT_EQ(nodes, graph.nodes.size()) << "seed " << seed << ", " << kinds;
    for (const View& view : views_of(to_svg(graph))) {
      EXPECT_LE(view.parts.size(), 32U) << kinds;
    }
  }
}

}  // namespace fold_test
}  // namespace penstock::graph
