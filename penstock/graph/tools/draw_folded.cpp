// Folded pictures of a graph: an overview that fits a screen, and a page in which each box can be opened.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/base/markup.h"
#include "penstock/base/text.h"
#include "penstock/graph/tools/draw.h"
#include "penstock/graph/tools/fold.h"
#include "penstock/graph/tools/graph_drawing.h"

namespace penstock::graph {
namespace {

constexpr double kScreenWidth = 1600, kScreenHeight = 1000;
constexpr std::size_t kOutside = static_cast<std::size_t>(-1);

constexpr std::string_view kFoldedStyle =
    ".paper{fill:#fff} .heading{font-size:20px;font-weight:600;fill:#1d2330} "
    ".sub{font-size:13px;fill:#5b6470} "
    ".column{font-size:13px;font-weight:600;letter-spacing:.08em;fill:#7a8494} "
    ".name{font-size:14px;font-weight:600;fill:#1d2330} .detail{font-size:12px;fill:#4a5361} "
    ".small{font-size:11px;fill:#6a7382} .op{font-size:12px;font-weight:600;fill:#1d2330} "
    ".card{stroke-width:1.2} .forward .card{fill:#e3eefb;stroke:#5a8fd0} .backward "
    ".card{fill:#fdebdf;stroke:#d98c55} .pill{fill:#eef1f5;stroke:#b9c1cc} .badge{fill:#1d2330} "
    ".badge-text{font-size:13px;font-weight:700;fill:#fff} "
    ".saved .card{stroke-width:2.6} .flow{fill:none;stroke:#8a93a0;stroke-width:1.6} "
    ".thin{fill:none;stroke:#a8b0bc;stroke-width:1.1} .keep{fill:none;stroke:#b0519c} "
    ".keep-text{font-size:11px;fill:#8d3f7d;paint-order:stroke;stroke:#fff;stroke-width:4px} "
    ".head{fill:#8a93a0} "
    "a:hover .card{filter:brightness(.96)} a{cursor:pointer;text-decoration:none}";
constexpr std::string_view kFoldedDark =
    "@media (prefers-color-scheme:dark){body{background:#12161d;color:#dfe4ea} .paper{fill:#12161d} "
    ".heading,.name,.op{fill:#eef2f6} .sub,.detail{fill:#b3bcc8} .column,.small{fill:#939dab} "
    ".forward .card{fill:#1c2f47;stroke:#5a8fd0} .backward .card{fill:#45301f;stroke:#d98c55} "
    ".pill{fill:#222833;stroke:#4a5361} .badge{fill:#eef2f6} .badge-text{fill:#12161d} "
    ".keep-text{fill:#e09bd0;stroke:#12161d}}";

std::string cut(std::string_view text, std::size_t letters) {
  return text.size() <= letters ? std::string(text) : fmt::format("{}...", text.substr(0, letters - 3));
}

double size_in_bytes(const Geometry& geometry) {
  return static_cast<double>(geometry.numel()) * static_cast<double>(c10::elementSize(geometry.dtype));
}

std::string amount(double bytes) { return format_bytes(static_cast<std::uint64_t>(std::min(bytes, 9e18))); }

std::string counted(std::size_t count, std::string_view thing) {
  return fmt::format("{} {}{}", count, thing, count == 1 ? "" : "s");
}

// The inputs and results of node sequences.
class NodeSequences {
 public:
  NodeSequences(const Graph& graph, const DrawOptions& options)
      : graph_(graph),
        maker_(graph.values.size(), kOutside),
        input_(graph.values.size(), kOutside),
        saved_(graph.values.size(), 0) {
    for (std::size_t i = 0; i < graph.nodes.size(); ++i)
      for_each_value(graph.nodes[i].results, [&](ValueId value) { maker_[index_of(value)] = i; });
    for (std::size_t i = 0; i < graph.inputs.size(); ++i) input_[index_of(graph.inputs[i].value)] = i;
    for (const ValueId value : options.saved) saved_[index_of(value)] = 1;
  }

  struct Total {
    std::size_t count = 0;
    double bytes = 0;
    void add(double more) {
      ++count;
      bytes += more;
    }
  };

  // Inputs of the graph that the nodes use, each once.
  std::vector<ValueId> inputs(std::size_t begin, std::size_t end) const {
    std::set<ValueId> values;
    each_argument(begin, end, [&](ValueId value, std::size_t) {
      if (input_[index_of(value)] != kOutside) values.insert(value);
    });
    return {values.begin(), values.end()};
  }
  Total parameters(std::size_t begin, std::size_t end) const {
    Total total;
    for (const ValueId value : inputs(begin, end))
      if (name_of(value).find('.') != std::string::npos) total.add(size_in_bytes(graph_[value].geometry));
    return total;
  }
  // Results of nodes [from, from_end) that nodes [to, to_end) use, each once.
  std::vector<ValueId> handed(std::size_t from, std::size_t from_end, std::size_t to,
                              std::size_t to_end) const {
    std::set<ValueId> values;
    each_argument(to, to_end, [&](ValueId value, std::size_t maker) {
      if (maker != kOutside && maker >= from && maker < from_end) values.insert(value);
    });
    return {values.begin(), values.end()};
  }
  bool keeps(std::size_t begin, std::size_t end) const {
    for (std::size_t i = begin; i < end; ++i) {
      bool found = false;
      for_each_value(graph_.nodes[i].results, [&](ValueId value) { found |= saved_[index_of(value)] != 0; });
      if (found) return true;
    }
    return false;
  }
  bool is_saved(ValueId value) const { return saved_[index_of(value)] != 0; }
  bool is_input(ValueId value) const { return input_[index_of(value)] != kOutside; }
  std::size_t maker(ValueId value) const { return maker_[index_of(value)]; }
  const std::string& name_of(ValueId input) const { return graph_.inputs[input_[index_of(input)]].name; }
  const Graph& graph() const { return graph_; }

  template <class Visit>
  void each_argument(std::size_t begin, std::size_t end, const Visit& visit) const {
    for (std::size_t i = begin; i < end; ++i)
      for_each_value(graph_.nodes[i].arguments,
                     [&](ValueId value) { visit(value, maker_[index_of(value)]); });
  }

 private:
  const Graph& graph_;
  std::vector<std::size_t> maker_, input_;
  std::vector<char> saved_;
};

// The target of a box: an anchor within the page; absent for boxes that do not open.
using Links = std::map<const Fold*, std::string>;

struct Placed {
  double x = 0, y = 0, width = 0, height = 0;
  double middle() const { return x + width / 2; }
};

class FoldedWriter {
 public:
  FoldedWriter(const NodeSequences& sequences, const Links& links) : sequences_(sequences), links_(links) {}

  // A complete picture; `times`: how often its contents occur in the graph.
  std::string picture(const std::vector<Fold>& parts, const std::string& id, const std::string& heading,
                      const std::string& sub, std::size_t times) {
    out_.clear();
    arrow_ = "arrow-" + id;  // a marker of a hidden picture is not drawn, so each picture has its own
    const auto border = std::find_if(parts.begin(), parts.end(),
                                     [](const Fold& part) { return part.phase == Phase::Backward; });
    const bool two_columns =
        border != parts.begin() && border != parts.end() &&
        std::none_of(border, parts.end(), [](const Fold& part) { return part.phase == Phase::Forward; }) &&
        std::any_of(parts.begin(), parts.end(), [](const Fold& part) { return !part.is_node(); });
    if (two_columns) {
      overview(parts, static_cast<std::size_t>(border - parts.begin()));
    } else if (!parts.empty()) {
      layers(parts);
    } else {
      height_ = 110;  // no nodes: the graph returns its inputs
    }
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
        "width=\"{0:.0f}\" height=\"{1:.0f}\" data-times=\"{2}\" font-family=\"Inter, 'Segoe UI', 'Helvetica "
        "Neue', Arial, sans-serif\">\n"
        "<title>{3}</title>\n<style>{4}</style>\n<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n"
        "<defs><marker id=\"{7}\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" "
        "markerHeight=\"7\" orient=\"auto\"><path class=\"head\" d=\"M0 0L8 4L0 8z\"/></marker></defs>\n"
        "<text class=\"heading\" x=\"40\" y=\"42\">{3}</text>\n<text class=\"sub\" x=\"40\" "
        "y=\"66\">{5}</text>\n{6}</svg>\n",
        width_, height_, times, escape_xml(cut(heading, 120)), kFoldedStyle, escape_xml(sub), out_, arrow_);
  }

 private:
  template <class... Values>
  void add(fmt::format_string<Values...> format, Values&&... values) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Values>(values)...);
  }

  // ---- boxes ----

  std::string operators_of(const Fold& fold) const {
    std::map<std::string, std::size_t> times;
    for (std::size_t i = fold.first; i < fold.first + fold.length; ++i) {
      const std::string& name = sequences_.graph().nodes[i].op.operator_name().name;
      ++times[name.substr(name.find("::") == std::string::npos ? 0 : name.find("::") + 2)];
    }
    std::vector<std::pair<std::size_t, std::string>> order;
    for (const auto& [name, count] : times) order.emplace_back(count, name);
    std::stable_sort(order.begin(), order.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    std::string text;
    for (std::size_t i = 0; i < std::min<std::size_t>(order.size(), 5); ++i)
      text += fmt::format("{}{} {}", i == 0 ? "" : ", ", order[i].first, order[i].second);
    return text + (order.size() > 5 ? ", ..." : "");
  }

  std::vector<std::string> lines_of(const Fold& fold) const {
    const Graph& graph = sequences_.graph();
    std::vector<std::string> lines;
    if (fold.is_node()) {
      std::string shapes;
      for_each_value(graph.nodes[fold.first].results, [&](ValueId value) {
        shapes += (shapes.empty() ? "" : ", ") + to_text(graph[value].geometry, graph.table.get());
      });
      lines.push_back(shapes);
      std::string uses;
      for_each_value(graph.nodes[fold.first].arguments, [&](ValueId value) {
        if (sequences_.is_input(value)) uses += (uses.empty() ? "" : ", ") + sequences_.name_of(value);
      });
      if (!uses.empty()) lines.push_back(uses);
      return lines;
    }
    lines.push_back(fold.count > 1
                        ? fmt::format("{} each, {} in all", counted(fold.length, "node"), fold.nodes())
                        : counted(fold.length, "node"));
    const NodeSequences::Total parameters = sequences_.parameters(fold.first, fold.first + fold.length);
    if (parameters.count > 0)
      lines.back() += fmt::format(";  {}{}, {}", counted(parameters.count, "parameter"),
                                  fold.count > 1 ? " each" : "", amount(parameters.bytes));
    lines.push_back(operators_of(fold));
    return lines;
  }

  void box(const Fold& fold, const Placed& place) {
    const auto link = links_.find(&fold);
    const std::vector<std::string> lines = lines_of(fold);
    const std::string tip = fold.is_node()
                                ? to_text(sequences_.graph(), sequences_.graph().nodes[fold.first])
                                : fmt::format("{}: nodes {} to {}", fold.name, fold.first, fold.end() - 1);
    if (link != links_.end()) add("<a href=\"#{}\">", link->second);
    add("<g class=\"part {}{}{}\" data-first=\"{}\" data-length=\"{}\" data-count=\"{}\"><title>{}</title>",
        fold.phase == Phase::Forward ? "forward" : "backward", fold.is_node() ? " node" : "",
        sequences_.keeps(fold.first, fold.end()) && fold.is_node() ? " saved" : "", fold.first, fold.length,
        fold.count, escape_xml(cut(tip, 400)));
    for (int card = fold.count > 1 ? 2 : 0; card >= 0; --card)
      add("<rect class=\"card\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" rx=\"8\"/>",
          place.x + 5 * card, place.y - 5 * card, place.width, place.height);
    const std::size_t letters = static_cast<std::size_t>(std::max(8.0, (place.width - 24) / 6.6));
    double y = place.y + (fold.is_node() ? 18 : 24);
    add("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", fold.is_node() ? "op" : "name",
        place.x + 12, y,
        escape_xml(cut(fold.name, fold.is_node() ? letters
                                                 : static_cast<std::size_t>(
                                                       (place.width - (fold.count > 1 ? 80 : 24)) / 8))));
    for (const std::string& line : lines) {
      y += fold.is_node() ? 15 : 19;
      if (y > place.y + place.height - 4) break;
      add("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
          &line == &lines.front() ? "detail" : "small", place.x + 12, y, escape_xml(cut(line, letters)));
    }
    if (fold.count > 1) {
      const std::string times = fmt::format("\xc3\x97{}", fold.count);
      const double badge = 20 + 8.5 * static_cast<double>(times.size() - 1);
      add("<rect class=\"badge\" x=\"{0:.1f}\" y=\"{1:.1f}\" width=\"{2:.1f}\" height=\"22\" "
          "rx=\"11\"/><text class=\"badge-text\" x=\"{3:.1f}\" y=\"{4:.1f}\" "
          "text-anchor=\"middle\">{5}</text>",
          place.x + place.width - badge - 8, place.y + 8, badge, place.x + place.width - badge / 2 - 8,
          place.y + 24, times);
    }
    add("</g>{}\n", link != links_.end() ? "</a>" : "");
  }

  void pill(double middle, double y, const std::string& text) {
    const double width = 28 + 6.7 * static_cast<double>(text.size());
    add("<rect class=\"pill\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"28\" rx=\"14\"/><text "
        "class=\"detail\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n",
        middle - width / 2, y, width, middle, y + 18.5, escape_xml(text));
  }

  void down(const Placed& from, const Placed& to, const std::string& label) {
    add("<path class=\"flow\" marker-end=\"url(#{})\" d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\"/>\n", arrow_,
        from.middle(), from.y + from.height, to.middle(), to.y - 2);
    if (!label.empty())
      add("<text class=\"small\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", from.middle() + 10,
          (from.y + from.height + to.y) / 2 + 4, escape_xml(label));
  }

  // ---- forward on the left, downwards; backward on the right, upwards; saved tensors between them ----

  void overview(const std::vector<Fold>& parts, std::size_t forwards) {
    const std::size_t backwards = parts.size() - forwards, rows = std::max(forwards, backwards);
    constexpr double kTop = 156, kBottom = 84, kBox = 640, kLeft = 60, kRight = kScreenWidth - kLeft - kBox;
    const double row = std::clamp((kScreenHeight - kTop - kBottom) / static_cast<double>(rows), 60.0, 130.0);
    width_ = kScreenWidth;
    height_ = kTop + kBottom + row * static_cast<double>(rows);
    const double high = std::min(84.0, row - 28);
    std::vector<Placed> places(parts.size());
    const auto spread = [&](std::size_t count, std::size_t i) {
      return kTop +
             (static_cast<double>(rows) * row / static_cast<double>(count)) * (static_cast<double>(i) + 0.5) -
             high / 2;
    };
    for (std::size_t i = 0; i < forwards; ++i) places[i] = {kLeft, spread(forwards, i), kBox, high};
    for (std::size_t i = 0; i < backwards; ++i)
      places[forwards + i] = {kRight, spread(backwards, backwards - 1 - i), kBox, high};
    add("<text class=\"column\" x=\"{}\" y=\"104\">FORWARD</text><text class=\"column\" x=\"{}\" "
        "y=\"104\">BACKWARD</text>\n",
        kLeft, kRight);
    kept_between(parts, forwards, places);
    flows(parts, forwards, places);
    ends(parts, forwards, places);
    for (std::size_t i = 0; i < parts.size(); ++i) box(parts[i], places[i]);
  }

  void kept_between(const std::vector<Fold>& parts, std::size_t forwards, const std::vector<Placed>& places) {
    const Graph& graph = sequences_.graph();
    for (std::size_t i = 0; i < forwards; ++i) {
      for (std::size_t j = forwards; j < parts.size(); ++j) {
        NodeSequences::Total kept;
        for (const ValueId value :
             sequences_.handed(parts[i].first, parts[i].end(), parts[j].first, parts[j].end()))
          kept.add(size_in_bytes(graph[value].geometry));
        if (kept.count == 0) continue;
        const double x0 = places[i].x + places[i].width + (parts[i].count > 1 ? 11 : 0),
                     y0 = places[i].y + places[i].height / 2, x1 = places[j].x - 3,
                     y1 = places[j].y + places[j].height / 2;
        const double thick = std::clamp(std::log10(kept.bytes + 10) - 1.5, 1.0, 9.0);
        add("<path class=\"keep\" stroke-width=\"{:.1f}\" stroke-opacity=\".55\" d=\"M{:.1f} {:.1f}C{:.1f} "
            "{:.1f} {:.1f} {:.1f} {:.1f} {:.1f}\"><title>{}, {} from {} for {}</title></path>\n",
            thick, x0, y0, x0 + 70, y0, x1 - 70, y1, x1, y1, counted(kept.count, "tensor"),
            amount(kept.bytes), escape_xml(parts[i].name), escape_xml(parts[j].name));
        if (std::abs(y0 - y1) < 2 * places[i].height)
          add("<text class=\"keep-text\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}, {}</text>\n",
              (x0 + x1) / 2, (y0 + y1) / 2 - 4 - thick / 2, counted(kept.count, "tensor"),
              amount(kept.bytes));
      }
    }
  }

  std::string flow_text(const Fold& from, const Fold& to) const {
    const std::vector<ValueId> values = sequences_.handed(from.first, from.end(), to.first, to.end());
    if (values.empty()) return {};
    const Graph& graph = sequences_.graph();
    return values.size() == 1 ? to_text(graph[values[0]].geometry, graph.table.get())
                              : counted(values.size(), "tensor");
  }

  void flows(const std::vector<Fold>& parts, std::size_t forwards, const std::vector<Placed>& places) {
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      if (i + 1 == forwards) continue;
      const std::string text = flow_text(parts[i], parts[i + 1]);
      if (text.empty()) continue;
      if (i < forwards) {
        Placed to = places[i + 1];
        if (parts[i + 1].count > 1) to.y -= 10;  // the stacked cards of a box extend above it
        down(places[i], to, text);
      } else {  // upwards
        add("<path class=\"flow\" marker-end=\"url(#{6})\" d=\"M{0:.1f} {1:.1f}L{0:.1f} {2:.1f}\"/><text "
            "class=\"small\" x=\"{3:.1f}\" y=\"{4:.1f}\">{5}</text>\n",
            places[i].middle(), places[i].y - (parts[i].count > 1 ? 10 : 0),
            places[i + 1].y + places[i + 1].height + 3, places[i].middle() + 10,
            (places[i].y + places[i + 1].y + places[i + 1].height) / 2, escape_xml(text), arrow_);
      }
    }
  }

  // Inputs above forward, results below it, gradients above backward.
  void ends(const std::vector<Fold>& parts, std::size_t forwards, const std::vector<Placed>& places) {
    const Graph& graph = sequences_.graph();
    std::size_t parameters = 0, results = 0, gradients = 0;
    double bytes = 0;
    std::string others;
    for (const Placeholder& input : graph.inputs) {
      if (input.name.find('.') != std::string::npos) {
        ++parameters;
        bytes += size_in_bytes(graph[input.value].geometry);
      } else if (others.size() < 60) {
        others += (others.empty() ? "" : ", ") + input.name;
      }
    }
    std::string result;
    for (const Operand& output : graph.outputs) {
      const ValueId value = output.value();
      if (value == kNoValue) continue;
      const std::size_t maker = sequences_.maker(value);
      if (maker != kOutside && graph.nodes[maker].phase == Phase::Backward) {
        ++gradients;
      } else {
        if (++results == 1) result = to_text(graph[value].geometry, graph.table.get());
      }
    }
    std::string text = parameters > 0 ? fmt::format("{}, {}", counted(parameters, "parameter"), amount(bytes))
                                      : std::string();
    if (!others.empty()) text += (text.empty() ? "" : "; ") + others;
    const Placed& first = places.front();
    const Placed& last = places[forwards - 1];
    if (!text.empty()) {
      pill(first.middle(), 112, cut(text, 80));
      down({first.x, 112, first.width, 28},
           {first.x, first.y - (parts.front().count > 1 ? 10 : 0), first.width, 0}, "");
    }
    if (results > 0) {
      pill(last.middle(), height_ - 48, results == 1 ? "result: " + result : counted(results, "result"));
      down(last, {last.x, height_ - 48, last.width, 28}, "");
    }
    if (gradients > 0) {
      const Placed& top = places.back();
      pill(top.middle(), 112, counted(gradients, "gradient"));
      add("<path class=\"flow\" marker-end=\"url(#{2})\" d=\"M{0:.1f} {1:.1f}L{0:.1f} 143\"/>\n",
          top.middle(), top.y - (parts.back().count > 1 ? 10 : 0), arrow_);
    }
  }

  // ---- layers from top to bottom, in the number of columns that fills a screen best ----

  void layers(const std::vector<Fold>& parts) {
    const std::size_t count = parts.size();
    std::vector<std::size_t> owner;  // the part of each node of this view
    const std::size_t begin = parts.front().first, end = parts.back().end();
    for (std::size_t i = 0; i < count; ++i) owner.resize(parts[i].end() - begin, i);
    std::set<std::pair<std::size_t, std::size_t>> arrows;
    std::vector<std::size_t> layer(count, 0);
    for (std::size_t i = 0; i < count; ++i)
      sequences_.each_argument(parts[i].first, parts[i].end(), [&](ValueId, std::size_t maker) {
        if (maker == kOutside || maker < begin || maker >= end || owner[maker - begin] == i) return;
        arrows.emplace(owner[maker - begin], i);
      });
    // Sorted by `from`: all earlier layers are final.
    for (const auto& [from, to] : arrows) layer[to] = std::max(layer[to], layer[from] + 1);
    for (std::size_t pass = 0; pass < count; ++pass) {
      bool changed = false;
      for (const auto& [from, to] : arrows)
        if (layer[to] < layer[from] + 1) layer[to] = layer[from] + 1, changed = true;
      if (!changed) break;
    }
    std::vector<std::vector<std::size_t>> rows(*std::max_element(layer.begin(), layer.end()) + 1);
    for (std::size_t i = 0; i < count; ++i) rows[layer[i]].push_back(i);

    constexpr double kGap = 18, kBetween = 40, kNodeWidth = 250, kGroupWidth = 460, kMargin = 40, kHead = 92;
    const auto width_of = [&](const Fold& part) { return part.is_node() ? kNodeWidth : kGroupWidth; };
    const auto height_of = [&](const Fold& part) { return part.is_node() ? 54.0 : 72.0; };
    const auto width_of_row = [&](const std::vector<std::size_t>& row) {
      double width = -kGap;
      for (const std::size_t part : row) width += width_of(parts[part]) + kGap;
      return width;
    };
    const auto height_of_row = [&](const std::vector<std::size_t>& row) {
      double height = 0;
      for (const std::size_t part : row) height = std::max(height, height_of(parts[part]));
      return height + kBetween;
    };
    // The number of columns that maximizes the scale of the picture on a screen.
    std::vector<std::size_t> column_of(rows.size(), 0);
    double best = 0;
    for (std::size_t columns = 1; columns <= std::min<std::size_t>(rows.size(), 8); ++columns) {
      double whole = 0;
      for (const auto& row : rows) whole += height_of_row(row);
      std::vector<std::size_t> chosen(rows.size(), 0);
      std::vector<double> widths(columns, 0), heights(columns, 0);
      std::size_t column = 0;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        if (heights[column] > 0 &&
            heights[column] + height_of_row(rows[r]) / 2 > whole / static_cast<double>(columns) &&
            column + 1 < columns)
          ++column;
        chosen[r] = column;
        widths[column] = std::max(widths[column], width_of_row(rows[r]));
        heights[column] += height_of_row(rows[r]);
      }
      double width = 2 * kMargin - 60, height = 0;
      for (std::size_t c = 0; c <= column; ++c)
        width += widths[c] + 60, height = std::max(height, heights[c]);
      height += kHead + kMargin;
      if (const double scale = std::min(kScreenWidth / width, kScreenHeight / height); scale > 1.02 * best) {
        best = scale;
        column_of = chosen;
        width_ = std::max(width, 640.0);
        height_ = height;
        column_widths_ = widths;
      }
    }
    std::vector<Placed> places(count);
    double left = kMargin, y = kHead;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (r > 0 && column_of[r] != column_of[r - 1]) {
        left += column_widths_[column_of[r - 1]] + 60;
        y = kHead;
      }
      // Places each box near its operands.
      std::stable_sort(rows[r].begin(), rows[r].end(), [&](std::size_t a, std::size_t b) {
        return pull(a, arrows, places) < pull(b, arrows, places);
      });
      double x = left + (column_widths_[column_of[r]] - width_of_row(rows[r])) / 2;
      for (const std::size_t part : rows[r]) {
        places[part] = {x, y + 6, width_of(parts[part]), height_of(parts[part])};
        x += width_of(parts[part]) + kGap;
      }
      y += height_of_row(rows[r]);
    }
    for (const auto& [from, to] : arrows)
      arrow(places[from], places[to], parts[to].count > 1 ? 10 : 0,
            column_of[layer[from]] == column_of[layer[to]]);
    for (std::size_t i = 0; i < count; ++i) box(parts[i], places[i]);
  }

  static double pull(std::size_t part, const std::set<std::pair<std::size_t, std::size_t>>& arrows,
                     const std::vector<Placed>& places) {
    double sum = 0, count = 0;
    for (const auto& [from, to] : arrows)
      if (to == part) sum += places[from].middle(), ++count;
    return count == 0 ? 0 : sum / count;
  }

  void arrow(const Placed& from, const Placed& to, double cards, bool same_column) {
    const double x0 = from.middle(), y0 = from.y + from.height, x1 = to.middle(), y1 = to.y - 2 - cards;
    const double bend = same_column ? (y1 - y0) / 2 : 46;
    add("<path class=\"thin\" marker-end=\"url(#{})\" d=\"M{:.1f} {:.1f}C{:.1f} {:.1f} {:.1f} {:.1f} {:.1f} "
        "{:.1f}\"/>\n",
        arrow_, x0, y0, x0, y0 + bend, x1, y1 - bend, x1, y1);
  }

  const NodeSequences& sequences_;
  const Links& links_;
  std::string out_, arrow_;
  double width_ = kScreenWidth, height_ = kScreenHeight;
  std::vector<double> column_widths_;
};

std::string summary_of(const Graph& graph, const DrawOptions& options) {
  const auto forwards = static_cast<std::size_t>(std::count_if(
      graph.nodes.begin(), graph.nodes.end(), [](const Node& node) { return node.phase == Phase::Forward; }));
  std::string text = fmt::format("{} ({} forward, {} backward)", counted(graph.nodes.size(), "node"),
                                 forwards, graph.nodes.size() - forwards);
  double bytes = 0;
  for (const ValueId value : options.saved) bytes += size_in_bytes(graph[value].geometry);
  if (!options.saved.empty())
    text +=
        fmt::format("; {} saved for backward, {}", counted(options.saved.size(), "tensor"), amount(bytes));
  return text;
}

// A page with a picture for the whole graph and for each part that contains others.
class FoldedPage {
 public:
  FoldedPage(const Graph& graph, const DrawOptions& options)
      : options_(options), sequences_(graph, options), whole_(fold_graph(graph)) {
    number(whole_);
  }

  std::string write() {
    std::string views;
    view(whole_, "whole", options_.title,
         summary_of(sequences_.graph(), options_) +
             "; click a box to open it, Escape or the path above to go back",
         {}, 1, views);
    return fmt::format(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
        "content=\"width=device-width\"><title>{0}</title>\n"
        "<style>body{{margin:0;font-family:Inter,'Segoe UI','Helvetica "
        "Neue',Arial,sans-serif;background:#fff;color:#1d2330}} section{{display:none}} "
        "section:target,section#whole{{display:block}} section:target~section#whole{{display:none}} "
        "nav{{padding:14px 24px 0;font-size:14px;min-height:20px}} nav "
        "a{{color:#3f76b8;text-decoration:none}} nav a:hover{{text-decoration:underline}} "
        "svg{{display:block;width:100%;height:auto;max-height:calc(100vh - 50px)}} "
        "{1}</style></head><body>\n{2}"
        "<script>addEventListener('keydown',event=>{{if(event.key!=='Escape')return;const "
        "open=document.querySelector('section:target nav "
        "a:last-of-type');if(open)location.hash=open.getAttribute('href')}});</script>\n</body></html>\n",
        escape_xml(options_.title), kFoldedDark, views);
  }

 private:
  void number(const std::vector<Fold>& parts) {
    for (const Fold& part : parts) {
      if (part.is_node()) continue;
      links_.emplace(&part, fmt::format("part-{}", links_.size() + 1));
      number(part.parts);
    }
  }

  // The whole graph comes last, so that CSS alone can hide it when a part is the target of the address.
  void view(const std::vector<Fold>& parts, const std::string& id, const std::string& heading,
            const std::string& sub, const std::vector<std::pair<std::string, std::string>>& path,
            std::size_t times, std::string& views) {
    auto deeper = path;
    deeper.emplace_back(id, heading);
    for (const Fold& part : parts) {
      if (part.is_node()) continue;
      const std::string what = part.count > 1
                                   ? fmt::format("one of {} equal parts, {} of {} nodes in all", part.count,
                                                 counted(part.length, "node"), part.nodes())
                                   : counted(part.length, "node");
      view(part.parts, links_.at(&part), part.name,
           fmt::format("{}, {}", part.phase == Phase::Forward ? "forward" : "backward", what), deeper,
           times * part.count, views);
    }
    std::string crumbs;
    for (const auto& [target, name] : path)
      crumbs += fmt::format("<a href=\"#{}\">{}</a> \xe2\x80\xba ", target, escape_xml(cut(name, 60)));
    views += fmt::format("<section id=\"{}\"><nav>{}{}</nav>\n{}</section>\n", id, crumbs,
                         path.empty() ? "" : escape_xml(cut(heading, 60)),
                         FoldedWriter(sequences_, links_).picture(parts, id, heading, sub, times));
  }

  const DrawOptions& options_;
  NodeSequences sequences_;
  std::vector<Fold> whole_;
  Links links_;
};

}  // namespace

std::string draw_folded_svg(const Graph& graph, const DrawOptions& options) {
  const NodeSequences sequences(graph, options);
  const Links none;
  return FoldedWriter(sequences, none)
      .picture(fold_graph(graph), "whole", options.title, summary_of(graph, options), 1);
}

std::string to_html(const Graph& graph, const DrawOptions& options) {
  return FoldedPage(graph, options).write();
}

}  // namespace penstock::graph
