// Arithmetic of the interleaved (virtual) pipeline: which stages a rank owns, in which order it runs its
// chunks, and how many forwards come before the first backward. Used by the interleaved generators, analysis
// and tests.
//
// P = ranks, V = chunks (stages) per rank, M = microbatches, G = microbatches per group.
#pragma once

#include <optional>
#include <vector>

namespace penstock::schedule {

// Rank r owns stages r, r+P, r+2P, ...; ascending. Throws ValueError for a rank outside [0, P) or counts
// below 1.
std::vector<int> virtual_stages_of_rank(int rank, int ranks, int chunks);

struct TableEntry {
  int microbatch;
  int chunk;
  friend bool operator==(const TableEntry&, const TableEntry&) = default;
};

// The order of forwards on every rank: microbatches in groups of G, within a group chunk by chunk, within a
// chunk microbatch by microbatch; the last group holds the remainder. M*V entries. G defaults to P if P is
// given, otherwise to M.
std::vector<TableEntry> virtual_pipeline_table(int microbatches, int chunks,
                                               std::optional<int> ranks = std::nullopt,
                                               std::optional<int> group_size = std::nullopt);
// Backward runs the same table with the chunks reversed.
constexpr int backward_chunk(int chunk, int chunks) { return chunks - 1 - chunk; }

struct WarmUp {
  int total;      // M*V
  int warm_up;    // forwards before the first backward
  int remaining;  // total - warm_up
  bool all_warm_up;
};
// min(2(P-rank-1) + (V-1)G, M*V); forward only: everything is warm-up. G defaults to P.
WarmUp warm_up_counts(int rank, int ranks, int chunks, int microbatches,
                      std::optional<int> group_size = std::nullopt, bool forward_only = false);

// M / max(1, M / P) in integer arithmetic: the group size of the executed schedule. It equals P if and only
// if M is a multiple of P; M >= P is not enough (M=5, P=4 yields 5).
int microbatches_per_round(int microbatches, int ranks);

// Idle share of the step at equal stage costs: (P-1)/(M+P-1) for GPipe and 1F1B, (P-1)/(V*M+P-1) interleaved
// with M a multiple of P. Interleaving divides the bubble time by V; the share shrinks slightly less, since
// the step becomes shorter.
double bubble_share(int ranks, int chunks, int microbatches);

// Microbatches that 1F1B holds at once on a rank: min(P - rank, M).
int one_f_one_b_in_flight(int rank, int ranks, int microbatches);

}  // namespace penstock::schedule
