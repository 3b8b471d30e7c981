#include "penstock/dtensor/plan/shard_grid.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

namespace penstock::detail {
namespace {

using Numbers = std::vector<std::int64_t>;

// Placeholder if fewer than two dims are drawn: one cell.
const std::vector<Segment>& one_cell() {
  static const std::vector<Segment> one{{0, 1}};
  return one;
}

Numbers coordinate_of(std::int64_t index, const Numbers& shape) {
  Numbers coordinate(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    coordinate[axis] = index % shape[axis];
    index /= shape[axis];
  }
  return coordinate;
}

bool holds(const std::vector<Segment>& segments, const Segment& cell) {
  return std::any_of(segments.begin(), segments.end(), [&](const Segment& segment) {
    return segment.offset <= cell.offset && cell.offset < segment.offset + segment.length;
  });
}

std::string_view sign_of(PartialOp op) {
  switch (op) {
    case PartialOp::Sum:
      return "+";
    case PartialOp::Avg:
      return "avg";
    case PartialOp::Min:
      return "min";
    case PartialOp::Max:
      return "max";
    case PartialOp::Product:
      return "*";
  }
  return "";
}

std::string_view result_of(PartialOp op) {
  switch (op) {
    case PartialOp::Sum:
      return "sum";
    case PartialOp::Avg:
      return "mean";
    case PartialOp::Min:
      return "minimum";
    case PartialOp::Max:
      return "maximum";
    case PartialOp::Product:
      return "product";
  }
  return "";
}

// Four or more consecutive ranks are written as a range.
std::vector<std::string> rank_words(const std::vector<int>& ranks) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin < ranks.size();) {
    std::size_t end = begin + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - begin >= 4) {
      words.push_back(fmt::format("{}-{}", ranks[begin], ranks[end - 1]));
    } else {
      for (std::size_t i = begin; i < end; ++i) words.push_back(std::to_string(ranks[i]));
    }
    begin = end;
  }
  return words;
}

}  // namespace

ShardGrid::ShardGrid(const Numbers& global_shape, const DeviceMesh& mesh, const Placements& given)
    : shape(global_shape),
      names(mesh.names()),
      mesh_shape(mesh.shape()),
      placements(normalize_placements(given, mesh.ndim(), static_cast<std::int64_t>(global_shape.size()))),
      cells(global_shape.size()) {
  const std::vector<int> ranks = mesh.ranks();
  std::map<Numbers, std::size_t> terms;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    RankPart part;
    part.rank = ranks[i];
    part.coordinate = coordinate_of(static_cast<std::int64_t>(i), mesh_shape);
    part.segments = local_segments(shape, mesh_shape, part.coordinate, placements);
    part.empty = std::any_of(part.segments.begin(), part.segments.end(),
                             [](const auto& segments) { return segments.empty(); });
    Numbers term;
    for (std::size_t axis = 0; axis < placements.size(); ++axis)
      if (placements[axis].is_partial()) term.push_back(part.coordinate[axis]);
    part.term = terms.try_emplace(term, terms.size()).first->second;
    parts.push_back(std::move(part));
  }
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    std::set<std::int64_t> borders{0, shape[dim]};
    for (const RankPart& part : parts)
      for (const Segment& segment : part.segments[dim]) {
        borders.insert(segment.offset);
        borders.insert(segment.offset + segment.length);
      }
    for (auto next = std::next(borders.begin()); next != borders.end(); ++next)
      cells[dim].push_back({*std::prev(next), *next - *std::prev(next)});
  }
  drawn.resize(shape.size());
  std::iota(drawn.begin(), drawn.end(), 0);
  if (drawn.size() > 2) {
    const auto pieces = [&](int dim) { return cells[static_cast<std::size_t>(dim)].size(); };
    std::stable_sort(drawn.begin(), drawn.end(), [&](int a, int b) { return pieces(a) > pieces(b); });
    while (!drawn.empty() && (drawn.size() > 2 || pieces(drawn.back()) < 2)) {
      hides_splits |= pieces(drawn.back()) > 1;
      drawn.pop_back();
    }
    std::sort(drawn.begin(), drawn.end());
  }
}

const std::vector<Segment>& ShardGrid::columns() const {
  return drawn.empty() ? one_cell() : cells[static_cast<std::size_t>(drawn.back())];
}
const std::vector<Segment>& ShardGrid::rows() const {
  return drawn.size() < 2 ? one_cell() : cells[static_cast<std::size_t>(drawn.front())];
}

bool ShardGrid::has_elements() const { return std::find(shape.begin(), shape.end(), 0) == shape.end(); }

bool ShardGrid::has_partial() const {
  return std::any_of(placements.begin(), placements.end(),
                     [](const Placement& placement) { return placement.is_partial(); });
}

CellRanks ShardGrid::ranks_of(std::size_t row, std::size_t column) const {
  std::map<std::size_t, std::vector<int>> by_term;
  for (const RankPart& part : parts) {
    if (part.empty) continue;
    if (!drawn.empty() && !holds(part.segments[static_cast<std::size_t>(drawn.back())], columns()[column]))
      continue;
    if (drawn.size() == 2 && !holds(part.segments[static_cast<std::size_t>(drawn.front())], rows()[row]))
      continue;
    by_term[part.term].push_back(part.rank);
  }
  CellRanks ranks;
  for (auto& [term, members] : by_term) {
    std::sort(members.begin(), members.end());
    ranks.push_back(std::move(members));
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

std::string ShardGrid::term_sign() const {
  std::string sign;
  for (const Placement& placement : placements) {
    if (!placement.is_partial()) continue;
    const std::string_view mine = sign_of(placement.partial_op());
    if (!sign.empty() && sign != mine) return "&";
    sign = mine;
  }
  return sign;
}

std::string ShardGrid::mesh_text() const {
  std::string text;
  for (std::size_t axis = 0; axis < mesh_shape.size(); ++axis)
    text +=
        fmt::format("{}{}{}", axis ? " x " : "", names.empty() ? "" : names[axis] + "=", mesh_shape[axis]);
  if (names.empty()) text += parts.size() == 1 ? " rank" : " ranks";
  return text;
}

std::string ShardGrid::axis_text(std::size_t axis) const {
  return names.empty() ? fmt::format("axis {}", axis) : names[axis];
}

std::string ShardGrid::title() const {
  return fmt::format("[{}] as {}", fmt::join(shape, ", "), penstock::to_string(placements));
}

std::vector<std::string> ShardGrid::notes(bool pictured) const {
  std::vector<std::string> lines;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (placements[axis].is_partial())
      lines.push_back(
          fmt::format("{} over {}: the tensor is the {} of the terms{}", placements[axis].to_string(),
                      axis_text(axis), result_of(placements[axis].partial_op()),
                      pictured ? fmt::format(", which {} joins", term_sign()) : " that its ranks hold"));
  bool copies = false;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    copies |= placements[axis].is_replicate() && mesh_shape[axis] > 1;
  if (pictured && hides_splits)
    lines.push_back("ranks of one cell hold different parts of the dims that are not drawn");
  else if (pictured && copies)
    lines.push_back("ranks with a comma between them hold the same values");
  std::vector<int> idle;
  for (const RankPart& part : parts)
    if (part.empty) idle.push_back(part.rank);
  std::sort(idle.begin(), idle.end());
  if (!has_elements())
    lines.push_back("the tensor has no elements");
  else if (!idle.empty())
    lines.push_back(fmt::format("no elements: {} {}", idle.size() == 1 ? "rank" : "ranks",
                                fmt::join(rank_words(idle), ", ")));
  return lines;
}

std::string range_text(const Segment& segment) {
  return segment.length == 1 ? std::to_string(segment.offset)
                             : fmt::format("{}-{}", segment.offset, segment.offset + segment.length - 1);
}

std::string ranges_text(const std::vector<Segment>& segments, std::int64_t size) {
  if (segments.empty()) return "nothing";
  if (segments.front().length == size) return "all";
  std::vector<std::string> words;
  for (const Segment& segment : segments) words.push_back(range_text(segment));
  if (words.size() <= 8) return fmt::format("{}", fmt::join(words, ", "));
  return fmt::format("{}, {}, {}, ... {} ({} ranges)", words[0], words[1], words[2], words.back(),
                     words.size());
}

std::vector<std::string> label_lines(const CellRanks& ranks, const std::string& sign, std::size_t width) {
  std::vector<std::string> words;  // with their separators
  for (std::size_t term = 0; term < ranks.size(); ++term) {
    const std::vector<std::string> members = rank_words(ranks[term]);
    for (std::size_t i = 0; i < members.size(); ++i)
      words.push_back(members[i] + (i + 1 < members.size()    ? ","
                                    : term + 1 < ranks.size() ? " " + sign
                                                              : ""));
  }
  std::vector<std::string> lines{""};
  for (const std::string& word : words) {
    if (!lines.back().empty() && lines.back().size() + 1 + word.size() > width) lines.emplace_back();
    lines.back() += (lines.back().empty() ? "" : " ") + word;
  }
  return lines;
}

}  // namespace penstock::detail
