#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "penstock/base/markup.h"
#include "penstock/graph/tools/graph_drawing.h"

namespace penstock::graph {
namespace {

// Pixels.
constexpr double kMarginOfPicture = 24, kTitleHeight = 56, kBoxHeight = 38, kLayerGap = 34, kBoxGap = 14,
                 kLetterWidth = 6.4, kNarrowest = 64;

std::string_view class_of(GraphDrawing::Kind kind) {
  switch (kind) {
    case GraphDrawing::Kind::Input:
      return "input";
    case GraphDrawing::Kind::Constant:
      return "constant";
    case GraphDrawing::Kind::Forward:
      return "forward";
    case GraphDrawing::Kind::Backward:
      return "backward";
    case GraphDrawing::Kind::Output:
      return "output";
  }
  return "forward";
}

std::string shortened(std::string_view text) {
  return text.size() <= 42 ? std::string(text) : fmt::format("{}...", text.substr(0, 39));
}

class LayeredPicture {
 public:
  explicit LayeredPicture(GraphDrawing drawing)
      : drawing_(std::move(drawing)), x_(drawing_.boxes.size(), 0), width_(drawing_.boxes.size(), 0) {
    for (std::size_t i = 0; i < drawing_.boxes.size(); ++i) {
      const GraphDrawing::Box& box = drawing_.boxes[i];
      if (layers_.size() <= box.layer) layers_.resize(box.layer + 1);
      layers_[box.layer].push_back(i);
      width_[i] = std::max(kNarrowest,
                           16 + kLetterWidth * static_cast<double>(std::max(shortened(box.name).size(),
                                                                            shortened(box.detail).size())));
    }
    order_layers();
    place();
  }

  std::string write(const std::string& title) const {
    const double width = std::max(total_width_, 420.0) + 2 * kMarginOfPicture,
                 height = y_of(layers_.size()) + kMarginOfPicture;
    std::string out = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
        "width=\"{0:.0f}\" height=\"{1:.0f}\" "
        "font-family=\"Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif\">\n<title>{2}</title>\n"
        "<style>.paper{{fill:#fff}} .title{{font-size:18px;font-weight:600;fill:#222}} "
        ".name{{font-size:11px;fill:#222}} .detail{{font-size:10px;fill:#555}} "
        ".arrow{{fill:none;stroke:#8a93a0;stroke-width:1}} rect.box{{stroke:#5b6470;stroke-width:1}} "
        "rect.saved{{stroke:#b03030;stroke-width:2.5}} "
        ".input{{fill:#cfe8cf}} .constant{{fill:#e4e4e4}} .forward{{fill:#cfe0f5}} .backward{{fill:#f7d9c4}} "
        ".output{{fill:#f4efc2}}</style>\n"
        "<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n<text class=\"title\" x=\"{3}\" "
        "y=\"32\">{2}</text>\n",
        width, height, escape_xml(title), kMarginOfPicture);
    for (const GraphDrawing::Arrow& arrow : drawing_.arrows) write_arrow(arrow, &out);
    for (std::size_t i = 0; i < drawing_.boxes.size(); ++i) write_box(i, &out);
    return out + "</svg>\n";
  }

 private:
  // Moves each box near the centre of its neighbours, in a few passes down and up.
  void order_layers() {
    std::vector<std::vector<std::size_t>> above(drawing_.boxes.size()), below(drawing_.boxes.size());
    for (const GraphDrawing::Arrow& arrow : drawing_.arrows) {
      above[arrow.to].push_back(arrow.from);
      below[arrow.from].push_back(arrow.to);
    }
    std::vector<double> rank(drawing_.boxes.size(), 0);
    const auto renumber = [&](const std::vector<std::size_t>& layer) {
      for (std::size_t i = 0; i < layer.size(); ++i)
        rank[layer[i]] = static_cast<double>(i) / static_cast<double>(std::max<std::size_t>(layer.size(), 1));
    };
    for (const auto& layer : layers_) renumber(layer);
    const auto arrange = [&](std::vector<std::size_t>& layer,
                             const std::vector<std::vector<std::size_t>>& joined) {
      std::vector<std::pair<double, std::size_t>> keyed;
      for (const std::size_t box : layer) {
        double sum = 0;
        for (const std::size_t other : joined[box]) sum += rank[other];
        keyed.emplace_back(joined[box].empty() ? rank[box] : sum / static_cast<double>(joined[box].size()),
                           box);
      }
      std::stable_sort(keyed.begin(), keyed.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
      for (std::size_t i = 0; i < layer.size(); ++i) layer[i] = keyed[i].second;
      renumber(layer);
    };
    for (int pass = 0; pass < 3; ++pass) {
      for (auto& layer : layers_) arrange(layer, above);
      for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) arrange(*layer, below);
    }
  }

  void place() {
    const auto width_of = [&](const std::vector<std::size_t>& layer) {
      return std::accumulate(layer.begin(), layer.end(), -kBoxGap,
                             [&](double sum, std::size_t box) { return sum + width_[box] + kBoxGap; });
    };
    for (const auto& layer : layers_) total_width_ = std::max(total_width_, width_of(layer));
    for (const auto& layer : layers_) {
      double x = kMarginOfPicture + (total_width_ - width_of(layer)) / 2;
      for (const std::size_t box : layer) {
        x_[box] = x;
        x += width_[box] + kBoxGap;
      }
    }
  }

  static double y_of(std::size_t layer) {
    return kTitleHeight + static_cast<double>(layer) * (kBoxHeight + kLayerGap);
  }

  void write_arrow(const GraphDrawing::Arrow& arrow, std::string* out) const {
    const double x0 = x_[arrow.from] + width_[arrow.from] / 2,
                 y0 = y_of(drawing_.boxes[arrow.from].layer) + kBoxHeight;
    const double x1 = x_[arrow.to] + width_[arrow.to] / 2, y1 = y_of(drawing_.boxes[arrow.to].layer);
    const double middle = (y0 + y1) / 2;
    fmt::format_to(std::back_inserter(*out),
                   "<path class=\"arrow\" d=\"M{:.1f} {:.1f}C{:.1f} {:.1f} {:.1f} {:.1f} {:.1f} {:.1f}\"/>\n",
                   x0, y0, x0, middle, x1, middle, x1, y1);
  }

  void write_box(std::size_t i, std::string* out) const {
    const GraphDrawing::Box& box = drawing_.boxes[i];
    const double y = y_of(box.layer), middle = x_[i] + width_[i] / 2;
    fmt::format_to(
        std::back_inserter(*out),
        "<g><title>{5} {6}</title><rect class=\"box {0}{1}\" x=\"{2:.1f}\" y=\"{3:.1f}\" width=\"{4:.1f}\" "
        "height=\"{7:.0f}\" rx=\"5\"/>"
        "<text class=\"name\" x=\"{8:.1f}\" y=\"{9:.1f}\" text-anchor=\"middle\">{10}</text>"
        "<text class=\"detail\" x=\"{8:.1f}\" y=\"{11:.1f}\" text-anchor=\"middle\">{12}</text></g>\n",
        class_of(box.kind), box.saved ? " saved" : "", x_[i], y, width_[i], escape_xml(box.name),
        escape_xml(box.detail), kBoxHeight, middle, y + 16, escape_xml(shortened(box.name)), y + 30,
        escape_xml(shortened(box.detail)));
  }

  GraphDrawing drawing_;
  std::vector<std::vector<std::size_t>> layers_;
  std::vector<double> x_, width_;
  double total_width_ = 0;
};

}  // namespace

std::string to_svg(const Graph& graph, const DrawOptions& options) {
  if (graph.nodes.size() > options.max_boxes) return draw_folded_svg(graph, options);
  GraphDrawing drawing(graph, options);
  return drawing.boxes.size() > options.max_boxes ? draw_folded_svg(graph, options)
                                                  : LayeredPicture(std::move(drawing)).write(options.title);
}

}  // namespace penstock::graph
