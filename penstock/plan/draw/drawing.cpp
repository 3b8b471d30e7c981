#include "penstock/plan/draw/drawing.h"
#include "penstock/draw.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "penstock/base/quote.h"
#include "penstock/base/text.h"

namespace penstock::plan {

using schedule::ActionKind;

namespace {

using Rgb = std::array<int, 3>;

Rgb base_colour(ActionKind kind) {
  switch (kind) {
    case ActionKind::Forward:
      return {0x2f, 0x6f, 0xc4};
    case ActionKind::Backward:
      return {0x7d, 0x56, 0xb8};
    case ActionKind::BackwardInput:
      return {0x16, 0x9c, 0xa8};
    case ActionKind::BackwardWeight:
      return {0x5a, 0xa0, 0x3c};
    case ActionKind::SendForward:
    case ActionKind::RecvForward:
      return {0x8a, 0xa6, 0xcf};
    case ActionKind::SendBackward:
    case ActionKind::RecvBackward:
      return {0xb4, 0x9d, 0xd6};
    case ActionKind::Unshard:
      return {0xc7, 0x82, 0x2d};
    case ActionKind::Reshard:
      return {0xd9, 0xb4, 0x7f};
    case ActionKind::ReduceGrad:
      return {0xb8, 0x4a, 0x45};
  }
  return {0, 0, 0};
}

}  // namespace

std::string fill_colour(ActionKind kind, int chunk, int chunks) {
  Rgb colour = base_colour(kind);
  // The last stage keeps enough colour to differ from the background.
  const double white = chunks <= 1 ? 0 : 0.55 * chunk / std::max(1, chunks - 1);
  for (int& part : colour) part = static_cast<int>(std::lround(part + (255 - part) * white));
  return fmt::format("#{:02x}{:02x}{:02x}", colour[0], colour[1], colour[2]);
}

std::string_view text_colour(std::string_view fill) {
  const auto part = [&](std::size_t at) {
    int value = 0;
    std::from_chars(fill.data() + at, fill.data() + at + 2, value, 16);
    return value;
  };
  const double brightness = 0.299 * part(1) + 0.587 * part(3) + 0.114 * part(5);
  return brightness > 150 ? "#12212b" : "#ffffff";
}

std::vector<int> chunk_of_stages(const schedule::StageMap& stages) {
  std::vector<int> seen(static_cast<std::size_t>(stages.ranks()), 0);
  std::vector<int> chunks;
  for (const int rank : stages.stage_to_rank()) chunks.push_back(seen[static_cast<std::size_t>(rank)]++);
  return chunks;
}

int most_chunks(const schedule::StageMap& stages) {
  const std::vector<int> chunks = chunk_of_stages(stages);
  return 1 + *std::max_element(chunks.begin(), chunks.end());
}

std::string shape_words(const schedule::Schedule& schedule) {
  return fmt::format("{}, {}, {}", count_of(schedule.ranks(), "rank"),
                     count_of(schedule.stages().stages(), "stage"),
                     count_of(schedule.microbatches(), "microbatch", "microbatches"));
}

std::string totals_words(const Simulation& simulation) {
  std::string words =
      fmt::format("time {:.6g}, bubble {:.1f} %, in span {:.1f} %, at most {} activations", simulation.time,
                  100 * simulation.bubble, 100 * simulation.span_bubble, simulation.peak_activations());
  if (simulation.peak_bytes() > 0)
    words += fmt::format(" and {}", format_bytes(static_cast<std::uint64_t>(simulation.peak_bytes())));
  return words + " on a rank";
}

std::string hover_words(const Drawing& drawing, int rank, std::size_t slot) {
  const TimedSlot& timed = drawing.simulation.slots[static_cast<std::size_t>(rank)][slot];
  return fmt::format("{} on rank {}\nstart {:.6g}, end {:.6g}\nwaited for {}",
                     to_text(drawing.schedule.row(rank)[slot]), rank, timed.start, timed.end,
                     waited_for(drawing.schedule, drawing.simulation, timed.cause, timed.start));
}

double tick_distance(double length, int count) {
  if (!(length > 0)) return 1;
  const double raw = length / count;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (raw <= factor * power) return factor * power;
  }
  return 10 * power;
}

}  // namespace penstock::plan
