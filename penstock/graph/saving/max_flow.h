// Maximum flow from a source to a sink, and with it a minimum cut (Dinic's method).
//
//   MaxFlow network(3);
//   const std::size_t edge = network.add_edge(0, 1);
//   network.set_capacity(edge, 2.5);
//   network.set_capacity(network.add_edge(1, 2), 1.0);
//   network.run(0, 2);                                // 1.0
//   network.reached();                                // {1, 1, 0}: the cut is the edge from 1 to 2
//
// Built once, run many times with other capacities. Every path from the source to the sink must have an edge
// of finite capacity.
// Thread safety: that of a standard container.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace penstock::graph {

class MaxFlow {
 public:
  static constexpr double kUnlimited = std::numeric_limits<double>::infinity();

  explicit MaxFlow(std::size_t vertices) : first_(vertices, kNone) {}

  // Returns the number of the edge, whose capacity is 0.
  std::size_t add_edge(std::size_t from, std::size_t to);
  void set_capacity(std::size_t edge, double capacity) { capacity_[edge] = capacity; }
  // Returns the flow.
  double run(std::size_t source, std::size_t sink);
  // Of the latest run: the vertices that the source can still reach.
  const std::vector<char>& reached() const { return reached_; }

 private:
  static constexpr std::uint32_t kNone = static_cast<std::uint32_t>(-1);

  bool find_levels(std::size_t source, std::size_t sink);
  double send_along_levels(std::size_t source, std::size_t sink);

  // An edge and its reverse are neighbours: arc 2 * edge and arc 2 * edge + 1.
  std::vector<std::uint32_t> first_, next_, to_;
  std::vector<double> capacity_, left_;
  double tiny_ = 0;  // differences below are rounding
  std::vector<std::uint32_t> level_, current_, queue_;
  std::vector<char> reached_;
};

}  // namespace penstock::graph
