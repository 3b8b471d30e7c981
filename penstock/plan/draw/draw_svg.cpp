#include "penstock/draw.h"
#include "penstock/plan/draw/drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

#include "penstock/base/markup.h"
#include "penstock/base/text.h"

namespace penstock::plan {

namespace {

using schedule::Action;
using schedule::ActionKind;
using schedule::Slot;

// Pixels.
constexpr double kLeft = 74;
constexpr double kRight = 132;
constexpr double kTop = 64;
constexpr double kCell = 30;
constexpr double kStrip = 7;  // transfers and collectives, which run parallel to the computation
constexpr double kGap = 8;
constexpr double kNarrowest = 1000;  // of the time axis
constexpr double kWidest = 12000;
constexpr double kPleasantCell = 24;  // wide enough for a number of two digits

const char* words_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::Forward:
      return "F forward";
    case ActionKind::Backward:
      return "B backward";
    case ActionKind::BackwardInput:
      return "I input gradient";
    case ActionKind::BackwardWeight:
      return "W weight gradient";
    case ActionKind::SendForward:
      return "activation in transit";
    case ActionKind::RecvForward:
      return "activation in transit";
    case ActionKind::SendBackward:
      return "gradient in transit";
    case ActionKind::RecvBackward:
      return "gradient in transit";
    case ActionKind::Unshard:
      return "unshard";
    case ActionKind::Reshard:
      return "reshard";
    case ActionKind::ReduceGrad:
      return "reduce gradients";
  }
  return "";
}

class SvgWriter {
 public:
  SvgWriter(const Drawing& drawing, const SvgOptions& options)
      : drawing_(drawing),
        options_(options),
        chunk_(chunk_of_stages(drawing.schedule.stages())),
        chunks_(most_chunks(drawing.schedule.stages())) {
    double shortest = drawing.simulation.time;
    for (int rank = 0; rank < drawing.schedule.ranks(); ++rank) {
      const schedule::Row& row = drawing.schedule.row(rank);
      for (std::size_t slot = 0; slot < row.size(); ++slot) {
        if (row[slot].empty()) continue;
        const TimedSlot& timed = timed_at(rank, slot);
        if (timed.end > timed.start) {
          for (const Action& action : row[slot]) kinds_.insert(action.kind());
        }
        if (is_compute(row[slot][0].kind())) {
          if (timed.end > timed.start) shortest = std::min(shortest, timed.end - timed.start);
        } else if (timed.end > timed.start) {
          strips_ = true;
        }
      }
    }
    const double time = std::max(drawing.simulation.time, 1e-12);
    const double pleasant = shortest > 0 ? kPleasantCell * time / shortest : kNarrowest;
    scale_ = std::clamp(pleasant, kNarrowest, kWidest) / time;
    row_height_ = kCell + (strips_ ? kStrip + 2 : 0) + kGap;
    for (const CriticalAction& step : drawing.simulation.critical_path)
      critical_.insert({step.rank, step.slot});
  }

  std::string write() {
    const double axis_width = drawing_.simulation.time * scale_;
    width_ = kLeft + axis_width + kRight;
    top_ = options_.heading ? kTop : kTop - 50;
    bottom_ = top_ + drawing_.schedule.ranks() * row_height_;
    legend_columns();
    const double height = bottom_ + 52 + 20 * legend_rows_;
    print(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" "
        "height=\"{1:.0f}\" "
        "font-family=\"Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif\">\n",
        width_, height);
    style();
    print("<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n");
    if (options_.heading) heading();
    axis(axis_width);
    for (int rank = 0; rank < drawing_.schedule.ranks(); ++rank) row(rank, axis_width);
    legend();
    out_ += "</svg>\n";
    return std::move(out_);
  }

 private:
  void heading() {
    print("<text x=\"{}\" y=\"27\" class=\"title\">{}<tspan class=\"shape\" dx=\"12\">{}</tspan></text>\n",
          kLeft, escape_xml(drawing_.title), shape_words(drawing_.schedule));
    print("<text x=\"{}\" y=\"47\" class=\"totals\">{}</text>\n", kLeft, totals_words(drawing_.simulation));
  }

  template <class... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }

  const TimedSlot& timed_at(int rank, std::size_t slot) const {
    return drawing_.simulation.slots[static_cast<std::size_t>(rank)][slot];
  }

  static std::string class_of(ActionKind kind, int chunk) {
    return fmt::format("k{}c{}", static_cast<int>(kind), chunk);
  }

  void style() {
    out_ +=
        "<style>"
        ".paper{fill:#ffffff}.title{font-size:19px;font-weight:600;fill:#12212b}.shape{font-size:13px;font-"
        "weight:400;fill:#5b6b76}"
        ".totals{font-size:13px;fill:#33444f}.label{font-size:13px;fill:#33444f}.note{font-size:11.5px;fill:#"
        "5b6b76}"
        ".lane{fill:#f1f4f6}.tick{stroke:#d5dde2;stroke-width:1}.number{font-size:12px;text-anchor:middle;"
        "pointer-events:none}"
        ".small{font-size:10.5px}.critical{stroke:#12212b;stroke-width:1.6}";
    for (const ActionKind kind : kinds_) {
      for (int chunk = 0; chunk < chunks_; ++chunk) {
        const std::string fill = fill_colour(kind, chunk, chunks_);
        print(".{0}{{fill:{1}}}.t{0}{{fill:{2}}}", class_of(kind, chunk), fill, text_colour(fill));
      }
    }
    out_ += "</style>\n";
  }

  void axis(double axis_width) {
    const double distance =
        tick_distance(drawing_.simulation.time, static_cast<int>(std::max(4.0, axis_width / 90)));
    const int ticks = static_cast<int>(drawing_.simulation.time / distance + 1e-9);
    for (int tick = 0; tick <= ticks; ++tick) {
      const double x = kLeft + tick * distance * scale_;
      print("<line class=\"tick\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\"/>", x, top_ - 6,
            bottom_ + 1);
      print("<text class=\"note\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{:g}</text>\n", x,
            bottom_ + 15, tick * distance);
    }
  }

  void row(int rank, double axis_width) {
    const double y = top_ + rank * row_height_;
    const RankSummary& summary = drawing_.simulation.ranks[static_cast<std::size_t>(rank)];
    print("<text class=\"label\" text-anchor=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">rank {}</text>\n", kLeft - 12,
          y + kCell / 2 + 4.5, rank);
    print("<rect class=\"lane\" x=\"{}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{}\" rx=\"3\"/>\n", kLeft, y,
          axis_width, kCell);
    const double share = drawing_.simulation.time > 0 ? 100 * summary.idle / drawing_.simulation.time : 0;
    print("<text class=\"note\" x=\"{:.1f}\" y=\"{:.1f}\">idle {:.1f} %</text>", kLeft + axis_width + 12,
          y + 12.5, share);
    const std::string memory =
        summary.peak_bytes > 0 ? ", " + format_bytes(static_cast<std::uint64_t>(summary.peak_bytes)) : "";
    print("<text class=\"note\" x=\"{:.1f}\" y=\"{:.1f}\">{} in flight{}</text>\n", kLeft + axis_width + 12,
          y + 26.5, summary.peak_activations, memory);
    const schedule::Row& slots = drawing_.schedule.row(rank);
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      if (!slots[slot].empty()) cell(rank, slot, slots[slot], y);
    }
  }

  void cell(int rank, std::size_t slot, Slot members, double y) {
    const TimedSlot& timed = timed_at(rank, slot);
    const double width = (timed.end - timed.start) * scale_;
    const bool compute = is_compute(members[0].kind());
    if (!(width > 0)) return;
    const double x = kLeft + timed.start * scale_;
    // A thin gap between adjacent cells separates equal colours.
    const double drawn = std::max(width - (width > 4 ? 1 : 0.3), 0.3);
    const double top = compute ? y : y + kCell + 2;
    const double height = (compute ? kCell : kStrip) / static_cast<double>(members.size());
    const int microbatch = members[0].has_microbatch() ? *members[0].microbatch() : -1;
    const std::string hover = escape_xml(hover_words(drawing_, rank, slot));
    if (options_.titles) {
      print("<g class=\"cell\"><title>{}</title>", hover);
    } else {
      print("<g class=\"cell\" data-m=\"{}\" data-tip=\"{}\">", microbatch, hover);
    }
    for (std::size_t i = 0; i < members.size(); ++i) {
      const Action& action = members[i];
      const std::string name = class_of(action.kind(), chunk_[static_cast<std::size_t>(action.stage())]);
      const double member_top = top + static_cast<double>(i) * height;
      print("<rect class=\"{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" rx=\"{}\"/>",
            name, x, member_top, drawn, height - (i + 1 < members.size() ? 0.6 : 0), width > 8 ? 2 : 0);
      const std::string number = action.has_microbatch() ? fmt::format("{}", *action.microbatch()) : "";
      if (compute && drawn >= 7.2 * static_cast<double>(number.size()) + 2) {
        print("<text class=\"number{} t{}\" x=\"{:.2f}\" y=\"{:.1f}\">{}</text>",
              members.size() > 1 ? " small" : "", name, x + drawn / 2,
              member_top + height / 2 + (members.size() > 1 ? 3.6 : 4.2), number);
      }
    }
    if (compute && critical_.contains({rank, static_cast<std::uint32_t>(slot)}) && drawn > 5) {
      print(
          "<rect class=\"critical\" fill=\"none\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" "
          "height=\"{:.1f}\" rx=\"2\"/>",
          x + 0.8, y + 0.8, drawn - 1.6, kCell - 1.6);
    }
    out_ += "</g>\n";
  }

  struct LegendEntry {
    std::string swatches;
    double swatch_width;
    std::string_view words;
    double x = 0;
    int row = 0;
  };

  // Entries from left to right, on as many rows as the width requires.
  void legend_columns() {
    for (const ActionKind kind : kinds_) {
      std::string swatches;
      for (int chunk = 0; chunk < chunks_; ++chunk) {
        swatches += fmt::format("<rect class=\"{}\" x=\"{}\" width=\"14\" height=\"14\" rx=\"2\"/>",
                                class_of(kind, chunk), 15 * chunk);
      }
      // Both sides of a transfer have the same colour and name.
      const bool named = kind == ActionKind::RecvForward || kind == ActionKind::RecvBackward;
      if (!named) legend_.push_back({swatches, 15.0 * chunks_ - 1, words_of(kind)});
    }
    legend_.push_back({"<rect class=\"lane\" width=\"14\" height=\"14\" rx=\"2\"/>", 14, "idle"});
    legend_.push_back(
        {"<rect class=\"critical\" fill=\"none\" x=\"1\" y=\"1\" width=\"12\" height=\"12\" rx=\"2\"/>", 14,
         "on the critical path"});
    double x = kLeft;
    for (LegendEntry& entry : legend_) {
      const double length = entry.swatch_width + 6 + 6.0 * static_cast<double>(entry.words.size()) + 18;
      if (x + length > width_ && x > kLeft) {
        x = kLeft;
        ++legend_rows_;
      }
      entry.x = x;
      entry.row = legend_rows_ - 1;
      x += length;
    }
  }

  void legend() {
    const double y = bottom_ + 30;
    for (const LegendEntry& entry : legend_) {
      print(
          "<g transform=\"translate({:.1f},{:.1f})\">{}<text class=\"note\" x=\"{:.1f}\" "
          "y=\"11\">{}</text></g>\n",
          entry.x, y + 20 * entry.row, entry.swatches, entry.swatch_width + 6, entry.words);
    }
    print("<text class=\"note\" x=\"{}\" y=\"{:.1f}\">Numbers are microbatches.{}</text>\n", kLeft,
          y + 20 * legend_rows_ + 10, chunks_ > 1 ? " Lighter shades: later stages of the same rank." : "");
  }

  const Drawing& drawing_;
  const SvgOptions& options_;
  std::vector<int> chunk_;
  int chunks_;
  std::set<ActionKind> kinds_;
  std::set<std::pair<int, std::uint32_t>> critical_;
  bool strips_ = false;
  double scale_ = 1;
  double row_height_ = 0;
  double width_ = 0;
  double top_ = 0;
  double bottom_ = 0;
  std::vector<LegendEntry> legend_;
  int legend_rows_ = 1;
  std::string out_;
};

}  // namespace

std::string draw_svg(const Drawing& drawing, const SvgOptions& options) {
  return SvgWriter(drawing, options).write();
}

}  // namespace penstock::plan
