#include "penstock/schedule/generate/virtual_pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::schedule {

namespace {

void check_positive(const char* what, int value) {
  if (value < 1) throw ValueError(describe(what, fmt::format("{}", value), "at least 1"));
}

void check_rank(int rank, int ranks) {
  check_positive("pipeline ranks", ranks);
  if (rank < 0 || rank >= ranks) {
    throw ValueError(describe("pipeline rank", fmt::format("{}", rank), fmt::format("0 to {}", ranks - 1)));
  }
}

}  // namespace

std::vector<int> virtual_stages_of_rank(int rank, int ranks, int chunks) {
  check_rank(rank, ranks);
  check_positive("chunks per rank", chunks);
  std::vector<int> stages(static_cast<std::size_t>(chunks));
  for (int chunk = 0; chunk < chunks; ++chunk) stages[static_cast<std::size_t>(chunk)] = rank + chunk * ranks;
  return stages;
}

std::vector<TableEntry> virtual_pipeline_table(int microbatches, int chunks, std::optional<int> ranks,
                                               std::optional<int> group_size) {
  check_positive("microbatches", microbatches);
  check_positive("chunks per rank", chunks);
  const int group = group_size ? *group_size : ranks.value_or(microbatches);
  check_positive("microbatch group size", group);
  std::vector<TableEntry> table;
  table.reserve(static_cast<std::size_t>(microbatches) * static_cast<std::size_t>(chunks));
  for (int first = 0; first < microbatches; first += std::min(group, microbatches - first)) {
    const int end = first + std::min(group, microbatches - first);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int microbatch = first; microbatch < end; ++microbatch) table.push_back({microbatch, chunk});
    }
  }
  return table;
}

WarmUp warm_up_counts(int rank, int ranks, int chunks, int microbatches, std::optional<int> group_size,
                      bool forward_only) {
  check_rank(rank, ranks);
  check_positive("chunks per rank", chunks);
  check_positive("microbatches", microbatches);
  const int group = group_size.value_or(ranks);
  check_positive("microbatch group size", group);
  const int total = microbatches * chunks;
  const int warm_up = forward_only ? total : std::min(2 * (ranks - rank - 1) + (chunks - 1) * group, total);
  return {total, warm_up, total - warm_up, warm_up == total};
}

int microbatches_per_round(int microbatches, int ranks) {
  check_positive("microbatches", microbatches);
  check_positive("pipeline ranks", ranks);
  return microbatches / std::max(1, microbatches / ranks);
}

double bubble_share(int ranks, int chunks, int microbatches) {
  check_positive("pipeline ranks", ranks);
  check_positive("chunks per rank", chunks);
  check_positive("microbatches", microbatches);
  const double idle = ranks - 1;
  return idle / (static_cast<double>(chunks) * microbatches + idle);
}

int one_f_one_b_in_flight(int rank, int ranks, int microbatches) {
  check_rank(rank, ranks);
  check_positive("microbatches", microbatches);
  return std::min(ranks - rank, microbatches);
}

}  // namespace penstock::schedule
