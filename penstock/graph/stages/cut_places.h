// Where a traced forward may be cut into stages, and where somebody asked for it.
//
//   const CutPlaces places(trace, kinds);
//   places.why_not(40);                               // empty, or what a cut before node 40 would tear apart
//   places.at(Split{"encoder.2", Split::Side::Before});   // the node before which the stage ends
//
// A place is the number of nodes before it. Thread safety: concurrent reads are safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/graph/stages/forward_trace.h"

namespace penstock::graph {

// How an input of a traced forward reaches the stages.
enum class InputKind : std::uint8_t {
  State,       // a parameter or buffer: each stage that uses it has it
  Positional,  // given to the first stage, which passes it on
  Keyword      // given to each stage that uses it
};

struct Split {
  enum class Side : std::uint8_t { Before, After };
  std::string module;
  Side side = Side::Before;
};

class CutPlaces {
 public:
  // `kinds`: by input of the graph.
  CutPlaces(const ForwardTrace& trace, const std::vector<InputKind>& kinds);

  std::size_t nodes() const { return why_not_.size(); }
  // Why no stage may end before this node: memory would be written in two stages, or a user-defined function
  // would be torn apart. Empty if one may.
  const std::string& why_not(std::size_t place) const { return why_not_.at(place); }

  // Throws ValueError for a module that no operator ran in: with the nearest of `known` if there is no such
  // module. A module that runs several times begins with the first and ends with the last.
  std::size_t at(const Split& split, const std::vector<std::string>& known) const;

  // Returns the places sorted. Throws ValueError, naming split and graph line, for a place that must not be
  // cut, two at the same place, and a stage without operators. `names`: what each place is, for messages.
  std::vector<std::size_t> checked(std::vector<std::size_t> places, std::vector<std::string> names) const;

 private:
  void forbid(std::size_t after, std::size_t until, const std::string& why);
  void forbid_torn_memory(const std::vector<InputKind>& kinds);
  void forbid_torn_functions();

  const ForwardTrace& trace_;
  std::vector<std::string> why_not_;  // by place
};

// The state inputs and their uses aside, what a cut at each place would send: bytes of the values that are
// made before it (positional arguments too) and used after it. One more than nodes.
std::vector<std::int64_t> bytes_across(const ForwardTrace& trace, const std::vector<InputKind>& kinds);
// An estimate of what each node costs, in floating-point operations; a byte that is moved counts as
// kCostOfByte.
inline constexpr double kCostOfByte = 4;
std::vector<double> node_costs(const Graph& graph);

struct AutomaticCut {
  // How much more than necessary the most expensive stage may cost if fewer bytes are sent then.
  double tolerance = 0.05;
};
// The places for `stages` stages: among the cuts whose most expensive stage costs at most 1 + tolerance times
// the least possible, the one that sends the fewest bytes. Throws ValueError if there are too few places.
std::vector<std::size_t> automatic_places(const CutPlaces& places, const std::vector<double>& costs,
                                          const std::vector<std::int64_t>& bytes, int stages,
                                          const AutomaticCut& how = {});

}  // namespace penstock::graph
