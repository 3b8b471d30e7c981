#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "penstock/base/markup.h"
#include "penstock/dtensor/plan/shard_drawing.h"
#include "penstock/dtensor/plan/shard_grid.h"

namespace penstock {
namespace {

using detail::CellRanks;
using detail::RankPart;
using detail::ShardGrid;

// Pixels.
constexpr double kMargin = 20;
constexpr double kPicture = 600;  // target width of the grid
constexpr double kTallest = 360;  // target height
constexpr double kOneRow = 64;    // height for a tensor with one dim
constexpr double kLetter = 7.3;   // width of a character in the label font
constexpr double kLine = 16;
constexpr double kSwatch = 14;
constexpr std::size_t kMostCells = 20000;
constexpr std::size_t kMostStripes = 64;  // thinner ones are not visible

// A colour for each position in the mesh: neighbours differ strongly in hue, and all are light enough for
// dark text.
std::string colour_of(std::size_t index) {
  const double hue = std::fmod(207.0 + 137.50776405 * static_cast<double>(index), 360.0) / 30.0;
  const double saturation = 0.62, lightness = index % 3 == 0 ? 0.74 : index % 3 == 1 ? 0.82 : 0.68;
  const double amplitude = saturation * std::min(lightness, 1 - lightness);
  const auto part = [&](double offset) {
    const double k = std::fmod(offset + hue, 12.0);
    return static_cast<int>(
        std::lround(255 * (lightness - amplitude * std::max(-1.0, std::min({k - 3, 9 - k, 1.0})))));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", part(0), part(8), part(4));
}

// Sizes in proportion to the lengths of the cells, none below the minimum.
std::vector<double> extents(const std::vector<Segment>& cells, double wanted,
                            const std::vector<double>& least) {
  double total = 0;
  for (const Segment& cell : cells) total += static_cast<double>(cell.length);
  std::vector<double> sizes;
  for (std::size_t i = 0; i < cells.size(); ++i)
    sizes.push_back(std::max(least[i], wanted * static_cast<double>(cells[i].length) / total));
  return sizes;
}

class ShardSvg {
 public:
  explicit ShardSvg(const ShardGrid& grid) : grid_(grid), sign_(grid.term_sign()) {}

  std::string write() {
    drawn_ = grid_.has_elements() && (grid_.shape.size() <= 2 || !grid_.drawn.empty()) &&
             grid_.rows().size() * grid_.columns().size() <= kMostCells;
    double y = 74;
    if (drawn_) y = picture(y) + 18;
    y = legend(y);
    for (const std::string& note : grid_.notes(drawn_)) {
      text("note", kMargin, y + 12, note);
      y += 18;
    }
    const double height = y + kMargin - 6;
    width_ = std::max(width_, kMargin * 2 + 9.6 * static_cast<double>(grid_.title().size()));
    std::string svg = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
        "width=\"{0:.0f}\" height=\"{1:.0f}\" "
        "font-family=\"Inter, 'Segoe UI', 'Helvetica Neue', Arial, "
        "sans-serif\">\n<title>{2}</title>\n{3}<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n",
        width_, height, escape_xml(fmt::format("{} on {}", grid_.title(), grid_.mesh_text())), style());
    std::swap(svg, out_);
    text("title", kMargin, 32, grid_.title());
    text("note", kMargin, 52, fmt::format("on {}{}", grid_.mesh_text(), direction()));
    return out_ + svg + "</svg>\n";
  }

 private:
  template <class... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }

  void text(std::string_view kind, double x, double y, std::string_view words,
            std::string_view anchor = "start") {
    print("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", kind, x, y, anchor,
          escape_xml(words));
    // The widest line determines the width of the picture; lines that do not start at the left end within the
    // grid.
    if (anchor == "start") width_ = std::max(width_, x + 6.6 * static_cast<double>(words.size()) + kMargin);
  }

  std::string direction() const {
    if (!drawn_ || grid_.drawn.empty()) return "";
    if (grid_.drawn.size() == 1) return fmt::format("; dim {} to the right", grid_.drawn[0]);
    return fmt::format("; dim {} down, dim {} to the right", grid_.drawn[0], grid_.drawn[1]);
  }

  std::string style() const {
    std::string rules =
        "<style>.paper{fill:#ffffff}.title{font-size:18px;font-weight:600;fill:#12212b}.note{font-size:12px;"
        "fill:#4a5a65}.range{font-size:12px;fill:#4a5a65}"
        ".label{font-size:13px;fill:#12212b}.cell{fill:none;stroke:#ffffff;stroke-width:2}.shared{fill:#"
        "d5dde2}.hatch{stroke:#12212b;stroke-width:1.4;"
        "stroke-opacity:.35}@media(prefers-color-scheme:dark){.paper{fill:#14191d}.title{fill:#eef3f6}.note,."
        "range{fill:#b4c2cb}.cell{stroke:#14191d}}";
    for (std::size_t i = 0; i < grid_.parts.size(); ++i)
      rules += fmt::format(".r{}{{fill:{}}}", i, colour_of(i));
    rules += "</style>\n";
    if (grid_.has_partial())
      rules +=
          "<defs><pattern id=\"penstock-terms\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\" "
          "patternTransform=\"rotate(45)\">"
          "<line class=\"hatch\" x1=\"0\" y1=\"0\" x2=\"0\" y2=\"8\"/></pattern></defs>\n";
    return rules;
  }

  // Positions in the mesh, which determine the colours.
  std::vector<std::size_t> positions_of(const CellRanks& ranks) const {
    std::vector<std::size_t> positions;
    for (const auto& term : ranks)
      for (const int rank : term)
        positions.push_back(
            static_cast<std::size_t>(std::find_if(grid_.parts.begin(), grid_.parts.end(),
                                                  [&](const RankPart& part) { return part.rank == rank; }) -
                                     grid_.parts.begin()));
    return positions;
  }

  // Returns the y coordinate of its end.
  double picture(double top) {
    const auto& columns = grid_.columns();
    const auto& rows = grid_.rows();
    std::vector<std::vector<CellRanks>> ranks(rows.size());
    std::vector<std::vector<std::vector<std::string>>> labels(rows.size());
    std::vector<double> widest(columns.size(), 24), tallest(rows.size(), 24);
    for (std::size_t row = 0; row < rows.size(); ++row)
      for (std::size_t column = 0; column < columns.size(); ++column) {
        ranks[row].push_back(grid_.ranks_of(row, column));
        labels[row].push_back(detail::label_lines(ranks[row].back(), sign_));
        for (const std::string& line : labels[row].back())
          widest[column] = std::max(widest[column], kLetter * static_cast<double>(line.size()) + 14);
        tallest[row] = std::max(tallest[row], kLine * static_cast<double>(labels[row].back().size()) + 10);
      }
    double left = kMargin;
    if (grid_.drawn.size() == 2)
      for (const Segment& cell : rows)
        left = std::max(left, kMargin + kLetter * static_cast<double>(detail::range_text(cell).size()) + 8);
    if (!grid_.drawn.empty())
      for (std::size_t column = 0; column < columns.size(); ++column)
        widest[column] = std::max(
            widest[column], kLetter * static_cast<double>(detail::range_text(columns[column]).size()) + 8);
    const auto widths = extents(columns, kPicture, widest);
    const auto heights = extents(rows, grid_.drawn.size() == 2 ? kTallest : kOneRow, tallest);
    const double first = top + (grid_.drawn.empty() ? 0 : 18);
    double x = left;
    for (std::size_t column = 0; column < columns.size(); ++column) {
      if (!grid_.drawn.empty())
        text("range", x + widths[column] / 2, first - 6, detail::range_text(columns[column]), "middle");
      x += widths[column];
    }
    width_ = std::max(width_, x + kMargin);
    double y = first;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (grid_.drawn.size() == 2)
        text("range", left - 6, y + heights[row] / 2 + 4, detail::range_text(rows[row]), "end");
      x = left;
      for (std::size_t column = 0; column < columns.size(); ++column) {
        print("<g><title>{}</title>", escape_xml(hover(row, column, ranks[row][column])));
        cell(x, y, widths[column], heights[row], ranks[row][column], labels[row][column]);
        out_ += "</g>\n";
        x += widths[column];
      }
      y += heights[row];
    }
    return y;
  }

  std::string hover(std::size_t row, std::size_t column, const CellRanks& ranks) const {
    std::string words;
    if (grid_.drawn.size() == 2)
      words += fmt::format("dim {}: {}, ", grid_.drawn[0], detail::range_text(grid_.rows()[row]));
    if (!grid_.drawn.empty())
      words += fmt::format("dim {}: {}\n", grid_.drawn.back(), detail::range_text(grid_.columns()[column]));
    return words + fmt::format("ranks {}", fmt::join(detail::label_lines(ranks, sign_), " "));
  }

  void cell(double x, double y, double width, double height, const CellRanks& ranks,
            const std::vector<std::string>& label) {
    const std::vector<std::size_t> positions = positions_of(ranks);
    if (positions.size() > kMostStripes) {
      print("<rect class=\"shared\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>", x, y,
            width, height);
    } else {
      const double stripe = width / static_cast<double>(std::max<std::size_t>(positions.size(), 1));
      for (std::size_t i = 0; i < positions.size(); ++i)
        print("<rect class=\"r{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\"/>",
              positions[i], x + stripe * static_cast<double>(i), y, stripe, height);
    }
    if (grid_.has_partial())
      print(
          "<rect fill=\"url(#penstock-terms)\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
          "height=\"{:.1f}\"/>",
          x, y, width, height);
    print("<rect class=\"cell\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>", x, y, width,
          height);
    double line_y = y + height / 2 - kLine * static_cast<double>(label.size() - 1) / 2 + 4.5;
    for (const std::string& line : label) {
      text("label", x + width / 2, line_y, line, "middle");
      line_y += kLine;
    }
  }

  // What each rank holds, in as many columns as fit.
  double legend(double top) {
    std::vector<std::string> entries;
    std::size_t longest = 0;
    for (const RankPart& part : grid_.parts) {
      std::string words = fmt::format("rank {} at ({})", part.rank, fmt::join(part.coordinate, ", "));
      std::string held;
      for (std::size_t dim = 0; dim < grid_.shape.size() && !part.empty; ++dim)
        if (part.segments[dim].front().length != grid_.shape[dim])
          held += fmt::format("{}dim {}: {}", held.empty() ? "" : "; ", dim,
                              detail::ranges_text(part.segments[dim], grid_.shape[dim]));
      words +=
          ": " + (part.empty     ? "nothing"
                  : held.empty() ? std::string(grid_.has_partial() ? "a term of everything" : "everything")
                                 : held);
      longest = std::max(longest, words.size());
      entries.push_back(std::move(words));
    }
    const double entry = kSwatch + 8 + 6.6 * static_cast<double>(longest) + 24;
    const auto across = static_cast<std::size_t>(
        std::max(1.0, std::floor((std::max(width_, kPicture) - 2 * kMargin) / entry)));
    const std::size_t down = (entries.size() + across - 1) / across;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const double x = kMargin + entry * static_cast<double>(i / down),
                   y = top + 20 * static_cast<double>(i % down);
      print("<rect class=\"r{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{}\" height=\"{}\" rx=\"2\"/>", i, x, y,
            kSwatch, kSwatch);
      text("note", x + kSwatch + 8, y + 11.5, entries[i]);
    }
    double y = top + 20 * static_cast<double>(down) + 4;
    if (grid_.has_partial()) {
      print(
          "<rect class=\"shared\" x=\"{0:.1f}\" y=\"{1:.1f}\" width=\"{2}\" height=\"{2}\" rx=\"2\"/><rect "
          "fill=\"url(#penstock-terms)\" x=\"{0:.1f}\" y=\"{1:.1f}\" "
          "width=\"{2}\" height=\"{2}\" rx=\"2\"/>",
          kMargin, y, kSwatch);
      text("note", kMargin + kSwatch + 8, y + 11.5, "hatched: terms, not values");
      y += 22;
    }
    return y;
  }

  const ShardGrid& grid_;
  const std::string sign_;
  bool drawn_ = false;
  double width_ = 320;
  std::string out_;
};

}  // namespace

std::string draw_sharding_svg(const std::vector<std::int64_t>& global_shape, const DeviceMesh& mesh,
                              const Placements& placements) {
  const ShardGrid grid(global_shape, mesh, placements);
  return ShardSvg(grid).write();
}

}  // namespace penstock
