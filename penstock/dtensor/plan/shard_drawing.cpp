#include "penstock/dtensor/plan/shard_drawing.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "penstock/dtensor/plan/shard_grid.h"

namespace penstock {
namespace {

using detail::label_lines;
using detail::range_text;
using detail::ShardGrid;

using Lines = std::vector<std::string>;

// More columns do not fit any terminal, and more rows are unreadable.
constexpr std::size_t kMostColumns = 24;
constexpr std::size_t kMostRows = 256;
// A single dim is drawn horizontally if it fits, otherwise vertically.
constexpr std::size_t kMostToTheRight = 12;

std::string padded(const std::string& text, std::size_t width) {
  return text + std::string(width - std::min(width, text.size()), ' ');
}

void add_line(std::string& out, std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  out += line + "\n";
}

// A grid of labels, each of one or more lines, with headers above the columns and left of the rows.
struct Grid {
  std::vector<std::string> above, left;
  std::vector<std::vector<Lines>> labels;  // [row][column]
};

std::string draw(const Grid& grid) {
  std::vector<std::size_t> widths;
  for (std::size_t column = 0; column < grid.labels[0].size(); ++column) {
    std::size_t width = grid.above.empty() ? 0 : grid.above[column].size();
    for (const auto& row : grid.labels)
      for (const std::string& line : row[column]) width = std::max(width, line.size());
    widths.push_back(width);
  }
  std::size_t margin = 0;
  for (const std::string& text : grid.left) margin = std::max(margin, text.size());
  const std::string indent(margin ? margin + 1 : 0, ' ');
  std::string rule = indent + "+", header = indent, out;
  for (std::size_t column = 0; column < widths.size(); ++column) {
    rule += std::string(widths[column] + 2, '-') + "+";
    if (!grid.above.empty()) header += "  " + padded(grid.above[column], widths[column] + 1);
  }
  if (!grid.above.empty()) add_line(out, header);
  out += rule + "\n";
  for (std::size_t row = 0; row < grid.labels.size(); ++row) {
    std::size_t height = 1;
    for (const Lines& label : grid.labels[row]) height = std::max(height, label.size());
    for (std::size_t i = 0; i < height; ++i) {
      std::string line = margin ? padded(i == 0 ? grid.left[row] : "", margin) + " " : "";
      for (std::size_t column = 0; column < widths.size(); ++column) {
        const Lines& label = grid.labels[row][column];
        line += "| " + padded(i < label.size() ? label[i] : "", widths[column]) + " ";
      }
      out += line + "|\n";
    }
    out += rule + "\n";
  }
  return out;
}

std::vector<std::string> range_texts(const std::vector<Segment>& cells) {
  std::vector<std::string> texts;
  for (const Segment& cell : cells) texts.push_back(range_text(cell));
  return texts;
}

bool fits(const ShardGrid& grid) {
  if (!grid.has_elements()) return false;
  if (grid.drawn.size() == 1) return grid.columns().size() <= kMostRows;
  return grid.columns().size() <= kMostColumns && grid.rows().size() <= kMostRows;
}

std::string picture(const ShardGrid& shards) {
  const std::string sign = shards.term_sign();
  Grid grid;
  std::string out;
  const bool down = shards.drawn.size() == 1 && shards.columns().size() > kMostToTheRight;
  if (shards.drawn.empty())
    out = "cells name ranks\n\n";
  else if (shards.drawn.size() == 1)
    out = fmt::format("dim {} {}; cells name ranks\n\n", shards.drawn[0], down ? "down" : "to the right");
  else
    out = fmt::format("dim {} down, dim {} to the right; cells name ranks\n\n", shards.drawn[0],
                      shards.drawn[1]);
  if (shards.drawn.size() == 2) grid.left = range_texts(shards.rows());
  if (!shards.drawn.empty()) (down ? grid.left : grid.above) = range_texts(shards.columns());
  for (std::size_t row = 0; row < shards.rows().size(); ++row) {
    std::vector<Lines> line;
    for (std::size_t column = 0; column < shards.columns().size(); ++column)
      line.push_back(label_lines(shards.ranks_of(row, column), sign));
    if (down)
      for (Lines& label : line) grid.labels.push_back({std::move(label)});
    else
      grid.labels.push_back(std::move(line));
  }
  return out + draw(grid);
}

std::string table(const ShardGrid& grid) {
  std::vector<Lines> rows{
      {"rank", grid.names.empty() ? "at" : fmt::format("({})", fmt::join(grid.names, ", "))}};
  for (std::size_t dim = 0; dim < grid.shape.size(); ++dim) rows[0].push_back(fmt::format("dim {}", dim));
  for (const detail::RankPart& part : grid.parts) {
    Lines row{std::to_string(part.rank), fmt::format("({})", fmt::join(part.coordinate, ", "))};
    for (std::size_t dim = 0; dim < grid.shape.size(); ++dim)
      row.push_back(detail::ranges_text(part.segments[dim], grid.shape[dim]));
    rows.push_back(std::move(row));
  }
  std::vector<std::size_t> widths(rows[0].size());
  for (const Lines& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string out;
  for (const Lines& row : rows) {
    std::string line = std::string(widths[0] - row[0].size(), ' ') + row[0];  // right-aligned numbers
    for (std::size_t i = 1; i < row.size(); ++i) line += "  " + padded(row[i], widths[i]);
    add_line(out, line);
  }
  return out;
}

}  // namespace

std::string draw_sharding_text(const std::vector<std::int64_t>& global_shape, const DeviceMesh& mesh,
                               const Placements& placements) {
  const ShardGrid grid(global_shape, mesh, placements);
  std::string out = fmt::format("{} on {}\n", grid.title(), grid.mesh_text());
  const bool drawn = fits(grid) && (grid.shape.size() <= 2 || !grid.drawn.empty());
  if (grid.shape.size() > 2 || !drawn) out += "\n" + table(grid);
  if (drawn) out += (grid.shape.size() > 2 ? "\n" : "") + picture(grid);
  for (const std::string& note : grid.notes(drawn)) out += note + "\n";
  return out;
}

}  // namespace penstock
