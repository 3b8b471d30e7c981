#include "penstock/graph/saving/max_flow.h"

#include <algorithm>
#include <cmath>

namespace penstock::graph {

std::size_t MaxFlow::add_edge(std::size_t from, std::size_t to) {
  const auto arc = static_cast<std::uint32_t>(to_.size());
  to_.push_back(static_cast<std::uint32_t>(to));
  next_.push_back(first_[from]);
  first_[from] = arc;
  to_.push_back(static_cast<std::uint32_t>(from));
  next_.push_back(first_[to]);
  first_[to] = arc + 1;
  capacity_.push_back(0);
  return capacity_.size() - 1;
}

bool MaxFlow::find_levels(std::size_t source, std::size_t sink) {
  level_.assign(first_.size(), kNone);
  queue_.clear();
  queue_.push_back(static_cast<std::uint32_t>(source));
  level_[source] = 0;
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    const std::uint32_t vertex = queue_[i];
    for (std::uint32_t arc = first_[vertex]; arc != kNone; arc = next_[arc]) {
      if (left_[arc] <= tiny_ || level_[to_[arc]] != kNone) continue;
      level_[to_[arc]] = level_[vertex] + 1;
      queue_.push_back(to_[arc]);
    }
  }
  return level_[sink] != kNone;
}

double MaxFlow::send_along_levels(std::size_t source, std::size_t sink) {
  current_ = first_;
  double sent = 0;
  std::vector<std::uint32_t> path;  // arcs from the source; no recursion, since paths may be long
  std::uint32_t vertex = static_cast<std::uint32_t>(source);
  for (;;) {
    if (vertex == sink) {
      double amount = kUnlimited;
      for (const std::uint32_t arc : path) amount = std::min(amount, left_[arc]);
      sent += amount;
      // Continues from the first arc that is full.
      std::size_t keep = path.size();
      for (std::size_t i = path.size(); i-- > 0;) {
        left_[path[i]] -= amount;
        left_[path[i] ^ 1U] += amount;
        if (left_[path[i]] <= tiny_) keep = i;
      }
      vertex = to_[path[keep] ^ 1U];
      path.resize(keep);
      continue;
    }
    std::uint32_t& arc = current_[vertex];
    while (arc != kNone && (left_[arc] <= tiny_ || level_[to_[arc]] != level_[vertex] + 1)) arc = next_[arc];
    if (arc != kNone) {
      path.push_back(arc);
      vertex = to_[arc];
      continue;
    }
    if (path.empty()) return sent;
    level_[vertex] = kNone;  // leads nowhere
    vertex = to_[path.back() ^ 1U];
    path.pop_back();
  }
}

double MaxFlow::run(std::size_t source, std::size_t sink) {
  left_.resize(to_.size());
  double largest = 0;
  for (std::size_t edge = 0; edge < capacity_.size(); ++edge) {
    left_[2 * edge] = capacity_[edge];
    left_[2 * edge + 1] = 0;
    if (std::isfinite(capacity_[edge])) largest = std::max(largest, capacity_[edge]);
  }
  tiny_ = 1e-13 * largest;
  double flow = 0;
  while (find_levels(source, sink)) flow += send_along_levels(source, sink);
  reached_.assign(first_.size(), 0);
  for (std::size_t vertex = 0; vertex < first_.size(); ++vertex) reached_[vertex] = level_[vertex] != kNone;
  return flow;
}

}  // namespace penstock::graph
