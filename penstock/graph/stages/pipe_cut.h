// A traced forward cut into stages: what each computes, what it owns, and which values travel.
//
//   const PipeCut cut = cut_forward(trace, kinds, {40, 81});
//   cut.stages[1].state;                              // inputs of the graph that stage 1 owns
//   cut.stages[1].main_inputs;                        // values from stage 0, in order
//   cut.hops;                                         // every value on its way, stage by stage
//
// A value that several later stages use goes from one of them to the next: each sends it on. The gradient
// comes back on the same way, and every stage adds its own share. The additions are then in the order of one
// backward through the whole model, so that the sums have its bits.
//
// Plain values. Thread safety: concurrent reads are safe.
#pragma once

#include <cstddef>
#include <vector>

#include "penstock/graph/stages/cut_places.h"
#include "penstock/graph/stages/forward_trace.h"

namespace penstock::graph {

// A value that is sent from a stage to a later one.
struct Hop {
  ValueId value = kNoValue;
  int from = 0, to = 0;
  // Whether it goes past other stages.
  bool skips() const { return to > from + 1; }
};

struct CutStage {
  std::size_t first = 0, end = 0;      // its nodes
  std::vector<std::size_t> functions;  // those that get their history in it
  // Inputs of the graph: parameters and buffers, and keyword arguments, that it uses.
  std::vector<std::size_t> state, keywords;
  // In ascending order of values. Values that skip stages are in the order of PipeCut::hops.
  std::vector<ValueId> main_inputs, main_outputs, skip_inputs, skip_outputs;
};

struct PipeCut {
  std::vector<CutStage> stages;
  std::vector<Hop> hops;                // by value, then by stage
  std::vector<std::size_t> positional;  // inputs of the graph that the first stage is given
  std::vector<std::size_t> unused;      // parameters and buffers that no node uses

  // The stage of a node.
  int stage_of(std::size_t node) const;
};

// `places`: where stages 1, 2, ... begin; checked by CutPlaces. Throws ValueError for an operator that
// depends on how a value from another stage is laid out in memory (as_strided).
PipeCut cut_forward(const ForwardTrace& trace, const std::vector<InputKind>& kinds,
                    const std::vector<std::size_t>& places);

}  // namespace penstock::graph
